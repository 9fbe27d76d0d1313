"""What cannot be simulated fails these tests: skipping them would hide it."""

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
    """Let nobody have described a kernel, and what a test describes end with it."""
    for name in ("operators", "kernels", "_functions"):
        monkeypatch.setattr(DESCRIPTIONS, name, {})
