"""What torch's own CUDA code finds on the dry device, asked in one process for each kind."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_gpumem.simulated.gpu.catalogue import GPUS
from tests.dry.conftest import Run, run

MIB = 1024 * 1024
GIB = 1024 * MIB

PROGRAM = """
import ctypes
driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
found["driver_of_an_import"] = driver.cuDeviceGetCount(ctypes.byref(count))
properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
found["names"] = [one.name for one in properties]
found["memory"] = [one.total_memory for one in properties]
found["capability"] = [[one.major, one.minor] for one in properties]
found["sms"] = [one.multi_processor_count for one in properties]
found["threads"] = [one.max_threads_per_multi_processor for one in properties]
found["l2"] = [one.L2_cache_size for one in properties]
found["shared"] = [getattr(one, "shared_memory_per_block_optin", None) for one in properties]
found["free"] = [torch.cuda.mem_get_info(index) for index in range(3)]
found["peer"] = torch.cuda.can_device_access_peer(0, 1)
found["driver"] = driver.cuDeviceGetCount(ctypes.byref(count)), count.value
nvml = torch.cuda.clock_rate, torch.cuda.temperature, torch.cuda.power_draw, torch.cuda.utilization
found["nvml"] = [ask() for ask in nvml]
import os, pynvml
first = pynvml.nvmlDeviceGetHandleByIndex(0)
found["cpus"] = [list(pynvml.nvmlDeviceGetCpuAffinity(first, 16))[0], (1 << os.cpu_count()) - 1]

try:
    torch.empty(60 * 2**30, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    found["out_of_memory"] = str(error)

brought = torch.arange(5)
found["values"] = brought.cuda().tolist()
found["computed"] = (brought.cuda() + 1).tolist()
found["on_another"] = brought.to("cuda:1").to("cuda:2").tolist()

block = torch.empty(16 * 2**30, dtype=torch.uint8, device="cuda")
found["segment"] = torch.cuda.mem_get_info(0)[1] - torch.cuda.mem_get_info(0)[0]
del block
torch.cuda.empty_cache()

side = torch.cuda.Stream()
with torch.cuda.stream(side):
    used = torch.empty(20 * 2**20, dtype=torch.uint8, device="cuda")
used.record_stream(torch.cuda.current_stream())
del used
with torch.cuda.stream(side):
    found["while_a_stream_uses_it"] = torch.empty(20 * 2**20, dtype=torch.uint8, device="cuda")
found["while_a_stream_uses_it"] = torch.cuda.memory_reserved()
torch.cuda.synchronize()
with torch.cuda.stream(side):
    again = torch.empty(20 * 2**20, dtype=torch.uint8, device="cuda")
found["when_the_host_has_waited"] = torch.cuda.memory_reserved()
event = torch.cuda.Event()
event.record(side)
found["event"] = event.query()
of_any_device = torch.Event("cuda")
of_any_device.record(side)
found["event_of_any_device"] = of_any_device.query()

def used_elsewhere() -> int:
    stats = torch.cuda.memory_stats()
    return stats["active_bytes.all.current"] - stats["allocated_bytes.all.current"]


with torch.cuda.stream(side):
    used = torch.empty(20 * 2**20, dtype=torch.uint8, device="cuda")
used.record_stream(torch.cuda.current_stream())
del used
for _ in range(1024):
    torch.empty(1, device="cuda")
found["until_1024_allocations"] = used_elsewhere()
torch.empty(1, device="cuda")
found["after_1024_allocations"] = used_elsewhere()

for name, host in {"pinned": torch.empty(3, pin_memory=True), "pageable": torch.empty(3)}.items():
    with torch.cuda.stream(side):
        used = torch.empty(20 * 2**20, dtype=torch.uint8, device="cuda")
    used.record_stream(torch.cuda.current_stream())
    del used
    host.copy_(torch.ones(3, device="cuda"), non_blocking=True)
    torch.empty(1, device="cuda")
    found[f"used_after_a_copy_to_{name}_memory"] = used_elsewhere()

start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
start.record()
with torch.cuda.device(1):
    end.record()
try:
    start.elapsed_time(end)
except RuntimeError as error:
    found["between_gpus"] = str(error).splitlines()[0]

graph = torch.cuda.CUDAGraph()
static = torch.ones(1000, device="cuda")
with torch.cuda.graph(graph):
    result = static * 2
graph.replay()
found["pinned"] = torch.empty(10).pin_memory().is_pinned()

layer = torch.nn.LSTM(8, 16, num_layers=2, bidirectional=True).cuda()
found["recurrent"] = layer._flat_weights[0].untyped_storage().nbytes()
found["recurrent_elements"] = sum(one.numel() for one in layer.parameters())
output, _ = layer(torch.randn(5, 3, 8, device="cuda"))
output.sum().backward()
convolution = torch.nn.Conv2d(3, 8, 3).cuda()
convolution(torch.randn(2, 3, 32, 32, device="cuda")).sum().backward()
found["inverse"] = list(torch.linalg.inv(torch.eye(3, device="cuda")).shape)
found["transform"] = list(torch.fft.fft(torch.randn(8, device="cuda")).shape)
"""


@pytest.fixture(scope="module")
def found(dry_run: Run) -> Any:
    """What one A100 and two H100 tell."""
    return dry_run(PROGRAM, gpu="A100-40GB,H100*2")


def test_the_devices_are_those_of_the_catalogue(found: Any) -> None:
    models = [GPUS["A100-40GB"], GPUS["H100"], GPUS["H100"]]

    assert found["names"] == [model.full_name for model in models]
    assert found["memory"] == [model.total_memory for model in models]
    assert found["capability"] == [list(model.compute_capability) for model in models]
    assert found["sms"] == [model.sm_count for model in models]
    assert found["threads"] == [model.max_threads_per_sm for model in models]
    assert found["l2"] == [model.l2_cache_bytes for model in models]
    # CUDA C++ Programming Guide: 163 KiB and 227 KiB for one block.
    # torch 2.6 does not tell.
    assert found["shared"] in ([163 * 1024, 227 * 1024, 227 * 1024], [None] * 3)
    assert found["free"] == [[model.total_memory, model.total_memory] for model in models]
    assert found["peer"] is True


def test_out_of_memory_is_torchs_own_sentence(found: Any) -> None:
    assert found["out_of_memory"].startswith(
        "CUDA out of memory. Tried to allocate 60.00 GiB. GPU 0 has a total capacity of 39.39 GiB "
        "of which 39.39 GiB is free."
    )


def test_values_are_those_that_copies_brought(found: Any) -> None:
    assert found["values"] == [0, 1, 2, 3, 4]
    assert found["on_another"] == [0, 1, 2, 3, 4]
    assert found["computed"] == [0, 0, 0, 0, 0]


def test_a_segment_takes_the_devices_memory_and_none_of_the_hosts(found: Any) -> None:
    assert found["segment"] == 16 * GIB + 2 * MIB  # and the segment of small blocks


def test_what_another_stream_uses_is_free_when_the_host_has_waited(found: Any) -> None:
    before = found["while_a_stream_uses_it"]

    assert before % (2 * MIB) == 0
    assert before >= 40 * MIB
    assert found["when_the_host_has_waited"] == before
    assert found["event"] is True
    assert found["event_of_any_device"] is True


def test_a_copy_to_pageable_memory_is_over_when_it_returns(found: Any) -> None:
    assert found["used_after_a_copy_to_pinned_memory"] == 20 * 2**20
    assert found["used_after_a_copy_to_pageable_memory"] == 0


def test_a_stream_is_behind_by_the_launches_that_wait_at_most(found: Any) -> None:
    assert (found["until_1024_allocations"], found["after_1024_allocations"]) == (20 * 2**20, 0)


def test_no_time_lies_between_events_of_two_gpus(found: Any) -> None:
    assert found["between_gpus"] == "CUDA error: invalid resource handle"


def test_the_driver_begins_when_devices_are_asked_for(found: Any) -> None:
    """CUDA_ERROR_NOT_INITIALIZED is 3: test_lazy_init of PyTorch's test_cuda.py."""
    assert found["driver_of_an_import"] == 3
    assert found["driver"] == [0, len(found["names"])]


def test_nvml_answers_as_of_a_gpu_without_work(found: Any) -> None:
    # MHz, degrees, milliwatts, percent.
    assert found["nvml"] == [1000, 30, 50_000, 0]
    assert found["cpus"][0] == found["cpus"][1]


def test_libraries_answer(found: Any) -> None:
    assert found["pinned"] is True
    assert found["recurrent"] == 4 * found["recurrent_elements"]
    assert found["inverse"] == [3, 3]
    assert found["transform"] == [8]


ALLOCATORS = """
block = torch.empty(8 * 2**20, dtype=torch.uint8, device="cuda")
more = torch.empty(30 * 2**20, dtype=torch.uint8, device="cuda")
found["reserved"] = torch.cuda.memory_reserved()
found["allocated"] = torch.cuda.memory_allocated()
free, total = torch.cuda.mem_get_info()
found["used"] = total - free
del block, more
torch.cuda.empty_cache()
found["left"] = torch.cuda.memory_reserved()
"""


@pytest.mark.parametrize(
    ("setting", "reserved"),
    [
        # A segment of 20 MiB for a block below 10 MiB (kMinLargeAlloc), else of the block's size.
        ("", 20 * MIB + 30 * MIB),
        # Pages of 20 MiB.
        ("expandable_segments:True", 40 * MIB),
        ("backend:cudaMallocAsync", 38 * MIB),
    ],
)
def test_each_allocator_takes_what_it_would(dry_run: Run, setting: str, reserved: int) -> None:
    found = dry_run(ALLOCATORS, PYTORCH_CUDA_ALLOC_CONF=setting)

    assert found["allocated"] == 38 * MIB
    assert found["reserved"] == found["used"] == reserved
    assert found["left"] == 0


def test_kernels_take_no_values_from_memory_that_was_used_before(dry_run: Run) -> None:
    found = dry_run(
        """
earlier = torch.full((4096,), 7.5).cuda()
del earlier
found["any"] = torch.zeros(3, device="cuda").any().item()
found["sum"] = torch.ones(3, device="cuda").sum().item()
found["part"] = torch.randn(4096, device="cuda")[5].item()
found["unique"] = list(torch.randint(9, (4096,), device="cuda").unique().shape)
brought = torch.arange(4096.0).cuda()
found["brought"] = brought[5:7].tolist()
found["copied"] = brought.clone()[7].item()
"""
    )

    assert found == {
        "any": False,
        "sum": 0.0,
        "part": 0.0,
        "unique": [0],
        "brought": [5.0, 6.0],
        "copied": 7.0,
    }


RANK = """
import torch.distributed as dist
store = dist.HashStore()
here = torch.device("cuda:0")
dist.init_process_group("nccl", store=store, rank=0, world_size=8, device_id=here)
model = torch.nn.Linear(1024, 1024, bias=False, device="cuda")
"""

LEAVE = "dist.destroy_process_group()\n"
"""Without it the watchdog of the group may still run when the process ends, and aborts it."""


def test_one_rank_of_several_runs_alone_over_the_real_process_group(dry_run: Run) -> None:
    sharded = dry_run(
        RANK + "from torch.distributed.fsdp import fully_shard\n"
        "fully_shard(model)\n"
        "model(torch.ones(1, 1024, device='cuda')).sum().backward()\n"
        "found['parameter'] = model.weight.to_local().untyped_storage().nbytes()\n"
        "found['gradient'] = model.weight.grad.to_local().numel()\n" + LEAVE,
        gpu="H100",
    )
    replicated = dry_run(
        RANK + "wrapped = torch.nn.parallel.DistributedDataParallel(model)\n"
        "wrapped(torch.ones(1, 1024, device='cuda')).sum().backward()\n"
        "found['gradient'] = model.weight.grad.numel()\n" + LEAVE,
        gpu="H100",
    )

    # An eighth of 1024 x 1024 numbers of 4 bytes.
    assert sharded == {"parameter": 4 * 1024 * 128, "gradient": 1024 * 128}
    assert replicated == {"gradient": 1024 * 1024}


LIMIT = "TORCH_AUTOGRAD_SHUTDOWN_WAIT_LIMIT"


@pytest.mark.usefixtures("dry_run")
@pytest.mark.parametrize("time", range(4))
def test_a_program_may_end_as_soon_as_a_backward_pass_is_over(time: int) -> None:
    run("torch.nn.Linear(8, 8).cuda()(torch.ones(8, device='cuda')).sum().backward()")


@pytest.mark.usefixtures("dry_run")
@pytest.mark.parametrize(("variables", "limit"), [({}, "0.1"), ({LIMIT: "3"}, "3")])
def test_torch_waits_briefly_for_autograd_at_the_end(variables: dict[str, str], limit: str) -> None:
    """A tenth of a second, not torch's ten seconds, unless the user sets the limit."""
    found = run(f"import os\nfound['limit'] = os.environ['{LIMIT}']", **variables)

    assert found == {"limit": limit}


def test_attention_runs_by_cudnn(dry_run: Run) -> None:
    """As torch prefers on an H100: its frontend asks how much shared memory a plan takes."""
    found = dry_run(
        """
from torch.nn.attention import SDPBackend, sdpa_kernel
query = torch.ones(1, 4, 256, 64, device="cuda", dtype=torch.half, requires_grad=True)
with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
    output = torch.nn.functional.scaled_dot_product_attention(query, query, query)
output.sum().backward()
found["shapes"] = [list(output.shape), list(query.grad.shape)]
""",
        gpu="H100",
    )

    assert found["shapes"] == [[1, 4, 256, 64]] * 2
