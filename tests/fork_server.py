"""The server of ``tests.forked``: imports torch, and forks for each that connects."""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import os
import random
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from types import ModuleType

import pytest  # noqa: F401  # what a fork is to have
import torch  # noqa: F401


def serve(number: int) -> None:
    """Fork for each that connects to the listening socket ``number``, until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a fork's keeper
    beginning = set(os.environ.get("PYTHONPATH", "").split(os.pathsep)) | {""}
    sys.path[:] = [entry for entry in sys.path if entry not in beginning]
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


def _keep(connection: socket.socket) -> None:
    """Fork, wait for the fork, and tell who connected how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, streams, _, _ = socket.recv_fds(connection, 1, 3)
    request = b"".join(iter(lambda: connection.recv(65536), b""))
    fork = os.fork()
    if fork == 0:
        connection.close()
        for place, stream in enumerate(streams):
            os.dup2(stream, place)
            os.close(stream)
        _run(**json.loads(request))
    for stream in (0, 1, 2, *streams):
        os.close(stream)
    _, status = os.waitpid(fork, 0)
    with contextlib.suppress(OSError):  # it was killed before
        connection.sendall(str(status).encode())
    os._exit(0)


def _run(folder: str, environment: Mapping[str, str], arguments: Sequence[str]) -> None:
    """Be ``python -u -c`` with these arguments, the first of which is the code."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    own = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:0] = ["", *own]
    sys.argv[:] = ["-c", *arguments[1:]]
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
        exec(compile(arguments[0], "<string>", "exec"), main.__dict__)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter's end does
        atexit._run_exitfuncs()
        os._exit(code)
