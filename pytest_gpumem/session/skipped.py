"""Tests, and modules of them, that were skipped because torch saw no CUDA device at import."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

_DEVICE = re.compile(r"cuda|gpu|accelerator|is_available|device", re.IGNORECASE)
"""Words in conditions on a device, and in their reasons."""


def skipped_for_its_device(path: Path, longrepr: object, *, everything: bool) -> bool:
    """Return whether ``pytest.skip()`` skipped the module at ``path`` for want of a CUDA device.

    ``longrepr`` is that of its report. A module without the word gpumem would not be measured,
    unless ``everything`` is.
    """
    if not isinstance(longrepr, tuple):
        return False
    _, line, reason = longrepr
    try:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (OSError, SyntaxError, UnicodeDecodeError):
        return False
    if not everything and "gpumem" not in source:
        return False
    return any(_DEVICE.search(text) for text in (str(reason), *_conditions(tree, int(line))))


def _conditions(tree: ast.AST, line: int) -> Iterator[str]:
    """Yield the conditions under which ``line`` runs."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and node.lineno <= line <= (node.end_lineno or 0):
            yield ast.unparse(node.test)


def is_skipped_at_import(item: pytest.Item) -> bool:
    """Return whether a condition evaluated when the module was imported skips ``item``."""
    if any(mark.args[:1] == (True,) for mark in item.iter_markers("skipif")):
        return True
    # unittest's decorators, as ``skipUnless(torch_device == "cuda", ...)``.
    cls = getattr(item, "cls", None)
    holders = cls, getattr(cls, getattr(item, "originalname", None) or item.name, None)
    return any(getattr(holder, "__unittest_skip__", False) for holder in holders)
