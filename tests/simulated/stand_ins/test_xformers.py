"""xformers' attention: the kernel of torch that 0.0.35 takes, and what it keeps.

Bytes are worked out from xformers/ops/fmha; where xformers is installed, its own code runs beside
the stand-in and allocates the same.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from pytest_gpumem import simulate
from pytest_gpumem.simulated.gpu.device import parse_version
from pytest_gpumem.simulated.simulation import SimulatedGPU
from pytest_gpumem.simulated.stand_ins.xformers import MODULES

pytestmark = pytest.mark.skipif(
    parse_version(torch.__version__) < (2, 7), reason="xformers 0.0.35 needs torch 2.10"
)

BATCH, LENGTH, HEADS, SIZE = 2, 100, 4, 64
OUT = BATCH * LENGTH * HEADS * SIZE * 2
LSE = BATCH * HEADS * LENGTH * 4
PADDED = BATCH * HEADS * 128 * 4
"""Logsumexp of the efficient kernel, whose rows are rounded to 32."""
_HAS_SEED = parse_version(torch.__version__) >= (2, 15)
SEEDED, UNSEEDED = ([8, 8], [-8, -8]) if _HAS_SEED else ([], [])
"""The seed and offset of the efficient kernel, which has them without dropout since torch 2.15."""


@pytest.fixture
def gpu(on: Any) -> Any:
    return on("A100-40GB")


@pytest.fixture
def ops() -> Any:
    return _Module("xformers.ops")


@pytest.fixture
def biases() -> Any:
    return _Module("xformers.ops.fmha.attn_bias")


class _Module:
    """A module of the stand-in, wherever the real one is installed."""

    def __init__(self, name: str) -> None:
        self.__dict__.update(MODULES[name])

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


def made(*shape: int, dtype: torch.dtype = torch.half, grad: bool = True) -> Tensor:
    return torch.empty(shape, device="cuda", dtype=dtype, requires_grad=grad)


def heads(size: int = SIZE, *, grad: bool = True, dtype: torch.dtype = torch.half) -> Any:
    return [made(BATCH, LENGTH, HEADS, size, grad=grad, dtype=dtype) for _ in range(3)]


def gradients(gpu: Any, out: Tensor, inputs: list[Tensor]) -> list[int]:
    grad = torch.empty_like(out)
    return gpu.of(lambda: torch.autograd.grad(out, inputs, grad))  # type: ignore[no-any-return]


def test_halves_on_ampere_take_flash_attention(gpu: Any, ops: Any) -> None:
    given = heads()
    mask = ops.LowerTriangularMask()
    # The random numbers' state goes where nothing is dropped.
    assert gpu.of(lambda: ops.memory_efficient_attention(*given, mask)) == [
        OUT,
        LSE,
        16,
        8,
        -8,
        -16,
    ]
    kept = gpu.of(lambda: ops.memory_efficient_attention(*given, p=0.1))
    assert kept == [OUT, LSE, 16, 8, -8]
    with_none = heads(grad=False)
    events = gpu.of(lambda: ops.memory_efficient_attention(*with_none))
    assert sorted(events) == sorted([OUT, LSE, 16, 8, -8, -LSE, -16])


def test_backward_makes_a_gradient_of_logsumexp_that_nobody_reads(gpu: Any, ops: Any) -> None:
    given = heads()
    out = ops.memory_efficient_attention(*given)
    rows = BATCH * 128 * HEADS
    events = gradients(gpu, out, given)
    assert events[:6] == [LSE, OUT, OUT, OUT, rows * 4, rows * SIZE * 4]


@pytest.mark.parametrize(
    ("model", "dtype"), [("A100-40GB", torch.float32), ("T4", torch.half), ("T4", torch.float32)]
)
def test_others_take_the_efficient_kernel(
    on: Any, ops: Any, model: str, dtype: torch.dtype
) -> None:
    gpu = on(model)
    given = heads(dtype=dtype)
    out = OUT * dtype.itemsize // 2
    assert gpu.of(lambda: ops.memory_efficient_attention(*given)) == [
        *SEEDED,
        out,
        PADDED,
        *UNSEEDED,
    ]
    # Without gradients no sums are made.
    given = heads(grad=False, dtype=dtype)
    assert gpu.of(lambda: ops.memory_efficient_attention(*given)) == [*SEEDED, out, *UNSEEDED]


def test_a_matrix_takes_the_efficient_kernel(gpu: Any, ops: Any) -> None:
    given = heads()
    bias = torch.zeros(BATCH, HEADS, LENGTH, 104, device="cuda", dtype=torch.half)[..., :LENGTH]
    assert gpu.of(lambda: ops.memory_efficient_attention(*given, bias)) == [
        *SEEDED,
        OUT,
        PADDED,
        *UNSEEDED,
    ]
    with pytest.raises(NotImplementedError, match=r"attn_bias.stride\(-2\) % 8 != 0"):
        ops.memory_efficient_attention(*given, bias.contiguous())
    with pytest.raises(ValueError, match="Invalid shape for attention bias"):
        ops.memory_efficient_attention(*given, bias[:1])


def test_one_head_may_be_left_out(gpu: Any, ops: Any) -> None:
    given = [made(BATCH, LENGTH, SIZE) for _ in range(3)]
    out = ops.memory_efficient_attention(*given)
    assert out.shape == (BATCH, LENGTH, SIZE)
    assert gradients(gpu, out, given)


def test_sequences_one_behind_the_other(gpu: Any, ops: Any, biases: Any) -> None:
    gpu.events()
    mask = biases.BlockDiagonalMask.from_seqlens([30, 70])
    assert gpu.events() == [3 * 4], "where they begin, and no matrix"
    given = [made(1, LENGTH, HEADS, SIZE) for _ in range(3)]
    events = gpu.of(lambda: ops.memory_efficient_attention(*given, mask.make_causal()))
    assert events == [OUT // BATCH, LSE // BATCH, 16, 8, -8, -16]
    out = ops.memory_efficient_attention(*given, mask)
    assert [each.shape[1] for each in mask.split(out)] == [30, 70]
    mask, joined = biases.BlockDiagonalMask.from_tensor_list([made(2, 5, 8), made(1, 7, 8)])
    assert joined.shape == (1, 17, 8)
    assert [each.shape for each in mask.split(joined)] == [(2, 5, 8), (1, 7, 8)]


def test_masks_can_be_looked_at(biases: Any) -> None:
    see = {
        "LowerTriangularMask": [[1, 0, 0], [1, 1, 0]],
        "LowerTriangularFromBottomRightMask": [[1, 1, 0], [1, 1, 1]],
    }
    for name, seen in see.items():
        matrix = getattr(biases, name)().materialize((2, 3)).exp()
        assert matrix.tolist() == seen
    local = biases.LocalAttentionFromBottomRightMask(window_left=1, window_right=0)
    assert local.materialize((2, 3)).exp().tolist() == [[1, 1, 0], [0, 1, 1]]
    with pytest.raises(ValueError, match="window_left"):
        biases.LocalAttentionFromBottomRightMask(window_left=-1, window_right=0)
    blocks = biases.BlockDiagonalMask.from_seqlens([1, 1], [2, 1], device="cpu")
    assert blocks.materialize((2, 3)).exp().tolist() == [[1, 1, 0], [0, 0, 1]]


def _padded(biases: Any, name: str) -> Any:
    """Queries of 40 and 60 tokens; keys of 50 and 70 in room for 100 each."""
    lengths = [40, 60], [50, 70]
    if name.endswith("Local"):
        mask = biases.BlockDiagonalCausalLocalAttentionPaddedKeysMask
        return mask.from_seqlens_local(lengths[0], 100, lengths[1], 7)
    mask = getattr(biases, f"BlockDiagonal{name}KeysMask")
    room: Any = [0, 60, 200] if "Gappy" in name else 100
    return mask.from_seqlens(lengths[0], room, lengths[1])


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        # Of queries 40 and 60, keys 50 and 70; causal from the last key, 11 to 50 and 11 to 70.
        ("Padded", 40 * 50 + 60 * 70),
        ("CausalWithOffsetPadded", sum(range(11, 51)) + sum(range(11, 71))),
        ("Local", 7 * 100),
        ("Gappy", 40 * 50 + 60 * 70),
        ("CausalWithOffsetGappy", sum(range(11, 51)) + sum(range(11, 71))),
    ],
)
def test_keys_that_lie_apart_are_taken_without_gradients(
    gpu: Any, ops: Any, biases: Any, name: str, seen: int
) -> None:
    gpu.events()
    mask = _padded(biases, name)
    assert gpu.events() == [3 * 4, 2 * 4, 3 * 4], "beginnings of queries, lengths, and of keys"
    assert mask.to("cpu").materialize((100, 200)).exp().sum() == seen
    query = torch.empty(1, 100, HEADS, SIZE, device="cuda", dtype=torch.half)
    key = torch.empty(1, 200, HEADS, SIZE, device="cuda", dtype=torch.half)
    out, sums, state = 100 * HEADS * SIZE * 2, HEADS * 100 * 4, 2 * 8
    gpu.events()
    made = ops.memory_efficient_attention(query, key, key, mask)
    assert gpu.events()[:3] == [out, sums, state]
    assert made.shape == query.shape
    with pytest.raises(NotImplementedError, match="attn_bias type is"):
        ops.memory_efficient_attention(query.requires_grad_(), key, key, mask)


def test_torchs_kernels_take_no_pages(gpu: Any, ops: Any, biases: Any) -> None:
    tables = torch.zeros(2, 4, device="cuda", dtype=torch.int32)
    mask = _padded(biases, "Padded").make_paged(tables, 16, biases.PagedBlockDiagonalPaddedKeysMask)
    assert mask.k_seqinfo.padding == 4 * 16
    query = torch.empty(1, 100, HEADS, SIZE, device="cuda", dtype=torch.half)
    with pytest.raises(NotImplementedError, match="PagedBlockDiagonalPaddedKeysMask"):
        ops.memory_efficient_attention(query, query, query, mask)
    with pytest.raises(ValueError, match="k shapes wrong"):
        _padded(biases, "Padded").materialize((100, 199))


def test_the_kernel_can_be_asked_for(gpu: Any, ops: Any) -> None:
    given = heads()
    asked = ops.MemoryEfficientAttentionCutlassOp
    assert gpu.of(lambda: ops.memory_efficient_attention(*given, op=asked)) == [
        *SEEDED,
        OUT,
        PADDED,
        *UNSEEDED,
    ]
    wide = heads(dtype=torch.float32)
    asked = ops.MemoryEfficientAttentionFlashAttentionOp
    with pytest.raises(ValueError, match=r"dtype=torch\.float32"):
        ops.memory_efficient_attention(*wide, op=asked)


def test_shapes_that_do_not_fit_are_refused(gpu: Any, ops: Any) -> None:
    q, k, _ = heads()
    with pytest.raises(ValueError, match="Incompatible shapes"):
        ops.memory_efficient_attention(q, k, k[:, :50])


def test_it_is_there_where_it_is_named() -> None:
    if importlib.util.find_spec("xformers") is not None:
        pytest.skip("xformers is installed")
    with simulate(), pytest.raises(ModuleNotFoundError):
        importlib.import_module("xformers.ops")
    with SimulatedGPU("A100-40GB", stand_ins=("xformers",)).active():
        ops = importlib.import_module("xformers.ops")
        assert ops.memory_efficient_attention(*heads(grad=False)).shape == (
            *(BATCH, LENGTH, HEADS, SIZE),
        )


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The library's own code, where it is installed, over torch's kernels alone."""
    if importlib.util.find_spec("xformers") is None:
        pytest.skip("xformers is not installed")
    with SimulatedGPU("T4", stand_ins=("xformers",)).active():
        yield importlib.import_module("xformers.ops")


_CALLS: dict[str, Callable[[Any, Any, list[Tensor]], Tensor]] = {
    "plain": lambda ops, biases, given: ops.memory_efficient_attention(*given),
    "causal": lambda ops, biases, given: ops.memory_efficient_attention(
        *given, biases.LowerTriangularFromBottomRightMask()
    ),
    "dropout": lambda ops, biases, given: ops.memory_efficient_attention(*given, p=0.1),
    "blocks": lambda ops, biases, given: ops.memory_efficient_attention(
        *(each.view(1, -1, HEADS, each.shape[-1]) for each in given),
        biases.BlockDiagonalMask.from_seqlens([LENGTH, 40, 60]),
    ),
    "cutlass": lambda ops, biases, given: ops.memory_efficient_attention(
        *given, op=ops.MemoryEfficientAttentionCutlassOp
    ),
}


@pytest.mark.parametrize("call", list(_CALLS))
def test_the_library_itself_allocates_the_same(
    real: Any, on: Any, ops: Any, biases: Any, call: str
) -> None:
    lists: dict[bool, list[list[int]]] = {True: [], False: []}
    for model, dtype, size, grad, is_real in product(
        ("A100-40GB", "T4"), (torch.half, torch.float32), (64, 160), (True, False), (True, False)
    ):
        gpu = on(model)
        module, masks = (real, real.fmha.attn_bias) if is_real else (ops, biases)
        given = heads(size, dtype=dtype, grad=grad)
        gpu.events()
        out = _CALLS[call](module, masks, given)
        lists[is_real].append(gpu.events())
        if grad:
            lists[is_real].append(gradients(gpu, out, given))
        del out
    assert lists[True] == lists[False]
