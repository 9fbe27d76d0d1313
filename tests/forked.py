"""Python processes that have torch already: forks of a server that has only imported modules.

A new Python takes seconds to import torch and this package, and as many for torch's compilers,
which threads and optimizers need; these tests start hundreds. ``quick`` returns a program that is
called as Python is: with ``-c``, ``-m`` or a script. It asks a server for a fork, passes on its
folder, environment, arguments, open files and signals, and exits with the fork's status. The
server runs nothing else: no pytest, no simulated device, no thread. Called in any other way, the
program starts a new Python. All workers of a run of these tests share one server.

Workers of pytest-xdist are forks, too, of these tests and in runs that they start; so are processes
that a fork starts as ``sys.executable`` or by ``multiprocessing``.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from execnet import gateway_io

from pytest_gpumem.device.host_gpus import DRIVERS
from pytest_gpumem.dry.build import cuda_of

REPOSITORY = Path(__file__).parent.parent

SERVE = "from tests.fork_server import serve; serve({listening}, at_once={at_once})"

KINDS = ("plain", "symbolic", "full")
"""Kinds of programs; the processes of each have the modules of those before, and more."""

_DRY = "PYTEST_GPUMEM_DRY"
"""The environment variable of processes that have the dry device."""

_FOLDER = "QUICK_PYTHONS"
"""The environment variable that gives the workers the folder of the programs."""

# Uses _socket and _signal: importing socket and signal takes longer than all the rest.
_QUICK = """#!{python} -IS
import _signal, _socket, array, marshal, os, sys

flags = [flag for flag in sys.argv[1:3] if flag in ("-u", "-B")]
rest = sys.argv[1 + len(flags):]
if rest and rest[0].startswith("-m") and rest[0] != "-m":
    rest[:1] = ["-m", rest[0][2:]]
known = len(rest) > 1 if rest[:1] in (["-c"], ["-m"]) else rest and rest[0][0] != "-"
if not known:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
folder = os.open("/proc/self/fd", os.O_RDONLY)
files = sorted({{int(name) for name in os.listdir(folder)}} - {{folder}})
files = [number for number in files if os.path.exists(f"/proc/self/fd/{{number}}")]
os.close(folder)
request = marshal.dumps(
    dict(
        program=sys.argv[0],
        folder=os.getcwd(),
        environment=dict(os.environ),
        files=files,
        arguments=rest,
        leads=os.getpgrp() == os.getpid(),
    )
)
server = _socket.socket(_socket.AF_UNIX)
server.connect({address!r})
handed = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array.array("i", files))
server.sendmsg([len(request).to_bytes(8, "little")], [handed])
server.sendall(request)

def answer():
    told = b""
    while not told.endswith(b"\\n"):
        received = server.recv(1)
        if not received:
            return None
        told += received
    return int(told)

fork = answer() or -1
pass_on = os.killpg if os.getpgrp() == os.getpid() else os.kill  # as a terminal does, or a shell
for number in (_signal.SIGINT, _signal.SIGTERM):
    _signal.signal(number, lambda number, frame: pass_on(fork, number))
for number in files:
    os.close(number)
status = answer()
if status is None:
    status = 256
if os.WIFSIGNALED(status):
    if os.WTERMSIG(status) != _signal.SIGKILL:  # which nobody handles
        _signal.signal(os.WTERMSIG(status), _signal.SIG_DFL)
    os.kill(os.getpid(), os.WTERMSIG(status))
os._exit(os.waitstatus_to_exitcode(status))
"""


def quick(kind: str = "full") -> Path:
    """Return the program; it works until the process that started the server ends.

    Its processes have Dynamo and Inductor already, ``"symbolic"`` ones what these are built on, and
    ``"plain"`` ones no more than torch. Where CUDA has devices it is Python itself: autograd starts
    a thread for each device, and cannot run in forks of a process that has started them
    (``_in_bad_autograd_fork`` of torch/csrc/autograd/engine.cpp).
    """
    return begin_to_serve() / kind / "python" if can_serve() else Path(sys.executable)


def can_serve() -> bool:
    """Return whether forks of a process with torch can take the place of new Pythons.

    A CUDA build of torch without NVIDIA's packages is imported over the dry runtime only.
    """
    if _DRY in os.environ or any(map(os.path.exists, DRIVERS)):
        return False
    torch = find_spec("torch")
    folder = None if torch is None or torch.origin is None else Path(torch.origin).parent
    return folder is None or cuda_of(folder) is None or find_spec("nvidia") is not None


def begin_to_serve(*, at_once: bool = False) -> Path:
    """Start the server of this process and its children, unless one runs; return its folder.

    The server imports its modules ``at_once``, or on the first request.
    """
    if _FOLDER in os.environ:
        return Path(os.environ[_FOLDER])
    folder = Path(tempfile.mkdtemp(prefix="quick-python-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ[_FOLDER] = str(folder)
    listening = [_listening(folder / kind) for kind in KINDS]
    numbers = [one.fileno() for one in listening]
    server = subprocess.Popen(
        [sys.executable, "-c", SERVE.format(listening=numbers, at_once=at_once)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.PIPE,  # which closes with this process
        pass_fds=numbers,
    )
    for one in listening:
        one.close()
    assert server.stdin is not None
    atexit.register(server.wait)
    atexit.register(server.stdin.close)
    return folder


def _listening(folder: Path) -> socket.socket:
    """Write a program into ``folder``, and return the socket that it connects to."""
    folder.mkdir()
    address, program = folder / "server", folder / "python"
    program.write_text(_QUICK.format(python=sys.executable, address=str(address)))
    program.chmod(0o700)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(address))
    listening.listen(64)
    return listening


def quicken_workers() -> None:
    """Make pytest-xdist start the workers of this process as forks of the server."""
    usual = gateway_io.popen_args
    if usual.__module__ != __name__:
        gateway_io.popen_args = lambda spec: [str(quick()), *usual(spec)[1:]]


def is_quick() -> bool:
    """Return whether this process is a fork of the server."""
    return sys.executable.startswith(os.environ.get(_FOLDER, "/dev/null"))


def stop_forking() -> None:
    """Make this process, a fork itself, start new Pythons from now on."""
    sys.executable = sys.orig_argv[0]
    multiprocessing.set_executable(sys.executable)
