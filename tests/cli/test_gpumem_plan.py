"""``gpumem plan``: shards, their time and price on models of GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_gpumem.baseline.store import BaselineEntry
from pytest_gpumem.cli import main
from pytest_gpumem.report.json_report import write_report
from pytest_gpumem.report.record import TestRecord
from pytest_gpumem.sharing.learned import Learned, TestCost, add_learned
from pytest_gpumem.sharing.weights import read_weights
from pytest_gpumem.sizes import GIB
from tests.cli.test_without_torch import ABSENT
from tests.report.example_run import REAL, SIMULATED, measured
from tests.stores import BaselineStore

RUNNERS = ("--runner=T4:0.36", "--runner=L4:0.72", "--runner=H100:3.60")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def record(name: str, gib: int, seconds: float | None = 60.0, **more: object) -> TestRecord:
    size = gib * GIB
    return TestRecord(
        f"test_it.py::{name}",
        "passed",
        REAL,
        replace(measured(size), peak_reserved=size),
        duration=seconds,
        **more,  # type: ignore[arg-type]  # each by its own type
    )


@pytest.fixture
def report(folder: Path) -> str:
    small = [record(f"test_small[{number:02}]", 1) for number in range(97)]
    large = [record("test_l4", 16), record("test_h100", 30), record("test_both", 40)]
    write_report(folder / "report.json", [*small, *large])
    return "report.json"


def test_the_text_of_a_plan(
    report: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pytest_gpumem.cli.plan.terminal_width", lambda: 80)
    assert main(["plan", *RUNNERS, "--minutes=50", report]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    # 97 minutes on T4s of 50 minutes: two, 0.36 an hour each; one minute of an L4; two of an H100.
    assert out == (
        "97 of your 100 tests fit a T4, 98 an L4, all an H100\n"
        "\n"
        "GPU   an hour  for tests  fit  run  machines  minutes  cost\n"
        "T4       0.36  13.87 GiB   97   97         2     49.0  0.58\n"
        "L4       0.72  20.96 GiB   98    1         1      1.0  0.01\n"
        "H100     3.60  77.02 GiB  100    2         1      2.0  0.12\n"
        "\n"
        "4 machines, 49.0 minutes of the 50 that they have, 0.71 a run\n"
        "\n"
        "not on a T4:\n"
        "  test_it.py::test_both  needs 40.00 GiB\n"
        "  test_it.py::test_h100  needs 30.00 GiB\n"
        "  test_it.py::test_l4  needs 16.00 GiB\n"
        "\n"
        "not on an L4:\n"
        "  test_it.py::test_both  needs 40.00 GiB\n"
        "  test_it.py::test_h100  needs 30.00 GiB\n"
        "\n"
        "room for tests: a GPU's memory less 2% and 600.0 MiB of context\n"
        "needs: as measured by cuda-NVIDIA-H200-torch2.13-cu12.8\n"
        "durations: as reported on cuda-NVIDIA-H200-torch2.13-cu12.8; of tests alone on\n"
        "  their device\n"
    )


def test_seconds_are_not_shown_as_no_minutes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_report(folder / "report.json", [record("test_small", 1, seconds=2)])
    assert main(["plan", *RUNNERS, "--minutes=10", "report.json"]) == 0
    out = capsys.readouterr().out
    assert "1 machine, <0.1 minutes of the 10 that they have, 0.00 a run\n" in out
    assert out.splitlines()[3].split()[-3:] == ["1", "<0.1", "0.00"]


def test_the_shards_are_written_for_a_ci_matrix(report: str, folder: Path) -> None:
    assert main(["plan", *RUNNERS, "--minutes=50", "--output=shards.json", report]) == 0
    jobs = json.loads((folder / "shards.json").read_text())["matrix"]["include"]
    assert [(job["runner"], job["shard"], job["tests"]) for job in jobs] == [
        ("T4", "1/4", 49),
        ("T4", "2/4", 48),
        ("L4", "3/4", 1),
        ("H100", "4/4", 2),
    ]
    shards = read_weights(folder / "shards.json").shards
    assert [shard.runner for shard in shards] == ["T4", "T4", "L4", "H100"]
    assert len({nodeid for shard in shards for nodeid in shard.tests}) == 100


def test_json_has_every_number_of_the_plan(report: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *RUNNERS, "--json", report]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [runner["fit"] for runner in data["runners"]] == [97, 98, 100]
    assert [machine["runner"] for machine in data["machines"]] == ["T4", "L4", "H100"]
    assert len(data["tests"]) == 100
    assert data["cost"] == pytest.approx((97 * 0.36 + 0.72 + 2 * 3.6) / 60)


def test_a_test_that_fits_nowhere_is_a_failure(
    report: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--runner=T4:0.36", "--runner=L4:0.72", report]) == 1
    assert "on no runner:\n  test_it.py::test_both  needs 40.00 GiB\n" in capsys.readouterr().out


def test_a_test_longer_than_the_time_is_a_failure(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_report(folder / "report.json", [record("test_long", 1, 600.0), record("test_it", 1)])
    assert main(["plan", "--runner=T4:1", "--minutes=5", "report.json"]) == 1
    assert "longer than there is time:\n  test_it.py::test_long\n" in capsys.readouterr().out


def test_durations_measured_beside_others_do_not_count(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_report(
        folder / "report.json", [record("test_a", 1, 120.0), record("test_b", 1, 900.0, beside=3)]
    )
    assert main(["plan", "--runner=T4:1", "report.json"]) == 0
    out = capsys.readouterr().out
    assert "1 machine, 4.0 minutes, 0.07 a run\n" in out
    assert out.endswith("of tests alone on their device; 1 unknown, taken for average\n")


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ([1], "your test fits a T4, an L4 and an H100"),
        ([90], "your test fits no T4 and no L4 and no H100"),
        ([1, 2], "all of your 2 tests fit a T4, all an L4, all an H100"),
        ([1, 16], "1 of your 2 tests fits a T4, all an L4, all an H100"),
        ([30, 90], "none of your 2 tests fits a T4, none an L4, 1 an H100"),
    ],
)
def test_the_first_sentence_agrees_with_the_number_of_tests(
    folder: Path, capsys: pytest.CaptureFixture[str], sizes: list[int], said: str
) -> None:
    write_report(folder / "report.json", [record(f"test_{n}", n) for n in sizes])
    main(["plan", *RUNNERS, "report.json"])
    assert capsys.readouterr().out.startswith(said + "\n")


def test_needs_of_tests_are_read_from_baselines(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = BaselineStore(folder / "baselines")
    entry = BaselineEntry(15 * GIB, 16 * GIB, 0, 0)
    store.write(SIMULATED, "test_it.py", {"test_large": entry})
    learned = Learned()
    learned.learn("cuda-NVIDIA-L4-torch2.13-cu12.8", "test_it.py::test_large", TestCost(120.0))
    cache = folder / ".pytest_cache" / "d" / "gpumem"
    add_learned(cache, learned)
    assert main(["plan", *RUNNERS, "baselines"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("your test fits an L4 and an H100, not a T4\n")
    assert "1 machine, 2.0 minutes, 0.02 a run\n" in out
    assert "needs: stored baselines of sim-A100-40GB-torch2.13\n" in out
    assert "durations: of earlier runs, by pytest's cache on cuda-NVIDIA-L4-torch2.13" in out


def test_durations_of_a_simulated_run_are_marked_as_simulated(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_report(folder / "report.json", [replace(record("test_a", 1), environment=SIMULATED)])
    assert main(["plan", *RUNNERS, "report.json"]) == 0
    assert "on sim-A100-40GB-torch2.13, where a real GPU differs;" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["report.json"], "the following arguments are required: --runner; see gpumem plan --help"),
        (["--runner=T5:1", "report.json"], "'T5' is not a GPU model; known: T4, "),
        (["--runner=T4", "report.json"], "--runner 'T4' is not a GPU model and the price of an "),
        (["--runner=T4:1", "nope.json"], "report nope.json cannot be read: No such file"),
        (["--runner=T4:1", "--minutes=0", "report.json"], "'0' is not a number of minutes above 0"),
        (["--runner=T4:1", "--durations=no", "report.json"], "no cannot be read: No such file"),
    ],
)
def test_bad_input_is_one_sentence(
    report: str, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    assert report == "report.json"
    assert main(["plan", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert sentence in captured.err


def test_a_report_needs_no_torch(report: str, folder: Path) -> None:
    (folder / "sitecustomize.py").write_text(ABSENT)
    search = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    ran = subprocess.run(
        [sys.executable, "-m", "pytest_gpumem.cli", "plan", *RUNNERS, report],
        env={**os.environ, "PYTHONPATH": search},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith("97 of your 100 tests fit a T4, ")


SUITE = """
import pytest
import torch

@pytest.mark.gpumem
@pytest.mark.parametrize("gib", [1, 15, 90])
def test_takes(gib):
    torch.empty(gib << 30, dtype=torch.uint8, device="cuda")

@pytest.mark.gpumem
def test_fp8():
    a = torch.ones(64, 64, device="cuda").to(torch.float8_e4m3fn)
    one = torch.ones((), device="cuda")
    torch._scaled_mm(a, a.t(), one, one, out_dtype=torch.bfloat16)

@pytest.mark.gpumem(min_memory="40GiB")
def test_large_only():
    torch.ones(1, device="cuda")

@pytest.mark.gpumem
def test_broken():
    torch.ones(1, device="cuda").nothing()

def test_plain():
    pass
"""


@pytest.mark.usefixtures("forked_python")
def test_a_suite_runs_on_each_runner(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "test_it.py").write_text(SUITE)
    assert main(["plan", *RUNNERS, "--json", "test_it.py"]) == 1
    data = json.loads(capsys.readouterr().out)
    tests = {test["nodeid"].partition("::")[2]: test for test in data["tests"]}
    assert tests["test_takes[15]"]["bytes"]["H100"] == 15 * GIB
    assert tests["test_takes[15]"]["obstacles"] == {"T4": "runs out of memory, needs 15.00 GiB"}
    assert tests["test_fp8"]["obstacles"].keys() == {"T4"}
    assert "compute capability" in tests["test_fp8"]["obstacles"]["T4"]
    assert tests["test_large_only"]["obstacles"].keys() == {"T4", "L4"}
    assert tests["test_plain"]["bytes"] == {"T4": 0, "L4": 0, "H100": 0}
    assert tests["test_broken"]["problem"].startswith("AttributeError: 'Tensor' object has no ")
    assert data["nowhere"] == ["test_it.py::test_takes[90]"]
    homes = {
        nodeid.partition("::")[2]: machine["runner"]
        for machine in data["machines"]
        for nodeid in machine["tests"]
    }
    assert homes == {
        "test_takes[1]": "T4",
        "test_plain": "T4",
        "test_takes[15]": "L4",
        "test_fp8": "L4",
        "test_large_only": "H100",
        "test_broken": "H100",
    }
