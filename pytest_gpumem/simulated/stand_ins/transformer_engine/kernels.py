"""``transformer_engine_torch``: what its functions allocate.

Source: transformer_engine/pytorch/csrc/extensions/gemm.cpp (``gemm``) and normalization.cpp,
transformer_engine/pytorch/module/base.py (``get_workspace``) and utils.py of 2.8.
"""

from __future__ import annotations

import os
from typing import Any, NoReturn

import torch
from torch import Tensor

from pytest_gpumem.simulated.common.callsite import user_line
from pytest_gpumem.simulated.common.errors import UnsupportedOperatorError
from pytest_gpumem.simulated.stand_ins.registering import compiled
from pytest_gpumem.simulated.stand_ins.transformer_engine.plans import workspace
from pytest_gpumem.simulated.stand_ins.usage import keeping, tell, used

_NAME = "transformer-engine"
_HOPPER_WORKSPACE = 32 * 1024 * 1024 + 1024
_WORKSPACE = 4 * 1024 * 1024


def refuse(what: str) -> NoReturn:
    """Say that the stand-in lacks ``what``."""
    raise UnsupportedOperatorError(
        f"{what} of {_NAME} at {user_line()} has no stand-in: describe what calls it with "
        f"pytest_gpumem.simulate_operator, or leave it out"
    )


_CHOICES = (
    "NVTE_BWD_LAYERNORM_SM_MARGIN",
    "NVTE_DISABLE_NVRTC",
    "NVTE_GEMM_GELU_FUSION",
    "NVTE_FWD_LAYERNORM_SM_MARGIN",
    "NVTE_INF_LAYERNORM_SM_MARGIN",
    "NVTE_NORM_BWD_USE_CUDNN",
    "NVTE_NORM_FWD_USE_CUDNN",
    "NVTE_UNFUSED_FP8_UPDATE",
)
"""Variables by which other kernels, or more of them, are taken."""


def launched() -> None:
    """Say that a kernel of the library runs, which the environment must not have chosen."""
    used(_NAME)
    for name in _CHOICES:
        value = os.environ.get(name, "0")
        if value not in ("", "0"):
            refuse(f"{name}={value}")


def cublas_workspace() -> Tensor:
    """get_workspace(): one of the process for all products, 32 MiB and 1 KiB from Hopper on."""
    return keeping(f"{_NAME}'s workspace", _new_workspace)


def _new_workspace() -> Tensor:
    major = torch.cuda.get_device_properties(torch.cuda.current_device()).major
    nbytes = _HOPPER_WORKSPACE if major >= 9 else _WORKSPACE
    return torch.empty(nbytes, dtype=torch.uint8, device="cuda")


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """cast_if_needed()."""
    if tensor.dtype == dtype:
        return tensor
    with torch.enable_grad():
        return tensor.to(dtype=dtype)


def clear(*tensors: Tensor) -> None:
    """clear_tensor_data(): the memory goes although somebody keeps the tensor."""
    for tensor in tensors:
        tensor.data = torch.empty(0, device=tensor.device)


def _gemm(
    a: Tensor,
    b: Tensor,
    dtype: torch.dtype,
    *,
    layout: str = "TN",
    bias: Tensor | None = None,
    grad: bool = False,
) -> tuple[Tensor, Tensor | None]:
    launched()
    transa, transb = layout[0] == "T", layout[1] == "T"
    outer = (b.shape[-1],) if transb else tuple(b.shape[:-1])
    inner = a.shape[:-1].numel() if transa else a.shape[-1]
    out = torch.empty((*outer, inner), dtype=dtype, device=a.device)
    if bias is None or not grad:
        return out, None
    return out, torch.empty(b.shape[-1], dtype=dtype, device=a.device)


def _gemm_gelu(
    a: Tensor, b: Tensor, dtype: torch.dtype, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    launched()
    shape = *b.shape[:-1], a.shape[:-1].numel()
    made = [torch.empty(shape, dtype=dtype, device=a.device) for _ in range(2)]
    return made[0], made[1]


_product = compiled(_gemm)
_product_gelu = compiled(_gemm_gelu)


def gemm(*args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
    """general_gemm(): the product, and with ``grad`` and ``bias`` the sum of ``b``'s rows."""
    cublas_workspace()
    made: tuple[Tensor, Tensor | None] = _product(*args, **options)
    return made


def gemm_gelu(*args: Any) -> tuple[Tensor, Tensor]:
    """general_gemm(gelu=True): GELU of the product, and the product."""
    cublas_workspace()
    made: tuple[Tensor, Tensor] = _product_gelu(*args)
    return made


def _normalized(
    norm: str, x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    launched()
    rows = x.shape[0]
    mean = _statistics(x, rows) if norm == "LayerNorm" else None
    deviation = _statistics(x, rows)
    out = torch.empty_like(x)
    _work(norm, x, backward=False)
    return out, mean, deviation


def _statistics(x: Tensor, rows: int) -> Tensor:
    return torch.empty(rows, dtype=torch.float32, device=x.device)


def _differentiated(
    norm: str,
    grad: Tensor,
    x: Tensor,
    mean: Tensor | None,
    deviation: Tensor,
    weight: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None]:
    launched()
    given = grad.contiguous(), x.contiguous(), weight.contiguous()
    made = torch.empty_like(given[1])
    gamma = torch.empty_like(given[2])
    beta = torch.empty_like(given[2]) if norm == "LayerNorm" else None
    _work(norm, given[1], backward=True)
    return made, gamma, beta


def _work(norm: str, x: Tensor, *, backward: bool) -> None:
    """Take the kernel's workspace for the time of the call."""
    rows, columns = x.shape
    if x.dtype == torch.float32 and columns > 8192:
        refuse(f"a {norm} of {columns} columns of float32")
    processors = int(torch.cuda.get_device_properties(x.device).multi_processor_count)
    needed = workspace(norm, backward=backward, rows=rows, columns=columns, processors=processors)
    if not needed.nbytes:
        return
    if needed.is_estimate:
        tell(
            f"the workspace of {_NAME}'s {norm} is an estimate: it grows with the blocks that fit "
            f"on a multiprocessor, which only the compiler of its kernels knows"
        )
    torch.empty(needed.nbytes, dtype=torch.uint8, device=x.device)


normalize = compiled(_normalized)
"""layernorm_fwd() and rmsnorm_fwd(): output, mean and inverse of the deviation."""
differentiate_norm = compiled(_differentiated)
"""layernorm_bwd() and rmsnorm_bwd(): gradients of input, weight and bias."""
