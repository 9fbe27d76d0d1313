"""Functions of matrices that torch's own code builds from other operators.

Exponentials are Taylor polynomials, of a degree that the norm of a single matrix says; those of a
batch are all scaled, so that one degree does, and squared as often as their norms say.

Source: aten/src/ATen/native/LinearAlgebra.cpp (mexp_impl and the functions that it calls,
linalg_matrix_rank) and torch/csrc/autograd/FunctionsManual.cpp (linalg_eig_backward); the order of
temporaries is that of torch's own code on the dry device, 2.6 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from pytest_gpumem.simulated.operators.rules import Composite

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


def matrix_exp(self: Tensor) -> Tensor:
    """``aten::linalg_matrix_exp``."""
    rows = self.shape[-1]
    if rows == 0:
        return self.clone()
    if rows == 1:
        return self.exp()
    bounds = _SINGLE if self.dtype in (torch.float32, torch.complex64) else _DOUBLE
    matrices = self.reshape(-1, rows, rows)
    if not len(matrices):
        return self.clone()
    absolute = matrices.abs()
    sums = absolute.sum(-2)
    norm, where = sums.max(-1)
    del where, sums, absolute
    if len(matrices) > 1:
        return _squared(matrices, norm, bounds[-1]).view(self.shape)
    return _of_degree(matrices, norm, bounds).view(self.shape)


def _of_degree(matrices: Tensor, norm: Tensor, bounds: Sequence[float]) -> Tensor:
    """Return the exponential of a single matrix."""
    norms = norm.to("cpu")
    result = torch.empty_like(matrices)
    polynomial = next(
        (
            polynomial
            for bound, polynomial in zip(bounds, _POLYNOMIALS, strict=False)
            if (norms <= bound).nonzero().numel()
        ),
        None,
    )
    first = torch.zeros(1, dtype=torch.int64, device="cpu")
    place = first.to(matrices.device)
    chosen = matrices.index_select(0, place)
    if polynomial is not None:
        made = polynomial(chosen)
        result.index_put_((place,), made)
        del made
    else:
        chosen_norm = norm.index_select(0, place)
        made = _squared(chosen, chosen_norm, bounds[-1])
        again = first.to(matrices.device)
        result.index_put_((again,), made)
        del again, made, chosen_norm
    del chosen, place
    return result


def _squared(matrices: Tensor, norm: Tensor, bound: float) -> Tensor:
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
    polynomials = _degree_18(scaled)
    sorted_times, order = times.sort()
    sorted_times = sorted_times.to(torch.int64)
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
    both = torch.cat((ends, steps)).to("cpu")
    groups = both.view(2, -1).tolist()
    rest = polynomials.index_select(0, order)
    pieces = []
    for (before, end), squares in zip(pairwise((-1, *groups[0])), groups[1], strict=True):
        for _ in range(squares):
            product = torch.empty_like(rest)
            torch.bmm(rest, rest, out=product)
            rest = product
            del product
        pieces.append(rest[: end - before])
        rest = rest[end - before :]
    joined = torch.cat(pieces)
    places = order.sort()[-1]
    result = joined.index_select(0, places)
    del places, joined, rest
    while pieces:
        del pieces[0]
    del steps, different, ends, counts, sorted_times, order, polynomials, scaled, factors, times
    return result


# Polynomials.


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


def _brought(matrices: Tensor, coefficients: Sequence[Sequence[float]]) -> Tensor:
    """Return ``coefficients`` as real numbers beside ``matrices``, copied from the host."""
    real = torch.empty(0, dtype=matrices.dtype, device="meta").real.dtype
    return torch.tensor(coefficients, dtype=real, device="cpu").to(matrices.device)


def _sum_of(matrices: Tensor, *coefficients: float) -> Tensor:
    brought = _brought(matrices, [coefficients])
    sums: Tensor = _aten._compute_linear_combination(matrices, brought)
    return sums.squeeze(0)


def _degree_1(matrices: Tensor) -> Tensor:
    return _powers(matrices, 2, 2).sum(0)


def _degree_2(matrices: Tensor) -> Tensor:
    powers = _powers(matrices, 3, 3)
    powers[2].div_(2.0)
    return powers.sum(0)


def _degree_4(matrices: Tensor) -> Tensor:
    powers = _powers(matrices, 4, 3)
    _product(powers[3], powers[2], _sum_of(powers[:3], 1 / 2, 1 / 6, 1 / 24))
    return _sum_of(powers, 1.0, 1.0, 0.0, 1.0)


def _degree_8(matrices: Tensor) -> Tensor:
    root = 177**0.5
    x3 = 2 / 3
    x1, x2 = x3 * (1 + root) / 88, x3 * (1 + root) / 352
    x4, x5 = (-271 + 29 * root) / (315 * x3), (-11 + 11 * root) / (1260 * x3)
    x6, x7 = (-99 + 11 * root) / (5040 * x3), (89 - root) / (5040 * x3)
    powers = _powers(matrices, 5, 3)
    _product(powers[3], powers[2], _sum_of(powers[1:3], x1, x2))
    # C++ evaluates the last argument first.
    second = _sum_of(powers[:4], x4, x5, x6, x7)
    first = _sum_of(powers[2:4], x3, 1.0)
    _product(powers[4], first, second)
    del first, second
    return _sum_of(powers, 1.0, 1.0, (857 - 58 * root) / 630, 0.0, 1.0)


_COEFFICIENTS_12 = (
    (9.0198e-16, 0.46932117595418237389, -0.20099424927047284052, -0.04623946134063071740),
    (
        *(5.31597895759871264183, 1.19926790417132231573),
        *(0.01179296240992997031, 0.01108844528519167989),
    ),
    (
        *(0.18188869982170434744, 0.05502798439925399070),
        *(0.09351590770535414968, 0.00610700528898058230),
    ),
    (-2.0861320e-13, -0.13181061013830184015, -0.02027855540589259079, -0.00675951846863086359),
)
_COEFFICIENTS_18 = (
    (
        *(0.0, -1.00365581030144618291e-01, -8.02924648241156932449e-03),
        *(-8.92138498045729985177e-04, 0.0),
    ),
    (
        *(0.0, 3.97849749499645077844e-01, 1.36783778460411720168e00),
        *(4.98289622525382669416e-01, -6.37898194594723280150e-04),
    ),
    (
        *(-1.09676396052962061844e01, 1.68015813878906206114e00, 5.71779846478865511061e-02),
        *(-6.98210122488052056106e-03, 3.34975017086070470649e-05),
    ),
    (
        *(-9.04316832390810593223e-02, -6.76404519071381882256e-02, 6.75961301770459654925e-02),
        *(2.95552570429315521194e-02, -1.39180257516060693404e-05),
    ),
    (
        *(0.0, 0.0, -9.23364619367118555360e-02),
        *(-1.69364939002081722752e-02, -1.40086798182036094347e-05),
    ),
)


def _by_coefficients(
    matrices: Tensor, coefficients: Sequence[Sequence[float]], first: tuple[int, int, int]
) -> Tensor:
    """Return a polynomial of products of sums; ``first`` are a sum and the factors added to it."""
    brought = _brought(matrices, coefficients)
    powers = _powers(matrices, len(coefficients), len(coefficients))
    sums = _aten._compute_linear_combination(powers, brought)
    target, one, other = first
    sums[target].add_(_product(powers[0], sums[one], sums[other]))
    factor = sums[target - 1].add_(sums[target])
    result: Tensor = sums[target - 2].add_(_product(powers[0], factor, sums[target]))
    del powers, brought
    return result


def _degree_18(matrices: Tensor) -> Tensor:
    return _by_coefficients(matrices, _COEFFICIENTS_18, (3, 0, 4))


_POLYNOMIALS: tuple[Callable[[Tensor], Tensor], ...] = (
    *(_degree_1, _degree_2, _degree_4, _degree_8),
    lambda matrices: _by_coefficients(matrices, _COEFFICIENTS_12, (2, 3, 3)),
)


# Of values and vectors.


def matrix_rank(
    input: Tensor, atol: Tensor | float | None, rtol: Tensor | float | None, hermitian: bool
) -> Tensor:
    """``aten::linalg_matrix_rank``, which writes to a result that it makes first."""
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
    """``aten::diagonal_scatter``, which gradients of values do in place."""
    node = torch._C._current_autograd_node()
    in_place = node is not None and node.name() in _VALUES and not torch.is_grad_enabled()
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

DECIDING = frozenset({"aten.linalg_matrix_exp.default"})
"""Overloads that decide by values of their parts, which are followed one by one."""
