"""The expectations in the markers of tests, and the choice of measured tests."""

from __future__ import annotations

from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpumem.device import DeviceError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pytest_gpumem.device.select import DeviceSelector
    from pytest_gpumem.marker import Expectation
    from pytest_gpumem.options import Settings
    from pytest_gpumem.values.world import RequestedRank

MARKER_NAME = "gpumem"
FIXTURE_NAME = "gpumem"

MODEL_PARAMETER = "_gpumem_model"
"""The parameter of each test of a list of GPU models."""
RANKS_PARAMETER = "_gpumem_ranks"
"""The parameter of each test of a list of numbers of ranks."""


class Expectations:
    """The memory expectations of tests."""

    def __init__(self, settings: Settings, selector: DeviceSelector) -> None:
        self._settings = settings
        self._selector = selector

    def of(self, item: pytest.Item) -> Expectation | None:
        """Return the expectation of ``item``'s markers, ``None`` where it has none."""
        return self._read(item)[0]

    def problem(self, item: pytest.Item) -> str:
        """Return the error in the markers of ``item``, one sentence; empty for none."""
        expectation, problem = self._read(item)
        if expectation is None:
            return problem
        for keyword, given, one in (
            ("gpu", expectation.gpu, model_of(item)),
            ("ranks", expectation.ranks, _parameter(item, RANKS_PARAMETER)),
        ):
            if len(given) > 1 and one is None:
                return (
                    f"gpumem marker: {keyword}={list(given)!r} asks for a test id of each, which "
                    "only plain test functions can have, not unittest classes nor single "
                    "parameters; give one"
                )
        return problem

    def is_measured(self, item: pytest.Item) -> bool:
        """Return whether ``item`` is measured; one with an error in its markers is not."""
        expectation, problem = self._read(item)
        if problem or self._selector.off or item.get_closest_marker("skip"):
            return False
        return expectation is not None or self.measures_unmarked(getattr(item, "fixturenames", ()))

    def models(self, item: pytest.Item) -> tuple[str | None, tuple[str, ...]]:
        """Return the model that ``item`` runs on, ``None`` for any, and all those it names."""
        models = self._selector.models(self.of(item))
        return model_of(item) or (models[0] if models else None), tuple(models)

    def requested_rank(self, item: pytest.Item, rank: int = 0) -> RequestedRank | None:
        """Return the rank that ``item`` requests; ``rank`` for the worst of them, or ``None``."""
        expectation, size = self.of(item), self.ranks(item)
        if expectation is None or size is None or self._selector.world is not None:
            return self._selector.launched_rank
        from pytest_gpumem.marker import WORST
        from pytest_gpumem.values.world import RequestedRank

        if expectation.rank == WORST:
            return RequestedRank(size, rank, is_worst=True)
        return RequestedRank(size, int(expectation.rank or 0))

    def processes(self, item: pytest.Item) -> int | None:
        """Return the number of processes for ``item``, one per rank; ``None`` for this one."""
        expectation = self.of(item)
        if expectation is None or self._selector.off or item.get_closest_marker("skip"):
            return None
        size = self.ranks(item)
        with suppress(DeviceError):  # reported where the test begins
            share = self._settings.share
            if size is not None and not share and self._selector.measured_device() is not None:
                from pytest_gpumem.device.cuda import device_count

                if device_count() >= size:
                    return size
        return 1 if expectation.isolate else None

    def ranks(self, item: pytest.Item) -> int | None:
        """Return the number of ranks that ``item`` requests; ``None`` where it does not."""
        expectation = self.of(item)
        if expectation is None or not expectation.ranks:
            return None
        return _parameter(item, RANKS_PARAMETER) or expectation.ranks[0]

    def parametrize(self, metafunc: pytest.Metafunc) -> None:
        """Make one test id of each GPU model and number of ranks that a test names."""
        expectation, problem = self._read(metafunc.definition)
        if problem:
            return  # reported when the module has been collected, with the test's id
        if expectation is None and not self.measures_unmarked(metafunc.fixturenames):
            return
        models = self._selector.models(expectation)
        ranks = expectation.ranks if expectation else ()
        for parameter, values, ids in (
            (MODEL_PARAMETER, models, models),
            (RANKS_PARAMETER, ranks, [f"{size}ranks" for size in ranks]),
        ):
            if len(values) > 1:
                metafunc.fixturenames.append(parameter)
                metafunc.parametrize(parameter, values, ids=ids)

    @cached_property
    def torch_is_there(self) -> bool:
        """Whether torch is installed, so that tests without expectations can be measured."""
        with suppress(DeviceError):
            self._selector.check_torch()
            return True
        return False

    def measures_unmarked(self, fixture_names: Iterable[str]) -> bool:
        """Return whether a test without markers, with these fixtures, is measured."""
        if self._selector.off:
            return False
        return FIXTURE_NAME in fixture_names or (self._settings.all and self.torch_is_there)

    def _read(self, node: pytest.Item) -> tuple[Expectation | None, str]:
        """Return the expectation of a test's markers, and the error in them."""
        markers = list(node.iter_markers(MARKER_NAME))
        if not markers:
            return None, ""
        from pytest_gpumem.marker import expectation_of

        # pytest lists a parameter's marks last, but they are the closest to the test.
        of_parameter = getattr(getattr(node, "callspec", None), "marks", ())
        markers.sort(key=lambda mark: mark not in of_parameter)
        try:
            return expectation_of(markers, self._settings.defaults), ""
        except ValueError as error:
            return None, str(error)


def model_of(item: pytest.Item) -> str | None:
    """Return the GPU model that is part of a test's id."""
    model: str | None = _parameter(item, MODEL_PARAMETER)
    return model


def _parameter(item: pytest.Item, name: str) -> Any:
    callspec = getattr(item, "callspec", None)
    return callspec.params.get(name) if callspec else None
