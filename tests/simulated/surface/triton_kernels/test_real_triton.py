"""Launches with Triton itself, where it is installed; no GPU is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from pytest_gpumem import simulate
from pytest_gpumem.values.errors import UnknownValueError

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
if os.environ.get("TRITON_INTERPRET", "0") != "0":
    pytest.skip("TRITON_INTERPRET is set: nothing is launched", allow_module_level=True)
tl: Any = pytest.importorskip("triton.language")


# Triton reads annotations of kernels itself, and may be missing.
@triton.jit
def put(place, at, value, mask):  # type: ignore[no-untyped-def]
    tl.store(place + at, value, mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    put(out_ptr, at, tl.load(x_ptr + at, mask=mask) + tl.load(y_ptr + at, mask=mask), mask)


@pytest.fixture(autouse=True)
def no_warning_of_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # asked for by 3.9


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    add_kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](
        x, y, out, x.numel(), BLOCK=128
    )
    return out


def test_a_launch_allocates_nothing_itself() -> None:
    with simulate("T4") as gpu:
        x, y = torch.arange(256, device="cuda"), torch.ones(256, device="cuda")
        out = add(x, y)
        assert gpu.allocated == 2048 + 1024 + 2048
        with pytest.raises(UnknownValueError):
            out.sum().item()
    with pytest.raises(RuntimeError, match="active driver"):
        add_kernel[(1,)](torch.ones(3), torch.ones(3), torch.ones(3), 3, BLOCK=4)


def test_tuning_and_heuristics() -> None:
    configs = [triton.Config({"BLOCK": size}) for size in (256, 512)]

    with simulate("T4") as gpu:
        # Up to 3.3 the driver is asked where a kernel is decorated.
        tuner = triton.autotune(configs, key=["n"], restore_value=["x_ptr"])(add_kernel)
        chosen = triton.heuristics({"BLOCK": lambda args: triton.next_power_of_2(args["n"])})(
            add_kernel
        )
        x = torch.ones(1000, device="cuda")
        for kernel in (tuner, chosen):
            kernel[(1,)](x, x, x, 1000)
        assert gpu.peak_allocated == 4096
    assert tuner.best_config is configs[0]
    assert not tuner.cache
    (note,) = gpu.notes
    assert f"{__name__}.add_kernel at tests/simulated/surface/triton_kernels/test_real_" in note
    assert "clear 256 MiB" in note


def test_tritons_driver_is_that_of_the_simulated_gpu() -> None:
    with simulate("H100"):
        active = triton.runtime.driver.active
        assert (active.get_current_target().arch, active.get_current_device()) == (90, 0)
        if hasattr(active, "get_active_torch_device"):  # since 3.3
            assert active.get_active_torch_device() == torch.device("cuda", 0)
        assert active.utils.get_device_properties(0)["multiprocessor_count"] == 132
    with pytest.raises(RuntimeError, match="active driver"):
        triton.runtime.driver.active.get_current_target()


def test_do_bench_allocates_its_cache_buffer() -> None:
    with simulate("T4") as gpu:
        x = torch.ones(3, device="cuda")
        triton.testing.do_bench(lambda: add(x, x), warmup=1, rep=1)
        assert gpu.peak_allocated == 256 * 1024 * 1024 + 512 + 512


def test_operators_of_triton_op_show_their_temporaries() -> None:
    @torch.library.triton_op("gumem_triton::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        between, out = torch.empty(1024, device=x.device), torch.empty_like(x)
        launch: Any = torch.library.wrap_triton(add_kernel)
        launch[(1,)](x, x, between, x.numel(), BLOCK=16)
        launch[(1,)](between, between, out, x.numel(), BLOCK=16)
        return out

    with simulate("T4") as gpu:
        x = torch.ones(128, device="cuda")
        twice(x)
        assert [event.size for event in gpu.trace if event.action == "alloc"] == [512, 4096, 512]
        torch.library.wrap_triton(add_kernel)[(1,)](x, x, x, 128, BLOCK=16)
        with pytest.raises(UnknownValueError):
            (x == 3).any().item()


def test_a_model_with_a_kernel_is_trained() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return add(x, x)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return add(gradient, gradient)

    with simulate("T4") as gpu:
        x = torch.ones(256, device="cuda", requires_grad=True)
        apply: Any = Doubled.apply
        apply(x).sum().backward()
        assert x.grad is not None
        assert gpu.allocated == 2048


def test_triton_is_imported_on_first_use_alone() -> None:
    asked = """
import sys, torch
from pytest_gpumem import simulate

with simulate("A100-40GB"):
    layer = torch.nn.Linear(3, 4).cuda()
    layer(torch.ones(2, 3, device="cuda")).sum().backward()
    torch.optim.AdamW(layer.parameters()).step()
    assert "triton" not in sys.modules
    import triton

    for _ in range(2):
        with simulate("T4"):
            assert triton.runtime.driver.active.get_current_target().arch == 75
        assert triton.runtime.driver.active.get_current_target().arch == 80
driver = triton.runtime.driver
assert "SimulatedDriver" not in repr(vars(driver))
"""
    subprocess.run([sys.executable, "-c", asked], check=True, timeout=120)


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_torch_analyses_the_stores_of_a_kernel_while_compiling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch needs the kernel's IR from Triton, which needs the driver's GPU."""
    from torch._higher_order_ops import triton_kernel_wrap

    warned: list[Any] = []
    monkeypatch.setattr(triton_kernel_wrap.log, "warning", lambda *said, **_: warned.append(said))
    with simulate("A100-40GB", compile="always"):
        x = torch.ones(256, device="cuda")
        run: Any = torch.compile(add)
        assert run(x, x).is_cuda
    assert warned == []  # "... assuming every input is mutated"
