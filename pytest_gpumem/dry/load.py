"""Loading of the dry runtime, in this process or in its child processes.

The runtime reads the GPU models of the catalogue from the environment.
"""

from __future__ import annotations

import ctypes
import os
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from pytest_gpumem.dry.build import RUNTIME, DryError, built_for_installed
from pytest_gpumem.simulated.gpu import catalogue
from pytest_gpumem.simulated.gpu.catalogue import INSTANCES, GpuError, GpuModel

DEFAULT = "A100-40GB"

DEVICES = "PYTEST_GPUMEM_DRY_DEVICES"
"""The variable that describes the GPUs; the runtime reads it at its first call."""
MODELS = "PYTEST_GPUMEM_DRY"
"""The variable with the GPUs' names, as the user wrote them."""
SHARED = "PYTEST_GPUMEM_DRY_SHARED"
"""The variable with the folder by which processes share the GPUs.

Without it each process has its own GPUs.
"""
BY_PYTEST = "PYTEST_GPUMEM_DRY_BY_PYTEST"
"""The variable that marks processes in which pytest has loaded the GPUs for marked tests."""
_PRELOAD, _FOLDERS = "LD_PRELOAD", "LD_LIBRARY_PATH"

_BEGIN = "begin"
"""The function of ``source/memory.c`` by which the runtime is identified."""

_kept: list[ctypes.CDLL] = []


def load(names: str) -> None:
    """Load the GPUs ``names`` in this process and its child processes.

    Torch must not have been imported. Raises :class:`DryError`, and ``GpuError`` for ``names``.
    """
    if is_loaded():
        return
    if "torch" in sys.modules:
        raise DryError("the dry device must be there before torch is imported, which it is already")
    os.environ.update(environment(names))
    folder = folder_of_build()
    # A loaded library serves every later request for its name, and the loader looks for symbols
    # in global libraries first.
    for path in _libraries(folder):
        _kept.append(ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL))


def is_loaded() -> bool:
    """Return whether this process has the dry runtime, by :func:`load` or ``LD_PRELOAD``."""
    return sys.platform == "linux" and hasattr(ctypes.CDLL(None), f"pytest_gpumem_dry_{_BEGIN}")


def function(name: str, *arguments: Any, gives: Any = ctypes.c_int) -> Any:
    """Return the runtime's function ``name`` with the C types of its ``arguments`` and result."""
    found = getattr(ctypes.CDLL(None), f"pytest_gpumem_dry_{name}")
    found.argtypes, found.restype = arguments or None, gives
    return found


@contextmanager
def inherited() -> Iterator[None]:
    """Make child processes that are started inside load the runtime, too."""
    before = {name: os.environ.get(name) for name in (_PRELOAD, _FOLDERS)}
    inside = _searched(folder_of_build())
    os.environ.update(inside)
    try:
        yield
    finally:
        for name, value in before.items():
            if os.environ.get(name) == inside[name]:  # not changed by the code inside
                _set(name, value)


def disinherit() -> None:
    """Make child processes that are started from now on run without the runtime."""
    own = {str(folder_of_build()), *_libraries(folder_of_build())}
    for name in (_PRELOAD, _FOLDERS):
        others = [one for one in os.environ.get(name, "").split(":") if one not in own]
        _set(name, ":".join(others) or None)


def _set(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def is_launched() -> bool:
    """Return whether the whole program was started on the dry device."""
    return is_loaded() and BY_PYTEST not in os.environ


def restart_placing() -> None:
    """Place later segments of every GPU as in a new process, below existing ones."""
    function(_BEGIN)()


@cache
def folder_of_build() -> Path:
    """Return the folder with the runtime for the installed torch; raises :class:`DryError`."""
    if sys.platform != "linux":
        raise DryError(
            f"the dry device runs on Linux only, and this is {sys.platform}: use "
            "--gpumem-device=sim"
        )
    return built_for_installed()


def environment(names: str, memory: int | None = None) -> Mapping[str, str]:
    """Return the variables that give a new process the GPUs of ``names``.

    Each has as many bytes of ``memory``, or its model's. Raises :class:`DryError`, and ``GpuError``
    for ``names``.
    """
    models = models_of(names)
    if memory is not None:
        models = [replace(model, total_memory=memory) for model in models]
    folder = folder_of_build()
    return {
        MODELS: names,
        DEVICES: description(models),
        **_searched(folder),
        # Triton links its launcher with the driver's library of this folder.
        "TRITON_LIBCUDA_PATH": str(folder),
    }


def environment_of_option(names: str, memory: int | None = None) -> Mapping[str, str]:
    """Return :func:`environment` for ``--device dry``.

    Raises ``ValueError`` with a sentence where there is no such device.
    """
    try:
        return environment(names, memory)
    except DryError as error:
        raise ValueError(f"--device dry: {error}") from None


def _searched(folder: Path) -> dict[str, str]:
    """Return the variables by which the loader finds the libraries in ``folder`` first."""
    return {
        # Preload all of them: torch's RPATH names NVIDIA's packages, which the loader searches
        # before the folders of LD_LIBRARY_PATH.
        _PRELOAD: _joined(_libraries(folder), os.environ.get(_PRELOAD)),
        _FOLDERS: _joined([str(folder)], os.environ.get(_FOLDERS)),
    }


@cache
def _libraries(folder: Path) -> list[str]:
    """Return the paths of the runtime and of the libraries in place of NVIDIA's."""
    return [str(folder / RUNTIME), *map(str, sorted(folder.glob("lib*.so.*[0-9]")))]


def _joined(first: Sequence[str], others: str | None) -> str:
    rest = [one for one in (others or "").split(":") if one and one not in first]
    return ":".join([*first, *rest])


def models_of(names: str) -> list[GpuModel]:
    """Return the GPUs of ``"A100-40GB*2,H100"``, one by one.

    Consecutive MIG instances belong to one GPU, as in ``"A100-40GB/3g.20gb,A100-40GB/2g.10gb"``.
    Raises ``GpuError`` for a model or a number that does not exist, and for instances that do not
    fit on their GPU.
    """
    machines = [catalogue.find_machine(name) for name in names.split(",")]
    models = [machine.model for machine in machines for _ in range(machine.count)]
    for parts in _divided(models):
        sizes = [INSTANCES[one.parent_name][one.profile] for one in parts if one.profile]
        if not catalogue.fit(sizes):
            written = ",".join(one.name for one in parts)
            raise GpuError(
                f'"{written}" are more instances of MIG than fit on one {parts[0].parent_name}'
            )
    return models


def _divided(models: Sequence[GpuModel]) -> Iterator[Sequence[GpuModel]]:
    """Yield each whole GPU, and the MIG instances of each divided GPU, as a sequence."""
    for (_, divided), group in groupby(models, lambda one: (one.parent_name, bool(one.profile))):
        parts = list(group)
        yield from [parts] if divided else [[one] for one in parts]


def description(models: Sequence[GpuModel]) -> str:
    """Return ``models`` as ``source/devices.c`` reads them, in the order of their indices."""
    lines: list[str] = []
    for parts in _divided(models):
        if parts[0].profile:
            lines.append(_one(catalogue.GPUS[parts[0].parent_name], len(lines)))
        lines += [_one(part, len(lines) + number) for number, part in enumerate(parts)]
    return ";".join(lines)


def _one(model: GpuModel, index: int) -> str:
    limits = catalogue.limits_of(model.compute_capability)
    major, minor = model.compute_capability
    fields = {
        "name": model.full_name,
        "uuid": uuid.uuid5(uuid.NAMESPACE_OID, f"{model.name}/{index}").hex,
        "memory": model.total_memory,
        "major": major,
        "minor": minor,
        "sms": model.sm_count,
        "threads": model.max_threads_per_sm,
        "l2": model.l2_cache_bytes,
        "shared": limits.shared_memory,
        "optin": limits.shared_memory_per_block,
        "blocks": limits.blocks,
        "bus": model.memory_bus_bits,
        "bandwidth": model.memory_gb_per_second,
        "instances": catalogue.COMPUTE_SLICES if model.name in INSTANCES else 0,
        "instance": int(bool(model.profile)),
    }
    return ",".join(f"{name}={value}" for name, value in fields.items())
