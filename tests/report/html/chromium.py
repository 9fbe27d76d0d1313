"""Chromium without a window, as tests and benchmarks of the page drive it."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --hide-scrollbars "
    "--disable-background-networking --disable-component-update --disable-sync"
)
DESKTOP, PHONE = (1280, 900), (390, 844)
"""Pixels, width and height."""


def missing() -> str:
    """Return a sentence that names what is not installed; empty if nothing is missing."""
    if find_spec("selenium") is None:
        return "selenium is not installed, which drives the browser"
    if None in map(shutil.which, ("chromium", "chromedriver")):
        return "no Chromium with its driver is installed"
    return ""


def start(profile: Path) -> Any:
    """Start the browser with its profile in the folder ``profile``."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in (*FLAGS.split(), f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    return webdriver.Chrome(options=options, service=service)


def look_through(browser: Any, size: tuple[int, int] = DESKTOP, *, dark: bool = False) -> None:
    """Show pages as on a screen of ``size``, in light or dark colours."""
    width, height = size
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == PHONE},
    )
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


def requests(browser: Any) -> list[str]:
    """Return the network requests since the last call."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [
        message["params"]["request"]["url"]
        for message in messages
        if message["method"] == "Network.requestWillBeSent"
    ]
    return [url for url in asked if url.startswith("http")]


def inaccessible(browser: Any) -> list[str]:
    """Return the findings of axe, an accessibility checker; skip where it is not installed."""
    import pytest

    found = find_spec("axe_playwright_python")
    if found is None or not found.submodule_search_locations:
        pytest.skip("axe-playwright-python is not installed, which ships the checker axe")
    (folder,) = found.submodule_search_locations
    browser.execute_cdp_cmd(
        "Runtime.evaluate", {"expression": (Path(folder) / "axe.min.js").read_text("utf-8")}
    )
    result = browser.execute_async_script(
        "axe.run().then(arguments[0], (error) => arguments[0]({violations: [], error: `${error}`}))"
    )
    assert "error" not in result, result
    return [
        f"{broken['id']}: {node['target']} {node['failureSummary']}"
        for broken in result["violations"]
        for node in broken["nodes"]
    ]
