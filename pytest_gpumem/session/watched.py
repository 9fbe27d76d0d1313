"""Data on this process's tests for ``gpumem gpus --watch``, while it watches."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pytest_gpumem.sharing import watched
from pytest_gpumem.sharing.database import default_folder
from pytest_gpumem.sharing.processes import this_process

if TYPE_CHECKING:
    from pytest_gpumem.session.item import MeasuredItem


class Watched:
    """The published state of this process."""

    def __init__(self, config: pytest.Config) -> None:
        self._folder = default_folder()
        self._shown = False
        self._run = watched.Run(
            this_process(),
            str(config.rootpath),
            getattr(config, "workerinput", {}).get("workerid", ""),
            device="",
        )

    def begins(self, test: MeasuredItem) -> None:
        """Publish that a measured test begins."""
        environment = test.device.environment
        self._say(
            device=f"{environment.kind}{environment.gpu}", test=test.nodeid, since=time.time()
        )

    def ended(self, test: MeasuredItem) -> None:
        """Publish that the test is over."""
        self._say(
            finished=self._run.finished + 1,
            test=None,
            last=test.nodeid,
            last_peak=test.measurement.peak_allocated if test.measurement else None,
        )

    def close(self) -> None:
        """Remove the published state."""
        if self._shown:
            watched.hide(self._folder)

    def _say(self, **changes: object) -> None:
        self._run = replace(self._run, **changes)  # type: ignore[arg-type]  # each of its own
        if watched.is_watched(self._folder):
            watched.show(self._folder, self._run)
            self._shown = True
