"""A machine with several simulated GPUs: devices of tensors, and allocations of each GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import comm
from torch.utils.checkpoint import checkpoint

from pytest_gpumem import simulate
from pytest_gpumem.simulating import SimulatedRun
from pytest_gpumem.values.errors import UnsupportedOperatorError

WORKSPACE = 8_519_680
MIB = 1 << 20
ZERO, ONE = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture
def gpu() -> Iterator[SimulatedRun]:
    with simulate("A100-80GB*2", torch_version="2.6") as run:
        yield run


def allocated(gpu: SimulatedRun) -> list[int]:
    return [device.allocated for device in gpu.devices]


@pytest.mark.usefixtures("gpu")
def test_the_machine_has_two_devices() -> None:
    assert torch.cuda.device_count() == torch.accelerator.device_count() == 2
    assert torch.cuda.get_device_name(1) == "NVIDIA A100-SXM4-80GB"
    assert torch.cuda.get_device_properties(1).total_memory == 84_987_740_160
    assert torch.cuda.current_device() == 0
    with pytest.raises(RuntimeError, match=r"invalid device ordinal \(cuda:2 .* 2 simulated GPUs"):
        torch.zeros(1, device="cuda:2")


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("device", ["cuda:1", ONE, 1])
def test_factories_and_moves_name_a_device(device: Any) -> None:
    made = [
        torch.empty(2, device=device),
        torch.tensor([1, 2], device=device),
        torch.as_tensor([1.0], device=device),
        torch.randn(2, device=device),
        torch.arange(3, device=device),
        torch.zeros(3, device="cuda:0").to(device),
        torch.zeros(3).cuda(device),
        torch.zeros(3, device="cuda:0").to(torch.zeros(1, device=device)),
        torch.zeros(3, device="cuda:0").type_as(torch.zeros(1, device=device)),
        nn.Linear(2, 2).to(device).weight,
        nn.Linear(2, 2, device=device).weight,
    ]
    assert {tensor.device for tensor in made} == {ONE}
    assert {tensor.get_device() for tensor in made} == {1}
    derived = [
        made[0].new_zeros(3),
        made[0].new_tensor([1.0]),
        torch.zeros_like(made[0]),
        made[0].clone(),
        made[0][:1],
        made[0] + 1,
    ]
    assert {tensor.device for tensor in derived} == {ONE}


@pytest.mark.usefixtures("gpu")
def test_cuda_without_an_index_is_the_current_device() -> None:
    def current() -> set[torch.device]:
        return {torch.zeros(1, device="cuda").device, torch.zeros(1).cuda().device}

    assert current() == {ZERO}
    with torch.cuda.device(1):
        assert current() == {ONE}
        assert torch.cuda.current_stream().device == ONE
    assert current() == {ZERO}
    torch.cuda.set_device("cuda:1")
    assert current() == {ONE}
    torch.accelerator.set_device_index(0)
    assert current() == {ZERO}
    with torch.device("cuda:1"):
        assert torch.zeros(1).device == ONE


def test_results_are_on_the_device_of_their_inputs(gpu: SimulatedRun) -> None:
    x = torch.zeros(1000, 1000, device="cuda:1")
    y = torch.relu(x) + 1
    assert y.device == ONE
    # 4,000,000 bytes, rounded to 512: the temporary is gone, x and y are left.
    assert allocated(gpu) == [0, 2 * 4_000_256]
    assert torch.cuda.memory_allocated() == 0
    assert torch.cuda.memory_stats(1)["allocated_bytes.all.current"] == 2 * 4_000_256
    assert torch.cuda.mem_get_info(1) == (84_987_740_160 - 20 * MIB, 84_987_740_160)
    assert torch.cuda.mem_get_info(0) == (84_987_740_160, 84_987_740_160)
    assert [segment["device"] for segment in torch.cuda.memory_snapshot()] == [1]


@pytest.mark.parametrize(
    "operation",
    [
        lambda a, b: a + b,
        lambda a, b: a @ b,
        lambda a, b: a.add_(b),
        lambda a, b: torch.cat([a, b]),
        lambda a, b: F.linear(a, b),
        lambda a, b: a + b[0, 0],
        lambda a, b: torch.where(a > 0, a, b),
        lambda a, b: F.mse_loss(a, b),
    ],
)
@pytest.mark.usefixtures("gpu")
def test_tensors_of_two_gpus_do_not_mix(operation: Callable[..., Any]) -> None:
    a, b = torch.zeros(3, 3, device="cuda:0"), torch.zeros(3, 3, device="cuda:1")
    with pytest.raises(
        RuntimeError,
        match=r"^Expected all tensors to be on the same device, but found at least two devices, "
        "cuda:0 and cuda:1! ",
    ):
        operation(a, b)


@pytest.mark.usefixtures("gpu")
def test_an_index_on_another_gpu_is_refused() -> None:
    x, index = torch.zeros(3, device="cuda:1"), torch.zeros(2, dtype=torch.long, device="cuda:0")
    with pytest.raises(
        RuntimeError,
        match=r"^indices should be either on cpu or on the same device as the indexed tensor "
        r"\(cuda:1\)",
    ):
        x[index]
    assert x[index.cpu()].device == x[index.to("cuda:1")].device == ONE


def test_a_copy_is_allocated_on_its_target_device(gpu: SimulatedRun) -> None:
    x = torch.zeros(1000, device="cuda:0")
    y = x.to("cuda:1")
    assert (x.device, y.device) == (ZERO, ONE)
    assert allocated(gpu) == [4096, 4096]
    x.copy_(y)
    assert x.to("cuda:0") is x
    assert y.to("cuda:1") is y
    assert allocated(gpu) == [4096, 4096]


def two_halves() -> tuple[nn.Module, nn.Module]:
    return nn.Linear(100, 200).to("cuda:0"), nn.Linear(200, 50).to("cuda:1")


def test_a_model_on_two_gpus_takes_the_computed_bytes(gpu: SimulatedRun) -> None:
    first, second = two_halves()
    x = torch.randn(8, 100, device="cuda:0")
    with gpu.phase("forward"):
        hidden = first(x)
        y = second(hidden.to("cuda:1"))
    with gpu.phase("backward"):
        y.sum().backward()

    weights = [80_384 + 1_024, 40_448 + 512]  # 200 x 100 and 200 floats, 50 x 200 and 50
    # x and hidden; the copy of hidden and y. Each device has its cuBLAS workspace.
    activations = [3_584 + 6_656, 6_656 + 2_048]
    forward = [device.phases["forward"] for device in gpu.devices]
    assert [phase.allocated_before for phase in forward] == [weights[0] + 3_584, weights[1]]
    assert [phase.allocated_after for phase in forward] == [
        weights[0] + activations[0] + WORKSPACE,
        weights[1] + activations[1] + WORKSPACE,
    ]
    assert [phase.cublas_workspace for phase in forward] == [WORKSPACE, WORKSPACE]
    # A gradient for each weight on its device, and a workspace of each backward thread; nobody
    # needs the copy of hidden any more.
    backward = [device.phases["backward"] for device in gpu.devices]
    assert [phase.allocated_after for phase in backward] == [
        2 * weights[0] + activations[0] + 2 * WORKSPACE,
        2 * weights[1] + activations[1] - 6_656 + 2 * WORKSPACE,
    ]
    for half, device in ((first, ZERO), (second, ONE)):
        assert {p.grad.device for p in half.parameters() if p.grad is not None} == {device}


@pytest.mark.parametrize(
    "options",
    [{"foreach": True}, {"foreach": False}, {"fused": True}, {"capturable": True}],
    ids=str,
)
@pytest.mark.usefixtures("gpu")
def test_optimizer_state_is_on_the_device_of_the_parameters(options: dict[str, bool]) -> None:
    first, second = two_halves()
    parameters = [*first.parameters(), *second.parameters()]
    optimizer = torch.optim.AdamW(parameters, **options)  # type: ignore[arg-type]  # by keyword
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(2):
        loss = second(first(torch.zeros(4, 100, device="cuda")).to("cuda:1")).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    for parameter in parameters:
        assert optimizer.state[parameter]["exp_avg"].device == parameter.device


@pytest.mark.usefixtures("gpu")
def test_gradients_return_to_the_device_of_their_parameters() -> None:
    weight = torch.ones(10, 10, device="cuda:0", requires_grad=True)
    x = torch.ones(4, 10, device="cuda:0")
    here = (x @ weight).sum()
    there = (x.to("cuda:1") @ weight.to("cuda:1")).sum()
    (here + there.to("cuda:0")).backward()
    assert weight.grad is not None
    assert weight.grad.device == ZERO

    copied, view = torch.ones(10, device=ONE, requires_grad=True), torch.zeros(20, device=ZERO)
    view[:10].copy_(copied)
    view.sum().backward()
    assert copied.grad is not None
    assert copied.grad.device == ONE

    item = torch.ones(10, device=ONE, requires_grad=True)
    view = torch.zeros(20, device=ZERO)
    view[:10] = item
    view[10:] = torch.zeros(10, device=ONE)
    view.sum().backward()
    assert item.grad is not None
    assert item.grad.device == ONE

    (once,) = torch.autograd.grad((weight.to(ONE) ** 3).sum(), weight, create_graph=True)
    (twice,) = torch.autograd.grad(once.sum(), weight)
    assert once.device == twice.device == ZERO


def test_a_copy_that_casts_brings_back_its_gradient_in_one_step(gpu: SimulatedRun) -> None:
    weight = torch.zeros(1000, device="cuda:0", requires_grad=True)
    moved = weight.to("cuda:1", torch.float16)
    moved.backward(torch.zeros(1000, dtype=torch.float16, device="cuda:1"))
    assert weight.grad is not None
    assert (weight.grad.device, weight.grad.dtype) == (ZERO, torch.float32)
    sizes = [[e.size for e in each.trace if e.action == "alloc"] for each in gpu.devices]
    assert sizes == [[4000, 4000], [2000, 2000]]


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.usefixtures("gpu")
def test_checkpointing_over_two_gpus(use_reentrant: bool) -> None:
    first, second = two_halves()
    x = torch.zeros(4, 100, device="cuda:0", requires_grad=True)

    def model(x: torch.Tensor) -> Any:
        return second(first(x).relu().to("cuda:1"))

    checkpoint(model, x, use_reentrant=use_reentrant).sum().backward()
    assert x.grad is not None
    assert x.grad.device == ZERO
    for half, device in ((first, ZERO), (second, ONE)):
        assert {p.grad.device for p in half.parameters() if p.grad is not None} == {device}


@pytest.mark.usefixtures("gpu")
def test_operators_over_lists_run_device_by_device() -> None:
    tensors = [torch.ones(3, device=f"cuda:{index % 2}") for index in range(4)]
    expected = [ZERO, ONE, ZERO, ONE]
    for results in (
        torch._foreach_mul(tensors, 2),
        torch._foreach_add(tensors, tensors),
        torch._foreach_mul(tensors, [1.0, 2.0, 3.0, 4.0]),
        torch._foreach_pow(2.0, tensors),
    ):
        assert [tensor.device for tensor in results] == expected
    torch._foreach_add_(tensors, tensors)
    assert [tensor.device for tensor in tensors] == expected


def test_tensors_made_in_cpp_are_on_the_device_of_the_inputs(gpu: SimulatedRun) -> None:
    labels = torch.zeros(3, dtype=torch.long, device="cuda:1")
    sequence = torch.zeros(5, 4, device="cuda:1")
    query = torch.zeros(1, 2, 4, 8, device="cuda:1")
    elsewhere = torch.zeros(1, device="cuda:0")
    makers: tuple[Callable[[], Any], ...] = (
        lambda: F.one_hot(labels, 5),
        lambda: nn.utils.rnn.pad_sequence([sequence, sequence[:2]]),
        lambda: F.scaled_dot_product_attention(query, query, query, is_causal=True),
        lambda: sequence.quantile(0.5),
        lambda: torch.nanquantile(sequence, 0.5),
        lambda: torch.cov(sequence),
        lambda: sequence.corrcoef(),
    )
    for made in makers:
        elsewhere.add_(1)
        assert made().device == ONE
    assert allocated(gpu)[0] == 512


def test_numpy_by_force_copies_to_the_host() -> None:
    with simulate("T4*2"):
        assert torch.ones(2, device="cuda:1").numpy(force=True).tolist() == [1, 1]
        with pytest.raises(TypeError, match="can't convert cuda:1 device type tensor to numpy"):
            torch.ones(2, device="cuda:1").numpy()


def test_layers_on_one_gpu_allocate_nothing_on_the_other(gpu: SimulatedRun) -> None:
    recurrent = nn.LSTM(8, 8).to("cuda:1")
    recurrent(torch.zeros(5, 2, 8, device="cuda:1"))[0].sum().backward()
    images = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(196, 3)
    ).to("cuda:1")
    target = torch.zeros(2, dtype=torch.long, device="cuda:1")
    F.cross_entropy(images(torch.zeros(2, 3, 16, 16, device="cuda:1")), target).backward()
    encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).to("cuda:1")
    encoder(torch.zeros(2, 5, 16, device="cuda:1")).sum().backward()
    with torch.inference_mode():
        encoder(torch.zeros(2, 5, 16, device="cuda:1"))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        images(torch.zeros(2, 3, 16, 16, device="cuda:1")).sum().backward()
    assert gpu.peak_allocated == 0
    assert gpu.devices[1].peak_allocated > 0


@pytest.mark.usefixtures("gpu")
def test_an_out_of_memory_error_names_the_full_gpu() -> None:
    with pytest.raises(torch.OutOfMemoryError, match=r"GPU 1 has a total capacity of 79\.15 GiB"):
        torch.empty(90 << 30, dtype=torch.uint8, device="cuda:1")
    torch.empty(70 << 30, dtype=torch.uint8, device="cuda:0")


@pytest.mark.usefixtures("gpu")
def test_random_states_are_per_device() -> None:
    torch.cuda.manual_seed_all(1)
    states = torch.cuda.get_rng_state_all()
    assert len(states) == 2
    torch.cuda.set_rng_state(states[0], "cuda:1")


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("nn.DataParallel over several GPUs", lambda model: nn.DataParallel(model)),
        (
            "torch.nn.parallel.comm.broadcast",
            lambda model: comm.broadcast(model.weight, [0, 1]),
        ),
        (
            "torch.nn.parallel.comm.reduce_add",
            lambda model: comm.reduce_add([model.weight, model.weight.to("cuda:1")]),
        ),
        (
            "torch.nn.parallel.comm.reduce_add_coalesced",
            lambda model: comm.reduce_add_coalesced([[model.weight], [model.weight.to("cuda:1")]]),
        ),
    ],
)
@pytest.mark.usefixtures("gpu")
def test_functions_of_real_gpus_are_refused_by_name(name: str, use: Callable[..., Any]) -> None:
    with pytest.raises(UnsupportedOperatorError) as error:
        use(nn.Linear(3, 3).cuda())
    place = f"{os.path.relpath(__file__)}:"
    assert str(error.value).startswith(f"{name} at {place}")
    assert str(error.value).endswith('place its parts with .to("cuda:1")')


@pytest.mark.usefixtures("gpu")
def test_torch_device_cuda_is_the_current_gpu() -> None:
    torch.cuda.set_device(1)
    assert torch.tensor([1, 2], device="cuda").device == ONE
    assert torch.zeros(2, device="cuda").device == ONE
    with torch.device("cuda"):
        assert torch.tensor([1, 2]).device == ONE
        assert torch.zeros(2).device == ONE
    torch.cuda.set_device(0)
    assert torch.tensor([1, 2], device="cuda").device == ZERO


@pytest.mark.usefixtures("gpu")
def test_data_parallel_on_one_gpu_calls_its_module() -> None:
    model = nn.DataParallel(nn.Linear(3, 3).to("cuda:1"), device_ids=[1])
    assert model(torch.zeros(2, 3, device="cuda:1")).device == ONE


@pytest.mark.usefixtures("gpu")
@pytest.mark.filterwarnings("ignore:Using -1 to represent CPU tensor")
def test_data_parallel_moves_its_inputs_to_its_gpu() -> None:
    """Torch copies on a side stream, whose memory is separate."""
    model = nn.DataParallel(nn.ReLU(), device_ids=[1])
    given = torch.zeros(2, 3, requires_grad=True)

    result = model(given)

    assert result.device == ONE
    assert torch.cuda.memory_reserved("cuda:1") == 2 * MIB + 2 * MIB
    result.sum().backward()
    assert given.grad is not None
    assert given.grad.device.type == "cpu"


@pytest.mark.usefixtures("gpu")
def test_data_parallel_gathers_gradients_into_one_new_tensor() -> None:
    model = nn.DataParallel(nn.Linear(256, 1).cuda(), device_ids=[0])
    given = torch.zeros(8, 256, device="cuda", requires_grad=True)
    result = model(given).sum()
    before = torch.cuda.memory_allocated()

    (gradient,) = torch.autograd.grad(result, [given])

    assert gradient.device == ZERO
    assert torch.cuda.max_memory_allocated() >= before + 2 * gradient.nbytes


def test_each_device_has_its_own_run(gpu: SimulatedRun) -> None:
    torch.zeros(1000, device="cuda:1")
    first, second = gpu.devices
    assert first is gpu
    assert second.devices is gpu.devices
    assert (first.peak_allocated, second.peak_allocated) == (0, 4096)
    assert (first.peak_reserved, second.peak_reserved) == (0, 2 * MIB)
    assert (len(first.trace), [event.action for event in second.trace][:2]) == (
        0,
        ["segment_alloc", "alloc"],
    )
    assert [len(trace) for trace in gpu.snapshot()["device_traces"]] == [0, 4]
    assert second.model.name == "A100-80GB"


def test_a_single_device_is_a_machine_of_one_gpu() -> None:
    with simulate("T4") as gpu:
        assert gpu.devices == (gpu,)


@pytest.mark.parametrize("model", [None, 7, "T4*0", "A100"])
def test_an_unknown_machine_is_refused_in_one_sentence(model: Any) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+$"), simulate(model):
        pass
