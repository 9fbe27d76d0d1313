"""Log records that pytest keeps of a measured test, as text.

pytest keeps every record until the test ends, with its arguments and exceptions: tensors, and the
frames of a traceback with their callers. Their memory would be in the numbers of the test that
makes the record, such as the first one that runs into a failed import.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from functools import partial
from logging import LogRecord
from typing import Any

import pytest


@contextmanager
def kept_as_text(item: pytest.Item) -> Iterator[None]:
    """Drop the objects of records that are captured inside, unless ``item`` uses ``caplog``."""
    logs = item.config.pluginmanager.get_plugin("logging-plugin")
    if logs is None or "caplog" in getattr(item, "fixturenames", ()):
        yield
        return
    handlers = (logs.caplog_handler, logs.report_handler)
    for handler in handlers:
        handler.emit = partial(_emit, handler)
    try:
        yield
    finally:
        for handler in handlers:
            vars(handler).pop("emit", None)


def _emit(handler: Any, record: LogRecord) -> None:
    kept = copy(record)  # other handlers get the record as it was made
    type(handler).emit(handler, kept)
    kept.msg, kept.args, kept.exc_info = kept.getMessage(), None, None
