"""Traces of a test's body in its process, removed after it: settings, processes, log records.

A test's numbers must not depend on other tests. Settings made by fixtures stay.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import copy
from functools import partial
from logging import LogRecord
from typing import Any

import pytest

from pytest_gpumem.garbage import settings_restored

_MEASURES_WITH = (
    *("current_device", "device_count", "empty_cache", "get_device_properties", "is_available"),
    *("is_initialized", "memory_allocated", "memory_reserved", "memory_snapshot", "memory_stats"),
    *("max_memory_allocated", "reset_peak_memory_stats", "synchronize"),
)
"""Functions of torch.cuda that measurements call: a body's replacement of them is undone."""


@contextmanager
def process_restored() -> Iterator[None]:
    """Restore settings that code inside changes: collector, ``sys.path``, torch's defaults."""
    torch = sys.modules.get("torch")
    is_loaded = hasattr(torch, "set_default_device")
    path, before = sys.path, list(sys.path)
    with settings_restored(), _torch_restored(torch) if is_loaded else nullcontext():
        try:
            yield
        finally:
            sys.path = path  # entries that the code has added stay
            path += [entry for entry in before if entry not in path]


@contextmanager
def _torch_restored(torch: Any) -> Iterator[None]:
    # Looked up before the body, which may replace them.
    set_grad_enabled, set_default_dtype = torch._C._set_grad_enabled, torch.set_default_dtype
    set_default_device = torch.set_default_device
    grad, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    device = _default_device(torch)
    autocast = {kind: torch.is_autocast_enabled(kind) for kind in ("cuda", "cpu")}
    set_autocast_enabled, nesting = torch.set_autocast_enabled, torch.autocast_increment_nesting
    depth = nesting() - 1
    leave = torch.autocast_decrement_nesting
    leave()
    cuda, functions = torch.cuda, {name: getattr(torch.cuda, name) for name in _MEASURES_WITH}
    set_device, current = cuda.set_device, cuda.current_device() if cuda.is_initialized() else None
    try:
        yield
    finally:
        vars(cuda).update(functions)
        if current is not None:
            set_device(current)
        if _default_device(torch) != device:
            set_default_device(device)
        set_default_dtype(dtype)
        set_grad_enabled(grad)
        for kind, enabled in autocast.items():
            set_autocast_enabled(kind, enabled)
        nesting()
        while leave() > depth:
            pass
        if not depth:
            torch.clear_autocast_cache()


def memory_fractions_kept() -> Callable[[], None]:
    """Return a function that restores the fractions that the process may now reserve of devices.

    It is called after a failure was explained, which names the fraction that a body has set.
    """
    cuda = sys.modules["torch"].cuda
    fraction_of, set_fraction = (
        cuda.get_per_process_memory_fraction,
        cuda.set_per_process_memory_fraction,
    )
    devices = range(cuda.device_count()) if cuda.is_initialized() else ()
    kept = {index: fraction_of(index) for index in devices}

    def restore() -> None:
        for index, fraction in kept.items():
            if fraction_of(index) != fraction:  # the allocator's errors name one that was ever set
                set_fraction(fraction, index)

    return restore


def _default_device(torch: Any) -> Any:
    """Return ``set_default_device``'s argument, ``None`` without a call; contexts do not count."""
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


@contextmanager
def end_of_children(nodeid: str) -> Iterator[None]:
    """End a process that ``os.fork()`` made inside and that leaves: it would be a second pytest.

    Its exit code is that of a script that ends here. A sentence on the test ``nodeid`` goes to its
    standard error, below the place of an exception.
    """
    process = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != process:
            _end(sys.exc_info()[1], nodeid)


def _end(error: BaseException | None, nodeid: str) -> None:
    code = 0 if error is None else 1
    shown = ""
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    elif error is not None:
        shown = "".join(traceback.format_exception(error, limit=-1))
    sentence = f"{shown}gpumem: process {os.getpid()}, forked by {nodeid}, ends with the body\n"
    os.write(2, sentence.encode(errors="backslashreplace"))
    os._exit(code & 0xFF)


@contextmanager
def records_kept_as_text(item: pytest.Item) -> Iterator[None]:
    """Drop the objects of log records captured inside, unless ``item`` uses ``caplog``.

    pytest keeps every record until the test ends, with its arguments and exceptions: tensors, and
    the frames of a traceback with their callers. Their memory would be in the numbers of the test
    that makes the record, such as the first one that runs into a failed import.
    """
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
