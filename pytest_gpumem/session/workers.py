"""``-n auto`` where workers share GPUs: as many as fit their memory, and never more than cores."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import pytest

from pytest_gpumem.options import Settings, settings_from
from pytest_gpumem.session.host import SIZED


class Room(NamedTuple):
    """The room of one device for workers; bytes."""

    free: int
    context: int
    """The bytes that each worker takes, whatever it runs."""
    most_workers: int | None = None
    """The most workers of the device; ``None`` for no limit."""


def workers_by_memory(config: pytest.Config) -> int | None:
    """Return how many workers ``-n auto`` stands for, ``None`` where pytest-xdist decides."""
    settings = settings_from(config)
    if not settings.share or os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS"):
        return None
    from xdist.plugin import pytest_xdist_auto_num_workers

    rooms, gpu = _rooms(settings)
    if not rooms:
        return None
    cores: int = pytest_xdist_auto_num_workers(config)
    needs = list(_needs(settings, gpu))
    if settings.quota is not None and not settings.quota.auto:
        most = settings.quota.of(max(room.free for room in rooms), 1)
        # The quota is itself used where no need is known.
        needs = [min(need, most) for need in needs] or [most]
    found = min(fitting(rooms, needs), cores)
    config.stash[SIZED] = f"-n auto: {found} of {cores} cores' workers fit the memory"
    return found


def fitting(rooms: Iterable[Room], needs: Sequence[float]) -> int:
    """Return the number of workers that can run tests at once: at least one.

    Each holds its context and a test of the mean need; ``needs`` are bytes, of the tests whose
    needs are known. More workers would only wait, and hold their contexts.
    """
    mean = sum(needs) / len(needs) if needs else 0.0
    total = 0
    for room in rooms:
        each = room.context + mean
        # Without known needs, only the number of cores limits workers.
        fit = int(room.free // each) if each else 2**16
        total += fit if room.most_workers is None else min(fit, room.most_workers)
    return max(total, 1)


def _rooms(settings: Settings) -> tuple[list[Room], str]:
    """Return the rooms of the devices, and the prefix of their folders of baselines."""
    from pytest_gpumem.device.host_gpus import host_gpus

    if gpus := host_gpus(settings.device):
        from pytest_gpumem.session.placement import candidate_of
        from pytest_gpumem.sharing.host import CONTEXT
        from pytest_gpumem.sharing.host import MARGIN as LEFT_FREE

        used = gpus if settings.device.index is None else gpus[:1]
        rooms = [
            Room(round(one.room(()) - one.total * LEFT_FREE), CONTEXT, one.most_workers)
            for one in map(candidate_of, used)
        ]
        return rooms, f"cuda-{gpus[0].name}"
    if settings.device.kind not in ("sim", "auto"):
        return [], ""
    from pytest_gpumem.simulated.gpu.catalogue import find_machine

    machine = find_machine(settings.device.models[0])
    return [Room(machine.model.total_memory, 0)] * machine.count, f"sim-{machine.name}"


def _needs(settings: Settings, gpu: str) -> Iterator[float]:
    """Yield the needs of tests, from a common declaration, or from the baselines of this GPU."""
    from pytest_gpumem.session.sharing import MARGIN

    for keyword, margin in (("max_reserved", 1.0), ("max", MARGIN)):
        if declared := settings.defaults.get(keyword):
            yield declared * margin
            return
    from pytest_gpumem.baseline.content import read_file
    from pytest_gpumem.baseline.store import BaselineError

    beginning = re.sub(r"[^A-Za-z0-9._-]+", "-", gpu) + "-"
    for path in sorted(settings.baselines.glob("*/**/*.json")):
        folder = path.relative_to(settings.baselines).parts[0]
        if not folder.startswith(beginning):
            continue
        try:
            content = read_file(path, folder)
        except BaselineError:
            continue  # reported where a baseline is needed
        for entry in content.tests.values() if content else ():
            yield max(entry.peak_reserved, entry.peak_allocated * MARGIN)
