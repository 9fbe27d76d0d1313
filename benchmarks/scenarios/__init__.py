"""Programs that the twin run makes on a real and on a simulated device.

A scenario is plain PyTorch for ``cuda``: no value of a tensor may decide what it allocates.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

Program = Callable[[], Any]
"""Runs, and returns what lives at the end."""


@dataclass(frozen=True)
class Scenario:
    """One program under one setting of the allocator."""

    name: str
    """``group/what``."""
    run: Program
    module: str
    """Where it is defined: a change there makes it another scenario."""
    alloc_conf: str = ""
    """PYTORCH_CUDA_ALLOC_CONF."""
    package: str = ""
    """What has to be installed."""

    is_warmed: bool = False
    """Whether it is run once before, on both sides: what compiles, tunes what it has compiled."""

    @property
    def possible(self) -> bool:
        """Whether its package is there."""
        return not self.package or find_spec(self.package) is not None

    @property
    def digest(self) -> str:
        """Of everything that makes it what it is, but for torch."""
        files = sorted(_sources(sys.modules[self.module]))
        parts = [self.name.encode(), self.alloc_conf.encode(), *map(Path.read_bytes, files)]
        return sha256(b"\0".join(parts)).hexdigest()[:16]


def _sources(module: Any) -> set[Path]:
    """Return the file of ``module`` and those of the programs beside it that it uses."""
    folder = Path(__file__).resolve().parents[1]
    used = [getattr(value, "__module__", None) for value in vars(module).values()]
    used += [value.__name__ for value in vars(module).values() if isinstance(value, type(sys))]
    files = {Path(module.__file__).resolve()}
    # What is imported only when a program runs, a module names itself.
    files |= {folder / f"{name}.py" for name in getattr(module, "IMPORTED_LATER", ())}
    for name in {name for name in used if isinstance(name, str)}:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file and Path(file).resolve().is_relative_to(folder):
            files.add(Path(file).resolve())
    return files


def scenarios() -> dict[str, Scenario]:
    """Every scenario by name, in the order of the groups."""
    from scenarios import allocator, compiled, networks, operators, optimizers, pretrained

    found: dict[str, Scenario] = {}
    for module in (operators, optimizers, networks, pretrained, allocator, compiled):
        listed: Iterable[Scenario] = module.scenarios()
        found.update((scenario.name, scenario) for scenario in listed)
    return found
