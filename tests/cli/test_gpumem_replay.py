"""``gpumem replay``: what it prints, its exit codes, and what it refuses."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pytest_gpumem.allocator import Allocator, OutOfMemory
from pytest_gpumem.cli import main, replay
from tests.report.html.parsed import Page

GIB = 1 << 30
Gpumem = Callable[..., tuple[int, list[str]]]
Refusal = Callable[..., str]


class Line:
    """A stand-in for the source line that allocates."""

    def __init__(self, line: int) -> None:
        self.frames = [{"filename": "model.py", "line": line, "name": "forward"}]


def fragmented(total: int = 1 << 40, device: int = 0) -> Allocator:
    """Return a snapshot where 3 of 6 GiB are free, in blocks too small for the next request."""
    allocator = Allocator(total, version=(2, 6), device=device)
    allocator.free(allocator.malloc(6 * GIB, context=Line(1)))
    allocator.malloc(3 * GIB, context=Line(2))
    with suppress(OutOfMemory):
        allocator.malloc(4 * GIB, context=Line(3))
    return allocator


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, with a recording in it."""
    monkeypatch.chdir(tmp_path)
    save(tmp_path, "run.pickle", fragmented().snapshot())
    return tmp_path


def save(folder: Path, name: str, snapshot: Any) -> None:
    (folder / name).write_bytes(pickle.dumps(snapshot))


@pytest.fixture
def gpumem(folder: Path, capsys: pytest.CaptureFixture[str]) -> Gpumem:
    """Return a function that runs the command: exit code and lines of output."""

    def run(*arguments: str) -> tuple[int, list[str]]:
        code = main(("replay", *arguments))
        written = capsys.readouterr()
        assert written.err == ""
        return code, written.out.splitlines()

    return run


@pytest.fixture
def refusal(folder: Path, capsys: pytest.CaptureFixture[str]) -> Refusal:
    """Return a function that runs the command and returns its one sentence of refusal."""

    def run(*arguments: str) -> str:
        assert main(("replay", *arguments)) == 2
        written = capsys.readouterr()
        assert written.out == ""
        (sentence,) = written.err.splitlines()
        return sentence

    return run


@pytest.mark.parametrize(
    ("total", "exact", "sentence"),
    [
        (1, 1, "the one address agrees, and so does the final layout"),
        (2, 2, "all 2 addresses agree, and so does the final layout"),
        (3, 1, "1 of 3 addresses agrees"),
        (3, 2, "2 of 3 addresses agree"),
    ],
)
def test_a_single_address_is_in_the_singular(total: int, exact: int, sentence: str) -> None:
    result = SimpleNamespace(total=total, exact=exact == total, exact_addresses=exact)
    assert replay._agreement(cast(Any, result)) == sentence


def test_a_replay_that_agrees_with_its_recording(gpumem: Gpumem) -> None:
    assert gpumem("run.pickle") == (
        0,
        [
            "run.pickle: 7 events on cuda:0, recorded with the allocator's default settings",
            "replayed by the rules of torch 2.6: all 3 addresses agree, and so does the final "
            "layout",
            "",
            "  cuda:0                      recorded",
            "  peak allocated              7.00 GiB",
            "  peak reserved              10.00 GiB",
            "  fragmentation at the peak   3.00 GiB",
            "  share of peak reserved        30.0 %",
            "  largest inactive split      3.00 GiB",
            "  segments                           2",
            "  out of memory                     no",
        ],
    )


def test_other_settings_are_replayed_on_a_gpu(gpumem: Gpumem) -> None:
    code, lines = gpumem("run.pickle", "--alloc-conf", "expandable_segments:True", "--gpu=RTX-4060")
    assert code == 0
    assert lines[3:] == [
        "what if: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True on RTX-4060 (7.75 GiB)",
        "",
        "  cuda:0                      recorded   what if     change",
        "  peak allocated              7.00 GiB  7.00 GiB",
        "  peak reserved              10.00 GiB  7.01 GiB  -2.99 GiB",
        "  fragmentation at the peak   3.00 GiB  12.0 MiB  -2.99 GiB",
        "  share of peak reserved        30.0 %     0.2 %",
        "  largest inactive split      3.00 GiB  12.0 MiB  -2.99 GiB",
        "  segments                           2         1",
        "  out of memory                     no        no",
        "",
        "cuda:0 fits on RTX-4060: 760.1 MiB are left for the CUDA context and others",
    ]


def test_a_gpu_that_is_too_small_runs_out_of_memory(gpumem: Gpumem) -> None:
    code, lines = gpumem("run.pickle", "--gpu", "rtx-4060")
    assert code == 1
    assert "  out of memory                     no       yes" in lines
    assert lines[-2:] == [
        "cuda:0 would run out of memory: event 6 asks for 4.00 GiB with 1.75 GiB free, at "
        "model.py:3, forward",
        "  what comes after it is left out, so the peaks are those up to there",
    ]


def test_memory_used_elsewhere_reduces_the_capacity(gpumem: Gpumem) -> None:
    conf = "--alloc-conf=expandable_segments:True"
    code, lines = gpumem("run.pickle", conf, "--gpu=RTX-4060", "--used-elsewhere=700MiB")
    assert code == 0
    assert lines[3].endswith("on RTX-4060 (7.75 GiB, 700.0 MiB of it used elsewhere)")
    assert lines[-1] == "cuda:0 fits on RTX-4060: 60.1 MiB are left"
    assert gpumem("run.pickle", conf, "--gpu=RTX-4060", "--used-elsewhere=800MiB")[0] == 1


def test_a_recording_that_ran_out_of_memory_is_replayed(folder: Path, gpumem: Gpumem) -> None:
    save(folder, "oom.pickle", fragmented(9 * GIB).snapshot())

    code, lines = gpumem("oom.pickle")
    assert code == 0
    ran_out = (
        "cuda:0 ran out of memory in the recording: event 5 asked for 4.00 GiB with 3.00 GiB "
        "free, at model.py:3, forward"
    )
    assert lines[-1] == ran_out
    # The recording has the free memory of its device, so that no GPU need be named.
    code, lines = gpumem("oom.pickle", "--alloc-conf=expandable_segments:True")
    assert code == 0
    assert lines[-2:] == [ran_out, "cuda:0 would not run out of memory there"]


def test_without_a_gpu_the_fit_is_unknown(gpumem: Gpumem) -> None:
    code, lines = gpumem("run.pickle", "--alloc-conf=expandable_segments:True")
    assert code == 0
    assert "  out of memory                     no         ?" in lines
    assert lines[-1] == (
        "Whether it fits depends on the memory of the GPU, which is not on record; give --gpu."
    )


def test_a_recording_that_began_late_starts_with_live_blocks(folder: Path, gpumem: Gpumem) -> None:
    allocator = Allocator(1 << 40, version=(2, 6))
    allocator.malloc(GIB)
    allocator.trace.clear()
    allocator.malloc(GIB)
    save(folder, "late.pickle", allocator.snapshot())

    code, lines = gpumem("late.pickle", "--alloc-conf=max_split_size_mb:64", "--gpu=T4")
    assert code == 0
    assert lines[-1] == (
        "What was allocated before recording began is placed anew, without the gaps it had."
    )


def test_a_disagreement_is_shown_and_the_exit_code_is_1(folder: Path, gpumem: Gpumem) -> None:
    snapshot = fragmented().snapshot()
    event = snapshot["device_traces"][0][4]
    assert event["action"] == "alloc"
    event["addr"] += 512
    snapshot["segments"][0]["blocks"][0]["size"] += 512
    snapshot["segments"][0]["blocks"][1]["size"] -= 512
    save(folder, "wrong.pickle", snapshot)

    code, lines = gpumem("wrong.pickle")

    assert code == 1
    assert lines[1:5] == [
        "replayed by the rules of torch 2.6: 2 of 3 addresses agree",
        "  cuda:0 differs first at event 4 (model.py:2, forward)",
        "    recorded   alloc of 3221225472 B at 0x7f0000000200 on stream 0",
        "    simulated  alloc of 3221225472 B at 0x7f0000000000 on stream 0",
    ]


def test_a_recording_without_allocations_is_refused(folder: Path, gpumem: Gpumem) -> None:
    allocator = Allocator(1 << 40, version=(2, 6))
    allocator.free(allocator.malloc(6 * GIB))
    snapshot = allocator.snapshot()
    # max_entries=1: the default of the oldest releases.
    save(folder, "run.pickle", {**snapshot, "device_traces": [snapshot["device_traces"][0][-1:]]})

    code, output = gpumem("run.pickle")

    assert (code, output[:2]) == (
        0,
        [
            "run.pickle: 1 event on cuda:0, recorded with the allocator's default settings",
            "replayed by the rules of torch 2.6: no allocation is among the events; with a larger "
            "max_entries recording keeps more",
        ],
    )


def test_every_device_is_shown(folder: Path, gpumem: Gpumem) -> None:
    snapshot, other = fragmented().snapshot(), fragmented(device=1).snapshot()
    snapshot["segments"] += other["segments"]
    snapshot["device_traces"] += other["device_traces"]
    save(folder, "two.pickle", snapshot)

    code, lines = gpumem("two.pickle")

    assert code == 0
    assert lines[0].startswith("two.pickle: 14 events on cuda:0, cuda:1, recorded with")
    assert [line.split()[0] for line in lines if line.endswith("recorded")] == ["cuda:0", "cuda:1"]


def test_json_has_recorded_and_replayed_numbers(gpumem: Gpumem) -> None:
    code, lines = gpumem("run.pickle", "--gpu=RTX-4060", "--json")
    data = json.loads("\n".join(lines))
    assert code == 1
    assert data["snapshot"] == "run.pickle"
    assert (data["exact"], data["exact_addresses"], data["total"]) == (True, 3, 3)
    assert (data["gpu"], data["alloc_conf"], data["recorded_conf"]) == ("RTX-4060", None, "")
    assert (data["version"], data["out_of_memory"]) == ("2.6", True)
    (device,) = data["devices"]
    assert device["recorded"]["peak_reserved"] == 10 * GIB
    assert device["recorded"]["fragmentation"] == 3 * GIB
    assert device["what_if"]["out_of_memory"] == {
        "event": 6,
        "requested": 4 * GIB,
        "free": 8_325_824_512 - 6 * GIB,
        "line": "model.py:3, forward",
    }


def test_the_page_is_written_besides_the_printed_text(folder: Path, gpumem: Gpumem) -> None:
    plain = gpumem("run.pickle", "--gpu=RTX-4060")
    assert gpumem("run.pickle", "--gpu=RTX-4060", "--html", "new/page.html") == plain
    overview = Page((folder / "new" / "page.html").read_text(encoding="utf-8")).overview
    assert (overview["name"], overview["gpu"], overview["exact"]) == (
        "run.pickle",
        "RTX-4060",
        True,
    )
    assert overview["notes"] == plain[1][-2:]
    (device,) = overview["devices"]
    assert device["recorded"]["usage"]["peak_reserved"] == 10 * GIB
    assert device["places"][1]["site"] == "model.py:2"


def test_the_page_is_written_besides_json_too(folder: Path, gpumem: Gpumem) -> None:
    _, lines = gpumem("run.pickle", "--json", "--html=page.html")
    assert json.loads("\n".join(lines))["exact"]
    assert (folder / "page.html").exists()


def test_a_page_is_never_written_over_its_snapshot(folder: Path, refusal: Refusal) -> None:
    before = (folder / "run.pickle").read_bytes()
    assert refusal("run.pickle", "--html=run.pickle") == (
        "gpumem: the page would replace the snapshot run.pickle; name another"
    )
    assert (folder / "run.pickle").read_bytes() == before
    assert "cannot be written: Is a directory" in refusal("run.pickle", "--html=.")


def test_the_rules_of_a_release_can_be_selected(gpumem: Gpumem) -> None:
    assert gpumem("run.pickle", "--torch=2.11")[1][1].startswith(
        "replayed by the rules of torch 2.11"
    )


def test_bad_input_is_one_sentence(folder: Path, refusal: Refusal) -> None:
    (folder / "empty.pickle").write_bytes(b"")
    (folder / "text.pickle").write_text("hello\n")
    (folder / "code.pickle").write_bytes(b"cos\nsystem\n(S'echo ran'\ntR.")
    save(folder, "list.pickle", [])
    for arguments, sentence in [
        (["none.pickle"], "none.pickle: No such file or directory."),
        (["."], ". is not a file; give a memory snapshot."),
        (["empty.pickle"], "Cannot read the memory snapshot empty.pickle: it is empty."),
        (["text.pickle"], "Cannot read the memory snapshot text.pickle: "),
        (["code.pickle"], "it refers to os.system, and a snapshot holds only plain values."),
        (["list.pickle"], "list.pickle is not a memory snapshot: it holds a list"),
        (["run.pickle", "--gpu=A101"], "'A101' is not a GPU model"),
        (["run.pickle", "--gpu=T4*2"], "'T4*2' is not a GPU model"),
        (["run.pickle", "--alloc-conf=nonsense:1"], "nonsense"),
        (["run.pickle", "--torch=new"], "--torch: 'new' is not a release; write one like 2.6"),
        (["run.pickle", "--torch=1.0"], "torch 1.0 is not known to the simulated allocator"),
        (["run.pickle", "--used-elsewhere=1GiB"], "give its model with --gpu"),
        (["run.pickle", "--gpu=T4", "--used-elsewhere=x"], "--used-elsewhere: 'x'"),
        ([], "the following arguments are required: SNAPSHOT"),
    ]:
        assert sentence in refusal(*arguments), arguments


def test_the_command_runs_without_torch(folder: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from pytest_gpumem.cli import main\n"
        "sys.exit(main(['replay', 'run.pickle', '--gpu', 'T4', '--html', 'page.html']))"
    )
    repository = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(repository)}, capture_output=True
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert (folder / "page.html").exists()
