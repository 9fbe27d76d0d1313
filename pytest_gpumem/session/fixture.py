"""The ``gpumem`` fixture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpumem.quoting import printable, quoted

if TYPE_CHECKING:
    import torch

    from pytest_gpumem.prediction.batch import BatchFit
    from pytest_gpumem.session.run import TestRun
    from pytest_gpumem.values.measurement import PhaseRecord


class Gpumem:
    """The interface of a test to its measurement."""

    def __init__(self, run: TestRun) -> None:
        self._run = run

    @property
    def device(self) -> str:
        """The device that the test is measured on, as torch names it: ``cuda:0``."""
        return f"cuda:{self._run.device.index}"

    @property
    def phases(self) -> Mapping[str, PhaseRecord]:
        """The phases that have been left so far, by name; sizes in bytes.

        Which cuBLAS workspaces were live in them is known only when the test is over.
        """
        return _Phases(self._run.phases())

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Return a context manager: the code inside is the phase ``name``.

        Inside a phase of the same name nothing new begins. Raises ``ValueError`` for a name that
        is empty or reserved by the plugin, and where it is left before a phase begun inside it.
        """
        _check_name(name)
        return self._run.phase(name)

    def watch(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Declare the owner of bytes: parameters and gradients, and the optimizer's state.

        Modules that are called or moved to the device, and optimizers that step, are known anyway.
        Watching keeps nothing alive.

        Raises ``TypeError`` for anything but a module and an optimizer of torch.
        """
        import torch

        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"gpumem.watch(model={quoted(model)}): give a torch.nn.Module")
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"gpumem.watch(optimizer={quoted(optimizer)}): give a torch.optim.Optimizer"
            )
        self._run.watch(model)
        if optimizer is not None:
            self._run.watch(optimizer)

    def fit_batch(
        self,
        step: Callable[[int], Any],
        sizes: Sequence[int],
        *,
        largest: bool = True,
        in_a_row: int = 1,
    ) -> BatchFit:
        """Run ``step(batch)`` for ``sizes`` on the test's device and fit a line through its peaks.

        The test is not charged for it. See :func:`pytest_gpumem.fit_batch`.
        """
        from pytest_gpumem.prediction.batch import fit_batch

        return fit_batch(step, sizes, largest=largest, in_a_row=in_a_row)


class IdleGpumem:
    """A stand-in for :class:`Gpumem` where nothing is measured: code in phases just runs."""

    def __init__(self, *, off: bool) -> None:
        self._reason = (
            "--gpumem-device=off measures nothing"
            if off
            else "a test that asks for gpumem by getfixturevalue() is not measured: name it among "
            "the test's arguments"
        )

    @property
    def device(self) -> str:
        """``cuda:0`` where torch sees a CUDA device, else ``cpu``."""
        import torch

        return "cuda:0" if torch.cuda.is_available() else "cpu"

    @property
    def phases(self) -> Mapping[str, PhaseRecord]:
        """Skip the test, with the reason: it was about to judge numbers that were not taken."""
        pytest.skip(f"the test reads gpumem.phases, and {self._reason}")

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Return a context manager that does nothing."""
        _check_name(name)
        return nullcontext()

    def watch(self, model: Any, optimizer: Any = None) -> None:
        """Do nothing."""

    def fit_batch(self, step: Any, sizes: Any, **options: Any) -> BatchFit:
        """Skip the test, with the reason: there is nothing to measure on."""
        pytest.skip(f"the test calls gpumem.fit_batch, and {self._reason}")


class _Phases(dict[str, "PhaseRecord"]):
    def __missing__(self, name: str) -> PhaseRecord:
        known = printable(", ".join(self)) or "none"
        raise KeyError(f"no phase {quoted(name)} has ended yet; phases so far: {known}")


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name:
        raise ValueError(
            f"gpumem.phase({quoted(name)}): a phase's name is a text that is not empty"
        )
    if name in ("setup", "call"):
        raise ValueError(
            f"gpumem.phase({quoted(name)}): pytest-gpumem keeps this name for pytest's own phase; "
            "choose another"
        )
