"""The names of operators that are fused into one kernel."""

from __future__ import annotations

FUSED = ", fused"
"""The end of a compiled kernel's name; its operators, joined by ``+``, come before it."""
