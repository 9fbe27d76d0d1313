"""mamba-ssm: its Python runs as it is installed, over what csrc/selective_scan.cpp allocates.

Of 2.3.2.post1. Bytes are worked out from that file.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pytest_gpumem import simulate
from pytest_gpumem.simulated.common.errors import UnsupportedOperatorError
from pytest_gpumem.simulated.simulation import SimulatedGPU
from pytest_gpumem.simulated.stand_ins.imports import served

BATCH, DIM, LENGTH, STATES, GROUPS = 2, 64, 3000, 16, 1
ROWS = BATCH * DIM * LENGTH * 2
CHUNKS = 2
"""Of at most 2048 elements."""
KEPT = BATCH * DIM * CHUNKS * 2 * STATES * 4
VARYING = BATCH * GROUPS * STATES * LENGTH
"""Elements of B and C; gradients are float32 first, and then of their dtype."""


@pytest.fixture
def gpu(on: Any) -> Iterator[Any]:
    watched = on("A100-40GB")
    with served(("mamba-ssm",), lambda sentence: None):
        yield watched


@pytest.fixture
def scan(gpu: Any) -> Any:
    return importlib.import_module("selective_scan_cuda")


def half(*shape: int) -> Tensor:
    return torch.empty(shape, device="cuda", dtype=torch.half)


def wide(*shape: int) -> Tensor:
    return torch.empty(shape, device="cuda")


def inputs() -> list[Tensor]:
    """u, delta, A, B, C and D."""
    varying = (half(BATCH, GROUPS, STATES, LENGTH) for _ in range(2))
    return [
        *(half(BATCH, DIM, LENGTH), half(BATCH, DIM, LENGTH), wide(DIM, STATES)),
        *(*varying, wide(DIM)),
    ]


def test_forward_keeps_a_state_for_each_chunk(gpu: Any, scan: Any) -> None:
    given, z, bias = inputs(), half(BATCH, DIM, LENGTH), wide(DIM)
    assert gpu.of(lambda: scan.fwd(*given, None, bias, True)) == [ROWS, KEPT]
    # The gated output is made first.
    assert gpu.of(lambda: scan.fwd(*given, z, bias, True)) == [ROWS, ROWS, KEPT]


def test_gradients_of_what_varies_are_summed_in_float32(gpu: Any, scan: Any) -> None:
    given, z, bias = inputs(), half(BATCH, DIM, LENGTH), wide(DIM)
    out, kept, _ = scan.fwd(*given, z, bias, True)
    grad = half(BATCH, DIM, LENGTH)
    events = gpu.of(lambda: scan.bwd(*given, z, bias, grad, kept, out, None, True, False))
    assert events == [
        *(ROWS, ROWS, ROWS, DIM * STATES * 4, VARYING * 4, VARYING * 4),
        *(DIM * 4, DIM * 4, VARYING * 2, VARYING * 2, -VARYING * 4, -VARYING * 4),
    ]
    dz = half(BATCH, DIM, LENGTH)
    events = gpu.of(lambda: scan.bwd(*given, z, bias, grad, kept, out, dz, True, True))
    assert events[:3] == [ROWS, ROWS, ROWS], "the gated output again, and no gradient of the gate"


@pytest.mark.parametrize(
    ("position", "wrong", "sentence"),
    [
        (0, torch.float64, "float or half"),
        (1, torch.float32, "delta"),
        (2, torch.half, "weight_type"),
        (3, torch.float32, "B.scalar_type"),
        (5, torch.half, "D and delta_bias"),
    ],
)
def test_what_the_kernel_refuses_is_refused(
    gpu: Any, scan: Any, position: int, wrong: torch.dtype, sentence: str
) -> None:
    given = inputs()
    given[position] = given[position].to(wrong)
    with pytest.raises(RuntimeError, match=sentence):
        scan.fwd(*given, None, None, True)


def test_states_are_at_most_256(gpu: Any, scan: Any) -> None:
    given = inputs()
    given[2] = wide(DIM, 257)
    with pytest.raises(RuntimeError, match="state dimension <= 256"):
        scan.fwd(*given, None, None, True)


def test_python_code_that_is_missing_is_named_with_the_way_to_install_it() -> None:
    if importlib.util.find_spec("mamba_ssm") is not None:
        pytest.skip("mamba-ssm is installed")
    with (
        SimulatedGPU("T4", stand_ins=("mamba-ssm",)).active(),
        pytest.raises(UnsupportedOperatorError, match=r"MAMBA_SKIP_CUDA_BUILD=TRUE .* mamba-ssm$"),
    ):
        importlib.import_module("mamba_ssm")


def test_an_installation_without_kernels_gets_them_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mamba_ssm").mkdir()
    (tmp_path / "mamba_ssm" / "__init__.py").write_text("import selective_scan_cuda as scan\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "mamba_ssm"]:
        monkeypatch.delitem(sys.modules, name)
    with simulate() as gpu:
        module = importlib.import_module("mamba_ssm")
        module.scan.fwd(*inputs(), None, None, True)
    del sys.modules["mamba_ssm"]
    assert list(gpu.notes) == [
        "selective_scan_cuda of mamba-ssm is not installed: a stand-in allocated what mamba-ssm "
        "2.3.2.post1 does"
    ]


WIDTH, INNER, HEADS, TALL = 256, 512, 8, 64


def test_mamba_2_as_it_is_installed_keeps_what_its_function_saves(on: Any) -> None:
    gpu = on("A100-40GB")
    mamba = pytest.importorskip("mamba_ssm").Mamba2(WIDTH, d_state=TALL).cuda()
    x = torch.randn(BATCH, 512, WIDTH, device="cuda", requires_grad=True)
    before = torch.cuda.memory_allocated()
    out = mamba(x)
    kept = torch.cuda.memory_allocated() - before
    rows = BATCH * 512
    # The projected input, the scan's output, the norm's factors, A and exp of its logarithm, and
    # the result (MambaSplitConv1dScanCombinedFn); cuBLAS keeps a workspace.
    projected = 2 * INNER + 2 * TALL + HEADS
    saved = rows * (projected + INNER + 1) * 4 + 2 * 512
    assert kept == saved + rows * WIDTH * 4 + 8519680
    optimizer = torch.optim.AdamW(mamba.parameters())
    out.sum().backward()
    optimizer.step()
    assert all(each.grad is not None for each in mamba.parameters())
    assert gpu.events()
