"""The rules of all families, and how composite operators are routed to them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.machine.machine import SimulatedMachine
from pytest_gpumem.simulated.machine.signatures import overload_of
from pytest_gpumem.simulated.operators import meta_kernels, normalization, rnn, slices, vision
from pytest_gpumem.simulated.operators.autocast import CastCache
from pytest_gpumem.simulated.operators.rules import (
    BoundRule,
    Composite,
    Rule,
    decompose,
    on_machine,
)

_FAMILIES = [
    import_module(f"{__package__}.{family}")
    for family in """
        activations attention batch_norm chunks comparisons convolution embeddings encoders engine
        factorizations indexing libraries matmul matrix_functions moments normalization quantized
        reductions rnn solvers sorting spatial below_autograd
    """.split()
]


def _of_all(table: str, prefix: str = "") -> dict[str, Any]:
    """Return the entries of every family's ``table``, each for one or several names."""
    found = [vars(family).get(table, {}) for family in _FAMILIES]
    return {
        f"{prefix}{name}": entry
        for entries in found
        for names, entry in entries.items()
        for name in names.split()
    }


_TRANSFORMS = "FuncTorchDynamicLayerFrontMode"
_IN_TRANSFORMS = "dropout scaled_dot_product_attention rms_norm softmax.int log_softmax.int".split()
_META = torch._C.DispatchKey.Meta

RULES: dict[str, Rule] = {**_of_all("RULES", "aten::"), **vision.RULES}
"""By operator name: hidden allocations."""
ABOVE_AUTOGRAD: dict[str, Composite] = _of_all("ABOVE_AUTOGRAD")
"""By overload: operators that CUDA decomposes differently from the CPU and ``meta``."""
BELOW_AUTOGRAD: dict[str, Composite] = _of_all("BELOW_AUTOGRAD")
"""By overload: operators that autograd records as one and that CUDA builds from others."""


@cache
def rule_of(func: OpOverload) -> BoundRule | None:
    """Return the rule that ``func`` follows."""
    rule = RULES.get(func._schema.name)
    # ``upsample_nearest2d.vec_out``: generated from a composite, as is its CUDA kernel;
    # ``repeat_interleave`` along a dimension: made of the overload that repeats numbers.
    is_built = func._overloadname in ("vec_out", "self_Tensor", "self_int")
    return None if rule is None or is_built else BoundRule(rule, func._schema)


MAY_OVERRIDE = "allow_override" in signature(torch.library.Library.impl).parameters
"""Whether torch lets its own kernels be replaced. Not in 2.6, where they give the right shapes, but
check less than CUDA's."""


def _in_transforms(kernel: Callable[..., Any], overload: OpOverload) -> Callable[..., Any]:
    """Return ``kernel`` for functions of torch.func: their wrappers have no key of ``meta``."""

    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        if any(one.is_cuda for one in tensors):
            return kernel(*args, **kwargs)
        return decompose(overload, *args, **kwargs)

    return call


def _give_formula(library: torch.library.Library) -> None:
    """Give ``_fused_rms_norm`` shapes, and with them autograd's formula, as it has on CUDA.

    torch.library itself lets no operator with a composite have shapes. Wrappers of torch.func have
    ``AutogradOther``, where the formula is not.
    """
    fused = torch.ops.aten._fused_rms_norm.default

    def of_wrapper(keys: torch._C.DispatchKeySet, *args: Any) -> Any:
        return fused.redispatch(keys.add(torch._C.DispatchKey.AutogradMeta), *args)

    library.m.impl("_fused_rms_norm", "Meta", meta_kernels.fused_rms_norm, False)  # type: ignore[union-attr]  # set until it is destroyed
    library.impl("_fused_rms_norm", of_wrapper, "AutogradOther", with_keyset=True)


def _replace_kernels(library: torch.library.Library, machine: SimulatedMachine) -> None:
    """Replace kernels; torch warns at the first one of a process."""
    for name, implementation in ABOVE_AUTOGRAD.items():
        operator = name.removeprefix("aten.").removesuffix(".default")
        overload = overload_of(operator)
        assert overload is not None
        kernel = on_machine(implementation, overload, machine)
        library.impl(operator, kernel, "AutogradMeta")
        if operator in _IN_TRANSFORMS and MAY_OVERRIDE:
            kernel = _in_transforms(kernel, overload)
            library.impl(operator, kernel, _TRANSFORMS, allow_override=True)
    for name, kernel in meta_kernels.SHAPES.items():
        found = overload_of(name)
        if found is not None and not found.has_kernel_for_dispatch_key(_META):
            library.impl(name, kernel, "Meta")
    for name, kernel in meta_kernels.WRONG.items() if MAY_OVERRIDE else ():
        if overload_of(name) is not None:
            library.impl(name, kernel, "Meta", allow_override=True)
    if machine.current.version >= normalization.FUSED_SINCE:
        _give_formula(library)
    for name, kernel in meta_kernels.ZEROS.items() if MAY_OVERRIDE else ():
        library.impl(name, kernel, "ZeroTensor", allow_override=True)


@contextmanager
def installed(machine: SimulatedMachine, casts: CastCache) -> Iterator[None]:
    """Route composite operators of meta tensors as on CUDA, above autograd."""
    library = torch.library.Library("aten", "IMPL")
    patches = Patches()
    rnn.add_patches(patches)
    patches.apply()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _replace_kernels(library, machine)
        with casts.reachable(), slices.made(machine.current.version):
            yield
    finally:
        patches.undo()
        library._destroy()
