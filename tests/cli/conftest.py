"""What every test of the command line has."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _forgotten_imports(forgotten_imports: None) -> None:
    """A command imports what it is to run."""
