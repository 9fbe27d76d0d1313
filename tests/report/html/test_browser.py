"""The page of tests in a browser: it causes no error and no request, and its controls work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_gpumem.report.html.page import render
from pytest_gpumem.report.past import Past
from tests.report.example_run import MIB, failing, measured, passing, record, verdict
from tests.report.html import chromium

HOSTILE = "test_z[</script><img src=x onerror=document.title='taken'>]"
ODD = {
    "tests/test_z.py::test_z[\x1b[31mred]": "test_z[\\x1b[31mred]",
    "tests/test_z.py::test_z[line\nbreak]": "test_z[line\\nbreak]",
    "tests/test_z.py::test_z[::error file=a.py::taken]": "test_z[::error file=a.py::taken]",
}
"""Names, and how they are shown."""
USE = {
    "device": "simulated T4 cuda:0",
    "capacity": 16 * MIB,
    "spans": [
        {"nodeid": HOSTILE, "worker": "gw0", "begin": 0.0, "end": 2.0, "bytes": 8 * MIB},
        {"nodeid": "test_b", "worker": "gw1", "begin": 1.0, "end": 4.0, "bytes": 4 * MIB},
    ],
}
TIMELINE = {
    "events": 3,
    "positions": [0, 1, 2, 3],
    "categories": {"activations": [0, 512, 80 * MIB, 512]},
    "reserved": [0, 2 * MIB, 96 * MIB, 96 * MIB],
    "split": [0, 2 * MIB - 512, 10 * MIB, 2 * MIB - 512],
    "places": ["model.py:7 torch.mm"],
    "blocks": [[-1, 0], [0, 512], [0, 80 * MIB - 512], [0, 512 - 80 * MIB]],
    "phases": [["forward", 0, 3]],
}
SITE = {
    "category": "activations",
    "bytes": 80 * MIB,
    "count": 2,
    "site": "model.py:7",
    "operator": "torch.mm",
    "module": "head",
    "shape": [2, 4],
    "dtype": "float32",
}


@pytest.fixture
def page(opened_page: Callable[[Path], Any], tmp_path: Path) -> Any:
    failed = failing()
    assert failed.measurement is not None
    shown = replace(
        failed.measurement,
        composition={"activations": 80 * MIB},
        sites=(SITE,),
        timeline=TIMELINE,
    )
    many = [
        record(f"tests/test_many.py::test_{number:04}", measured(number * MIB))
        for number in range(500)
    ]
    hostile = [
        record(name, measured(MIB), verdict("limit", MIB, 2 * MIB)) for name in (HOSTILE, *ODD)
    ]
    records = [replace(failed, measurement=shown), passing(), *hostile, *many]
    past = Past([("run-1", "", {failed.key: 64 * MIB}), ("run-2", "", {failed.key: 80 * MIB})])
    path = tmp_path / "page.html"
    path.write_text(render(records, past, [USE]), encoding="utf-8")
    return opened_page(path)


def names(page: Any) -> list[str]:
    found: list[str] = page.execute_script(
        "return [...document.querySelectorAll('#rows .test-name')].map((one) => one.textContent)"
    )
    return found


def find(page: Any, text: str) -> None:
    page.execute_script(
        "const box = document.getElementById('find'); box.value = arguments[0];"
        "box.dispatchEvent(new Event('input'));",
        text,
    )


def opened(page: Any) -> str:
    """Open the first test by its key, as a keyboard user does; return what is shown."""
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import WebDriverWait

    button = page.find_element("css selector", "button.open")
    if button.get_attribute("aria-expanded") == "false":
        button.send_keys(Keys.ENTER)
    shown = WebDriverWait(page, 20).until(
        lambda browser: browser.find_elements("css selector", "tr.detail .body")
    )
    text: str = shown[0].text
    return text


def test_the_page_opens_without_error_or_request(page: Any) -> None:
    opened(page)
    assert chromium.requests(page) == []
    assert page.get_log("browser") == []
    assert page.title == "GPU memory report"


def test_failures_come_first_and_a_hostile_name_is_text(page: Any) -> None:
    assert names(page)[0] == "test_step"
    find(page, "onerror")
    assert names(page) == [HOSTILE]
    assert page.find_elements("css selector", "#rows img") == []
    assert page.title == "GPU memory report"


@pytest.mark.parametrize("shown", ODD.values())
def test_names_with_escapes_line_ends_and_commands_are_text(page: Any, shown: str) -> None:
    find(page, shown.lower())
    assert names(page) == [shown]
    assert "taken" not in page.title


def test_tests_can_be_searched_sorted_and_expanded(page: Any) -> None:
    assert len(names(page)) == 200
    find(page, "many test_012")
    assert names(page) == [f"test_{number:04}" for number in range(120, 130)]
    page.execute_script("sortBy('peak')")
    assert names(page)[0] == "test_0129"
    assert page.find_element("id", "count").text == "10 of 506 tests"
    find(page, "")
    page.find_element("id", "more").click()
    assert len(names(page)) == 506


def test_details_of_a_test_have_every_number_with_its_unit(page: Any) -> None:
    text = opened(page)
    for said in (
        "forward peaked at 80.0 MiB (83,886,080 B), 16.0 MiB over its baseline of 64.0 MiB",
        "peak, after event 2 of 3: 80.0 MiB allocated (activations 80.0 MiB), reserved 96.0 MiB",
        ", inactive split 10.0 MiB",
        "allocated by model.py:7 torch.mm",
        "cuBLAS workspaces\n8.1 MiB (8,519,680 B)",
        "activations model.py:7 torch.mm head 2 × 40.0 MiB [2, 4] float32",
        # 80 of 96 MiB at the peak, 10 in free parts; at the end all but 512 B is free.
        "at the peak 96.0 MiB 80.0 MiB 10.0 MiB, 10.4 % 6.0 MiB, 6.3 %",
        "at the end 96.0 MiB 512 B 2.0 MiB, 2.1 % 94.0 MiB, 97.9 %",
        "64.0 MiB to 80.0 MiB (+16.0 MiB) in 2 reports, 1 step",
        "run-2 64.0 MiB 80.0 MiB +16.0 MiB",
    ):
        assert said in text.replace("\u00a0", " ")
    assert page.find_elements("css selector", ".timeline canvas")
    assert page.find_elements("css selector", ".treemap .tile")


def test_keys_read_and_zoom_the_time_line(page: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    opened(page)
    chart = page.find_element("css selector", ".timeline")
    note = page.find_element("css selector", ".timeline + .hovered")
    chart.send_keys(Keys.ARROW_RIGHT)
    assert note.text.startswith("after event 3 of 3: 512 B allocated")
    assert "80.0 MiB freed, from model.py:7" in note.text
    chart.send_keys(Keys.HOME)
    assert note.text == "after event 0 of 3: 0 B allocated, reserved 0 B, inactive split 0 B"


def test_no_element_is_wider_than_a_phone(page: Any) -> None:
    chromium.look_through(page, chromium.PHONE)
    opened(page)
    assert page.execute_script("return document.documentElement.scrollWidth") == 390


def test_the_first_failure_is_open_and_its_key_closes_it(page: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    button = page.find_element("css selector", "button.open")
    assert button.get_attribute("aria-expanded") == "true"
    assert len(page.find_elements("css selector", "tr.detail")) == 1
    button.send_keys(Keys.ENTER)
    assert page.find_elements("css selector", "tr.detail") == []


def test_arrow_keys_move_between_tests_and_slash_searches(page: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    first = page.find_element("css selector", "button.open")
    first.send_keys(Keys.ARROW_DOWN)
    focused = page.switch_to.active_element
    assert focused.find_element("css selector", ".test-name").text == names(page)[1]
    page.switch_to.active_element.send_keys("/")
    assert page.switch_to.active_element.get_attribute("id") == "find"


def test_history_is_drawn_as_a_line_with_its_steps(page: Any) -> None:
    (picture,) = page.find_elements("css selector", "td.trend svg")
    assert picture.accessible_name == "64.0 MiB to 80.0 MiB (+16.0 MiB) in 2 reports, 1 step"
    assert len(picture.find_elements("css selector", "circle.step")) == 1


def test_shared_use_shows_each_test_s_memory_over_time(page: Any) -> None:
    usage = page.find_element("id", "usage")
    assert "12.0 MiB of 16.0 MiB were granted at most, to 2 workers in 4.0 s." in usage.text
    first, second = usage.find_elements("css selector", "rect.run")
    # Two of four seconds, and three of four that start after one; the picture is 1,000 wide.
    assert (first.get_attribute("x"), first.get_attribute("width")) == ("0.0", "500.0")
    assert (second.get_attribute("x"), second.get_attribute("width")) == ("250.0", "750.0")
    said = first.find_element("css selector", "title").get_attribute("textContent")
    assert said == f"{HOSTILE} on gw0: 8.0 MiB from 0 ms to 2.0 s"


def test_a_status_that_is_deselected_is_not_shown(page: Any) -> None:
    page.find_element("css selector", "#statuses input").click()
    assert "test_step" not in names(page)
    assert page.find_element("id", "count").text == "505 of 506 tests"


@pytest.mark.parametrize("size", [chromium.DESKTOP, chromium.PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_an_accessibility_checker_finds_no_fault(
    page: Any, size: tuple[int, int], dark: bool
) -> None:
    chromium.look_through(page, size, dark=dark)
    find(page, "step")
    opened(page)
    assert chromium.inaccessible(page) == []
