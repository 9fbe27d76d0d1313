"""selective_scan_cuda of mamba-ssm 2.3.2.post1: what the kernels of Mamba 1 allocate.

All else of mamba-ssm is Python and Triton and runs as it is installed.

Source: csrc/selective_scan/selective_scan.cpp (selective_scan_fwd, selective_scan_bwd).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pytest_gpumem.simulated.operators.layout import HALVES
from pytest_gpumem.simulated.stand_ins.libraries import LIBRARIES
from pytest_gpumem.simulated.stand_ins.registering import compiled
from pytest_gpumem.simulated.stand_ins.usage import used

_LIBRARY = LIBRARIES["mamba-ssm"]
_CHUNK = 2048
"""Elements of a sequence between states that are kept for backward."""
LARGEST_STATE = 256


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(message)


def _check(
    u: Tensor,
    delta: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *others: Tensor | None,
) -> None:
    """What TORCH_CHECK and CHECK_SHAPE hold, in their words."""
    used(_LIBRARY.name)
    for name, tensor in (("u", u), ("delta", delta), ("A", a), ("B", b), ("C", c)):
        _require(tensor.is_cuda, f"Expected {name}.is_cuda() to be true, but got false.")
    _require(u.dtype in (torch.float32, *HALVES), "Expected input_type to be float or half")
    _require(
        a.dtype in (torch.float32, torch.complex64),
        "Expected weight_type == at::ScalarType::Float || weight_type == "
        "at::ScalarType::ComplexFloat to be true, but got false.",
    )
    _require(delta.dtype == u.dtype, "Expected delta.scalar_type() == input_type to be true")
    batch, dim, length = u.shape
    states = a.shape[1]
    _require(states <= LARGEST_STATE, "selective_scan only supports state dimension <= 256")
    _require(delta.shape == u.shape, f"delta must have shape ({batch}, {dim}, {length})")
    rows = length * (2 if a.is_complex() else 1)
    for name, tensor in (("B", b), ("C", c)):
        varies = tensor.dim() >= 3
        dtype = u.dtype if varies else a.dtype
        _require(tensor.dtype == dtype, f"Expected {name}.scalar_type() to be {dtype}")
        shape = (batch, b.shape[1], states, rows) if varies else (dim, states)
        _require(tensor.shape == shape, f"{name} must have shape {shape}")
    for other in others:
        _require(
            other is None or other.dtype == torch.float32,
            "Expected D and delta_bias to be of at::ScalarType::Float",
        )


def _forward(
    u: Tensor,
    delta: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    delta_softplus: bool,
) -> list[Tensor]:
    """``fwd``: out, states and, with a gate ``z``, the gated out."""
    _check(u, delta, a, b, c, d, delta_bias)
    gated = None if z is None else torch.empty_like(z)
    # As delta, whose rows may lie apart: out has its layout.
    out = torch.empty_like(delta)
    batch, dim, length = u.shape
    kept = u.new_empty((batch, dim, -(-length // _CHUNK), 2 * a.shape[1]), dtype=a.dtype)
    return [out, kept] if gated is None else [out, kept, gated]


def _backward(
    u: Tensor,
    delta: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    dout: Tensor,
    x: Tensor | None,
    out: Tensor | None,
    dz: Tensor | None,
    delta_softplus: bool,
    recompute_out_z: bool,
) -> list[Any]:
    """``bwd``: gradients of u, delta, A, B, C, D, delta_bias and z, and the gated out."""
    _check(u, delta, a, b, c, d, delta_bias)
    _require(dout.dtype == u.dtype, "Expected dout.scalar_type() == input_type to be true")
    again = None
    if z is not None:
        _require(out is not None, "Expected out_.has_value() to be true, but got false.")
        assert out is not None
        dz = torch.empty_like(z) if dz is None else dz
        again = torch.empty_like(out) if recompute_out_z else None
    _require(
        u.shape[2] <= _CHUNK or x is not None, "Expected x_.has_value() to be true, but got false."
    )
    du, ddelta, grad_a = torch.empty_like(u), torch.empty_like(delta), torch.zeros_like(a)
    grad_b, grad_c = _summed(b), _summed(c)
    grad_d = None if d is None else torch.zeros_like(d)
    dbias = None if delta_bias is None else torch.zeros_like(delta_bias)
    # The list is written from left to right; the sums in float32 die with the function.
    made = [du, ddelta, grad_a, grad_b.to(b.dtype), grad_c.to(c.dtype), grad_d, dbias]
    del grad_c, grad_b
    return made + ([dz] if z is not None else []) + ([again] if recompute_out_z else [])


def _summed(of: Tensor) -> Tensor:
    """Gradients that vary over a sequence are summed in float32."""
    return torch.zeros_like(of, dtype=torch.float32) if of.dim() >= 3 else torch.zeros_like(of)


MODULES: Mapping[str, Mapping[str, Any]] = {
    "selective_scan_cuda": {"fwd": compiled(_forward), "bwd": compiled(_backward)}
}
"""By the library's names."""
