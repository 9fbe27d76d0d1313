"""The server of ``tests.forked``: imports what runs import, and forks for each that connects."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import io
import json
import multiprocessing
import os
import random
import runpy
import select
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

import numpy.random  # noqa: F401  # what a fork is to have
import torch  # noqa: F401
from _pytest.assertion import install_importhook
from _pytest.config import get_config

REWRITTEN = (
    *("_hypothesis_globals", "hypothesis", "anyio.pytest_plugin", "xdist.newhooks"),
    *("pytest_gpumem.plugin", "pytest_gpumem.session.item", "pytest_gpumem.session.ahead"),
    *("pytest_gpumem.session.measuring", "pytest_gpumem.device.simulated"),
)


MOST_FILES = 250
"""Open files that Linux hands over at once (SCM_MAX_FD), nearly."""


COMPILERS = ("torch._dynamo", "torch._inductor.compile_fx", "torch._functorch.aot_autograd")


def serve(number: int, *, compilers: bool) -> None:
    """Fork for each that connects to the listening socket ``number``, until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a fork's keeper
    _import_rewritten()
    for name in COMPILERS if compilers else ():
        importlib.import_module(name)
    beginning = set(os.environ.get("PYTHONPATH", "").split(os.pathsep)) | {""}
    sys.path[:] = [entry for entry in sys.path if entry not in beginning]
    gc.freeze()  # no fork is to go through all of torch
    with socket.socket(fileno=number) as listening:
        while True:
            ready, _, _ = select.select([listening.fileno(), 0], [], [])
            if 0 in ready:
                return
            connection, _ = listening.accept()
            if os.fork() == 0:
                listening.close()
                _keep(connection)
            connection.close()


def _import_rewritten() -> None:
    """Import modules of plugins as pytest does, which warns of those that it has not rewritten."""
    config = get_config([])
    hook = install_importhook(config)
    hook.mark_rewrite(*{name.partition(".")[0] for name in REWRITTEN})
    for name in REWRITTEN:
        importlib.import_module(name)
    config._ensure_unconfigure()


def _keep(connection: socket.socket) -> None:
    """Fork, wait for the fork, and tell who connected how it ended; it goes when they go."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, files, _, _ = socket.recv_fds(connection, 8, MOST_FILES)
    (length,) = struct.unpack("q", size)
    request = json.loads(connection.recv(length, socket.MSG_WAITALL))
    places = request.pop("files")
    fork = os.fork()
    if fork == 0:
        connection.close()
        # Out of each other's way first.
        above = [fcntl.fcntl(file, fcntl.F_DUPFD, max(places) + 1) for file in files]
        for file in files:
            os.close(file)
        for file, place in zip(above, places, strict=True):
            os.dup2(file, place)
            os.close(file)
        _run(**request)
    for file in (0, 1, 2, *files):
        os.close(file)
    ended = os.pidfd_open(fork)
    with contextlib.suppress(OSError):  # it was killed before
        connection.sendall(f"{fork}\n".encode())
        ready, _, _ = select.select([ended, connection.fileno()], [], [])
        if ended not in ready:
            os.kill(fork, signal.SIGKILL)
    _, status = os.waitpid(fork, 0)
    with contextlib.suppress(OSError):
        connection.sendall(f"{status}\n".encode())
    os._exit(0)


def _run(
    program: str, folder: str, environment: Mapping[str, str], arguments: Sequence[str]
) -> None:
    """Be ``python -u`` with these arguments: with ``-c``, ``-m`` or a script."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.executable = program
    multiprocessing.set_executable(program)
    own = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    how, *rest = arguments
    first = {"-c": "", "-m": folder}.get(how, str(Path(how).resolve().parent))
    sys.path[:0] = [first, *own]
    sys.argv[:] = [how, *rest[1:]] if how in ("-c", "-m") else arguments
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]  # which the fork's own folder may have
    random.seed()
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    for stream, place in (("stdout", 1), ("stderr", 2)):
        raw = io.FileIO(place, "w", closefd=False)
        text = io.TextIOWrapper(raw, "utf-8", "backslashreplace", write_through=True)
        setattr(sys, stream, text)
        setattr(sys, f"__{stream}__", text)
    sys.modules["__main__"] = main = ModuleType("__main__")
    code = 0
    try:
        if how == "-m":
            runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]  # as -m does
        elif how == "-c":
            exec(compile(rest[0], "<string>", "exec"), main.__dict__)
        else:
            main.__dict__["__file__"] = how
            exec(compile(Path(how).read_bytes(), how, "exec"), main.__dict__)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter's end does
        atexit._run_exitfuncs()
        os._exit(code)
