"""GPU memory regression testing for pytest, on a real CUDA device or on a simulated one."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_gpumem.allocator.recording import SnapshotError as SnapshotError
    from pytest_gpumem.allocator.replayed import ReplayResult as ReplayResult
    from pytest_gpumem.allocator.settings import SettingsError as SettingsError
    from pytest_gpumem.prediction.batch import fit_batch as fit_batch
    from pytest_gpumem.script.entry import run_script as run_script
    from pytest_gpumem.session.fixture import Gpumem as Gpumem
    from pytest_gpumem.simulated.gpu.catalogue import GpuError as GpuError
    from pytest_gpumem.simulated.gpu.replay import replay as replay
    from pytest_gpumem.simulated.operators.custom_kernels import (
        simulate_operator as simulate_operator,
    )
    from pytest_gpumem.simulating import SimulatedRun as SimulatedRun
    from pytest_gpumem.simulating import simulate as simulate
    from pytest_gpumem.values.errors import SimulationError as SimulationError
    from pytest_gpumem.values.errors import UnknownValueError as UnknownValueError
    from pytest_gpumem.values.errors import UnsupportedOperatorError as UnsupportedOperatorError

_PLACES = {
    "GpuError": "simulated.gpu.catalogue",
    "Gpumem": "session.fixture",
    "ReplayResult": "allocator.replayed",
    "SettingsError": "allocator.settings",
    "SimulatedRun": "simulating",
    "SimulationError": "values.errors",
    "SnapshotError": "allocator.recording",
    "UnknownValueError": "values.errors",
    "UnsupportedOperatorError": "values.errors",
    "fit_batch": "prediction.batch",
    "replay": "simulated.gpu.replay",
    "run_script": "script.entry",
    "simulate": "simulating",
    "simulate_operator": "simulated.operators.custom_kernels",
}
__all__ = list(_PLACES)


def __getattr__(name: str) -> Any:
    # Importing the package must not import torch: pytest does so in every project.
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
