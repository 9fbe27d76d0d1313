"""Threads that the code under test starts use the simulated GPU too."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from pytest_gpumem import simulate
from pytest_gpumem.values.errors import UnknownValueError


def in_thread(function: Callable[[], None]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_a_thread_allocates_on_the_simulated_gpu() -> None:
    kept = []

    def work() -> None:
        x = torch.ones(256, device="cuda")
        kept.append(x * 2)

    with simulate("T4") as gpu:
        in_thread(work)
        gc.collect()
        assert kept[0].is_cuda
        assert gpu.allocated == 1024
        assert gpu.peak_allocated == 2048
        kept.clear()
        assert gpu.allocated == 0


def test_a_thread_trains_with_a_handle_of_its_own_as_on_a_gpu() -> None:
    with simulate("T4", torch_version="2.6") as gpu:
        layer = nn.Linear(8, 8).cuda()
        x = torch.ones(2, 8, device="cuda")
        x @ layer.weight
        in_thread(lambda: layer(x).sum().backward())
        assert layer.weight.grad is not None
        assert layer.weight.grad.is_cuda
        gc.collect()
        # weight, bias, their gradients and x; the workspaces of this thread, the other one and
        # autograd's.
        assert gpu.allocated == 5 * 512 + 3 * 8_519_680


def test_executors_and_asyncio_run_their_tasks_on_the_simulated_gpu() -> None:
    def is_cuda(_: int = 0) -> bool:
        x = torch.ones(4, 4, device="cuda")
        return (x @ x).is_cuda

    with ThreadPoolExecutor(2) as executor:
        list(executor.map(str, range(4)))
        for _ in range(2):
            with simulate("T4"):
                assert all(executor.map(is_cuda, range(8)))
                assert asyncio.run(asyncio.to_thread(is_cuda))
        on_cpu = executor.submit(lambda: torch.ones(3).sum().item())
        assert on_cpu.result() == 3


def test_autocast_and_the_current_device_belong_to_the_thread() -> None:
    seen = []

    def work() -> None:
        layer = nn.Linear(3, 3).cuda()
        x = torch.ones(2, 3, device="cuda")
        seen.append((torch.cuda.current_device(), layer(x).dtype))
        with torch.autocast("cuda"):
            seen.append((torch.cuda.current_device(), layer(x).dtype))

    with simulate("T4*2"):
        torch.cuda.set_device(1)
        with torch.autocast("cuda"):
            in_thread(work)
        assert torch.cuda.current_device() == 1
    assert seen == [(0, torch.float32), (0, torch.float16)]


def test_many_threads_at_once_leave_a_consistent_allocator() -> None:
    def work() -> None:
        for size in range(1, 40):
            layer = nn.Linear(size, 2 * size).cuda()
            y = layer(torch.ones(3, size, device="cuda"))
            assert y.device.type == "cuda"
            y.sum().backward()

    with simulate("T4", cublas_workspace_config=":0:0") as gpu:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        work()
        for thread in threads:
            thread.join()
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()  # one of cuBLASLt's for each thread
        assert gpu.allocated == 0
        torch.cuda.empty_cache()
        assert gpu.reserved == 0


def test_join_raises_the_refusal_of_its_thread() -> None:
    with simulate("T4"):
        thread = threading.Thread(target=lambda: torch.rand(3, device="cuda").tolist())
        thread.start()
        with pytest.raises(UnknownValueError, match=r"tolist\(\) at .*test_threads.py"):
            thread.join()


def test_the_simulation_raises_refusals_of_unjoined_threads_at_its_end() -> None:
    done = threading.Event()

    def work() -> None:
        try:
            torch.rand(3, device="cuda").tolist()
        finally:
            done.set()

    def forget() -> None:
        with simulate("T4"):
            thread = threading.Thread(target=work, daemon=True)
            thread.start()
            done.wait()
            while thread.is_alive():
                pass

    with pytest.raises(UnknownValueError):
        forget()


def test_parallel_apply_runs_its_replicas() -> None:
    with simulate("T4"):
        layer = nn.Linear(3, 3).cuda()
        inputs = [(torch.ones(2, 3, device="cuda"),)] * 2
        outputs = nn.parallel.parallel_apply([layer, layer], inputs, devices=[0, 0])
        assert [output.is_cuda for output in outputs] == [True, True]


@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_bring_pinned_batches(workers: int) -> None:
    with simulate("T4") as gpu:
        loader = DataLoader(
            torch.utils.data.TensorDataset(torch.arange(1024.0)),
            batch_size=512,
            num_workers=workers,
            pin_memory=True,
        )
        sums = []
        for (batch,) in loader:
            assert batch.is_pinned()
            sums.append(batch.sum().item())
            assert batch.cuda(non_blocking=True).is_cuda
        assert sums == [sum(range(512)), sum(range(512, 1024))]
        assert gpu.peak_allocated in (2048, 4096)


def test_threading_is_restored_after_the_simulation() -> None:
    before = (threading.Thread.start, threading.Thread.join, ThreadPoolExecutor.submit)
    with simulate("T4"):
        in_thread(lambda: None)
    assert (threading.Thread.start, threading.Thread.join, ThreadPoolExecutor.submit) == before
    seen = []
    in_thread(lambda: seen.append(torch._C._len_torch_dispatch_stack()))
    assert seen == [0]
