"""The twin run, with a simulated device in the place of the real one."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY
from tests.forked import quick

SOME = (
    *("products/linear bfloat16", "optimizers/AdamW fused", "checkpointing/reentrant autocast"),
    *("losses/cross_entropy smoothed", "allocator/churn large expandable_segments:True"),
)


def twin(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [quick(), "benchmarks/twin.py", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )


def load(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(path.read_text())
    return data


@pytest.fixture(scope="module")
def evidence(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("evidence") / "some.json"
    ran = twin("--device=sim", f"--evidence={path}", "--minutes=5", *SOME)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "events exact                    5  100.0 %" in ran.stdout
    return path


def test_a_simulated_device_differs_in_nothing_from_its_simulation(evidence: Path) -> None:
    data = load(evidence)

    assert set(data["scenarios"]) == set(SOME)
    counts = ("events", "peak_allocated", "peak_reserved")
    assert [data["summary"][f"{name}_exact"] for name in counts] == [5, 5, 5]
    assert data["environment"]["machine"]["name"] == "H200"
    linear = data["scenarios"]["products/linear bfloat16"]
    assert linear["real"]["statistics"] == linear["simulated"]["statistics"]
    # The weight, 512 x 384 in two bytes, and everything else besides.
    assert linear["real"]["statistics"]["peak_allocated"] > 2 * 512 * 384


def test_evidence_describes_only_the_gpu_of_the_machine(evidence: Path) -> None:
    environment = load(evidence)["environment"]

    assert set(environment) == {"machine", "torch", "cuda", "cudnn", "driver", "transformers"}
    assert not any(
        folder in evidence.read_text() for folder in (str(REPOSITORY), "/home/", "/tmp/")
    )


def test_a_twin_run_resumes_from_its_evidence(evidence: Path, tmp_path: Path) -> None:
    data = load(evidence)
    changed = data["scenarios"]["products/linear bfloat16"]
    # As if an older simulation had been compared, and the real peak had been twice as high.
    changed["simulation"] = "before"
    changed["real"]["statistics"]["peak_allocated"] *= 2
    other = tmp_path / "other.json"
    other.write_text(json.dumps(data))

    ran = twin(f"--recorded={other}")

    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "products/linear bfloat16: peak allocated -50.00 %" in ran.stdout
    again = load(other)["scenarios"]
    assert again["products/linear bfloat16"]["simulation"] != "before"
    assert not again["products/linear bfloat16"]["peak_allocated_exact"]
    kept, before = (found["optimizers/AdamW fused"] for found in (again, data["scenarios"]))
    assert kept["real"] == before["real"]
    assert kept["events_exact"]


def test_evidence_of_another_cuda_version_is_replaced(evidence: Path, tmp_path: Path) -> None:
    data = load(evidence)
    data["environment"]["cuda"] = "11.0"
    other = tmp_path / "other.json"
    other.write_text(json.dumps(data))

    ran = twin("--device=sim", f"--evidence={other}", "products/dot")

    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert set(load(other)["scenarios"]) == {"products/dot"}


def test_the_option_list_names_every_family() -> None:
    listed = {line.partition("/")[0] for line in twin("--list").stdout.splitlines()}

    assert {"products", "attention", "recurrent", "optimizers", "vision", "allocator"} <= listed


def test_a_twin_run_without_a_gpu_ends_with_one_sentence() -> None:
    ran = twin()

    assert ran.returncode == 1
    assert "--device sim simulates one" in ran.stderr
    assert "Traceback" not in ran.stderr
