"""Facts that differ between releases of PyTorch have names in tables, not numbers in the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest_gpumem

FOLDER = Path(pytest_gpumem.__file__).parent
COMPARED = re.compile(r"ersion(__)?\s*(<=|>=|<|>|==)\s*[(\"']2")
RULES = FOLDER / "simulated" / "operators"
"""The rule of an operator states its release beside the source that it cites."""


def test_versions_are_compared_with_named_constants_only() -> None:
    found = [
        f"{path.relative_to(FOLDER)}: {line.strip()}"
        for path in sorted(FOLDER.rglob("*.py"))
        if RULES not in path.parents and path.parts[-2:] != ("values", "environment.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if COMPARED.search(line)
    ]
    assert not found, "\n".join(found)
