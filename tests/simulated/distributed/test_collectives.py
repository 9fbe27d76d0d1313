"""Memory and known values of collectives, as of ``ProcessGroupNCCL`` since torch 2.8."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

from pytest_gpumem import simulate
from pytest_gpumem.simulating import SimulatedRun
from pytest_gpumem.values.errors import UnknownValueError

MIB = 1 << 20
RANKS = 8


pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated. Please use .torch.distributed")


@pytest.fixture
def gpu() -> Iterator[SimulatedRun]:
    with simulate("H100", world_size=RANKS, rank=3) as run:
        yield run


def sizes(gpu: SimulatedRun, run: Callable[[], Any]) -> list[int]:
    """Return the bytes that ``run`` allocates, and below zero frees, while its result lives."""
    before = len(gpu.trace)
    result = run()
    signs = {"alloc": 1, "free_requested": -1}
    found = [signs[e.action] * e.size for e in gpu.trace[before:] if e.action in signs]
    del result
    return found


def release() -> tuple[int, ...]:
    return tuple(int(part) for part in torch.__version__.split(".")[:2])


def tensor(mebibytes: int = 1) -> torch.Tensor:
    return torch.randn(mebibytes * MIB // 4, device="cuda")


def test_a_list_is_gathered_into_one_tensor(gpu: SimulatedRun) -> None:
    one, parts = tensor(), [tensor() for _ in range(RANKS)]
    # Since 2.15 part by part, as torch's own code does on the dry device.
    flat = [8 * MIB, -8 * MIB] if release() < (2, 15) else []
    assert sizes(gpu, lambda: dist.all_gather(parts, one)) == flat
    assert sizes(gpu, lambda: dist.reduce_scatter(one, parts)) == flat
    # Parts of several sizes are broadcast one by one, others are sent as they are.
    uneven = [tensor(1 + (place == 3)) for place in range(RANKS)]
    assert sizes(gpu, lambda: dist.all_gather(uneven, tensor(2)))[1:-1] == []
    assert sizes(gpu, lambda: dist.all_to_all(parts, parts)) == []


def test_collectives_in_place_allocate_nothing(gpu: SimulatedRun) -> None:
    one, all_of_them = tensor(), tensor(RANKS)
    for run in (
        lambda: dist.all_reduce(one),
        lambda: dist.broadcast(one, 0),
        lambda: dist.reduce(one, 0),
        lambda: dist.all_gather_into_tensor(all_of_them, one),
        lambda: dist.reduce_scatter_tensor(one, all_of_them),
        lambda: dist.all_to_all_single(one, one),
        lambda: dist.send(one, 4),
        lambda: dist.recv(one, 2),
    ):
        assert sizes(gpu, run) == []


def test_a_barrier_reduces_a_number(gpu: SimulatedRun) -> None:
    first = later = [4, -4]
    # Since 2.15 it is asked of a device, and names it by a tensor of a byte (ProcessGroup.hpp).
    # The first one takes the number, which its group keeps.
    if release() >= (2, 15):
        first, later = [1, 4, -1], [1, -1]
    assert sizes(gpu, lambda: dist.barrier()) == first
    assert sizes(gpu, lambda: dist.barrier()) == later
    before = gpu.allocated
    dist.destroy_process_group()
    assert before - gpu.allocated == (512 if release() >= (2, 15) else 0)


def test_tensors_of_an_async_collective_are_kept_until_wait(gpu: SimulatedRun) -> None:
    work: Any = dist.all_reduce(tensor(), async_op=True)
    assert gpu.allocated == MIB
    work.wait()
    assert work.is_completed()
    del work
    assert gpu.allocated == 0
    dist.all_reduce(tensor())
    assert gpu.allocated == 0


def test_batched_operations_are_waited_for_together(gpu: SimulatedRun) -> None:
    earlier: Any = dist.all_reduce(tensor(), async_op=True)
    (work,) = dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor(), rank) for rank in (4, 5)])
    assert gpu.allocated == 3 * MIB
    work.wait()
    assert gpu.allocated == MIB
    earlier.wait()
    del earlier
    assert gpu.allocated == 0


def test_the_future_of_a_collective_has_its_results(gpu: SimulatedRun) -> None:
    one = tensor()
    work: Any = dist.all_reduce(one, async_op=True)
    assert work.get_future().then(lambda done: done.value()[0].shape).wait() == one.shape


def test_the_largest_of_equal_values_is_the_same_on_the_root(gpu: SimulatedRun) -> None:
    count = torch.tensor([5, 7], device="cuda")
    dist.reduce(count, 0, dist.ReduceOp.MAX)
    assert count.tolist() == [5, 7]


def test_each_callback_of_a_chain_runs_on_a_stream_of_its_own(gpu: SimulatedRun) -> None:
    seen = []

    def noting(done: Any) -> Any:
        seen.append(torch.cuda.current_stream().stream_id)
        return done.value()

    one = tensor()
    work: Any = dist.all_reduce(one, async_op=True)
    last = work.get_future().then(noting).then(noting)
    last.add_done_callback(noting)
    assert len({0, *seen}) == 4
    assert torch.cuda.current_stream().stream_id == 0
    # Each of these streams used the result, so it is free once the host has seen their work end.
    del work, last, one
    assert (gpu.allocated, torch.cuda.memory_stats()["active_bytes.all.current"]) == (0, MIB)
    torch.cuda.synchronize()
    torch.empty(1, device="cuda")
    assert torch.cuda.memory_stats()["active_bytes.all.current"] == 0


def test_an_error_of_a_callback_is_that_of_the_next_future(gpu: SimulatedRun) -> None:
    work: Any = dist.all_reduce(tensor(), async_op=True)
    failed = work.get_future().then(lambda done: done.value()[1])
    with pytest.raises(RuntimeError, match="IndexError"):
        failed.wait()


def test_old_buckets_of_gradients_are_free_once_they_are_replaced(gpu: SimulatedRun) -> None:
    """A hook's callback has used them on another stream."""
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(512, 512).cuda())
    net.register_comm_hook(None, bf16_compress_hook)
    for _ in range(2):
        net(torch.ones(8, 512, device="cuda")).sum().backward()
    stats = torch.cuda.memory_stats()
    assert stats["active_bytes.all.current"] - stats["allocated_bytes.all.current"] < MIB


def test_functional_collectives_have_results_of_their_own(gpu: SimulatedRun) -> None:
    group: Any = dist.group.WORLD
    one = tensor()
    reduced: Any = functional.all_reduce(one, "sum", group)
    before = gpu.allocated
    # To wait for it makes no other tensor.
    assert sizes(gpu, lambda: functional.wait_tensor(reduced)) == []
    assert gpu.allocated == before == 2 * MIB
    gathered = functional.all_gather_tensor(one, 0, group)
    assert gathered.nbytes == 8 * MIB
    assert functional.reduce_scatter_tensor(gathered, "sum", 0, group).nbytes == MIB


def test_other_ranks_are_assumed_to_send_the_same_values(gpu: SimulatedRun) -> None:
    count = torch.tensor([5, 7], device="cuda")
    dist.all_reduce(count)
    assert count.tolist() == [40, 56]
    dist.all_reduce(count, op=dist.ReduceOp.MAX)
    assert count.tolist() == [40, 56]
    everyone = torch.empty(16, dtype=torch.int64, device="cuda")
    dist.all_gather_into_tensor(everyone, count)
    assert everyone.tolist() == [40, 56] * 8
    # All-to-all of experts: each rank sends the fourth, this one, what this one sends.
    sent = torch.arange(8, device="cuda")
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    assert received.tolist() == [3] * 8
    # A part of what is gathered, and a reduction that another rank receives.
    whole = torch.zeros(16, device="cuda")
    whole[6:8] = 3
    dist.all_gather_into_tensor(whole, whole[6:8])
    assert whole.tolist() == [3] * 16
    dist.reduce(sent, 0)
    assert sent.tolist() == list(range(8))
    (note, *_) = gpu.notes
    assert note.startswith("a collective at tests/simulated/distributed/test_collectives.py:")
    assert note.endswith(" assumes that other ranks send what this one does")


def test_values_of_another_rank_are_unknown(gpu: SimulatedRun) -> None:
    count = torch.tensor([5], device="cuda")
    dist.recv(count, 2)
    with pytest.raises(UnknownValueError):
        count.item()
    with pytest.raises(UnknownValueError, match=r"recv_object_list at .* only another rank knows"):
        dist.recv_object_list([None], 2)


def test_objects_of_other_ranks_equal_this_ranks(gpu: SimulatedRun) -> None:
    found: list[Any] = [None] * RANKS
    dist.all_gather_object(found, {"loss": 1})
    assert found == [{"loss": 1}] * RANKS
    assert found[0] is not found[1]
    sent = ["config"]
    dist.broadcast_object_list(sent, src=0)
    assert sent == ["config"]
    own: list[Any] = [None]
    dist.scatter_object_list(own, list(range(RANKS)), src=3)
    assert own == [3]


def test_collectives_of_cpu_tensors_keep_values(gpu: SimulatedRun) -> None:
    group = dist.new_group(backend="gloo")
    one = torch.ones(3)
    dist.broadcast(one, 0, group=group)
    dist.barrier(group=group)
    assert one.tolist() == [1, 1, 1]


def test_functional_collectives_assume_equal_values_on_all_ranks(gpu: SimulatedRun) -> None:
    group: Any = dist.group.WORLD
    count = torch.tensor([5, 7], device="cuda")
    assert functional.all_reduce(count, "sum", group).tolist() == [40, 56]
    assert functional.all_reduce(count, "avg", group).tolist() == [5, 7]
    assert functional.all_gather_tensor(count, 0, group).tolist() == [5, 7] * 8
    sent = torch.arange(8, device="cuda")
    assert functional.all_to_all_single(sent, None, None, group).tolist() == [3] * 8
    # Two go to the fourth rank, this one, and one to any other: so it gets two from each.
    splits = [1 + (rank == 3) for rank in range(RANKS)]
    received = functional.all_to_all_single(torch.arange(9, device="cuda"), [2] * 8, splits, group)
    assert received.tolist() == [3, 4] * 8
