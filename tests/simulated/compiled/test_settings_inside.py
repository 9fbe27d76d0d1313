"""Contexts and settings of compiled functions, entered inside their body or around the call.

The sizes are those of torch's own code: the events of an A100 of torch 2.15.0+cu132 over a runtime
whose kernels do nothing, which an A100 of the simulation repeats one by one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from pytest_gpumem import simulate

KIB = 1 << 10


class Attention(nn.Module):
    """A block whose kernels, dtypes and saved tensors depend on the settings around it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(256)
        self.heads = nn.Linear(256, 768)
        self.out = nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = self.heads(self.norm(x)).view(batch, length, 3, 4, 64)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        other = torch.ones(width, width, device=x.device) * 1.5
        return F.gelu(x @ other.to(x.dtype)).softmax(-1)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def flag(set_to: Callable[[Any], Any], on: Any, off: Any) -> Iterator[None]:
    set_to(on)
    try:
        yield
    finally:
        set_to(off)


def deterministic(on: bool) -> None:
    torch.use_deterministic_algorithms(on, warn_only=True)


Opened = Callable[[], AbstractContextManager[Any]]
PLAIN, HALF, INFERRING, MATH = "plain", "half", "inferring", "math"
OPENED: dict[str, tuple[Opened, str]] = {
    "nothing": (nullcontext, PLAIN),
    "autocast to bfloat16": (lambda: torch.autocast("cuda", dtype=torch.bfloat16), HALF),
    "autocast to float16": (lambda: torch.autocast("cuda", dtype=torch.float16), HALF),
    "autocast": (lambda: torch.autocast("cuda"), HALF),
    "autocast without its cache": (lambda: torch.autocast("cuda", cache_enabled=False), HALF),
    "autocast of the CPU": (lambda: torch.autocast("cpu", dtype=torch.bfloat16), PLAIN),
    "autocast that is off": (lambda: torch.autocast("cuda", enabled=False), PLAIN),
    "no_grad": (torch.no_grad, INFERRING),
    "enable_grad": (torch.enable_grad, PLAIN),
    "set_grad_enabled": (lambda: torch.set_grad_enabled(False), INFERRING),
    "inference_mode": (torch.inference_mode, INFERRING),
    "the math kernel": (lambda: sdpa_kernel(SDPBackend.MATH), MATH),
    "the efficient kernel": (lambda: sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION), PLAIN),
    "no efficient kernel": (
        lambda: flag(torch.backends.cuda.enable_mem_efficient_sdp, False, True),
        MATH,
    ),
    "no flash kernel": (lambda: flag(torch.backends.cuda.enable_flash_sdp, False, True), PLAIN),
    "default dtype": (lambda: default_dtype(torch.bfloat16), PLAIN),
    "deterministic algorithms": (lambda: flag(deterministic, True, False), PLAIN),
    "a device": (lambda: torch.cuda.device(0), PLAIN),
    "another device": (lambda: torch.cuda.device(1), PLAIN),
    "a precision of products": (
        lambda: flag(torch.set_float32_matmul_precision, "high", "highest"),
        PLAIN,
    ),
    "default device": (lambda: flag(torch.set_default_device, "cuda", None), PLAIN),
}
"""By name: what is opened, and which of the ways of running the block it leads to."""

RECORDED = {
    # Peak of a third step in bytes, and the number of allocations and frees of it.
    PLAIN: (14_569_472, 92),
    HALF: (13_127_680, 102),
    INFERRING: (11_409_408, 22),
    MATH: (16_134_144, 98),
}


def step(name: str, *, inside: bool) -> tuple[int, list[int], tuple[str, ...]]:
    """Return peak and events of a training step, or of a forward pass without gradients."""
    opened, _ = OPENED[name]
    with simulate("A100-40GB*2") as gpu:
        torch.manual_seed(0)
        block: Any = Attention().cuda()

        def call(x: torch.Tensor) -> Any:
            if not inside:
                return block(x) * 2
            with opened():
                return block(x) * 2

        compiled = torch.compile(call)

        def run() -> None:
            x = torch.zeros(4, 128, 256, device="cuda")
            with nullcontext() if inside else opened():
                result = compiled(x)
            if result.requires_grad:
                result.sum().backward()
            block.zero_grad()

        for _ in range(2):
            run()
        torch.cuda.reset_peak_memory_stats()
        before = len(gpu.trace)
        run()
        signs = {"alloc": 1, "free_requested": -1}
        events = [signs[e.action] * e.size for e in gpu.trace[before:] if e.action in signs]
        return torch.cuda.max_memory_allocated(), events, gpu.notes


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about nondeterminism and float32
        yield


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
@pytest.mark.parametrize("name", OPENED)
def test_contexts_are_compiled_with_the_recorded_peak(name: str, inside: bool) -> None:
    if inside and name == "inference_mode" and torch.__version__ < "2.13":
        pytest.skip("torch itself fails to compile it, and leaves a dispatch key behind")
    peak, events, notes = step(name, inside=inside)
    if torch.__version__ >= "2.15":
        assert (peak, len(events)) == RECORDED[OPENED[name][1]]
    assert not [note for note in notes if "eagerly" in note]


@pytest.mark.parametrize("name", ["autocast to bfloat16", "no_grad", "the math kernel", "a device"])
def test_a_context_inside_has_the_peak_of_one_outside(name: str) -> None:
    assert step(name, inside=True)[:2] == step(name, inside=False)[:2]


def test_autocast_inside_saves_halves() -> None:
    """Saved tensors worked out by hand: each activation has half the bytes."""

    def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return x @ y

    with simulate("A100-40GB") as gpu:
        x, y = (torch.ones(256, 256, device="cuda", requires_grad=True) for _ in range(2))
        result = torch.compile(product)(x, y)
        assert result.dtype == torch.bfloat16
        # Both in float32; the casts of both, which backward reads, and the result, in bfloat16.
        kept = 2 * 256 * KIB + 3 * 128 * KIB
        workspace = gpu.allocated - kept
        assert workspace in (0, 8_519_680)  # since 2.15 none is kept


def test_a_cached_graph_is_not_used_with_other_attention_kernels() -> None:
    """torch's cache keys lack the kernels: a peak would depend on earlier tests."""
    first = step("nothing", inside=False)
    assert step("the math kernel", inside=False)[1] != first[1]
    assert step("nothing", inside=False) == first


def _of_stream(x: torch.Tensor) -> torch.Tensor:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        return x * 2


def _of_event(x: torch.Tensor) -> torch.Tensor:
    event = torch.cuda.Event()
    event.record()
    event.synchronize()
    return x * 2


@pytest.mark.parametrize(("function", "made"), [(_of_stream, "Stream"), (_of_event, "Event")])
@pytest.mark.parametrize("whole", [False, True])
def test_streams_and_events_run_eagerly_with_a_note(
    function: Callable[[torch.Tensor], torch.Tensor], made: str, whole: bool
) -> None:
    with simulate("A100-40GB") as gpu:
        result = torch.compile(function, fullgraph=whole)(torch.ones(4, device="cuda"))
        assert result.tolist() == [2, 2, 2, 2]
    (note,) = gpu.notes
    assert note.endswith(f"compiled code may allocate less: it makes a torch.cuda.{made}")
