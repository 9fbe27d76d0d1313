"""Fixtures that read the bytes that a piece of code allocated and freed."""

from __future__ import annotations

from tests.simulated.operators.conftest import on

__all__ = ["on"]
