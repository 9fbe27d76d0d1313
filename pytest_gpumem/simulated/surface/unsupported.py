"""Parts of torch that need a real device: refused by name, or without effect."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch._higher_order_ops.flex_attention
import torch.cuda.jiterator
import torch.export
import torch.multiprocessing
import torch.nested
import torch.utils.dlpack
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_gpumem.simulated.common.callsite import refuse, refusing
from pytest_gpumem.simulated.common.compiled_notes import FOLLOWED_SINCE
from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.machine.machine import SimulatedMachine
from pytest_gpumem.simulated.operators.below_autograd import jiterated

MOST_LOOKED_AT = 8
"""Items of a list whose device is looked up: the rest are on the same one."""

_FLEX = sys.modules["torch._higher_order_ops.flex_attention"]
_NEEDS_DEVICE = "needs a real CUDA device, so it cannot run on a simulated GPU"
_NEEDS_MEMORY = (
    "hands over memory that a simulated GPU does not have: run pytest --gpumem-device=dry"
)
_NEEDS_PROCESS = (
    "starts processes, which have no simulated GPU: mark the test with "
    "@pytest.mark.gpumem(ranks=8), and it is one of them"
)
_HOST_STATISTICS = (
    "_cuda_hostMemoryStats",
    "_cuda_resetPeakHostMemoryStats",
    "_cuda_resetAccumulatedHostMemoryStats",
)
_OF_DRIVER = ("_cuda_", "_nccl_", "_construct_CUDA_Tensor", "_construct_storage_from_data_pointer")
_WITHOUT_DEVICE = frozenset(
    {
        "_cuda_get_conv_benchmark_empty_cache",
        "_cuda_lock_mutex",
        "_cuda_unlock_mutex",
        "_nccl_version",
        "_nccl_version_suffix",
    }
)
"""Functions that call no driver; nor do the settings of tunable operators."""


def add_patches(machine: SimulatedMachine, patches: Patches) -> None:
    """Replace functions that would abort, crash, or complain about a missing driver."""
    patches.add(torch.export, "export", refusing("torch.export.export", _NEEDS_DEVICE))
    # Modules create such functions on import, torch's own test helpers, too.
    patches.add(torch.cuda.jiterator._JittedFunction, "__call__", jiterated)
    if hasattr(torch.cuda, "_compile_kernel"):  # came with 2.8
        own = refusing(
            "torch.cuda._compile_kernel", "compiles a kernel, which no simulated GPU runs"
        )
        patches.add(torch.cuda, "_compile_kernel", own)
    why = "counts pinned memory, which a simulated GPU does not: run pytest --gpumem-device=dry"
    for name in _HOST_STATISTICS:
        patches.add(torch._C, name, refusing(f"torch._C.{name}", why))
    for name in ("spawn", "start_processes"):
        own = refusing(f"torch.multiprocessing.{name}", _NEEDS_PROCESS)
        patches.add(torch.multiprocessing, name, own)
    _refuse_layouts(patches)
    dlpack = torch.utils.dlpack
    for owner, name in ((torch.Tensor, "__dlpack__"), (dlpack, "to_dlpack")):
        patches.wrap(owner, name, _without_memory(machine, name))
    name = "__cuda_array_interface__"
    described = functools.partial(_without_memory(machine, name), vars(torch.Tensor)[name].__get__)
    patches.add(torch.Tensor, name, property(described))
    if torch.__version__ < FOLLOWED_SINCE:
        # Called for gradients only: it traces the score function in a mode that has a device.
        with_gradients = refusing(
            "flex_attention with gradients",
            "traces its score function, which a simulated GPU follows since torch "
            f"{FOLLOWED_SINCE}",
        )
        patches.add(_FLEX, "create_fw_bw_graph", with_gradients)
    if not hasattr(TorchDispatchMode, "supports_higher_order_operators"):  # 2.6 has only rules
        with_rule = functools.partial(_with_rule, type(machine.execution))
        patches.wrap(HigherOrderOperator, "dispatch", with_rule)
    _refuse_driver_functions(patches)


def _refuse_driver_functions(patches: Patches) -> None:
    """Refuse the rest of ``torch._C``: a build with CUDA would call the driver, and crash."""
    replaced = {name for owner, name, _ in patches.added if owner is torch._C}
    for name in dir(torch._C):
        if (
            name.startswith(_OF_DRIVER)
            and name not in replaced
            and name not in _WITHOUT_DEVICE
            and not name.startswith("_cuda_tunableop_")
            and not isinstance(getattr(torch._C, name), type)
        ):
            patches.add(torch._C, name, refusing(f"torch._C.{name}", _NEEDS_DEVICE))


def _with_rule(mode: type, dispatch: Any, operator: Any, /, *args: Any, **kwargs: Any) -> Any:
    def rule(active: Any, *args: Any, **kwargs: Any) -> Any:
        return active.__torch_dispatch__(operator, (), args, kwargs)

    operator.python_key_table.setdefault(mode, rule)
    return dispatch(operator, *args, **kwargs)


def _refuse_layouts(patches: Patches) -> None:
    """Refuse layouts that C++ makes on the device where no mode sees it."""
    for name in ("csr", "csc", "bsr", "bsc", "compressed"):
        name = f"sparse_{name}_tensor"
        why = "makes indices in C++ that a simulated GPU does not see: use sparse_coo_tensor"
        patches.wrap(torch, name, _refused_on_gpu(name, why))
    why = "is strided, which no simulated GPU is: use layout=torch.jagged"
    for name in ("nested_tensor", "as_nested_tensor"):
        patches.wrap(torch.nested, name, _refused_on_gpu(f"nested.{name}", why))


def _refused_on_gpu(name: str, why: str) -> Callable[..., Any]:
    def call(make: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if options.get("layout") is not torch.jagged and _is_on_gpu((args, options)):
            refuse(f"torch.{name}", f"on a GPU {why}")
        return make(*args, **options)

    return call


def _is_on_gpu(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_cuda
    if isinstance(value, dict):
        device = value.get("device")
        return _is_on_gpu(list(value.values())) or str(device).startswith("cuda")
    return isinstance(value, (list, tuple)) and any(map(_is_on_gpu, value[:MOST_LOOKED_AT]))


def _without_memory(machine: SimulatedMachine, name: str) -> Callable[..., Any]:
    is_on_host = machine.storages.is_unknown_on_cpu

    def call(method: Any, tensor: torch.Tensor, /, *args: Any, **options: Any) -> Any:
        if tensor.is_cuda or is_on_host(tensor):
            refuse(f"Tensor.{name}", _NEEDS_MEMORY)
        return method(tensor, *args, **options)

    return call
