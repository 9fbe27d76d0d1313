"""Fixtures of every test of the command line."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _forgotten_imports(forgotten_imports: None) -> None:
    """Remove the modules that a command imported to run them."""
