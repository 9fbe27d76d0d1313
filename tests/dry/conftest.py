from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_gpumem.dry.build import DryError
from pytest_gpumem.dry.load import environment

REPOSITORY = Path(__file__).parent.parent.parent

Run = Callable[..., Any]


def why_not() -> str | None:
    """Return why this machine has no dry device, ``None`` where it has."""
    try:
        environment("A100-40GB")
    except DryError as error:
        return str(error)
    return None


@pytest.fixture(scope="session")
def dry_run() -> Run:
    """A function that runs code on the dry device and returns what it puts into ``found``."""
    if reason := why_not():
        pytest.skip(reason)
    return run


def run(code: str, gpu: str = "A100-40GB", **variables: str) -> Any:
    """Run ``code`` in a new process; raises ``AssertionError`` with what it wrote if it fails."""
    program = f"import json, torch\nfound = {{}}\n{code}\nprint('\\n' + json.dumps(found))"
    command = [sys.executable, "-m", "pytest_gpumem.dry", "--gpu", gpu, "-c", program]
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env={**bare_environment(), **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def bare_environment() -> dict[str, str]:
    """Return the variables of a process that this one has told nothing of devices."""
    kept = ("PATH", "HOME", "XDG_CACHE_HOME", "VIRTUAL_ENV", "TMPDIR")
    found = {name: os.environ[name] for name in kept if name in os.environ}
    return {**found, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
