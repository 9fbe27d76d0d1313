"""Operators that cannot be simulated fail these tests: a skip would hide them."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from pytest_gpumem.simulated.operators.custom_kernels import DESCRIPTIONS
from pytest_gpumem.values.errors import SimulationError


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    """Raise an ordinary error where the plugin would skip."""
    try:
        return (yield)
    except SimulationError as error:
        raise AssertionError(str(error)) from error


@pytest.fixture
def no_descriptions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin each test without descriptions of kernels, and drop those that it adds."""
    for name in ("operators", "kernels", "_functions"):
        monkeypatch.setattr(DESCRIPTIONS, name, {})
