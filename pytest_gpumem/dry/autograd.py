"""Autograd's threads, one for each device, which hold the last task until they wait for another.

A task that has run for ``torch.autograd.grad`` holds its results (``future_result_`` of
torch/csrc/autograd/graph_task.h). The thread drops it after it has woken the caller
(``Engine::thread_main`` of torch/csrc/autograd/engine.cpp, torch 2.6 to 2.15), which on a busy
machine is after the caller's memory has been read.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

_NAME = "pt_autograd_"
"""The beginning of the threads' names, before the index of the device."""


def wait_for_threads() -> None:
    """Wait until autograd's running threads have dropped their last tasks."""
    for index in _devices():
        with torch.enable_grad():
            # Without elements: nothing is allocated, and no kernel runs.
            leaf = torch.empty(0, device=f"cuda:{index}", requires_grad=True)
            root = leaf.view(0)
        engine: Any = torch.autograd.Variable._execution_engine
        engine.run_backward(
            (root,), (leaf.detach(),), False, False, (leaf,), allow_unreachable=True
        )


def restart_numbering() -> None:
    """Count the nodes of every thread from zero, as in a new process (``source/numbers.c``)."""
    ctypes.CDLL(None).pytest_gpumem_dry_number_anew()


def _devices() -> Iterator[int]:
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError, ValueError):  # it has ended meanwhile, or has no device
            name = (thread / "comm").read_text().strip()
            if name.startswith(_NAME):
                yield int(name.removeprefix(_NAME))
