"""A browser that opens pages; tests that need it are skipped where it is not installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.report.html import chromium


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if problem := chromium.missing():
        pytest.skip(problem)
    started = chromium.start(tmp_path_factory.mktemp("profile"))
    try:
        yield started
    finally:
        started.quit()


@pytest.fixture
def opened_page(browser: Any) -> Callable[[Path], Any]:
    """Return a function that opens a file in the browser, on a desktop in light colours."""

    def opening(path: Path) -> Any:
        chromium.look_through(browser)
        browser.get("about:blank")
        for log in ("performance", "browser"):
            browser.get_log(log)
        browser.get(path.as_uri())
        return browser

    return opening
