"""How fast the HTML pages are in a browser: 2,000 tests, and a recording of 1,000,000 events.

Needs selenium, Chromium and its driver, as the tests of the page do. Prints a table, no verdict.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parent.parent
sys.path.insert(0, str(REPOSITORY))

from pytest_gpumem.allocator import Allocator  # noqa: E402
from pytest_gpumem.allocator.replay import replay  # noqa: E402
from pytest_gpumem.attribution.history import CATEGORIES  # noqa: E402
from pytest_gpumem.attribution.timeline import BUCKETS  # noqa: E402
from pytest_gpumem.report.html.page import RECORDING, assembled, render  # noqa: E402
from pytest_gpumem.report.html.recording import recording_of  # noqa: E402
from pytest_gpumem.report.json_report import write_report  # noqa: E402
from pytest_gpumem.report.record import TestRecord  # noqa: E402
from tests.report.example_run import MIB, failing, measured, record, verdict  # noqa: E402
from tests.report.html import chromium  # noqa: E402

TESTS = 2_000
EVENTS = 1_000_000
LINES = 40
"""The number of source lines of the recorded program."""
SIZES = 20
"""Of the blocks that one line allocates."""
TIMES = 5
"""The repetitions of each action; the median is shown."""

_WAIT = """
addEventListener('DOMContentLoaded', () => {
  const look = () => {
    if (!document.querySelector(%r)) return requestAnimationFrame(look);
    requestAnimationFrame(() => requestAnimationFrame(() => {
      window.shownAfter = performance.now();
    }));
  };
  look();
});
"""
"""Notes when the frame that shows an element is over."""

_FRAME = """
const done = arguments[arguments.length - 1];
const begin = performance.now();
%s;
requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now() - begin)));
"""
"""Milliseconds from an act to the end of the frame that shows what came of it."""


def records() -> Iterator[TestRecord]:
    """Yield tests that have a time line each, of which a hundredth fails."""
    draw = random.Random(0)
    for number in range(TESTS):
        peak = draw.randint(1, 4000) * MIB
        line = _timeline(draw, peak)
        shown = replace(
            measured(peak, composition={"parameters": peak // 3, "activations": peak - peak // 3}),
            timeline=line,
        )
        broken = number % 100 == 0
        limit = verdict("limit", peak, peak - MIB if broken else 2 * peak)
        name = f"tests/test_module_{number // 40}.py::test_number_{number}"
        yield record(name, shown, limit, outcome="failed" if broken else "passed")
    yield failing()


def _timeline(draw: random.Random, peak: int) -> dict[str, Any]:
    count = 2 * BUCKETS
    return {
        "events": 50_000,
        "positions": [number * 50_000 // count for number in range(count)],
        "categories": {name: [draw.randint(0, peak) for _ in range(count)] for name in CATEGORIES},
        "places": [f"model.py:{line} torch.mm" for line in range(LINES)],
        "blocks": [[draw.randrange(LINES), 512] for _ in range(count)],
        "phases": [["forward", 0, 20_000], ["backward", 20_000, 40_000]],
    }


class _Stack:
    def __init__(self, line: int) -> None:
        module = "/env/site-packages/torch/nn/modules/module.py"
        self.frames = [
            {"filename": "/app/model.py", "name": f"layer_{line}", "line": line},
            {"filename": module, "name": "_call_impl", "line": 1750},
        ]


def recording() -> dict[str, Any]:
    """Return a snapshot of steps of random blocks, most of which are freed again."""
    draw = random.Random(0)
    stacks = [_Stack(line) for line in range(LINES)]
    sizes = [512 * draw.randint(1, 40_000) for _ in range(LINES * SIZES)]
    allocator = Allocator(1 << 44, version=(2, 6))
    live: list[int] = []
    while len(allocator.trace) < EVENTS:
        for _ in range(1000):
            line = draw.randrange(LINES)
            nbytes = sizes[line * SIZES + draw.randrange(SIZES)]
            live.append(allocator.malloc(nbytes, context=stacks[line]))
        draw.shuffle(live)
        for address in live[50:]:
            allocator.free(address)
        del live[50:]
    return allocator.snapshot()


def main() -> None:
    """Print the table."""
    if problem := chromium.missing():
        sys.exit(problem)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        browser = chromium.start(folder / "profile")
        try:
            chromium.look_through(browser)
            _tests(browser, folder)
            _recording(browser, folder)
        finally:
            browser.quit()


def _tests(browser: Any, folder: Path) -> None:
    every = list(records())
    begin = time.perf_counter()
    page = folder / "tests.html"
    page.write_text(render(every), encoding="utf-8")
    report = write_report(folder / "tests.json", every)
    print(
        f"\n{TESTS + 1:,} tests with time lines: page {page.stat().st_size / MIB:.1f} MiB, JSON "
        f"{report.stat().st_size / MIB:.1f} MiB, written in {time.perf_counter() - begin:.1f} s"
    )
    _show("open", lambda: _opened(browser, page, "#rows tr"))
    words = iter("7 number_1 module_3 zz failed".split())
    find = "byId('find').value = %r; byId('find').dispatchEvent(new Event('input'))"
    _show("find", lambda: _frame(browser, find % next(words)))
    _show("sort", lambda: _frame(browser, "sortBy('peak')"))
    _show("all rows", lambda: _frame(browser, "document.getElementById('more').click()"), 1)


def _recording(browser: Any, folder: Path) -> None:
    snapshot = recording()
    events = len(snapshot["device_traces"][0])
    begin = time.perf_counter()
    result = replay(snapshot, courses=True)
    replayed = time.perf_counter() - begin
    page = folder / "run.html"
    found = recording_of("run.pickle", result, notes=[], used_elsewhere=0)
    page.write_text(assembled("recording.html", RECORDING, *found), encoding="utf-8")
    written = time.perf_counter() - begin
    print(f"\n{events:,} events of {LINES} lines: {page.stat().st_size / MIB:.1f} MiB")
    print(f"  replayed in {replayed:.1f} s, page written {written - replayed:.1f} s later")
    _show("open", lambda: _opened(browser, page, ".timeline canvas"))
    draw = random.Random(1)
    for part in (2, 10, 1000):

        def zoom(span: int = events // part) -> float:
            left = draw.randint(0, events - span)
            return _frame(browser, f"charts[0].show({left}, {left + span})")

        _show(f"zoom to 1/{part:,}", zoom)
    _show("show all", lambda: _frame(browser, f"charts[0].show(0, {events})"))


def _show(what: str, act: Callable[[], float], times: int = TIMES) -> None:
    took = [act() for _ in range(times)]
    print(f"  {what:16} {statistics.median(took):7.0f} ms   slowest {max(took):.0f} ms")


def _opened(browser: Any, page: Path, element: str) -> float:
    browser.get("about:blank")
    added = browser.execute_cdp_cmd(
        "Page.addScriptToEvaluateOnNewDocument", {"source": _WAIT % element}
    )
    browser.get(page.as_uri())
    while (after := browser.execute_script("return window.shownAfter")) is None:
        time.sleep(0.02)
    browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)
    return float(after)


def _frame(browser: Any, act: str) -> float:
    return float(browser.execute_async_script(_FRAME % act))


if __name__ == "__main__":
    main()
