"""Captures of CUDA graphs that a body leaves open: CUDA allows no wait for a device until they end.

Sources: cudaStreamEndCapture in the CUDA Runtime API; torch/cuda/graphs.py, torch 2.6 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from pytest_gpumem.simulated.common.patching import Patches


@contextmanager
def captures_ended() -> Iterator[None]:
    """End the captures that begin inside and are still open at the end."""
    kind = torch.cuda.CUDAGraph
    # capture_end() calls the first, since 2.15; a program may call it alone.
    name = "capture_end_pre" if hasattr(kind, "capture_end_pre") else "capture_end"
    under_way: dict[torch.cuda.CUDAGraph, torch.cuda.Stream] = {}
    """The graphs with their streams; a graph that is dropped does not end its capture."""

    def begin(original: Callable[..., None], graph: Any, *args: Any, **kwargs: Any) -> None:
        original(graph, *args, **kwargs)
        under_way[graph] = torch.cuda.current_stream()

    def end(original: Callable[..., None], graph: Any) -> None:
        try:
            original(graph)
        finally:
            if graph in under_way and not _is_capturing(under_way[graph]):
                del under_way[graph]

    patches = Patches()
    patches.wrap(kind, "capture_begin", begin)
    patches.wrap(kind, name, end)
    with patches.applied():
        try:
            yield
        finally:
            for graph, stream in reversed([*under_way.items()]):
                # An invalidated capture raises its error, and ends; an empty one warns.
                with suppress(RuntimeError, UserWarning), torch.cuda.stream(stream):
                    graph.capture_end()


def _is_capturing(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()
