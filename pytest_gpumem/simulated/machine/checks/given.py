"""The arguments of one call of an operator, by name, as a check looks at them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from pytest_gpumem.allocator.settings import Version

Check = Callable[["Given"], "Exception | None"]
"""A function that returns the error torch raises on these arguments, or ``None``."""


class Given:
    """The arguments of one call by the names in the operator's schema."""

    def __init__(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], version: Version
    ) -> None:
        self.name: str = func._schema.name.removeprefix("aten::")
        self.version = version
        names = (argument.name for argument in func._schema.arguments)
        self.by_name = dict(zip(names, args, strict=False)) | kwargs

    def __getitem__(self, name: str) -> Any:
        return self.by_name.get(name)

    @property
    def target(self) -> torch.Tensor | None:
        """The tensor that is written to."""
        target = self["self"] if self.name.endswith("_") else self["out"]
        return target if isinstance(target, torch.Tensor) else None

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that are arguments of their own, in order; not the one written to."""
        for name, value in self.by_name.items():
            if isinstance(value, torch.Tensor) and name != "out":
                yield value

    def dtype(self) -> torch.dtype:
        """Return the type of the first tensor, which most kernels are chosen by."""
        return next(self.tensors()).dtype

    def common_dtype(self) -> torch.dtype:
        """Return the type to which TensorIterator promotes the operands: the first two or three."""
        operands = [
            value
            for name, value in self.by_name.items()
            if name in _OPERANDS and isinstance(value, (torch.Tensor, bool, int, float, complex))
        ]
        first, *others = operands
        if not others:
            return self.dtype()
        promoted = [torch.result_type(first, other) for other in others]
        return promoted[0] if len(promoted) == 1 else torch.promote_types(*promoted)

    def floating_dtype(self) -> torch.dtype:
        """Return ``common_dtype()``, with integers promoted to the default floating type."""
        dtype = self.common_dtype()
        is_float = dtype.is_floating_point or dtype.is_complex
        return dtype if is_float else torch.get_default_dtype()


_OPERANDS = frozenset(
    "self input other x n tensor1 tensor2 min max exponent end weight real imag abs angle".split()
)
"""Arguments that take part in the promotion of types."""
