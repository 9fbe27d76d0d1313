"""The start of a pytest process with the dry device, before torch is imported."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from _pytest.capture import CaptureManager

from pytest_gpumem.dry import scope
from pytest_gpumem.dry.build import DryError
from pytest_gpumem.dry.load import BY_PYTEST, SHARED, environment, is_launched, is_loaded, load
from pytest_gpumem.options import Settings
from pytest_gpumem.simulated.gpu.catalogue import GpuError

_STARTED_ANEW = "PYTEST_GPUMEM_DRY_STARTED"
"""The variable that keeps a process from restarting itself a second time."""


def begin_process(config: pytest.Config, settings: Settings, *, controls: bool) -> None:
    """Load the dry GPUs of the ``settings`` in this process and its child processes.

    If torch has been imported, pytest restarts itself once. The settings decide whether the devices
    are visible everywhere or only in marked tests; a process that ``controls`` workers runs no
    tests. Raises ``pytest.UsageError``.
    """
    model = ",".join(settings.device.models)
    if settings.share:
        from pytest_gpumem.sharing.database import default_folder

        folder = default_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.environ[SHARED] = str(folder)
    # Child processes of such a program have the device anyway.
    kept = is_launched()
    try:
        if "torch" in sys.modules and not is_loaded():
            _restart(model, config.pluginmanager.getplugin("capturemanager"))
        load(model)
        if not kept:
            os.environ[BY_PYTEST] = "1"
    except (DryError, GpuError) as error:
        raise pytest.UsageError(f"--gpumem-device=dry: {error}") from None
    if settings.sim_scope != "session":
        scope.close(to_children=not controls and not kept)


def _restart(model: str, capturing: CaptureManager | None) -> None:
    """Replace this process by the same pytest, with the runtime preloaded; raises ``DryError``."""
    if _STARTED_ANEW in os.environ or not _is_pytest():
        raise DryError(
            "torch was imported before pytest could load the dry runtime: start the process with "
            "python -m pytest_gpumem.dry, or import torch later"
        )
    variables = {**os.environ, **environment(model), _STARTED_ANEW: "1", BY_PYTEST: "1"}
    if capturing is not None:
        capturing.stop_global_capturing()
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], variables)


def _is_pytest() -> bool:
    """Return whether this process is the command ``pytest``, not a program that calls pytest."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return str(spec.name).partition(".")[0] in ("pytest", "py")
    return Path(sys.argv[0]).name in ("pytest", "py.test")
