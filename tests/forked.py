"""Python processes that have torch already: forked from one that did nothing but import it.

A new Python imports torch for seconds of processor time; the tests here start hundreds. ``quick``
is a program that is called as Python is. Called with ``-c``, it asks a server of this test process
for a fork, hands it its folder, environment, arguments and its standard streams, and ends as the
fork did. No plugin, no simulated device and no thread was in the server before.

The workers of pytest-xdist in runs that tests start are such processes, too.
"""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from execnet import gateway_io

REPOSITORY = Path(__file__).parent.parent

_QUICK = """#!{python} -IS
import json, os, signal, socket, sys

flags = [flag for flag in sys.argv[1:] if flag in ("-u", "-B")]
rest = [word for word in sys.argv[1:] if word not in flags]
if rest[:1] != ["-c"]:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
request = dict(folder=os.getcwd(), environment=dict(os.environ), arguments=rest[1:])
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
socket.send_fds(server, [b"0"], [0, 1, 2])
server.sendall(json.dumps(request).encode())
server.shutdown(socket.SHUT_WR)
for stream in (0, 1, 2):
    os.close(stream)
status = int(server.recv(16) or 1)
if os.WIFSIGNALED(status):
    signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
    os.kill(os.getpid(), os.WTERMSIG(status))
os._exit(os.waitstatus_to_exitcode(status))
"""


@cache
def quick() -> Path:
    """Return the program; it serves until this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="quick-python-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    address, program = folder / "server", folder / "python"
    program.write_text(_QUICK.format(python=sys.executable, address=str(address)))
    program.chmod(0o700)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(address))
    listening.listen(64)
    server = subprocess.Popen(
        [sys.executable, "-c", f"from tests.fork_server import serve; serve({listening.fileno()})"],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.PIPE,  # which closes with this process
        pass_fds=[listening.fileno()],
    )
    listening.close()
    assert server.stdin is not None
    atexit.register(server.wait)
    atexit.register(server.stdin.close)
    return program


def quicken_workers() -> None:
    """Let every worker that pytest-xdist starts from here be such a process."""
    usual = gateway_io.popen_args
    if usual.__module__ != __name__:
        gateway_io.popen_args = lambda spec: [str(quick()), *usual(spec)[1:]]
