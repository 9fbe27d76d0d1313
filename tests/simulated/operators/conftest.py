"""Fixtures that read the bytes that a piece of code allocated and freed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pytest_gpumem import simulate


class Watched:
    """A simulated GPU with the events since the last read."""

    def __init__(self, gpu: Any) -> None:
        self._gpu = gpu
        self._seen = 0
        self.events()

    def events(self) -> list[int]:
        """Bytes allocated (positive) and freed (negative) since the last call, in order."""
        signs = {"alloc": 1, "free_requested": -1}
        new = self._gpu.trace[self._seen :]
        self._seen += len(new)
        return [signs[entry.action] * entry.size for entry in new if entry.action in signs]

    def of(self, call: Callable[[], Any]) -> list[int]:
        """Return the events of ``call()`` while its result lives."""
        self.events()
        result = call()
        events = self.events()
        del result
        return events


@pytest.fixture
def on(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``on("A100-40GB", "2.6")``: a watched GPU, active until the test ends.

    cuBLAS keeps its workspaces, which torch 2.15 does only with its cache enabled.
    """
    monkeypatch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", "1")
    contexts: list[Any] = []

    def start(model: str = "A100-40GB", version: str | None = None) -> Watched:
        context = simulate(model, torch_version=version, alloc_conf="")
        contexts.append(context)
        return Watched(context.__enter__())

    yield start
    for context in reversed(contexts):
        context.__exit__(None, None, None)
