"""The server of ``tests.forked``: imports what runs need, and forks for each connection."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import inspect
import io
import marshal
import mmap
import multiprocessing
import os
import random
import runpy
import select
import signal
import socket
import sys
import threading
import traceback
import weakref
from collections.abc import Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from _pytest.assertion import install_importhook
from _pytest.config import get_config

from tests import distributions

IMPORTED = ("numpy.random", "torch")

REWRITTEN = (
    *("_hypothesis_globals", "hypothesis", "anyio.pytest_plugin", "xdist.newhooks", "xdist._path"),
    *("pytest_gpumem.plugin", "pytest_gpumem.hookspecs", "pytest_gpumem.device.host_gpus"),
    *("pytest_gpumem.device.device", "pytest_gpumem.device.simulated"),
    "pytest_gpumem.baseline.collected",
    *("pytest_gpumem.report.header", "pytest_gpumem.report.record"),
    *("pytest_gpumem.session.lifecycle", "pytest_gpumem.session.hooks"),
    *("pytest_gpumem.session.hosts", "pytest_gpumem.session.isolated"),
    *("pytest_gpumem.session.item", "pytest_gpumem.sharing.learned"),
    *("pytest_gpumem.session.prepare", "pytest_gpumem.session.conclusion"),
    *("pytest_gpumem.session.placement", "pytest_gpumem.session.sharing"),
    *("pytest_gpumem.sharing.watched", "pytest_gpumem.session.device_admissions"),
    *("pytest_gpumem.sharing.admission", "pytest_gpumem.sharing.gate"),
    *("pytest_gpumem.sharing.ledger", "pytest_gpumem.sharing.usage"),
    *("xdist.dsession", "xdist.remote", "xdist.report", "xdist.scheduler", "xdist.workermanage"),
)
"""Modules that pytest's import hook rewrites in each run."""

PLAIN = ("faulthandler", "multiprocessing.synchronize", "pdb", "readline")
"""Modules that runs import without that hook."""

MOST_FILES = 250
"""Most open files in one message; Linux allows 253 (SCM_MAX_FD)."""

HUGE = 2 << 20
"""Bytes of a huge page."""

_COLLAPSE = 25
"""MADV_COLLAPSE of linux/mman.h, since Linux 6.1; older ones do nothing."""

SYMBOLIC = ("torch.fx.experimental.symbolic_shapes", "torch.distributed.tensor")
"""Modules that torch's compilers are built on."""

COMPILERS = ("torch._dynamo", "torch._inductor.compile_fx", "torch._functorch.aot_autograd")

CHECKPOINTS = tuple(f"torch.distributed.checkpoint.{name}" for name in ("filesystem", "state_dict"))


def serve(listening: Sequence[int], *, at_once: bool) -> None:
    """Fork for each connection to one of the listening sockets, until stdin closes.

    Processes of the second socket have the modules of the first and more, and so on.
    These are imported ``at_once``, or on the first connection.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sockets = [socket.socket(fileno=number) for number in listening]
    if not (at_once or _asked(*sockets)):
        return
    _import_plain()
    first = os.getpid()
    for names in (SYMBOLIC, (*COMPILERS, *CHECKPOINTS)):
        if process := os.fork():
            break
        sockets.pop(0).close()
        if not (at_once or _asked(*sockets)):
            os._exit(0)
        for name in names:
            importlib.import_module(name)
    own, *others = sockets
    for one in others:
        one.close()
    _fork_for_each(own)
    if process:
        os.waitpid(process, 0)
    if os.getpid() != first:
        os._exit(0)


def _import_plain() -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    _import_rewritten()
    _remember_distributions()
    beginning = set(os.environ.get("PYTHONPATH", "").split(os.pathsep)) | {""}
    sys.path[:] = [entry for entry in sys.path if entry not in beginning]


def _asked(*listening: socket.socket) -> bool:
    """Wait for a connection; return whether stdin is still open."""
    watched: list[Any] = [0, *listening]
    ready, _, _ = select.select(watched, [], [])
    return 0 not in ready


def _fork_for_each(listening: socket.socket) -> None:
    gc.freeze()  # collections in forks skip all of torch
    # Otherwise every fork would unregister torch's operator libraries at its end.
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    _into_huge_pages()
    # The first traceback of a process searches all modules; forks inherit the result.
    inspect.getmodule(_fork_for_each.__code__)
    forks: list[_Fork] = []
    while True:
        watched: list[Any] = [0, listening, *forks, *(fork.connection for fork in forks)]
        ready, _, _ = select.select(watched, [], [])
        for fork in [each for each in forks if each in ready or each.connection in ready]:
            fork.end()
            forks.remove(fork)
        if listening in ready:
            _serve_next(listening, forks)
        if 0 in ready:
            break
    for fork in forks:
        fork.end()


def _into_huge_pages() -> None:
    """Put the heap into huge pages, where possible: a fork then copies a small page table."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    advise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _, _, _, *name = line.split()
        if access.startswith("rw") and (not name or name == ["[heap]"]):
            start, end = (int(address, 16) for address in addresses.split("-"))
            start, end = -(-start // HUGE) * HUGE, end // HUGE * HUGE
            for how in (mmap.MADV_HUGEPAGE, _COLLAPSE) if start < end else ():
                advise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), how)


class _Fork:
    """A fork and its client, which receives the exit status; the fork is killed when it closes."""

    def __init__(self, process: int, connection: socket.socket) -> None:
        self.connection = connection
        self._process = process
        self._ended = os.pidfd_open(process)
        self._tell(process)

    def fileno(self) -> int:
        return self._ended

    def end(self) -> None:
        os.kill(self._process, signal.SIGKILL)  # no effect on a process that has ended
        _, status = os.waitpid(self._process, 0)
        self._tell(status)
        self.close()

    def close(self) -> None:
        self.connection.close()
        os.close(self._ended)

    def _tell(self, number: int) -> None:
        with contextlib.suppress(OSError):  # the client was killed
            self.connection.sendall(f"{number}\n".encode())


def _serve_next(listening: socket.socket, forks: list[_Fork]) -> None:
    connection, _ = listening.accept()
    size, files, _, _ = socket.recv_fds(connection, 8, MOST_FILES)
    length = int.from_bytes(size, "little")
    try:
        request = marshal.loads(connection.recv(length, socket.MSG_WAITALL))
    except (EOFError, ValueError, OSError):  # the client was killed
        connection.close()
    else:
        process = os.fork()
        if process == 0:
            listening.close()
            connection.close()
            for fork in forks:
                fork.close()
            _run(files, **request)
        forks.append(_Fork(process, connection))
    for file in files:
        os.close(file)


def _import_rewritten() -> None:
    """Import plugins' modules through pytest's hook, which warns of any that it did not rewrite."""
    config = get_config([])
    if not hasattr(config, "inicfg"):  # pytest 8 has it once its configuration is read
        vars(config)["inicfg"] = {}
    hook = install_importhook(config)
    hook.mark_rewrite(*{name.partition(".")[0] for name in REWRITTEN})
    for name in (*REWRITTEN, *PLAIN):
        if find_spec(name.partition(".")[0]):  # not every environment has all of the plugins
            importlib.import_module(name)
    config._ensure_unconfigure()


def _remember_distributions() -> None:
    for one in distributions.remembering():
        for part in ("metadata", "entry_points", "files"):
            getattr(one, part)
    metadata.distributions = distributions.remembering


def _run(
    handed: Sequence[int],
    *,
    files: Sequence[int],
    program: str,
    folder: str,
    environment: Mapping[str, str],
    arguments: Sequence[str],
    leads: bool,
) -> None:
    """Run as ``python -u`` with these arguments: with ``-c``, ``-m`` or a script.

    The descriptors ``handed`` over become ``files``; ``leads`` makes it lead a process group.
    """
    if leads:
        os.setpgid(0, 0)
    # First above all targets, so that none overwrites another.
    above = [fcntl.fcntl(file, fcntl.F_DUPFD, max(files) + 1) for file in handed]
    for file in handed:
        os.close(file)
    for file, place in zip(above, files, strict=True):
        os.dup2(file, place)
        os.close(file)
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
        del sys.modules[name]  # the fork's folder may have a package of this name
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
