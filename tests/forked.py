"""Python processes that have torch already: forked from one that did nothing but import.

A new Python imports torch and this package for seconds of processor time, and torch's compilers for
as many again, which threads and optimizers need; the tests here start hundreds. ``quick`` is a
program that is called as Python is: with ``-c``, with ``-m`` or with a script. It asks a server
for a fork, hands it its folder, environment, arguments and its open files, passes signals on, and
ends as the fork did. Nothing ran in the server before: no pytest, no simulated device, no thread.
What is called otherwise is a new Python. One server is for all workers of a run of these tests.

The workers of pytest-xdist are such processes, too, of these tests and in runs that they start; so
is what a fork starts as ``sys.executable`` or by ``multiprocessing``.
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
"""Programs, each of whose processes have what those before have, and more."""

_DRY = "PYTEST_GPUMEM_DRY"
"""The variable of processes that have the dry device."""

_FOLDER = "QUICK_PYTHONS"
"""The variable that tells the workers where the programs are."""

# By the modules under socket and signal, which import for longer than all the rest takes.
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
    """Return the program; it serves until the process that began to serve ends.

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
    """Start the server of this process and of those that it starts, if there is none.

    It imports what it has to ``at_once``, or when it is first asked.
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
    """Let every worker that pytest-xdist starts from here be such a process."""
    usual = gateway_io.popen_args
    if usual.__module__ != __name__:
        gateway_io.popen_args = lambda spec: [str(quick()), *usual(spec)[1:]]


def is_quick() -> bool:
    """Whether this process is such a one."""
    return sys.executable.startswith(os.environ.get(_FOLDER, "/dev/null"))


def be_usual() -> None:
    """Start new Pythons from here on, in this process that has torch already."""
    sys.executable = sys.orig_argv[0]
    multiprocessing.set_executable(sys.executable)
