from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_gpumem.baseline.store import BaselineEntry
from pytest_gpumem.baseline.verdict import Verdict
from pytest_gpumem.cli import main
from pytest_gpumem.report.json_report import write_report
from pytest_gpumem.report.record import TestRecord
from pytest_gpumem.values.environment import Environment
from pytest_gpumem.values.measurement import Measurement, PhaseRecord
from tests.stores import BaselineStore

MIB = 1024**2
T4 = Environment(simulated=True, gpu="T4", compute_capability="7.5", torch="2.13")
A10 = replace(T4, gpu="A10", compute_capability="8.6")
H100 = Environment(False, "NVIDIA H100", "9.0", "2.13", cuda="13.0")
Gpumem = Callable[..., tuple[int, list[str]]]
Refusal = Callable[..., str]
T4_LINE = "(sim-T4-torch2.13, simulated)"


def measured(peak: int, device: str = "cuda:0", **phases: int) -> Measurement:
    records = {name: PhaseRecord(name, size, 0, 0, 0) for name, size in phases.items()}
    return Measurement(device, True, peak, 0, 0, 0, 0, 0, phases=records)


def record(name: str, peak: int | None, **changes: Any) -> TestRecord:
    phases = changes.pop("phases", {})
    values: dict[str, Any] = {
        "nodeid": f"test_a.py::{name}",
        "outcome": "passed",
        "environment": T4,
        "measurement": None if peak is None else measured(peak, **phases),
    }
    return TestRecord(**{**values, **changes})


def report(path: Path, *records: TestRecord) -> Path:
    return write_report(path, records)


def folder(path: Path, environment: Environment = T4, **peaks: int) -> Path:
    entries = {name: BaselineEntry(peak, 0, 0, 0, {"forward": 512}) for name, peak in peaks.items()}
    BaselineStore(path).write(environment, "test_a.py", entries)
    return path


@pytest.fixture
def gpumem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Gpumem:
    """Return a function that runs the command beside the files: exit code, lines of output."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, list[str]]:
        code = main(arguments)
        written = capsys.readouterr()
        assert written.err == ""
        return code, written.out.splitlines()

    return run


@pytest.fixture
def refusal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Refusal:
    """Return a function that runs the command and returns its one sentence of refusal."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> str:
        assert main(arguments) == 2
        written = capsys.readouterr()
        assert written.out == ""
        (sentence,) = written.err.splitlines()
        return sentence

    return run


def test_a_narrow_terminal_gets_fewer_columns_and_shorter_names(
    gpumem: Gpumem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("command", "compare"):
        monkeypatch.setattr(f"pytest_gpumem.cli.{module}.terminal_width", lambda: 64)
    name = f"test_{'x' * 60}[bfloat16]"
    report(tmp_path / "a.json", record(name, 100 * MIB), record(f"{name[:-1]}-old]", 512))
    report(tmp_path / "b.json", record(name, 130 * MIB), record("test_new", 1024))
    _, lines = gpumem("compare", "a.json", "b.json", "--across-environments")
    assert max(map(len, lines)) <= 64
    assert lines[4:6] == [
        "test                     phase          A          B  status",
        "test_a.py::…x[bfloat16]         100.0 MiB  130.0 MiB  regression",
    ]
    assert lines[-3:] == [
        "1 test in A and B, peaks add up to 100.0 MiB and 130.0 MiB",
        "  (+30.0 MiB, +30.0 %); numbers: 1 regression, 0 improvement, 0",
        "  same, 1 new, 1 gone, 0 failed",
    ]


def test_two_reports_are_compared(gpumem: Gpumem, tmp_path: Path) -> None:
    report(
        tmp_path / "a.json",
        record("test_grown", 100 * MIB, phases={"forward": 80 * MIB, "backward": 100 * MIB}),
        record("test_less", 8 * MIB),
        record("test_old", 512),
        record("test_same", 0),
    )
    report(
        tmp_path / "b.json",
        record("test_grown", 130 * MIB, phases={"forward": 80 * MIB, "step": 512}),
        record("test_less", 6 * MIB),
        record("test_new", 1024),
        record("test_same", 0),
    )
    assert gpumem("compare", "a.json", "b.json") == (
        1,
        [
            f"A: a.json {T4_LINE}",
            f"B: b.json {T4_LINE}",
            "tolerance: 0 simulated, 1% + 1MiB measured",
            "",
            "test                   phase             A          B  difference      %  status",
            "test_a.py::test_grown            100.0 MiB  130.0 MiB   +30.0 MiB  +30.0  regression",
            "test_a.py::test_grown  backward  100.0 MiB          -                     gone",
            "test_a.py::test_grown  step              -      512 B                     new",
            "test_a.py::test_less               8.0 MiB    6.0 MiB    -2.0 MiB  -25.0  improvement",
            "",
            "new, in B alone:",
            "  test_a.py::test_new    1.0 KiB",
            "",
            "gone, in A alone:",
            "  test_a.py::test_old      512 B",
            "",
            "2 equal numbers are not shown (--all)",
            "",
            "3 tests in A and B, peaks add up to 108.0 MiB and 136.0 MiB (+28.0 MiB, +25.9 %); "
            "numbers: 1 regression, 1 improvement, 2 same, 2 new, 2 gone, 0 failed",
        ],
    )


def test_baselines_are_compared_with_baselines_and_a_report(gpumem: Gpumem, tmp_path: Path) -> None:
    folder(tmp_path / "old", test_x=1024)
    folder(tmp_path / "new", test_x=2048)
    report(tmp_path / "run.json", record("test_x", 1024, phases={"call": 1024, "forward": 512}))
    code, lines = gpumem("compare", "old", "new", "--all")
    assert code == 1
    assert lines[5:7] == [
        "test_a.py::test_x           1.0 KiB  2.0 KiB    +1.0 KiB  +100.0  regression",
        "test_a.py::test_x  forward    512 B    512 B         0 B    +0.0  same",
    ]
    assert lines[7] == "" != lines[8]  # one line apart from the totals
    code, lines = gpumem("compare", "old", "run.json")
    assert code == 0
    assert lines[-1].endswith("0 regression, 0 improvement, 2 same, 0 new, 0 gone, 0 failed")
    assert gpumem("compare", "old/sim-T4-torch2.13", "new")[0] == 1
    assert gpumem("compare", "new", "old")[0] == 0


def test_simulated_numbers_are_compared_exactly_and_measured_ones_with_a_tolerance(
    gpumem: Gpumem, tmp_path: Path
) -> None:
    for environment, code in ((T4, 1), (H100, 0)):
        folder(tmp_path / f"{code}a", environment, test_x=200 * MIB)
        folder(tmp_path / f"{code}b", environment, test_x=203 * MIB)
        assert gpumem("compare", f"{code}a", f"{code}b")[0] == code
    folder(tmp_path / "0b", H100, test_x=203 * MIB + 1)
    assert gpumem("compare", "0a", "0b")[0] == 1
    for peak, status in ((197 * MIB, "same"), (197 * MIB - 1, "improvement")):
        folder(tmp_path / "0b", H100, test_x=peak)
        code, lines = gpumem("compare", "0a", "0b", "--all")
        assert (code, lines[5].split()[-1]) == (0, status)


def test_the_tolerance_can_be_set(gpumem: Gpumem, refusal: Refusal, tmp_path: Path) -> None:
    folder(tmp_path / "a", test_x=1000)
    folder(tmp_path / "b", test_x=1100)
    assert gpumem("compare", "a", "b", "--tolerance", "100")[0] == 0
    code, lines = gpumem("compare", "a", "b", "--tolerance", "1% + 89")
    assert code == 1
    assert lines[2] == "tolerance: 1% + 89B"
    assert refusal("compare", "a", "b", "--tolerance=lots").startswith(
        "gpumem: --tolerance: 'lots' is not a tolerance; write "
    )


def test_each_test_keeps_its_own_tolerance(
    gpumem: Gpumem, refusal: Refusal, tmp_path: Path
) -> None:
    wide = {"tolerance": "10%"}
    for name, peak in (("a", 100 * MIB), ("b", 105 * MIB)):
        own = record("test_own", peak, expectation=wide)
        report(tmp_path / name, own, record("test_exact", peak))
    code, lines = gpumem("compare", "a", "b")
    assert code == 1
    assert lines[2] == "tolerance: 0 simulated, 1% + 1MiB measured; 1 test has its own"
    assert lines[5].endswith(
        "test_exact         100.0 MiB  105.0 MiB    +5.0 MiB  +5.0  regression"
    )
    assert lines[6].endswith("+5.0 MiB  +5.0  same (tolerance 10%)")
    assert gpumem("compare", "a", "b", "--test", "own")[0] == 0
    # A tolerance on the command line applies to all tests.
    assert gpumem("compare", "a", "b", "--test", "own", "--tolerance=0")[0] == 1


def test_a_baseline_stores_the_tolerance_of_its_test(gpumem: Gpumem, tmp_path: Path) -> None:
    for name, peak in (("a", 100 * MIB), ("b", 105 * MIB)):
        entry = BaselineEntry.of(measured(peak), "10%")
        BaselineStore(tmp_path / name).write(T4, "test_a.py", {"test_x": entry})
    assert gpumem("compare", "a", "b")[0] == 0
    BaselineStore(tmp_path / "b").write(T4, "test_a.py", {"test_x": BaselineEntry.of(measured(1))})
    assert gpumem("compare", "b", "a")[0] == 1


def test_the_largest_change_comes_first(gpumem: Gpumem, tmp_path: Path) -> None:
    before = {"a": 10, "b": 10, "c": 10, "d": 100, "e": 10}
    after = {"a": 11, "b": 20, "c": 9, "d": 10, "e": 10}
    for name, peaks in (("old", before), ("new", after)):
        report(tmp_path / name, *(record(f"test_{one}", size) for one, size in peaks.items()))
    _, lines = gpumem("compare", "old", "new")
    assert [line.split()[0][-1] for line in lines[5:9]] == ["b", "a", "d", "c"]
    assert lines[10] == "1 equal number is not shown (--all)"


def test_tests_and_phases_can_be_selected(gpumem: Gpumem, refusal: Refusal, tmp_path: Path) -> None:
    for name, peak in (("a", 1024), ("b", 2048)):
        report(
            tmp_path / name,
            record("test_x[big-1]", peak, phases={"forward": 512, "step": peak}),
            record("test_y[big-1]", 512, phases={"forward": peak}),
        )
    _, lines = gpumem("compare", "a", "b", "--test", "x[big", "--phase", "step")
    assert lines[5] == (
        "test_a.py::test_x[big-1]  step   1.0 KiB  2.0 KiB    +1.0 KiB  +100.0  regression"
    )
    assert lines[6] == ""
    # A test that is not selected does not count for the exit code.
    assert gpumem("compare", "a", "b", "--test", "a.py*x[", "--phase", "forward")[0] == 0
    assert gpumem("compare", "a", "b", "--test", "_x", "--test", "_y", "--phase=forward")[0] == 1
    assert refusal("compare", "a", "b", "--test", "test_z") == (
        "gpumem: no test has 'test_z' in its node id"
    )
    assert refusal("compare", "a", "b", "--phase", "backward") == (
        "gpumem: no test has a phase 'backward'; there are: forward, step"
    )


def test_a_renamed_test_is_compared_with_its_earlier_name(gpumem: Gpumem, tmp_path: Path) -> None:
    report(
        tmp_path / "a",
        record("test_train_step", 3000, phases={"forward": 100}),
        record("test_other", 3000),
        record("test_x", 512, nodeid="old/test_b.py::test_x[1]"),
    )
    report(
        tmp_path / "b",
        record("test_training_step", 3000, phases={"forward": 100}),
        record("test_quite_different", 512),
        record("test_x", 1024, nodeid="new/test_b.py::test_x[1]"),
    )
    code, lines = gpumem("compare", "a", "b", "--all")
    # A test that only moved is the same test, although it has grown; one with another name and
    # other numbers is another test.
    assert code == 1
    assert [line.split("  ")[0] for line in lines[5:8]] == [
        "new/test_b.py::test_x[1] (was old/test_b.py::test_x[1])",
        "test_a.py::test_training_step (was test_a.py::test_train_step)",
        "test_a.py::test_training_step (was test_a.py::test_train_step)",
    ]
    assert "  test_a.py::test_quite_different      512 B" in lines
    assert "  test_a.py::test_other    2.9 KiB" in lines


def test_environments_of_only_one_side_are_left_out_and_listed_first(
    gpumem: Gpumem, tmp_path: Path
) -> None:
    folder(tmp_path / "a", test_x=1024)
    folder(tmp_path / "a", A10, test_x=1)
    folder(tmp_path / "b", test_x=1024)
    code, lines = gpumem("compare", "a", "b")
    assert (code, lines[0]) == (
        0,
        "environments differ: sim-A10-torch2.13, sim-T4-torch2.13 in A, sim-T4-torch2.13 in B; "
        "not compared: sim-A10-torch2.13",
    )
    assert lines[-1].endswith(
        "numbers: 0 regression, 0 improvement, 2 same, 0 new, 0 gone, 0 failed"
    )


def test_different_environments_are_compared_only_on_request(
    gpumem: Gpumem, refusal: Refusal, tmp_path: Path
) -> None:
    folder(tmp_path / "a", test_x=200 * MIB)
    folder(tmp_path / "b", H100, test_x=202 * MIB)
    assert refusal("compare", "a", "b") == (
        "gpumem: a was measured in sim-T4-torch2.13 and b in cuda-NVIDIA-H100-torch2.13-cu13.0; "
        "compare them all the same with --across-environments"
    )
    code, lines = gpumem("compare", "a", "b", "--across-environments")
    assert code == 0
    assert lines[:3] == [
        "environments differ: sim-T4-torch2.13 in A, cuda-NVIDIA-H100-torch2.13-cu13.0 in B; "
        "compared all the same",
        f"A: a {T4_LINE}",
        "B: b (cuda-NVIDIA-H100-torch2.13-cu13.0, measured)",
    ]
    folder(tmp_path / "b", H100, test_x=204 * MIB)
    assert gpumem("compare", "a", "b", "--across-environments")[0] == 1


def test_dry_and_simulated_environments_of_one_gpu_are_paired(
    gpumem: Gpumem, tmp_path: Path
) -> None:
    for environment, peak in ((T4, 1024), (A10, 2048)):
        folder(tmp_path / "a", environment, test_x=peak)
        folder(tmp_path / "b", replace(environment, simulated=False, dry=True), test_x=2048)
    code, lines = gpumem("compare", "a", "b", "--across-environments")
    assert code == 1
    assert lines[0] == (
        "environments differ: sim-A10-torch2.13, sim-T4-torch2.13 in A, dry-A10-torch2.13, "
        "dry-T4-torch2.13 in B; compared all the same"
    )
    assert any("test_x [sim-T4-torch2.13]" in line and "regression" in line for line in lines)
    assert not any("test_x [sim-A10-torch2.13]" in line for line in lines)


def test_ambiguous_environments_are_refused(refusal: Refusal, tmp_path: Path) -> None:
    folder(tmp_path / "a", test_x=1)
    folder(tmp_path / "a", A10, test_x=1)
    folder(tmp_path / "b", H100, test_x=1)
    assert refusal("compare", "a", "b", "--across-environments") == (
        "gpumem: a has sim-A10-torch2.13, sim-T4-torch2.13 and b has "
        "cuda-NVIDIA-H100-torch2.13-cu13.0, so it is not clear which belong together; give "
        "folders of one environment each"
    )


def test_tests_of_several_environments_are_shown_with_it(gpumem: Gpumem, tmp_path: Path) -> None:
    for name, peak in (("a", 1024), ("b", 2048)):
        report(
            tmp_path / name,
            record("test_x", 512),
            record("test_y", 512),
            record("test_x", peak, environment=A10),
        )
    code, lines = gpumem("compare", "a", "b", "--all")
    assert code == 1
    assert [line.split("  ")[0] for line in lines[5:8]] == [
        "test_a.py::test_x [sim-A10-torch2.13]",
        "test_a.py::test_x [sim-T4-torch2.13]",
        "test_a.py::test_y [sim-T4-torch2.13]",
    ]
    assert lines[5].endswith("regression")


def test_a_test_whose_body_failed_is_shown_and_not_compared(gpumem: Gpumem, tmp_path: Path) -> None:
    over = Verdict("limit", "peak_allocated", None, 1, 4096, None, False)
    report(tmp_path / "a", *(record(f"test_{name}", 1024) for name in ("body", "limit", "setup")))
    report(
        tmp_path / "b",
        record("test_body", 512, outcome="failed", judged=False),
        record("test_limit", 4096, outcome="failed", verdicts=(over,)),
        record("test_setup", None, outcome="error"),
    )
    code, lines = gpumem("compare", "a", "b")
    assert code == 1
    assert [line.split()[-1] for line in lines[5:8]] == ["regression", "failed", "failed"]
    assert lines[6].split() == ["test_a.py::test_body", "1.0", "KiB", "-", "failed"]
    assert lines[-1].startswith("1 test in A and B, peaks add up to 1.0 KiB and 4.0 KiB (+3.0 KiB")


def test_a_skipped_test_counts_as_absent(gpumem: Gpumem, tmp_path: Path) -> None:
    report(tmp_path / "a", record("test_x", 1), record("test_y", 1))
    report(tmp_path / "b", record("test_x", 1), record("test_y", None, outcome="skipped"))
    code, lines = gpumem("compare", "a", "b")
    assert code == 0
    assert "gone, in A alone:" in lines
    assert "  test_a.py::test_y        1 B" in lines


def test_every_device_of_a_test_is_compared(gpumem: Gpumem, tmp_path: Path) -> None:
    for name, peak in (("a", 512), ("b", 1024)):
        other = measured(peak, "cuda:1", forward=peak)
        report(tmp_path / name, record("test_x", 1, other_devices=(other,)))
    code, lines = gpumem("compare", "a", "b", "--all")
    assert code == 1
    assert [line.split()[-1] for line in lines[5:8]] == ["same", "regression", "regression"]
    assert lines[6].startswith("test_a.py::test_x  cuda:1          ")
    assert lines[7].startswith("test_a.py::test_x  cuda:1 forward  ")


def test_node_ids_are_compared_without_xdist_groups(gpumem: Gpumem, tmp_path: Path) -> None:
    report(tmp_path / "a", record("test_x[1]", 1))
    report(tmp_path / "b", record("test_x[1]@gpu", 1))
    assert gpumem("compare", "a", "b")[1][-1].startswith("1 test in A and B")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "gpumem: report bad is not one of pytest-gpumem: not valid JSON ("),
        ("{}", "gpumem: report bad is not one of pytest-gpumem: 'schema_version' is a required"),
    ],
)
def test_a_file_that_is_no_report_is_refused(
    refusal: Refusal, tmp_path: Path, content: str, sentence: str
) -> None:
    (tmp_path / "bad").write_text(content)
    report(tmp_path / "good", record("test_x", 1))
    for pair in (("bad", "good"), ("good", "bad")):
        assert refusal("compare", *pair).startswith(sentence)


def test_a_path_without_reports_or_baselines_is_refused(refusal: Refusal, tmp_path: Path) -> None:
    report(tmp_path / "good", record("test_x", 1))
    report(tmp_path / "empty", record("test_x", None, outcome="skipped"))
    (tmp_path / "folder").mkdir()
    assert refusal("compare", "good", "nowhere") == (
        "gpumem: nowhere does not exist; give a JSON report or a baselines folder"
    )
    assert refusal("compare", "folder", "good").startswith("gpumem: folder holds no baselines; ")
    assert refusal("compare", "empty", "empty") == (
        "gpumem: neither empty nor empty holds a measured test; nothing to compare"
    )


def test_a_project_with_a_baselines_folder_is_refused_by_the_name_of_that(
    refusal: Refusal, tmp_path: Path
) -> None:
    folder(tmp_path / "project" / "baselines", test_x=1)
    cache = tmp_path / "project" / ".pytest_cache" / "d" / "gpumem"
    cache.mkdir(parents=True)
    (cache / "learned.json").write_text("{}")
    assert refusal("compare", "project", "project") == (
        "gpumem: project is not a baselines folder; give project/baselines, which is one"
    )


def test_a_damaged_baseline_is_refused(refusal: Refusal, tmp_path: Path) -> None:
    folder(tmp_path / "a", test_x=1)
    (tmp_path / "a" / "sim-T4-torch2.13" / "test_a.py.json").write_text("<<<<<<< HEAD")
    assert refusal("compare", "a", "a").startswith(
        "gpumem: baseline a/sim-T4-torch2.13/test_a.py.json is damaged or not one of pytest-gpumem"
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "gpumem: the following arguments are required: COMMAND; see gpumem --help"),
        (["fly"], "gpumem: 'fly' is not a command: there are run, predict, "),
        (["comapre"], "gpumem: 'comapre' is not a command: did you mean compare?; see gpumem --"),
        (["compare", "a"], "gpumem: the following arguments are required: B; see gpumem compare"),
        (["compare", "a", "b", "--no"], "gpumem: unrecognized arguments: --no; see gpumem compare"),
    ],
)
def test_bad_arguments_are_refused(refusal: Refusal, arguments: list[str], sentence: str) -> None:
    assert refusal(*arguments).startswith(sentence)


def test_help_names_the_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["--help"])
    assert done.value.code == 0
    assert "compare     two reports or baselines folders" in capsys.readouterr().out


def test_the_command_imports_neither_torch_nor_nvml(tmp_path: Path) -> None:
    folder(tmp_path / "a", test_x=1)
    code = (
        "import sys, pytest_gpumem.cli as cli\n"
        f"code = cli.main(['compare', {str(tmp_path / 'a')!r}, {str(tmp_path / 'a')!r}])\n"
        "print(code, json.dumps(sorted({'torch', 'pynvml'} & set(sys.modules))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import json\n{code}"], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == f"0 {json.dumps([])}"


def test_control_characters_of_a_name_are_escaped(tmp_path: Path, gpumem: Gpumem) -> None:
    hostile = record("test_\x1b[2J\n\u202e", MIB, phases={"\x1b[31m": MIB})
    before = report(tmp_path / "a\x1b.json", hostile)
    code, lines = gpumem("compare", "--all", str(before), str(report(tmp_path / "b.json", hostile)))
    assert code == 0
    assert all(line.isprintable() for line in lines)
    assert r"test_a.py::test_\x1b[2J\n\u202e" in "\n".join(lines)


def test_a_path_that_is_too_long_is_one_short_sentence(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "pytest_gpumem.cli", "compare", "x" * 50_000, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 2
    assert len(ran.stderr) < 1000
    assert ran.stderr.endswith(": File name too long\n")


@pytest.mark.parametrize("text", ["1%\x0b\x1c+ 1", "1 %\n+ 1MiB"])
def test_a_tolerance_with_odd_whitespace_is_read(tmp_path: Path, gpumem: Gpumem, text: str) -> None:
    same = str(report(tmp_path / "a.json", record("test_x", MIB)))
    assert gpumem("compare", same, same, f"--tolerance={text}")[0] == 0
