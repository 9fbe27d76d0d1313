"""The GPUs of this host and the tests that pytest runs there now."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gpumem.cli import gpu_lines
from pytest_gpumem.cli.columns import terminal_width
from pytest_gpumem.cli.command import Answer
from pytest_gpumem.echo import printable
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    from pytest_gpumem.sharing.watched import Run


def look(folder: Path) -> Answer:
    """Return the present state of the GPUs and of the runs that use ``folder``."""
    from pytest_gpumem.sharing.watched import runs

    devices, trouble = gpu_lines.found()
    seen = runs(folder)
    width = terminal_width()
    found = lines(devices, trouble, seen, time.time(), width)
    return Answer(
        (line[:width] for line in map(printable, found)),
        lambda: {"devices": devices, "nvml": trouble, "runs": list(map(asdict, seen))},
    )


def lines(
    devices: Sequence[Mapping[str, Any]],
    trouble: str | None,
    seen: Sequence[Run],
    now: float,
    width: int,
) -> Iterator[str]:
    """Yield the lines of output at the time ``now``, in ``width`` columns."""
    yield from gpu_lines.lines(devices, trouble, width)
    yield ""
    if not seen:
        yield "no pytest has begun a measured test since this looks"
    for one in seen:
        worker = f", worker {one.worker}" if one.worker else ""
        tests = "1 measured test" if one.finished == 1 else f"{one.finished} measured tests"
        yield f"pytest in {one.folder} (PID {one.process.pid}{worker}): {tests} so far"
        if one.test is not None:
            yield f"  runs  {one.test}  {max(now - one.since, 0):.0f} s on {one.device}"
        if one.last is not None:
            peak = "" if one.last_peak is None else f"  peak {format_size(one.last_peak)}"
            yield f"  last  {one.last}{peak}"
