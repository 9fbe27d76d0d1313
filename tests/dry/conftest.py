from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_gpumem.dry.build import DryError
from pytest_gpumem.dry.load import DEFAULT, environment

REPOSITORY = Path(__file__).parent.parent.parent

Run = Callable[..., Any]


def why_not() -> str | None:
    """Return why this machine has no dry device, ``None`` where it has."""
    try:
        environment(DEFAULT)
    except DryError as error:
        return str(error)
    return None


SERVER = """
import json, os, sys
import torch

for line in sys.stdin:
    *files, program, variables = json.loads(line)
    process = os.fork()
    if process == 0:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for stream, file in enumerate(files, 1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT), stream)
        os.environ.update(variables)
        code = 1
        try:
            exec(compile(program, "program.py", "exec"), {"__name__": "__main__"})
            code = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""
"""A program that has imported torch, which takes seconds, and runs each line it reads in a fork."""


@pytest.fixture(scope="session")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A function that runs code on the dry device and returns what it puts into ``found``.

    The code of a call without ``variables``, which torch may read while it is imported, runs in a
    fork of a process that has imported torch.
    """
    if reason := why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("forks")
    with subprocess.Popen(
        [sys.executable, "-m", "pytest_gpumem.dry", "-c", SERVER],
        cwd=REPOSITORY,
        env=bare_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        requests, replies = server.stdin, server.stdout
        assert requests is not None
        assert replies is not None

        def run_in_fork(code: str, gpu: str = DEFAULT, **variables: str) -> Any:
            if variables:
                return run(code, gpu, **variables)
            written, errors = Path(tempfile.mkdtemp(dir=folder), "written"), folder / "errors"
            request = json.dumps([str(written), str(errors), _program(code), environment(gpu)])
            print(request, file=requests, flush=True)
            status = int(replies.readline())
            assert status == 0, errors.read_text()
            return json.loads(written.read_text().splitlines()[-1])

        yield run_in_fork
        requests.close()


def _program(code: str) -> str:
    return f"import json, torch\nfound = {{}}\n{code}\nprint('\\n' + json.dumps(found))"


def run(code: str, gpu: str = DEFAULT, **variables: str) -> Any:
    """Run ``code`` in a new process; raises ``AssertionError`` with what it wrote if it fails."""
    command = [sys.executable, "-m", "pytest_gpumem.dry", "--gpu", gpu, "-c", _program(code)]
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
