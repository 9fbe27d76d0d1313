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


def gpumem(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command in ``folder``, whose modules come first."""
    search = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "pytest_gpumem.cli", *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": search},
        capture_output=True,
        text=True,
        check=False,
    )


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
    ran = gpumem(tmp_path, *command)
    assert (ran.returncode, ran.stdout, ran.stderr) == (
        2,
        "",
        "gpumem: this command runs code on torch, which is not installed: install torch\n",
    )


UNLOADABLE = """
import sys

class Unloadable:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise ImportError("libcudnn.so.9: cannot open shared object file", name="_C")

sys.meta_path.insert(0, Unloadable())
"""
"""As ``from torch._C import *`` in torch/__init__.py fails, 2.15, without NVIDIA's packages."""


def test_a_torch_that_cannot_be_imported_is_told_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(UNLOADABLE)
    predict, env = gpumem(tmp_path, "predict", "net.py:train"), gpumem(tmp_path, "env")

    why = "torch cannot be imported: libcudnn.so.9: cannot open shared object file"
    refusal = f"gpumem: {why}; --device dry may work without it\n"
    assert (predict.returncode, predict.stderr) == (2, refusal)
    assert (env.returncode, env.stderr) == (0, "")
    assert why in env.stdout
