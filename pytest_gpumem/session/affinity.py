"""Shared fixtures and the device that they were set up on.

A module's fixture may be set up by an unmarked test, where there is no GPU, and then be requested
by a marked one, where there is one; or by tests of two GPU models. Its value would belong to the
wrong machine, and numbers would depend on the order of tests. So a shared fixture that depends on
the device is set up anew for a test of another one.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from _pytest.fixtures import FixtureDef

    from pytest_gpumem.device.device import Device

_QUESTIONS = ("is_available", "device_count")
"""Functions of torch.cuda whose result tells one machine from the other."""

_DEVICE_NAME = re.compile(r"cpu|cuda(:\d+)?")


@dataclass
class _Origin:
    device: Device | None
    """The device of the set-up; ``None`` for the machine as it is."""
    asked: bool = False
    """Whether the set-up called torch's functions on CUDA devices."""

    def noticing(self, question: Callable[[], Any]) -> Callable[[], Any]:
        """Return ``question`` as a function that also records that it is called."""

        def noticed() -> Any:
            self.asked = True
            return question()

        return noticed


class FixtureDevices:
    """A record of the devices that shared fixtures were set up on."""

    def __init__(self) -> None:
        self._origins: dict[FixtureDef[Any], _Origin] = {}

    @contextmanager
    def setting_up(self, fixture: FixtureDef[Any], device: Device | None) -> Iterator[None]:
        """Record that ``fixture`` is set up inside, for a test on ``device``."""
        if fixture.scope == "function":
            yield
            return
        origin = self._origins[fixture] = _Origin(device)
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        with pytest.MonkeyPatch.context() as patches:
            for name in _QUESTIONS if cuda else ():
                patches.setattr(cuda, name, origin.noticing(getattr(cuda, name)))
            yield

    def forget(self, fixture: FixtureDef[Any]) -> None:
        """Drop a fixture that has been torn down."""
        self._origins.pop(fixture, None)

    def renew(self, item: pytest.Item, device: Device | None) -> None:
        """Tear down fixtures that ``item`` shares with earlier tests of another device."""
        info = getattr(item, "_fixtureinfo", None)
        definitions = info.name2fixturedefs.values() if info else ()
        for fixture in self._origins.keys() & {one for same in definitions for one in same}:
            origin = self._origins.get(fixture)  # finishing one finishes those that depend on it
            if origin is None or origin.device is device or fixture.cached_result is None:
                continue
            failed = fixture.cached_result[2] is not None
            if failed or origin.asked or _depends_on_device(fixture.cached_result[0]):
                with origin.device.active() if origin.device else nullcontext():
                    fixture.finish(item._request)  # type: ignore[attr-defined]  # as pytest itself


def _depends_on_device(value: Any) -> bool:
    if "torch" not in sys.modules:
        return False
    import torch

    from pytest_gpumem.measurement.leaks import reachable_objects

    return any(
        isinstance(found, torch.Tensor | torch.device)
        or (isinstance(found, str) and _DEVICE_NAME.fullmatch(found))
        for found in reachable_objects([value])
    )
