"""The bytes of watched modules and optimizers by closed forms, beside the measured ones."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch.utils.weak import WeakIdKeyDictionary

from pytest_gpumem.attribution.history import GRADIENTS, OPTIMIZER_STATE, PARAMETERS
from pytest_gpumem.prediction.closed_forms import block_bytes, optimizer_state_bytes


class Expected:
    """Bytes by category, each parameter and optimizer once; nothing is kept alive.

    It begins with the bytes of ``before``.
    """

    def __init__(self, before: Expected | None = None) -> None:
        self.categories: dict[str, int] = dict(before.categories) if before else {}
        self._seen: WeakIdKeyDictionary = WeakIdKeyDictionary(
            dict(before._seen.items()) if before else None
        )

    def add(self, holder: torch.nn.Module | torch.optim.Optimizer) -> None:
        """Count the bytes that ``holder`` holds after a training step.

        The state of an optimizer that has no closed form is left out.
        """
        if isinstance(holder, torch.nn.Module):
            for parameter in holder.parameters():
                if self._is_new(parameter):
                    size = block_bytes(parameter.shape, parameter.dtype)
                    self._count(PARAMETERS, size)
                    self._count(GRADIENTS, size if parameter.requires_grad else 0)
        elif self._is_new(holder):
            with suppress(ValueError):
                self._count(OPTIMIZER_STATE, optimizer_state_bytes(holder))

    def _is_new(self, one: object) -> bool:
        new = one not in self._seen
        self._seen[one] = True
        return new

    def _count(self, category: str, size: int) -> None:
        self.categories[category] = self.categories.get(category, 0) + size
