"""Compiled code beside other threads, none of which may use torch during a compilation."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytest_gpumem import simulate
from pytest_gpumem.simulated.surface.threads import Exclusive
from pytest_gpumem.values.errors import UnsupportedOperatorError
from tests.pytest_project import Project

MIB = 1024 * 1024

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]


def gated(x: torch.Tensor) -> torch.Tensor:
    return x.sigmoid() * x.tanh() * x.cos()


def held_after_forward() -> int:
    """Return the MiB of ``x``, saved tensors and result: 2 if ``gated`` is compiled."""
    torch._dynamo.reset()
    before = torch.cuda.memory_allocated()
    x = torch.ones(256, 1024, device="cuda", requires_grad=True)  # 1 MiB
    y = torch.compile(gated)(x)
    held = round((torch.cuda.memory_allocated() - before) / MIB)  # other threads hold some bytes
    y.sum().backward()
    return held


@contextmanager
def in_a_thread(work: Callable[[Callable[[], bool]], None]) -> Iterator[None]:
    """Run ``work`` in a thread inside of the context."""
    over = threading.Event()
    thread = threading.Thread(target=lambda: work(over.is_set))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_compiled_model_runs_beside_workers_and_a_pinning_thread() -> None:
    def peak(workers: int) -> int:
        torch._dynamo.reset()
        with simulate("A100-40GB", compile="always") as gpu:
            model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8)).cuda()
            run: Any = torch.compile(model)
            data = TensorDataset(torch.ones(96, 64))
            for (batch,) in DataLoader(data, 32, num_workers=workers, pin_memory=True):
                assert batch.is_pinned()
                run(batch.cuda(non_blocking=True)).sum().backward()
            assert gpu.notes == ()
        return gpu.peak_allocated

    assert peak(1) == peak(0)


def timer() -> Iterator[None]:
    """A thread like pytest-timeout's."""
    waiting = threading.Timer(600, lambda: None)
    waiting.start()
    yield
    waiting.cancel()
    waiting.join()


def monitor() -> Iterator[None]:
    """A thread like that of progress bars: it wakes up now and then, and never uses torch."""
    over = threading.Event()

    def work() -> None:
        while not over.wait(0.001):
            sum(range(1000))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield
    over.set()
    thread.join()


def server() -> Iterator[None]:
    """A thread like that of pytest-rerunfailures, which waits in C for connections."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listening:

        def work() -> None:
            connection, _ = listening.accept()
            connection.close()

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        yield
        socket.create_connection(listening.getsockname()).close()
        thread.join()


@pytest.mark.parametrize("thread", [timer, monitor, server])
def test_threads_that_do_not_use_torch_keep_running(thread: Callable[[], Iterator[None]]) -> None:
    with simulate("A100-40GB", compile="always") as gpu, contextmanager(thread)():
        assert held_after_forward() == 2
        assert gpu.notes == ()


@pytest.fixture
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Exclusive, "patience", 0.1)


@pytest.mark.usefixtures("short_patience")
def test_compiling_beside_a_thread_that_uses_torch_is_refused() -> None:
    began = threading.Event()

    def work(is_over: Callable[[], bool]) -> None:
        torch.zeros(3)
        began.set()
        while not is_over():
            time.sleep(0.01)

    sentence = r"compiles while another thread lives that uses torch.*--gpumem-device=dry"
    with simulate("A100-40GB"), in_a_thread(work):
        began.wait()
        with pytest.raises(UnsupportedOperatorError, match=sentence):
            held_after_forward()


@pytest.mark.usefixtures("short_patience")
def test_compiling_in_a_second_thread_is_refused() -> None:
    found: list[str] = []

    def work() -> None:
        try:
            held_after_forward()
        except UnsupportedOperatorError as error:
            found.append(str(error))

    with simulate("A100-40GB"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        with ThreadPoolExecutor(1) as executor:
            executor.submit(work).result()
    assert len(found) == 2
    assert "while another thread lives that uses torch" in found[0]


def test_code_with_compile_eager_runs_beside_other_threads() -> None:
    began = threading.Event()

    def work(is_over: Callable[[], bool]) -> None:
        while not is_over():
            torch.zeros(3)
            began.set()

    with simulate("A100-40GB", compile="eager"), in_a_thread(work):
        began.wait()
        assert held_after_forward() == 6


def test_buffers_have_the_line_of_their_own_threads_code() -> None:
    def one(x: torch.Tensor) -> torch.Tensor:
        return x.sin().cos()

    def other(x: torch.Tensor) -> torch.Tensor:
        return x.tan().exp()

    def again(is_over: Callable[[], bool]) -> None:
        while not is_over():
            second(y)

    with simulate("A100-40GB", compile="always") as gpu:
        torch._dynamo.reset()
        first: Any = torch.compile(one)
        second: Any = torch.compile(other)
        x, y = torch.ones(512, device="cuda"), torch.ones(1024, device="cuda")  # 2 and 4 KiB
        first(x), second(y)
        before = len(gpu.trace)
        with in_a_thread(again):
            for _ in range(200):
                first(x)
        taken = {
            (event.size, event.context.source_line[2])
            for event in gpu.trace[before:]
            if event.action == "alloc"
        }
    assert taken == {(2048, "one"), (4096, "other")}


def test_threads_of_other_plugins_do_not_prevent_compiling(
    project: Project,
) -> None:
    """pytest-timeout waits in a thread, a loader pins in one. Input and result are 4 MiB each."""
    pytest.importorskip("pytest_timeout")
    project.write(
        test_gate="""
        from torch.utils.data import DataLoader

        @pytest.mark.gpumem(max="8MiB")
        def test_gate():
            gate = torch.compile(lambda x: x.sigmoid() * x.tanh() * x.cos())
            rows = torch.ones(1024, 1024)
            for batch in DataLoader(rows, 1024, num_workers=1, pin_memory=True):
                gate(batch.cuda())
        """
    )
    ran = project.run_apart(
        *("--gpumem-sim-compile=always", "--timeout=300", "--timeout-method=thread", "--reruns=1"),
        device="--gpumem-device=sim:A100-40GB",
        use=("rerunfailures",),
    )
    ran.assert_outcomes(passed=1)
