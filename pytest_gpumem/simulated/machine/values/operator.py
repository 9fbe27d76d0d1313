"""Properties of an operator that decide which values are known after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from pytest_gpumem.simulated.machine.cpu_kernels.kernels import kernel_of
from pytest_gpumem.simulated.machine.signatures import Args, Kwargs, is_out
from pytest_gpumem.simulated.machine.values import finite
from pytest_gpumem.simulated.machine.values.assumptions import ASSUMPTIONS, Assumption
from pytest_gpumem.simulated.machine.values.views import on_device

_WRITES_UNDECLARED: dict[str, tuple[int, ...]] = {
    "aten::native_batch_norm": (3, 4),
    "aten::cudnn_batch_norm": (3, 4),
    "aten::batch_norm_gather_stats": (3, 4),
    "aten::batch_norm_gather_stats_with_counts": (3, 4),
    "aten::batch_norm_update_stats": (1, 2),
    "aten::rrelu_with_noise": (1,),
}
"""Arguments that an operator writes to although its schema omits it (2.6 to 2.15): running
statistics in native_functions.yaml; the noise of ``rrelu_with_noise`` up to 2.6."""

OVERWRITES = frozenset(
    f"aten::{name}_"
    for name in (
        "fill zero copy uniform normal bernoulli random exponential log_normal cauchy geometric"
    ).split()
)
"""In-place operators whose target's old values do not matter."""


@dataclass(frozen=True, eq=False)
class Operator:
    """The properties of an operator that decide which values are known after it."""

    func: Any
    name: str
    """The name with its namespace, without its overload."""
    compute: Callable[..., Any]
    """Computes it on the CPU."""
    written: tuple[tuple[int, str], ...]
    """Position and name of each argument that it writes to."""
    overwrites: bool = False
    """Whether the values it writes do not depend on the target's old ones."""
    moves_views: bool = False
    """Whether it changes only sizes and strides: ``t_``, ``squeeze_``, ``set_``."""
    undefined: bool = False
    """Whether its results are random, or come from a kernel that is not ATen's."""
    uninitialized: bool = False
    """Whether its results are uninitialised memory."""
    random: bool = False
    shaped_like: bool = False
    """Whether it looks at the shapes of its tensors only: ``zeros_like``, ``new_full``."""
    assumption: Assumption | None = None
    """The assumption that applies where an argument is unknown."""
    fills: bool = False
    """Whether programs write infinities and NaN with it."""
    makes: bool = False
    """Whether it is a factory, or copies between devices."""
    asks: bool = False
    """Whether it can check that numbers are finite."""

    @classmethod
    def of(cls, func: Any) -> Operator:
        """Describe ``func`` by its schema and tags."""
        schema, name = func._schema, func._schema.name
        undeclared = _WRITES_UNDECLARED.get(name, ())
        written = tuple(
            (at, argument.name)
            for at, argument in enumerate(schema.arguments)
            if at in undeclared or (argument.alias_info and argument.alias_info.is_write)
        )
        plain = name.removeprefix("aten::")
        random = torch.Tag.nondeterministic_seeded in func.tags
        return cls(
            func=func,
            name=name,
            written=written,
            overwrites=name in OVERWRITES or is_out(schema),
            moves_views=torch.Tag.inplace_view in func.tags or plain in ("resize_", "set_"),
            undefined=random or plain == name,
            uninitialized=plain.startswith(("empty", "new_empty")),
            random=random,
            shaped_like=plain.endswith("_like") or plain.startswith("new_"),
            compute=kernel_of(func),
            assumption=ASSUMPTIONS.get(func),
            fills=name in finite.FILLING,
            # ``is_pinned`` has a device, too, and makes no tensor.
            makes=any(argument.name == "device" for argument in schema.arguments)
            and any(isinstance(each.type, torch.TensorType) for each in schema.returns),
            asks=func in finite.QUESTIONS,
        )

    @classmethod
    def by(cls, compute: Callable[..., Any], written: tuple[tuple[int, str], ...] = ()) -> Operator:
        """Describe ``compute``, a Python function on CPU tensors, as an operator."""
        name = getattr(compute, "__name__", str(compute))
        return cls(func=compute, name=name, compute=compute, written=written)

    def targets(self, args: Args, kwargs: Kwargs) -> list[torch.Tensor]:
        """Return the tensors of a GPU among ``args`` and ``kwargs`` that it writes to."""
        return on_device(
            [args[at] if at < len(args) else kwargs.get(name) for at, name in self.written]
        )

    def read(self, args: Args, kwargs: Kwargs) -> list[Any]:
        """Return the arguments that it does not write to."""
        written = {each for pair in self.written for each in pair}
        given = [*enumerate(args), *kwargs.items()]
        return [value for place, value in given if place not in written]
