"""Properties of every subcommand: its help, its JSON, and one sentence for each wrong input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from pytest_gpumem.cli import COMMANDS, INTERRUPTED, main
from pytest_gpumem.report.json_report import write_report
from tests.forked import quick
from tests.report.example_run import MIB, measured, record

PROGRAM = (sys.executable, "-m", "pytest_gpumem.cli")

Refusal = Callable[..., str]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change into a folder of right and wrong files."""
    monkeypatch.chdir(tmp_path)
    write_report(tmp_path / "good.json", [record("test_a.py::test_x", measured(MIB))])
    contents = {
        "empty": b"",
        "damaged.json": b'{"schema_version": 1, "tests": [',
        "schema.json": b'{"schema_version": 1, "environment": null, "tests": [{}]}',
        "newer.json": b'{"schema_version": 99}',
        "list.json": b"[1, 2]",
        "null.json": b"null",
        "nan.json": b"NaN",
        "deep.json": b"[" * 100_000,
        "long.json": b"1" * 5_000,
        "binary.json": bytes(range(256)),
        "nul.json": b"\0" * 100,
        "surrogate.json": b'{"schema_version": 1, "environment": null, "tests": ["\\ud800"]}',
        "evil.pickle": b"cos\nsystem\n(S'touch evil'\ntR.",
        "half.pickle": b"\x80\x04\x95",
        "gzip.pickle": b"\x1f\x8b\x08garbage",
        "xz.pickle": b"\xfd7zXZ\x00garbage",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop.json").symlink_to("loop.json")
    return tmp_path


WRONG_FILES = (
    *("missing.json", "", "empty", "damaged.json", "schema.json", "newer.json", "list.json"),
    *("null.json", "nan.json", "deep.json", "long.json", "binary.json", "nul.json"),
    *("surrogate.json", "evil.pickle", "half.pickle", "gzip.pickle", "xz.pickle"),
    *("folder", "loop.json", "no\0name", "a" * 5_000, "/dev/null", "a\n\x1b[31mb.json"),
)


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Refusal:
    """Return a function that runs the command and returns the sentence with which it refuses."""

    def run(*arguments: str) -> str:
        assert main(arguments) == 2, arguments
        out, err = capsys.readouterr()
        assert out == "", arguments
        (sentence,) = err.splitlines()
        assert sentence.startswith("gpumem: "), arguments
        assert len(sentence) < 2_100
        assert sentence.isprintable(), arguments
        assert "Traceback" not in sentence
        return sentence

    return run


READERS = (
    ("compare", "FILE", "good.json"),
    ("compare", "good.json", "FILE"),
    ("report", "FILE"),
    ("report", "FILE", "--to", "markdown"),
    ("report", "good.json", "--to", "markdown", "--against", "FILE"),
    ("report", "FILE", "--to", "png"),
    ("history", "FILE"),
    ("history", "good.json", "FILE"),
    ("history", "--git", "HEAD", "--baselines", "FILE"),
    ("baselines", "list", "--baselines", "FILE"),
    ("baselines", "show", "a.py::b", "--baselines", "FILE"),
    ("baselines", "move", "a.py::b", "a.py::c", "--baselines", "FILE"),
    ("baselines", "prune", "--baselines", "FILE"),
    ("plan", "--runner", "T4:1", "good.json", "--durations", "FILE"),
    ("replay", "FILE"),
)


@pytest.mark.parametrize("reader", READERS, ids=" ".join)
def test_a_wrong_file_is_one_sentence(
    reader: tuple[str, ...], place: Path, refusal: Refusal
) -> None:
    for file in WRONG_FILES:
        refusal(*(file if word == "FILE" else word for word in reader))
    assert not (place / "evil").exists()


WRITERS = (
    ("report", "good.json", "--to", "html", "-o", "FILE"),
    ("report", "good.json", "--to", "markdown", "-o", "FILE"),
    ("plan", "--runner", "T4:1", "good.json", "--output", "FILE"),
)


@pytest.mark.parametrize("writer", WRITERS, ids=" ".join)
@pytest.mark.parametrize("file", ["folder", "good.json/x", "no\0name", "a" * 300])
def test_a_file_that_cannot_be_written_is_one_sentence(
    writer: tuple[str, ...], file: str, place: Path, refusal: Refusal
) -> None:
    refusal(*(file if word == "FILE" else word for word in writer))


WRONG_NUMBERS = ("", "-1", "x", "nan", "1e400", "-5MiB", "5 XB", "%", "-1%", "\x1b[31m")
OPTIONS_WITH_NUMBERS = (
    ("compare", "good.json", "good.json", "--tolerance"),
    ("history", "good.json", "--tolerance"),
    ("history", "good.json", "--max-creep"),
    ("replay", "half.pickle", "--gpu", "T4", "--used-elsewhere"),
    ("replay", "half.pickle", "--torch"),
    ("plan", "good.json", "--runner", "T4:1", "--minutes"),
    ("plan", "good.json", "--runner", "T4:1", "--startup"),
    ("predict", "net.py:step", "--by=layer", "--depth"),
    ("predict", "net.py:step", "--by=layer", "--input"),
    ("gpus", "--watch"),
    ("bisect", "test_a.py", "--good", "HEAD", "--tolerance"),
)


@pytest.mark.parametrize("option", OPTIONS_WITH_NUMBERS, ids=" ".join)
def test_a_wrong_number_is_one_sentence(
    option: tuple[str, ...], place: Path, refusal: Refusal
) -> None:
    for number in WRONG_NUMBERS:
        refusal(*option[:-1], f"{option[-1]}={number}")


@pytest.mark.parametrize("gpu", ["", "T5", "-1", "T4*0", "T4*x", "\x1b[31m", "T4:1"])
def test_an_unknown_gpu_is_one_sentence(gpu: str, place: Path, refusal: Refusal) -> None:
    (place / "snapshot.pickle").write_bytes(b"\x80\x04}\x94.")
    refusal("replay", "snapshot.pickle", f"--gpu={gpu}")
    refusal("plan", "good.json", f"--runner={gpu}:1:1")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            "report good.json --against good.json",
            "--against goes with --to markdown, not with --to",
        ),
        ("report good.json --to png --name x", "--name goes with --to markdown, not with --to png"),
        ("report good.json --to markdown --kind phases", "--kind goes with --to png, not with"),
        ("report good.json --to png -o x.svg", "--output x.svg does not end in .png, as --to says"),
        ("report", "name the report that --gpumem-report json:PATH wrote"),
        ("predict net.py:step --depth 2", "--depth goes with --by layer, not with no --by"),
        ("predict net.py:step --by line --csv", "--csv goes with --by layer, not with --by line"),
        (
            "predict net.py:step --by layer --ranks 8",
            "--ranks goes with no --by, not with --by lay",
        ),
        ("predict net.py:step --by line --gpu T4 --gpu L4", "--by line looks at one GPU, not at 2"),
        ("gpus --once", "--once goes with --watch; without --watch, the GPUs are read once"),
    ],
)
def test_an_option_of_another_form_is_refused(
    arguments: str, sentence: str, place: Path, refusal: Refusal
) -> None:
    assert refusal(*arguments.split()).startswith(f"gpumem: {sentence}")


def test_arguments_that_do_not_exist_are_one_sentence(place: Path, refusal: Refusal) -> None:
    for name in COMMANDS:
        assert refusal(name, "--nope", "--json=1").startswith("gpumem: ")
    assert refusal("--nope").endswith("see gpumem --help")
    assert refusal().endswith("see gpumem --help")
    assert "tcsh" in refusal("completion", "tcsh")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_an_example_and_json(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert name == "baselines" or "--json" in text
    assert f"examples:\n  {'eval' if name == 'completion' else f'gpumem {name}'}" in text
    assert "%%" not in text


def test_the_general_help_lists_commands_by_task_on_one_screen(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert all(any(line.startswith(f"    {name} ") for line in lines) for name in COMMANDS)
    assert sum(line.endswith("?") for line in lines) == 3
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        (["compare", "good.json", "good.json"], {"a", "b", "tests"}),
        (["gpus"], {"devices", "nvml"}),
        (["history", "good.json"], {"tests", "notes"}),
        (["report", "good.json"], {"output", "tests", "bytes"}),
        (["report", "good.json", "--to", "markdown"], {"output", "markdown"}),
        (["devices"], {"default", "models"}),
        (["plan", "good.json", "--runner", "T4:1"], {"runners", "tests", "machines", "cost"}),
        (["report", "good.json", "--to", "svg"], {"output", "kind", "tests"}),
        (["gpus", "--watch", "0.01", "--once"], {"devices", "nvml", "runs"}),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_json_is_the_only_output(
    arguments: list[str], keys: set[str], place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "svg" in arguments:
        pytest.importorskip("matplotlib")
    assert main([*arguments, "--json"]) == 0
    out, err = capsys.readouterr()
    assert keys <= json.loads(out).keys()
    assert err == ""


def test_compare_as_json(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_report(place / "more.json", [record("test_a.py::test_x", measured(3 * MIB))])
    assert main(["compare", "good.json", "more.json", "--json"]) == 1
    (test,) = json.loads(capsys.readouterr().out)["tests"]
    (number,) = test["numbers"]
    assert number.pop("changes") == []  # the reports have no source lines
    assert test == {
        "nodeid": "test_a.py::test_x",
        "environment": "sim-A100-40GB-torch2.13",
        "was": None,
        "tolerance": None,
        "numbers": [{"phase": "", "a": MIB, "b": 3 * MIB, "status": "regression"}],
    }


@pytest.mark.skipif(sys.platform == "win32", reason="closes streams by a POSIX shell")
@pytest.mark.parametrize(
    ("arguments", "code"),
    [("devices >&-", 0), ("nothing >&- 2>&-", 2), ("nothing 2>&-", 2), ("run s.py >&-", 0)],
)
def test_a_closed_stream_of_the_caller_gets_no_output(
    place: Path, arguments: str, code: int
) -> None:
    (place / "s.py").write_text("import torch\ntorch.empty(1, device='cuda')\nprint(1)\n")
    ran = subprocess.run(
        [f'"{sys.executable}" -m pytest_gpumem.cli {arguments}'],
        cwd=place,
        shell=True,
        capture_output=True,
        text=True,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (code, "", "")


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["compare", "--help"]], ids=" ".join
)
def test_a_reader_that_closes_its_pipe_early_causes_no_error(arguments: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    # With unbuffered output, as some machines set it, no write would remain at the end.
    buffered = {name: os.environ[name] for name in os.environ if name != "PYTHONUNBUFFERED"}
    ran = subprocess.run(
        [*PROGRAM, *arguments],
        stdout=writing,
        stderr=subprocess.PIPE,
        env=buffered,
        text=True,
        check=False,
    )
    os.close(writing)
    assert ran.stderr == ""


@pytest.mark.parametrize("command", [("predict", "slow.py:step"), ("run", "slow.py")])
def test_ctrl_c_prints_one_word(tmp_path: Path, command: tuple[str, str]) -> None:
    (tmp_path / "slow.py").write_text(
        "import pathlib, time\ndef step():\n    pathlib.Path('begun').touch()\n    time.sleep(60)\n"
        "if __name__ == '__main__':\n    step()\n"
    )
    begun = tmp_path / "begun"
    program = subprocess.Popen(
        [quick(), *PROGRAM[1:], *command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # shells may ignore it
    )
    deadline = time.monotonic() + 60
    while not begun.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(program.pid, signal.SIGINT)  # as a terminal does
    assert program.communicate(timeout=60) == ("", "gpumem: interrupted\n")
    assert program.returncode == INTERRUPTED


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["compare", "good.json", "good.json"],
        ["replay", "half.pickle"],
        ["run", "absent.py"],
    ],
    ids=" ".join,
)
def test_light_commands_import_no_heavy_module(arguments: list[str], place: Path) -> None:
    heavy = {"torch", "pytest", "numpy", "matplotlib", "jsonschema", "tqdm", "argcomplete"}
    code = (
        "import sys\n"
        "from pytest_gpumem.cli import main\n"
        "try:\n"
        f"    main({arguments})\n"
        "finally:\n"
        f"    print(sorted({heavy} & sys.modules.keys()), file=sys.stderr)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stderr.splitlines()[-1] == "[]"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_by_the_printed_script(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("argcomplete")
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "_ARGCOMPLETE" in script
    assert "gpumem" in script


def test_bash_completes_subcommands_and_their_options(tmp_path: Path) -> None:
    pytest.importorskip("argcomplete")
    assert _completions("gpumem comp", tmp_path) == ["compare", "completion"]
    assert _completions("gpumem compare --ac", tmp_path) == ["--across-environments "]
    assert _completions("gpumem report r.json --kind h", tmp_path) == ["history "]


def _completions(line: str, folder: Path) -> list[str]:
    """Return the completions that argcomplete writes to the file descriptor 8 for bash."""
    answer = folder / "answer"
    subprocess.run(
        ["bash", "-c", f"{' '.join(PROGRAM)} 8> {answer} 9> /dev/null"],
        env={
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "_ARGCOMPLETE": "1",
            "_ARGCOMPLETE_IFS": "\n",
            "COMP_LINE": line,
            "COMP_POINT": str(len(line)),
        },
        check=False,
    )
    return answer.read_text().split("\n")
