"""A program's peaks are the same in pytest, in simulate() and by ``gpumem run`` and ``predict``."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.forked import quick
from tests.order.programs import PROGRAMS

REPOSITORY = Path(__file__).parents[2]
GPU = "A100-40GB"

TEST = """
import pytest
from tests.order import programs

@pytest.mark.gpumem
def test_program():
    programs.{name}()
"""

SIMULATED = """
import json, sys
from pytest_gpumem import simulate
from tests.order import programs

with simulate("{gpu}") as gpu:
    programs.{name}()
print(json.dumps([gpu.peak_allocated, gpu.peak_reserved]))
"""

Peaks = tuple[int, int]
"""Allocated and reserved bytes."""


def output(folder: Path, *arguments: str) -> str:
    """Return the output of a Python process in which torch is imported and nothing has run."""
    ran = subprocess.run(
        [str(quick("plain")), *arguments],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        },
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def in_pytest(*options: str) -> Callable[[Path, str], Peaks]:
    def peaks(folder: Path, name: str) -> Peaks:
        (folder / "test_it.py").write_text(TEST.format(name=name))
        options_of_all = ("-p", "no:cacheprovider", f"--gpumem-device=sim:{GPU}")
        output(folder, "-m", "pytest", *options_of_all, "--gpumem-report=json:it.json", *options)
        (test,) = json.loads((folder / "it.json").read_text())["tests"]
        return test["measurement"]["peak_allocated"], test["measurement"]["peak_reserved"]

    return peaks


def simulated(folder: Path, name: str) -> Peaks:
    printed = output(folder, "-c", SIMULATED.format(name=name, gpu=GPU))
    allocated, reserved = json.loads(printed.splitlines()[-1])
    return allocated, reserved


def run(folder: Path, name: str) -> Peaks:
    (folder / "script.py").write_text(f"from tests.order import programs\nprograms.{name}()\n")
    printed = output(
        folder,
        "-m",
        "pytest_gpumem.cli",
        "run",
        "--gpu",
        GPU,
        "--steps",
        "9",
        "--json",
        "script.py",
    )
    (gpu,) = json.loads(printed)["gpus"]
    return gpu["peak_allocated"], gpu["peak_reserved"]


def predicted(folder: Path, name: str) -> Peaks:
    printed = output(
        folder,
        *("-m", "pytest_gpumem.cli", "predict", "--gpu", GPU, "--json"),
        f"tests.order.programs:{name}",
    )
    (gpu,) = json.loads(printed)["gpus"]
    return gpu["peak_allocated"], gpu["peak_reserved"]


WAYS: dict[str, Callable[[Path, str], Peaks]] = {
    "pytest": in_pytest(),
    "pytest, explained": in_pytest("--gpumem-explain=always"),
    "run": run,
    "predict": predicted,
}


@pytest.mark.parametrize("name", [program.__name__ for program in PROGRAMS])
def test_peaks_of_a_program_do_not_depend_on_the_way_it_is_run(tmp_path: Path, name: str) -> None:
    expected = simulated(tmp_path, name)
    assert {way: peaks(tmp_path, name) for way, peaks in WAYS.items()} == dict.fromkeys(
        WAYS, expected
    )
