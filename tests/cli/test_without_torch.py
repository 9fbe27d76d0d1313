"""Commands on a machine without torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ABSENT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name="torch")

sys.meta_path.insert(0, Absent())
"""


@pytest.mark.parametrize(
    "command",
    [
        ("predict", "net.py:train"),
        ("predict", "net.py:train", "--by", "layer"),
        ("predict", "net.py:train", "--by", "line"),
        ("run", "net.py"),
    ],
)
def test_a_command_that_runs_code_says_that_torch_is_missing(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    (tmp_path / "sitecustomize.py").write_text(ABSENT)
    (tmp_path / "net.py").write_text("def train(): ...")
    search = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    ran = subprocess.run(
        [sys.executable, "-m", "pytest_gpumem.cli", *command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": search},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (
        2,
        "",
        "gpumem: this command runs code on torch, which is not installed: install torch\n",
    )
