"""What the markers of tests expect, and which tests are measured.

Every project with the plugin installed pays for this module: what only measured tests need is
imported on use.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pytest_gpumem.device.select import DeviceSelector
    from pytest_gpumem.marker import Expectation
    from pytest_gpumem.options import Settings

MARKER_NAME = "gpumem"
FIXTURE_NAME = "gpumem"

MODEL_PARAMETER = "_gpumem_model"
"""The private fixture that a list of GPU models parametrizes."""


class Expectations:
    """What tests expect of their memory.

    Args:
        settings: of this run.
        selector: returns what chooses devices, which the start of the session may replace.
    """

    def __init__(self, settings: Settings, selector: Callable[[], DeviceSelector]) -> None:
        self._settings = settings
        self._selector = selector

    def of(self, item: pytest.Item) -> Expectation | None:
        """Return what the markers of ``item`` expect, ``None`` where it has none."""
        return self._read(item)[0]

    def problem(self, item: pytest.Item) -> str:
        """Return what is wrong with the markers of ``item``, one sentence; empty for nothing."""
        expectation, problem = self._read(item)
        if expectation is None or len(expectation.gpu) < 2 or model_of(item):
            return problem
        return (
            f"gpumem marker: gpu={list(expectation.gpu)!r} asks for a test id of each model, which "
            "only plain test functions can have, not unittest classes nor single parameters; give "
            "one model"
        )

    def is_measured(self, item: pytest.Item) -> bool:
        """Whether ``item``, of whose markers nothing is wrong, is measured."""
        expectation, problem = self._read(item)
        if problem or self._selector().off or item.get_closest_marker("skip"):
            return False
        return expectation is not None or self._measures_unmarked(_fixture_names(item))

    def models(self, item: pytest.Item) -> tuple[str | None, tuple[str, ...]]:
        """Return the model that ``item`` runs on, ``None`` for any, and all that it names."""
        models = self._selector().models(self.of(item))
        return model_of(item) or (models[0] if models else None), tuple(models)

    def parametrize(self, metafunc: pytest.Metafunc) -> None:
        """Make one test id of each GPU model that a test names."""
        expectation, problem = self._read(metafunc.definition)
        if problem:
            return  # said when the module has been collected, with the test's id
        if expectation is None and not self._measures_unmarked(metafunc.fixturenames):
            return
        models = self._selector().models(expectation)
        if len(models) > 1:
            metafunc.fixturenames.append(MODEL_PARAMETER)
            metafunc.parametrize(MODEL_PARAMETER, models, indirect=True, ids=models)

    @cached_property
    def torch_is_there(self) -> bool:
        """Whether tests that ask for nothing could be measured."""
        from pytest_gpumem.device.errors import DeviceError

        try:
            self._selector().check_torch()
        except DeviceError:
            return False
        return True

    def _measures_unmarked(self, fixture_names: Iterable[str]) -> bool:
        if self._selector().off:
            return False
        return FIXTURE_NAME in fixture_names or (self._settings.all and self.torch_is_there)

    def _read(self, node: pytest.Item) -> tuple[Expectation | None, str]:
        """Return what the markers of a test expect, and what is wrong with them."""
        markers = list(node.iter_markers(MARKER_NAME))
        if not markers:
            return None, ""
        from pytest_gpumem.marker import MarkerError, expectation_of

        # pytest puts a parameter's marks behind its function's; nothing is closer to the test.
        of_parameter = getattr(getattr(node, "callspec", None), "marks", ())
        markers.sort(key=lambda mark: mark not in of_parameter)
        try:
            return expectation_of(markers, self._settings.defaults), ""
        except MarkerError as error:
            return None, str(error)


def model_of(item: pytest.Item) -> str | None:
    """Return the GPU model that is part of a test's id."""
    callspec = getattr(item, "callspec", None)
    model: str | None = callspec.params.get(MODEL_PARAMETER) if callspec else None
    return model


def _fixture_names(item: pytest.Item) -> Iterable[str]:
    names: Iterable[str] = getattr(item, "fixturenames", ())
    return names
