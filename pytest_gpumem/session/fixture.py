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
    """The interface of a test to its measurement.

    Where nothing is measured (``off``, or no ``run``), code in phases runs as usual, and a test
    that reads numbers is skipped.
    """

    def __init__(self, run: TestRun | None, *, off: bool = False) -> None:
        self._run = run
        self._off = off

    @property
    def device(self) -> str:
        """The device that the test is measured on, as torch names it: ``cuda:0``.

        Where nothing is measured, ``cuda:0`` if torch sees a CUDA device, else ``cpu``.
        """
        if self._run is not None:
            return f"cuda:{self._run.device.index}"
        import torch

        return "cuda:0" if torch.cuda.is_available() else "cpu"

    @property
    def phases(self) -> Mapping[str, PhaseRecord]:
        """The phases that have ended so far, by name; sizes in bytes.

        Their live cuBLAS workspaces are known only after the test.
        """
        return _Phases(self._measured("reads gpumem.phases").phases())

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Return a context manager: the code inside is the phase ``name``.

        Inside a phase of the same name it begins no new one. Raises ``ValueError`` for a name that
        is empty or reserved by the plugin, and if it ends before a phase that began inside it.
        """
        _check_name(name)
        return nullcontext() if self._run is None else self._run.phase(name)

    def watch(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Attribute memory to ``model`` (parameters, gradients) and ``optimizer`` (its state).

        Modules that are called or moved to the device, and optimizers that step, need no call of
        this. Only weak references are kept.

        Raises ``TypeError`` for anything but a module and an optimizer of torch.
        """
        if self._run is None:
            return
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
        self._measured("calls gpumem.fit_batch")
        from pytest_gpumem.prediction.batch import fit_batch

        return fit_batch(step, sizes, largest=largest, in_a_row=in_a_row)

    def _measured(self, act: str) -> TestRun:
        """Return the test's run; skip the test, with the reason, where there is none."""
        if self._run is not None:
            return self._run
        why = "--gpumem-device=off measures nothing"
        if not self._off:
            why = (
                "a test that asks for gpumem by getfixturevalue() is not measured: name it among "
                "the test's arguments"
            )
        pytest.skip(f"the test {act}, and {why}")


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
