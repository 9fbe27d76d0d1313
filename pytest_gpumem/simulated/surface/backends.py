"""``torch.backends``: which libraries a CUDA build has, and which kernels it may choose."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.backends.cuda
import torch.backends.cudnn
import torch.backends.mha

from pytest_gpumem.quoting import quoted
from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.gpu.releases import STATIC_SIZE, cudnn_of
from pytest_gpumem.simulated.machine.machine import SimulatedMachine
from pytest_gpumem.simulated.operators.attention_choice import usable_kernels
from pytest_gpumem.simulated.operators.encoders import is_followed


def add_patches(machine: SimulatedMachine, patches: Patches) -> None:
    """Replace what a build with CUDA answers differently on this GPU."""
    version = machine.gpus[0].version
    cudnn = cudnn_of(version)
    patches.add(torch._C, "_has_cudnn", True)
    patches.add(torch.backends.cudnn, "version", lambda: cudnn)
    patches.add(torch._C, "_is_flash_attention_available", lambda: True)
    for name, kernel in {
        "_can_use_flash_attention": "flash",
        "_can_use_mem_efficient_attention": "efficient",
        "_can_use_cudnn_attention": "cudnn",
    }.items():
        patches.add(torch._C, name, partial(_can_use, machine, kernel))
    for name, value in {
        "_{}_linalg_preferred_backend": torch._C._get_linalg_preferred_backend(),
        "_{}_blas_preferred_backend": torch._C._get_blas_preferred_backend(),
        "_cuda_{}_cudnn_benchmark_limit": 10,  # Context::benchmark_limit_cudnn
    }.items():
        for kind, function in zip(("get", "set"), _setting(value), strict=True):
            patches.add(torch._C, name.format(kind), function)
    patches.add(torch.backends.cuda, "cufft_plan_cache", _PlanCache())
    patches.wrap(torch.backends.mha, "get_fastpath_enabled", partial(_takes_fast_path, machine))
    # A build with CUDA has these functions, whatever release is simulated.
    if version >= STATIC_SIZE or hasattr(torch._C, "_cuda_getCublasWorkspaceSize"):
        for name, library in {"Cublas": "cublas", "CublasLt": "cublaslt"}.items():
            sizes = _WorkspaceSize(machine, library)
            patches.add(torch._C, f"_cuda_get{name}WorkspaceSize", sizes.get)
            patches.add(torch._C, f"_cuda_set{name}WorkspaceSize", sizes.set)
            patches.add(torch._C, f"_cuda_reset{name}WorkspaceSize", sizes.reset)


class _WorkspaceSize:
    """The functions of one library since 2.13, below ``torch.backends.cuda.cublas_workspace_size``.

    Source: ``cublas_workspace_override`` of aten/src/ATen/cuda/CublasHandlePool.cpp, which goes
    before the environment for all devices of the process.
    """

    def __init__(self, machine: SimulatedMachine, library: str) -> None:
        self._machine = machine
        self._library = library

    def get(self) -> int:
        settings = self._machine.current.workspaces.settings
        return settings.cublas_bytes if self._library == "cublas" else settings.lt_bytes

    def set(self, size: int) -> None:
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise TypeError(
                f"a workspace of {quoted(size)} bytes: the size is an int that is not negative"
            )
        for gpu in self._machine.gpus:
            gpu.workspaces.settings.chosen[self._library] = size

    def reset(self) -> None:
        for gpu in self._machine.gpus:
            gpu.workspaces.settings.chosen.pop(self._library, None)


def _can_use(machine: SimulatedMachine, kernel: str, params: Any, debug: bool = False) -> bool:
    return kernel in usable_kernels(
        machine.current,
        params.query,
        params.key,
        params.value,
        params.attn_mask,
        params.dropout,
        params.is_causal,
        params.enable_gqa,
    )


def _setting(value: Any) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """Return getter and setter of a setting that changes speed but nothing that is simulated."""

    def change(new: Any) -> None:
        nonlocal value
        value = new

    return lambda: value, change


class _PlanCache:
    """``torch.backends.cuda.cufft_plan_cache``: settings of plans, which only the driver makes."""

    size = 0
    max_size = 4096  # aten/src/ATen/native/cuda/CuFFTPlanCache.h, CUFFT_DEFAULT_CACHE_SIZE

    def clear(self) -> None: ...

    def __getitem__(self, device: Any) -> _PlanCache:
        return self


def _takes_fast_path(machine: SimulatedMachine, enabled: Callable[[], bool]) -> bool:
    """Disable fast paths of transformer encoders that are not followed."""
    if not enabled():
        return False
    asking = sys._getframe(2).f_locals
    on_gpu = any(isinstance(value, torch.Tensor) and value.is_cuda for value in asking.values())
    if not isinstance(asking.get("self"), torch.nn.Module) or not on_gpu or _is_followed(asking):
        return True
    if not torch.is_grad_enabled():
        machine.note(
            "nn.TransformerEncoderLayer and nn.MultiheadAttention take their fast path on a "
            "GPU without gradients, with nested tensors for padding; it is simulated "
            "operator by operator"
        )
    return False


def _is_followed(asking: dict[str, Any]) -> bool:
    """Return whether the fast path of a ``forward`` with these local variables is followed.

    Source: torch/nn/modules/transformer.py and activation.py of torch 2.6 to 2.15: a layer, its
    attention, and the encoder, which makes nested tensors where there is padding.
    """
    module = asking.get("self")
    if isinstance(module, torch.nn.TransformerEncoderLayer):
        return not _is_nested_there() and is_followed(asking["src"])
    if isinstance(module, torch.nn.MultiheadAttention):
        same = asking["query"] is asking["key"] is asking["value"]
        return same and is_followed(asking["query"])
    return isinstance(module, torch.nn.TransformerEncoder) and not _is_padded(asking)


def _is_padded(asking: dict[str, Any]) -> bool:
    return asking.get("src_key_padding_mask") is not None


def _is_nested_there() -> bool:
    """Return whether the layer in question is called by an encoder whose input is padded."""
    encoding = torch.nn.TransformerEncoder.forward.__code__
    frame: FrameType | None = sys._getframe(4)
    while frame is not None and frame.f_code is not encoding:
        frame = frame.f_back
    if frame is None:
        return False
    variables = frame.f_locals
    padded = _is_padded(variables)
    if sys.version_info < (3, 13):
        # Before 3.13 the frame keeps this dictionary, and its tensors alive.
        variables.clear()
    return padded
