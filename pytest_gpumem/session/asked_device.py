"""The check that a GPU requested by name exists, made before the first test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest

from pytest_gpumem.session.expected import MARKER_NAME

if TYPE_CHECKING:
    from pytest_gpumem.device.select import DeviceSelector


def check_device(
    config: pytest.Config,
    selector: DeviceSelector,
    items: Sequence[pytest.Item],
) -> None:
    """Raise ``pytest.UsageError`` where no GPU is present, in a run that requests ``cuda``.

    A worker of pytest-xdist cannot end a run: in it the first test fails instead.
    """
    if hasattr(config, "workerinput"):
        return
    marked = any(item.get_closest_marker(MARKER_NAME) for item in items)
    if not marked or config.option.collectonly or selector.world is not None:
        return
    from pytest_gpumem.device.errors import DeviceError

    try:
        selector.real()
    except DeviceError as error:
        problem = str(error)
    else:
        return
    raise pytest.UsageError(problem)
