"""How operators are named where several of them are one kernel."""

from __future__ import annotations

FUSED = ", fused"
"""Ends the name of a compiled kernel; before it stand its operators, joined by ``+``."""
