"""GPU memory regression testing for pytest, on a real CUDA device or on a simulated one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_gpumem.session.fixture import Gpumem as Gpumem
    from pytest_gpumem.simulated.allocator.replay import replay as replay
    from pytest_gpumem.simulated.run import simulate as simulate

__all__ = ["Gpumem", "replay", "simulate"]


def __getattr__(name: str) -> Any:
    # Importing the package must not import torch: pytest does so in every project.
    if name == "simulate":
        from pytest_gpumem.simulated.run import simulate

        return simulate
    if name == "replay":
        from pytest_gpumem.simulated.allocator.replay import replay

        return replay
    if name == "Gpumem":
        from pytest_gpumem.session.fixture import Gpumem

        return Gpumem
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
