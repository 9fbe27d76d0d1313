"""A line on a terminal that names a slow operation, and is removed at its end."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def progress_line(config: pytest.Config, text: str) -> Iterator[Callable[[str], None] | None]:
    """Show ``text`` below the current line, followed by the argument of the yielded function.

    Shows nothing, and yields ``None``, if pytest does not own the terminal: in a worker of xdist,
    where output is not captured, and with live logs.
    """
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is None or not _is_free(config):
        yield None
        return
    writer = config.get_terminal_writer()
    column, width = writer.width_of_current_line, writer.fullwidth

    def write(control: str) -> None:
        with capture.global_and_fixture_disabled():
            sys.stdout.write(control)
            sys.stdout.flush()

    def show(more: str) -> None:
        shown = f"{text}{more}"[: width - 1]
        write(f"\r\x1b[2K{shown}")

    write("\n")
    show("")
    try:
        yield show
    finally:
        write(f"\r\x1b[2K\x1b[A\x1b[{column + 1}G")


def _is_free(config: pytest.Config) -> bool:
    reporter = config.pluginmanager.getplugin("terminalreporter")
    return (
        reporter is not None
        and not hasattr(config, "workerinput")
        and reporter.isatty
        and os.environ.get("TERM", "dumb") != "dumb"
        and config.getoption("capture", "no") != "no"
        and not _logs_live(config)
    )


def _logs_live(config: pytest.Config) -> bool:
    if not config.pluginmanager.hasplugin("logging-plugin"):
        return False
    return config.getoption("log_cli_level", None) is not None or bool(config.getini("log_cli"))
