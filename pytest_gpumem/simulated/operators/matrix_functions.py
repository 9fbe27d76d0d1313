"""Functions of matrices that torch's own code builds from other operators.

Exponentials are Taylor polynomials. The norm of a single matrix determines the degree; the matrices
of a batch are scaled so that one degree suffices, and squared as often as their norms require.

Source: aten/src/ATen/native/LinearAlgebra.cpp (mexp_impl and the functions that it calls,
linalg_matrix_rank) and torch/csrc/autograd/FunctionsManual.cpp (linalg_eig_backward); the order of
temporaries is that of torch's own code on the dry device, 2.6 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pytest_gpumem.simulated.common.callsite import user_line
from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.operators.rules import Composite
from pytest_gpumem.values.errors import UnknownValueError

_aten = torch.ops.aten

_SINGLE = (
    *(1.192092800768788e-07, 5.978858893805233e-04, 5.116619363445086e-02),
    *(5.800524627688768e-01, 1.461661507209034e00, 3.010066362817634e00),
)
_DOUBLE = (
    *(2.220446049250313e-16, 2.580956802971767e-08, 3.397168839976962e-04),
    *(4.991228871115323e-02, 2.996158913811580e-01, 1.090863719290036e00),
)
"""Norms up to which polynomials of degree 1, 2, 4, 8, 12 and 18 are exact enough."""


def matrix_exp(gpu: GPU, self: Tensor) -> Tensor:
    """Run ``aten::linalg_matrix_exp``, with allocations by the norms of known values."""
    rows = self.shape[-1]
    if rows == 1:
        return self.exp()
    if not self.numel():
        return self.clone()
    bounds = _SINGLE if self.dtype in (torch.float32, torch.complex64) else _DOUBLE
    matrices = self.reshape(-1, rows, rows)
    absolute = matrices.abs()
    sums = absolute.sum(-2)
    norm, where = sums.max(-1)
    del where, sums, absolute
    values = gpu.simulation.values
    known = values.known(self)
    gpu.copies()
    if known is None:
        raise UnknownValueError(values.refusal(f"matrix_exp at {user_line()} reads"))
    with torch._C._DisableTorchDispatch():
        norms = known.reshape(-1, rows, rows).abs().sum(-2).amax(-1)
    if len(matrices) > 1:
        return _squared(gpu, matrices, norm, norms, bounds[-1]).view(self.shape)
    return _of_degree(gpu, matrices, norm, norms, bounds).view(self.shape)


def _of_degree(
    gpu: GPU, matrices: Tensor, norm: Tensor, norms: Tensor, bounds: Sequence[float]
) -> Tensor:
    """Return the exponential of a single matrix."""
    result = torch.empty_like(matrices)
    place = _from_host(matrices, 1, dtype=torch.int64)
    chosen = matrices.index_select(0, place)
    fitting = zip(bounds, _POLYNOMIALS, strict=False)
    polynomial = next((each for bound, each in fitting if norms.item() <= bound), None)
    if polynomial is not None:
        made = polynomial(chosen)
        result.index_put_((place,), made)
        del made
    else:
        chosen_norm = norm.index_select(0, place)
        made = _squared(gpu, chosen, chosen_norm, norms, bounds[-1])
        again = _from_host(matrices, 1, dtype=torch.int64)
        result.index_put_((again,), made)
        del again, made, chosen_norm
    del chosen, place
    return result


def _squared(gpu: GPU, matrices: Tensor, norm: Tensor, norms: Tensor, bound: float) -> Tensor:
    """Scale, take the polynomial of the highest degree, and square (compute_T18_scale_square)."""
    parts = norm / bound
    logarithm = parts.log2()
    rounded = logarithm.ceil()
    times = rounded.clamp(min=0)
    del rounded, logarithm, parts
    negative = -times
    factors = torch.pow(2, negative)
    del negative
    scaled = matrices * factors.view(-1, 1, 1)
    polynomials = _by_sums(scaled, 5)
    sorted_times, order = times.sort()
    sorted_times = sorted_times.to(torch.int64)
    with torch._C._DisableTorchDispatch():
        known = norms.div(bound).log2().ceil().clamp(min=0).sort()[0].to(torch.int64)
        groups, sizes = known.unique_consecutive(return_counts=True)
        squares = groups.clamp(min=0).diff(prepend=groups.new_zeros(1))
    gpu.simulation.values.keep(sorted_times, known)
    counts = torch.unique_consecutive(sorted_times, return_inverse=True, return_counts=True)[-1]
    sums = counts.cumsum(0)
    ends = sums - 1
    del sums
    found = sorted_times.index_select(0, ends)
    different = found.clamp(min=0)
    del found
    zero = different.new_zeros(1)
    steps = different.diff(prepend=zero)
    del zero
    torch.cat((ends, steps))  # for the host
    rest = polynomials.index_select(0, order)
    pieces = []
    for size, count in zip(sizes.tolist(), squares.tolist(), strict=True):
        for _ in range(count):
            product = torch.empty_like(rest)
            torch.bmm(rest, rest, out=product)
            rest = product
            del product
        pieces.append(rest[:size])
        rest = rest[size:]
    joined = torch.cat(pieces)
    places = order.sort()[-1]
    result = joined.index_select(0, places)
    del places, joined, rest
    while pieces:
        del pieces[0]
    del steps, different, ends, counts, sorted_times, order, polynomials, scaled, factors, times
    return result


# Polynomials: sums of powers and of products. The values of coefficients are not needed.


_FACTORS = ((1, 1), (1, 2), (3, 3))
"""Places of the factors of the second, third and sixth power, which come after each other."""


def _powers(matrices: Tensor, room: int, count: int) -> Tensor:
    """Return room for so many matrices, and the first ``count`` powers in it."""
    powers = matrices.new_empty((room, *matrices.shape))
    one = torch.ones(1, dtype=matrices.dtype, device=matrices.device)
    identity = one.expand(matrices.shape[:-1]).diag_embed()
    powers[0].copy_(identity)
    del identity, one
    powers[1].copy_(matrices)
    for place, (first, second) in enumerate(_FACTORS[: count - 2], 2):
        _product(powers[place], powers[first], powers[second])
    return powers


def _product(target: Tensor, one: Tensor, other: Tensor) -> Tensor:
    return torch.bmm(one, other, out=target)


def _from_host(matrices: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return numbers on the device of ``matrices``, by default real ones, copied from the host."""
    return torch.empty(shape, dtype=dtype or matrices.dtype.to_real(), device="cpu").to(
        matrices.device
    )


def _sum_of(powers: Tensor) -> Tensor:
    coefficients = _from_host(powers, 1, len(powers))
    sums: Tensor = _aten._compute_linear_combination(powers, coefficients)
    return sums.squeeze(0)


def _degree_2(matrices: Tensor) -> Tensor:
    powers = _powers(matrices, 3, 3)
    powers[2].div_(2.0)
    return powers.sum(0)


def _degree_4(matrices: Tensor) -> Tensor:
    powers = _powers(matrices, 4, 3)
    _product(powers[3], powers[2], _sum_of(powers[:3]))
    return _sum_of(powers)


def _degree_8(matrices: Tensor) -> Tensor:
    powers = _powers(matrices, 5, 3)
    _product(powers[3], powers[2], _sum_of(powers[1:3]))
    # C++ evaluates the last argument first.
    second = _sum_of(powers[:4])
    first = _sum_of(powers[2:4])
    _product(powers[4], first, second)
    del first, second
    return _sum_of(powers)


def _by_sums(matrices: Tensor, count: int) -> Tensor:
    """Return the polynomial of degree 12, of four sums of four powers, or of degree 18, of five."""
    coefficients = _from_host(matrices, count, count)
    powers = _powers(matrices, count, count)
    sums = _aten._compute_linear_combination(powers, coefficients)
    sums[2].add_(_product(powers[0], sums[3], sums[3]))
    result: Tensor = sums[0].add_(_product(powers[0], sums[1], sums[2]))
    del powers, coefficients
    return result


_POLYNOMIALS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda matrices: _powers(matrices, 2, 2).sum(0),
    *(_degree_2, _degree_4, _degree_8),
    lambda matrices: _by_sums(matrices, 4),
)


# Of values and vectors.


def matrix_rank(
    input: Tensor, atol: Tensor | float | None, rtol: Tensor | float | None, hermitian: bool
) -> Tensor:
    """Run ``aten::linalg_matrix_rank``, which writes to a result that it makes first."""
    result = torch.empty(input.shape[:-2], dtype=torch.int64, device=input.device)
    least = _bound(input, 0.0 if atol is None else atol)
    share = rtol
    if share is None:
        share = torch.finfo(input.dtype).eps * max(input.shape[-2:])
        if isinstance(atol, Tensor):
            usual = _bound(input, share)
            nothing = _bound(input, 0.0)
            positive = atol > 0
            share = torch.where(positive, nothing, usual)
            del positive, nothing, usual
        elif atol:
            share = 0.0
    share = _bound(input, share)
    if not input.numel():
        return result.fill_(0)
    values = torch.linalg.eigvalsh(input).abs() if hermitian else torch.linalg.svdvals(input)
    largest = values.amax(-1, keepdim=True) if hermitian else values.narrow(-1, 0, 1)
    product = share.unsqueeze(-1) * largest
    bound = torch.maximum(least.unsqueeze(-1), product)
    del product
    above = values > bound
    torch.sum(above, -1, out=result)
    del above, bound, largest, values, least, share
    return result


def _bound(input: Tensor, value: Tensor | float) -> Tensor:
    if isinstance(value, Tensor):
        return value
    return torch.full((), value, dtype=torch.float64, device=input.device)


_VALUES = frozenset({"LinalgEigBackward0", "LinalgEighBackward0"})


def diagonal_scatter(self: Tensor, src: Tensor, offset: int, dim1: int, dim2: int) -> Tensor:
    """Run ``aten::diagonal_scatter``, which gradients of eigenvalues do in place."""
    node = torch._C._current_autograd_node()
    in_place = node is not None and node.name() in _VALUES
    result = self if in_place else self.clone()
    result.diagonal(offset, dim1, dim2).copy_(src)
    return result


ABOVE_AUTOGRAD: dict[str, Composite] = {
    "aten.linalg_matrix_rank.atol_rtol_float": lambda self, atol, rtol, hermitian: matrix_rank(
        self, atol, rtol, hermitian
    ),
    "aten.linalg_matrix_rank.atol_rtol_tensor": matrix_rank,
    "aten.linalg_matrix_rank.default": lambda self, tol, hermitian: matrix_rank(
        self, tol, 0.0, hermitian
    ),
    "aten.linalg_matrix_rank.tol_tensor": lambda input, tol, hermitian: matrix_rank(
        input, tol, torch.zeros((), dtype=tol.dtype, device=tol.device), hermitian
    ),
}

BELOW_AUTOGRAD: dict[str, Composite] = {
    "aten.diagonal_scatter.default": diagonal_scatter,
    "aten.linalg_matrix_exp.default": matrix_exp,
}
