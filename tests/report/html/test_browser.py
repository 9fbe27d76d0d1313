"""The page in a browser: no error, no request, and what a reader does works.

Needs selenium, Chromium and its driver; skipped where they are not installed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_gpumem.report.html import write_html
from tests.report.example_run import MIB, failing, measured, passing, record, verdict

webdriver = pytest.importorskip("selenium.webdriver")

FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync"
)
HOSTILE = "test_z[</script><img src=x onerror=document.title='taken'>]"
TIMELINE = {
    "events": 3,
    "positions": [0, 1, 2, 3],
    "categories": {"activations": [0, 512, 80 * MIB, 512]},
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


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    chromium, driver = map(shutil.which, ("chromium", "chromedriver"))
    if chromium is None or driver is None:
        pytest.skip("no Chromium with its driver is installed")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS.split(), f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        yield started
    finally:
        started.quit()


@pytest.fixture
def page(browser: Any, tmp_path: Path) -> Any:
    told = failing()
    assert told.measurement is not None
    shown = replace(
        told.measurement,
        composition={"activations": 80 * MIB},
        sites=(SITE,),
        timeline=TIMELINE,
    )
    many = [
        record(f"tests/test_many.py::test_{number:04}", measured(number * MIB))
        for number in range(500)
    ]
    leak = record(HOSTILE, measured(MIB), verdict("limit", MIB, 2 * MIB))
    records = [replace(told, measurement=shown), passing(), leak, *many]
    path = write_html(tmp_path / "page.html", records)
    browser.get("about:blank")
    browser.get_log("performance")
    browser.get(path.as_uri())
    return browser


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

    page.find_element("css selector", "button.open").send_keys(Keys.ENTER)
    shown = WebDriverWait(page, 20).until(
        lambda browser: browser.find_elements("css selector", "tr.detail .body")
    )
    text: str = shown[0].text
    return text


def test_it_opens_without_an_error_or_a_request(page: Any) -> None:
    opened(page)
    messages = [json.loads(entry["message"])["message"] for entry in page.get_log("performance")]
    asked = [
        message["params"]["request"]["url"]
        for message in messages
        if message["method"] == "Network.requestWillBeSent"
    ]
    assert [url for url in asked if url.startswith("http")] == []
    assert page.get_log("browser") == []
    assert page.title == "GPU memory report"


def test_failures_come_first_and_a_hostile_name_is_text(page: Any) -> None:
    assert names(page)[0] == "test_step"
    find(page, "onerror")
    assert names(page) == [HOSTILE]
    assert page.find_elements("css selector", "#rows img") == []
    assert page.title == "GPU memory report"


def test_finding_sorting_and_showing_more(page: Any) -> None:
    assert len(names(page)) == 200
    find(page, "many test_012")
    assert names(page) == [f"test_{number:04}" for number in range(120, 130)]
    page.execute_script("sortBy('peak')")
    assert names(page)[0] == "test_0129"
    assert page.find_element("id", "count").text == "10 of 503 tests"
    find(page, "")
    page.find_element("id", "more").click()
    assert len(names(page)) == 503


def test_what_opens_says_everything_with_its_unit(page: Any) -> None:
    text = opened(page)
    for said in (
        "forward peaked at 80.0 MiB (83,886,080 B), 16.0 MiB over its baseline of 64.0 MiB",
        "peak, after event 2 of 3: 80.0 MiB allocated (activations 80.0 MiB)",
        "allocated by model.py:7 torch.mm",
        "cuBLAS workspaces\n8.1 MiB (8,519,680 B)",
        "activations model.py:7 torch.mm head 2 × 40.0 MiB [2, 4] float32",
    ):
        assert said in text.replace("\u00a0", " ")
    assert page.find_elements("css selector", ".timeline canvas")
    assert page.find_elements("css selector", ".treemap .tile")


def test_the_time_line_is_read_and_zoomed_by_keys(page: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    opened(page)
    chart = page.find_element("css selector", ".timeline")
    note = page.find_element("css selector", ".timeline + .hovered")
    chart.send_keys(Keys.ARROW_RIGHT)
    assert note.text.startswith("after event 3 of 3: 512 B allocated")
    assert "80.0 MiB freed, from model.py:7" in note.text
    chart.send_keys(Keys.HOME)
    assert note.text == "after event 0 of 3: 0 B allocated"


def test_nothing_is_wider_than_a_phone(page: Any) -> None:
    page.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True},
    )
    try:
        opened(page)
        assert page.execute_script("return document.documentElement.scrollWidth") == 390
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
