"""Ranks: cuBLAS keeps its workspaces, which torch 2.15 does only with its cache enabled."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def workspaces_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", "1")
