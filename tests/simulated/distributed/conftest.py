"""Ranks: workspaces of cuBLAS stay, which since 2.15 they do only where torch is told so."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def workspaces_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", "1")
