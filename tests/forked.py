"""Pytest in a process of its own that has torch already, forked from one that only imported it.

A new Python imports torch for seconds of processor time, once for each test that needs a process;
a fork of one that did takes milliseconds. What such a process did before is to import torch: no
plugin, no simulated device, no thread.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path


@cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "pytest"])
    return context


def pytest_forked(
    arguments: Sequence[str], folder: Path, out: Path, err: Path, timeout: float
) -> int:
    """Run pytest in ``folder``, with what it prints in two files; return the exit code.

    Has this process's environment. Raises ``TimeoutError`` after ``timeout`` seconds, and a signal
    that ended the process is a negative exit code, as in ``subprocess``.
    """
    process = _context().Process(
        target=_run, args=(list(arguments), folder, out, err, dict(os.environ))
    )
    process.start()
    process.join(timeout)
    if process.is_alive():
        process.kill()
        process.join()
        raise TimeoutError(f"pytest took longer than {timeout} s in {folder}")
    assert process.exitcode is not None
    return process.exitcode


def _run(
    arguments: list[str], folder: Path, out: Path, err: Path, environment: Mapping[str, str]
) -> None:
    """Be that process, as ``python -m pytest`` begins one."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for path, number in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
    own = [str(folder), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    sys.path[:] = [*own, *(entry for entry in sys.path if entry not in own)]
    sys.argv[:] = ["pytest", *arguments]
    import pytest

    try:
        code = int(pytest.console_main())
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves without
    sys.exit(code)
