"""``gpumem gpus`` on machines of the fake NVML, with tests in a ledger."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from pytest_gpumem.cli import main
from pytest_gpumem.cli.gpus import frame, watch
from pytest_gpumem.sharing.admission import Budget
from pytest_gpumem.sharing.database import FOLDER_VARIABLE, Process
from pytest_gpumem.sharing.devices import SharedSimulatedDevice
from pytest_gpumem.sharing.ledger import Ledger
from tests.fake_nvml import GIB, MACHINES, FakeNvml, Gpu, process, sample, uuids

ME = os.getpid()
WORKER = os.getppid()
"""A process that lives as long as this one, and whose tests run and wait."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A ledger of the test's own."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "shared"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(init_error=12))
    return tmp_path / "shared"


def on(machine: str | FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    if isinstance(machine, str):
        for name, value in MACHINES[machine].environ.items():
            monkeypatch.setenv(name, value)
        machine = MACHINES[machine].nvml()
    monkeypatch.setitem(sys.modules, "pynvml", machine)


def shown(capsys: pytest.CaptureFixture[str], *args: str) -> list[str]:
    assert main(["gpus", *args]) == 0
    return capsys.readouterr().out.splitlines()


def test_a_missing_driver_is_reported_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys) == [
        "no GPU: NVML's shared library was not found, so no NVIDIA driver is installed"
    ]


def test_a_device_is_shown_with_its_processes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on("mps", monkeypatch)
    assert shown(capsys) == [
        "GPU-9d1fca33-2a4e-0bc4-6c53-40ab2c5a1c4a  NVIDIA H100 80GB HBM3  "
        "MPS, exclusive-process mode",
        "  █···················  2.36 GiB of 79.65 GiB  kernels 64 %  memory 21 %",
        "  other  30.0 MiB  PID 3421  nvidia-cuda-mps-server",
        "  other  1.16 GiB  PID 4242",
        "  other  1.16 GiB  PID 5123  python",
    ]


def test_every_mig_instance_is_shown_as_a_device(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on("mig", monkeypatch)
    found = shown(capsys)
    assert [line.split()[0] for line in found if line.startswith("MIG-")] == uuids("mig")
    assert found[:2] == [
        f"{uuids('mig')[0]}  NVIDIA A100-SXM4-40GB  MIG 3g.20gb",
        "  ····················  11.0 MiB of 19.63 GiB",
    ]


def test_memory_of_hidden_processes_is_shown_as_such(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on("hami", monkeypatch)
    assert shown(capsys)[1:] == [
        "  ███·················  500.0 MiB of 2.93 GiB  kernels 0 %  memory 0 %",
        "  other  500.0 MiB  of no process that can be seen here",
    ]


@pytest.fixture
def busy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Set up a GPU with a running and a waiting test, an idle worker and another program."""
    gpu = Gpu(
        used=30 * GIB,
        compute=[process(WORKER, 6 * GIB), process(1, 24 * GIB)],
        samples=[sample(WORKER, 2, 55), sample(1, 1, 30)],
    )
    on(FakeNvml(gpu, names={1: "train.py"}), monkeypatch)
    ledger = Ledger(folder)
    worker = Process(WORKER, psutil.Process(WORKER).create_time())
    runs, waits, idle = (ledger.join("run", name, worker) for name in ("gw0", "gw1", "gw2"))
    ledger.hold(runs, gpu.uuid, context=GIB, fixtures=0)
    ledger.hold(idle, gpu.uuid, context=GIB, fixtures=GIB // 2)
    device = {gpu.uuid: Budget(140 * GIB)}
    assert ledger.try_grant(ledger.ask(runs, "test_a.py::test_runs", {gpu.uuid: GIB}), device)
    assert not ledger.try_grant(
        ledger.ask(waits, "test_a.py::test_\x1b[31mwaits", {gpu.uuid: 139 * GIB}), device
    ).granted
    yield gpu.uuid
    ledger.close()


def test_running_and_waiting_tests_are_shown_beside_other_programs(
    busy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shown(capsys)[1:] == [
        "  ████················  30.00 GiB of 140.00 GiB  kernels 37 %  memory 12 %",
        f"  runs     1.00 GiB  PID {WORKER}  gw0  0 s  55 %  test_a.py::test_runs",
        f"  waits  139.00 GiB  PID {WORKER}  gw1  0 s        test_a.py::test_\\x1b[31mwaits",
        f"  holds    1.50 GiB  PID {WORKER}            55 %  between tests",
        f"  other   24.00 GiB  PID {1:<{len(str(WORKER))}}            30 %  train.py",
    ]


def test_json_has_every_number(busy: str, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = shown(capsys, "--json")
    document = json.loads(line)
    (device,) = document["devices"]
    assert document["nvml"] is None
    assert (device["name"], device["model"], device["mode"]) == (busy, "NVIDIA H200", [])
    assert (device["used"], device["total"], device["limit"]) == (30 * GIB, 140 * GIB, None)
    assert (device["busy"], device["memory_busy"]) == (37, 12)
    assert [one["nodeid"] for one in device["runs"]] == ["test_a.py::test_runs"]
    assert [one["bytes"] for one in device["waits"]] == [139 * GIB]
    assert device["workers"] == [{"pid": WORKER, "context": GIB, "fixtures": GIB // 2}]
    assert device["processes"] == [
        {"pid": 1, "name": "train.py", "used": 24 * GIB, "gpu_percent": 30},
        {"pid": WORKER, "name": None, "used": 6 * GIB, "gpu_percent": 55},
    ]


def test_a_simulated_device_is_shown_while_it_is_used(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    device = SharedSimulatedDevice(folder, "simulated T4 cuda:0", 16 * GIB)
    assert device.take(4 * GIB)
    assert shown(capsys) == [
        "simulated T4 cuda:0  simulated",
        "  █████···············  4.00 GiB of 16.00 GiB",
        f"  other  4.00 GiB  PID {ME}",
    ]
    device.give_all()
    assert shown(capsys)[0].startswith("no GPU: ")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_frame_overwrites_the_previous_one() -> None:
    assert frame(["one", "a longer line"], 8, 5) == "\x1b[Hone\x1b[K\r\na lo…ine\x1b[K\x1b[J"
    assert frame(list("abcd"), 20, 3) == (
        "\x1b[Ha\x1b[K\r\nb\x1b[K\r\n... 2 more lines\x1b[K\x1b[J"
    )


@pytest.mark.parametrize("interrupted", ["while it reads", "while it waits"])
def test_ctrl_c_restores_the_terminal(interrupted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out = Terminal()
    times: list[float] = []

    def read() -> list[str]:
        if interrupted == "while it reads" and times:
            raise KeyboardInterrupt
        return ["line"]

    def wait(seconds: float) -> None:
        times.append(seconds)
        if len(times) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("time.sleep", wait)
    watch(read, 0.5)
    frames = 1 if interrupted == "while it reads" else 2
    painted = "\x1b[Hline\x1b[K\x1b[J" * frames
    assert out.getvalue() == f"\x1b[?1049h\x1b[?25l{painted}\x1b[?25h\x1b[?1049l"


def test_a_failure_restores_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Terminal()
    monkeypatch.setattr("sys.stdout", out)

    def fail() -> list[str]:
        raise ValueError("the ledger is gone")

    with pytest.raises(ValueError, match="the ledger is gone"):
        watch(fail, 1)
    assert out.getvalue().endswith("\x1b[?25h\x1b[?1049l")


def test_a_pipe_gets_one_json_document_after_the_other() -> None:
    watching = subprocess.Popen(
        [sys.executable, "-m", "pytest_gpumem.cli", "gpus", "--json", "--watch", "0.05"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # shells may ignore it
    )
    assert watching.stdout is not None
    found = [json.loads(watching.stdout.readline()) for _ in range(3)]
    time.sleep(0.01)
    watching.send_signal(signal.SIGINT)
    _, errors = watching.communicate(timeout=60)
    assert (watching.returncode, errors) == (0, "")
    assert all(document["devices"] == [] for document in found)


@pytest.mark.parametrize("seconds", ["0", "-1", "soon", "inf", "1e300"])
def test_a_malformed_interval_is_refused(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpus", "--watch", seconds]) == 2
    assert f"'{seconds}' is not a number of seconds above 0" in capsys.readouterr().err
