"""The progress of a command, as a terminal shows it."""

from __future__ import annotations

import io
import sys
import time

import pytest

from pytest_gpumem import progress as module
from pytest_gpumem.progress import progress

pytest.importorskip("tqdm")


class Terminal(io.StringIO):
    """A stream that reports to be a terminal."""

    def isatty(self) -> bool:
        return True


def on_terminal(monkeypatch: pytest.MonkeyPatch, delay: float) -> Terminal:
    found = Terminal()
    monkeypatch.setattr(sys, "stderr", found)
    monkeypatch.setattr(module, "DELAY", delay)
    monkeypatch.setattr(module, "INTERVAL", 0.01)
    return found


def test_short_work_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch, delay=60.0)
    with progress("predict") as shown:
        shown.expect(2)
        shown.step()
    assert "predict" not in terminal.getvalue()


def test_long_work_shows_time_and_share_and_erases_the_line_at_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = on_terminal(monkeypatch, delay=0.01)
    out = io.StringIO()
    with progress("predict") as shown:
        time.sleep(0.1)
        shown.expect(4)
        shown.step()
        time.sleep(0.1)
        shown.say("a line", out)
        time.sleep(0.1)
    written = terminal.getvalue()
    assert "\rpredict: 00:00" in written
    assert "| 1 of 4, 00:00" in written
    assert written.endswith(" \r")
    assert out.getvalue() == "a line\n"


def test_a_file_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DELAY", 0.0)
    monkeypatch.setattr(sys, "stderr", written := io.StringIO())
    with progress("predict") as shown:
        shown.step()
        time.sleep(0.05)
    assert written.getvalue() == ""
