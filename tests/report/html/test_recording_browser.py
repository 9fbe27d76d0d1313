"""The page of a recording in a browser: every zoom keeps peaks, a click lists live blocks."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_gpumem.allocator import Allocator
from pytest_gpumem.report.html.page import RECORDING, assembled
from pytest_gpumem.report.html.recording import recording_of
from pytest_gpumem.simulated.gpu.replay import replay
from tests.report.html import chromium
from tests.report.html.test_recording import FORWARD, LOADING, MIB, recorded

LOST = """
const [tape, chart, from, to] = [charts[0].tape, charts[0], ...arguments];
chart.show(from, to);
const kept = chart.sampled().positions;
const layers = chart.sampled().layers;
const stretches = Math.floor(arguments[2]);
const lost = [];
const { recorded: reserved } = tape.reserved;
const series = { allocated: tape.allocated, reserved, split: tape.split.recorded };
for (const [name, values] of Object.entries(series)) {
  for (let stretch = 0; stretch < stretches; stretch++) {
    const begin = from + Math.floor((to - from + 1) * stretch / stretches);
    const end = from + Math.floor((to - from + 1) * (stretch + 1) / stretches);
    const highest = (some) => some.reduce((most, position) => Math.max(most, values[position]), -1);
    const inside = kept.filter((position) => position >= begin && position < end);
    const all = Array.from({ length: end - begin }, (_, i) => begin + i);
    if (highest(inside) !== highest(all)) lost.push([name, begin, end]);
  }
}
kept.forEach((position, index) => {
  const sum = layers.reduce((bytes, layer) => bytes + layer[index], 0);
  if (sum !== tape.allocated[position]) lost.push(["layers", position, sum]);
});
return lost;
"""
"""The stretches whose highest point is not drawn; ``arguments[2]`` is their number."""


def written(path: Path, snapshot: dict[str, Any], **question: Any) -> Path:
    result = replay(snapshot, courses=True, **question)
    found = recording_of("run.pickle", result, notes=["A note."], used_elsewhere=0)
    path.write_text(assembled("recording.html", RECORDING, *found), encoding="utf-8")
    return path


def long(events: int) -> dict[str, Any]:
    """Return a snapshot of blocks with random sizes and lifetimes."""
    draw = random.Random(3)
    allocator = Allocator(1 << 44, version=(2, 6))
    live: list[int] = []
    while len(allocator.trace) < events:
        if live and draw.random() < 0.49:
            allocator.free(live.pop(draw.randrange(len(live))))
        else:
            live.append(allocator.malloc(512 * draw.randint(1, 9_000), context=FORWARD))
    return allocator.snapshot()


@pytest.fixture
def page(opened_page: Callable[[Path], Any], tmp_path: Path) -> Any:
    path = written(tmp_path / "run.html", recorded().snapshot(), alloc_conf="max_split_size_mb:64")
    return ready(opened_page(path))


def ready(browser: Any) -> Any:
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, 20).until(
        lambda page: page.find_elements("css selector", ".timeline canvas")
    )
    return browser


def text(page: Any) -> str:
    found: str = page.find_element("css selector", "body").text
    return found.replace("\u00a0", " ")


def test_the_page_starts_with_a_summary_of_the_recording(page: Any) -> None:
    for said in (
        "9 events on cuda:0, recorded with the allocator's default settings",
        "3 of 3 addresses agree",
        "What if: PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64",
        "A note.",
        "Memory was highest after event 5 of 9: 38.0 MiB allocated.",
        "Most of it was held by main.py:3 in load: 30.0 MiB, 78.9 %, in 1 block.",
        "When most was reserved, 12.0 MiB of 50.0 MiB (24.0 %) lay unused in 2 segments.",
        "3.0 MiB were still allocated at the end.",
    ):
        assert said in text(page)


def test_the_page_opens_without_error_or_request(page: Any) -> None:
    assert chromium.requests(page) == []
    assert page.get_log("browser") == []
    assert page.title == "GPU memory of run.pickle"


def test_keys_read_zoom_and_pin_an_event(page: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    chart = page.find_element("css selector", ".timeline")
    note = page.find_element("css selector", ".timeline + .hovered")
    assert note.text.startswith("peak, after event 5 of 9: 38.0 MiB allocated; 50.0 MiB reserved")
    chart.send_keys(Keys.HOME, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert note.text.startswith("after event 2 of 9: 30.0 MiB allocated; 30.0 MiB reserved")
    assert note.text.endswith("a block of 30.0 MiB allocated by main.py:3 in load")
    chart.send_keys("+", Keys.ENTER)
    (_, _, kept) = page.find_elements("css selector", "section:last-child option")
    assert kept.text == "the event that was clicked, after event 2, 30.0 MiB"
    assert kept.is_selected()


def test_hovering_shows_block_line_and_layer(page: Any) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    over = page.find_element("css selector", ".timeline .u-over")
    low = over.size["height"] // 2 - 10
    ActionChains(page).move_to_element_with_offset(over, 0, low).perform()
    note = page.find_element("css selector", ".timeline + .hovered").text
    assert "under the pointer: " in note
    assert " allocated by src/model.py:7 in forward" in note or "freed, from src" in note


def test_dragging_zooms_and_a_double_click_shows_all(page: Any) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    over = page.find_element("css selector", ".timeline .u-over")
    ActionChains(page).move_to_element_with_offset(over, -200, 0).click_and_hold().move_by_offset(
        200, 0
    ).release().perform()
    shown = page.execute_script("return charts[0].sampled().positions")
    assert 0 not in shown
    assert "kept" not in page.find_element("css selector", ".timeline + .hovered").get_attribute(
        "class"
    )
    ActionChains(page).double_click(over).perform()
    assert page.execute_script("return charts[0].sampled().positions.length") == 10


def test_the_chart_can_be_stacked_by_line_and_by_size(page: Any) -> None:
    from selenium.webdriver.support.ui import Select

    select = Select(page.find_element("css selector", "select"))
    keys = [".key-list li", ".key-list li"]
    select.select_by_visible_text("source line")
    found = [one.text for one in page.find_elements("css selector", keys[0])]
    assert found[:2] == ["main.py:3 in load", "src/model.py:7 in forward"]
    select.select_by_visible_text("size of block")
    found = [one.text for one in page.find_elements("css selector", keys[1])]
    assert found[:3] == ["blocks of 30.0 MiB", "blocks of 5.0 MiB", "blocks of 3.0 MiB"]


def test_every_zoom_shows_the_peak_of_each_interval(
    opened_page: Callable[[Path], Any], tmp_path: Path
) -> None:
    page = ready(opened_page(written(tmp_path / "long.html", long(60_000))))
    events = page.execute_script("return charts[0].tape.length")
    stretches = page.execute_script(
        "return Math.floor(document.querySelector('.u-over').clientWidth / 2)"
    )
    draw = random.Random(5)
    views = [(0, events)]
    for span in (events // 2, events // 7, 5_000, 900):
        left = draw.randint(0, events - span)
        views.append((left, left + span))
    for view in views:
        assert page.execute_script(LOST, *view, stretches) == []


@pytest.mark.parametrize("size", [chromium.DESKTOP, chromium.PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_an_accessibility_checker_finds_no_fault(
    page: Any, size: tuple[int, int], dark: bool
) -> None:
    chromium.look_through(page, size, dark=dark)
    assert chromium.inaccessible(page) == []
    assert page.execute_script("return document.documentElement.scrollWidth") == size[0]


def test_each_of_several_devices_has_its_own_parts(
    opened_page: Callable[[Path], Any], tmp_path: Path
) -> None:
    snapshot = recorded().snapshot()
    other = Allocator(1 << 40, version=(2, 6), device=1)
    other.malloc(MIB, context=LOADING)
    second = other.snapshot()
    snapshot["segments"] += second["segments"]
    snapshot["device_traces"] += second["device_traces"]
    page = ready(opened_page(written(tmp_path / "two.html", snapshot)))
    titles = [one.text for one in page.find_elements("css selector", "h2")]
    assert titles == ["cuda:0, 9 events", "cuda:1, 2 events"]
    assert len(page.find_elements("css selector", ".timeline")) == 2
