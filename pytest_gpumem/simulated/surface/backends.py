"""``torch.backends``: which libraries a CUDA build has, and which kernels it may choose."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.backends.cuda
import torch.backends.cudnn

from pytest_gpumem.simulated.operators.attention import usable_kernels

if TYPE_CHECKING:
    from pytest_gpumem.simulated.patching import Patches
    from pytest_gpumem.simulated.simulation import Simulation

_CUDNN_VERSIONS = (
    ((2, 11), 91501),
    ((2, 8), 91002),
    ((0, 0), 90501),
)
"""First release of torch, cuDNN of its CUDA 12.6 wheel as ``cudnnGetVersion`` gives it (pytorch,
.github/scripts/generate_binary_build_matrix.py of the releases)."""


def plan(simulation: Simulation, patches: Patches) -> None:
    """Answer as a CUDA build on this GPU would."""
    version = simulation.gpus[0].version
    cudnn = next(number for since, number in _CUDNN_VERSIONS if version >= since)
    patches.plan(torch._C, "_has_cudnn", True)
    patches.plan(torch.backends.cudnn, "is_available", lambda: True)
    patches.plan(torch.backends.cudnn, "version", lambda: cudnn)
    patches.plan(torch._C, "_has_magma", True)
    patches.plan(torch._C, "_is_flash_attention_available", lambda: True)
    for name, kernel in {
        "_can_use_flash_attention": "flash",
        "_can_use_mem_efficient_attention": "efficient",
        "_can_use_cudnn_attention": "cudnn",
    }.items():
        patches.plan(torch._C, name, _asking(simulation, kernel))
    linalg = _Preferred(torch._C._get_linalg_preferred_backend())
    patches.plan(torch._C, "_get_linalg_preferred_backend", linalg.get)
    patches.plan(torch._C, "_set_linalg_preferred_backend", linalg.set)
    blas = _Preferred(torch._C._get_blas_preferred_backend())
    patches.plan(torch._C, "_get_blas_preferred_backend", blas.get)
    patches.plan(torch._C, "_set_blas_preferred_backend", blas.set)
    limit = _Preferred(10)  # Context::benchmark_limit_cudnn
    patches.plan(torch._C, "_cuda_get_cudnn_benchmark_limit", limit.get)
    patches.plan(torch._C, "_cuda_set_cudnn_benchmark_limit", limit.set)
    patches.plan(torch.backends.cuda, "cufft_plan_cache", _PlanCaches())


def _asking(simulation: Simulation, kernel: str) -> Any:
    def can_use(params: Any, debug: bool = False) -> bool:
        return kernel in usable_kernels(
            simulation.current,
            params.query,
            params.key,
            params.value,
            params.attn_mask,
            params.dropout,
            params.is_causal,
            params.enable_gqa,
        )

    return can_use


class _Preferred:
    """A setting that changes speed and not what the simulation models."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def get(self) -> Any:
        return self._value

    def set(self, value: Any) -> None:
        self._value = value


class _PlanCache:
    """The cuFFT plans of one device; plans are made by the driver, of which there is none."""

    size = 0

    def __init__(self) -> None:
        self.max_size = 4096  # aten/src/ATen/native/cuda/CuFFTPlanCache.h, CUFFT_DEFAULT_CACHE_SIZE

    def clear(self) -> None: ...


class _PlanCaches(_PlanCache):
    """``torch.backends.cuda.cufft_plan_cache``: of the current device, or by device."""

    def __init__(self) -> None:
        super().__init__()
        self._by_device: dict[int, _PlanCache] = {}

    def __getitem__(self, device: Any) -> _PlanCache:
        index = torch.cuda._utils._get_device_index(device, optional=True)
        return self._by_device.setdefault(index, _PlanCache())
