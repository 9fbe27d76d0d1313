"""Which errors cost a process its CUDA context."""

from __future__ import annotations

import pytest
import torch

from pytest_gpumem.device.cuda import fault_of


def answer(monkeypatch: pytest.MonkeyPatch, text: str) -> str | None:
    def synchronize(device: int) -> None:
        if text:
            raise RuntimeError(text)

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    return fault_of(0)


def test_a_sound_device_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert answer(monkeypatch, "") is None


@pytest.mark.parametrize(
    "text",
    ["device-side assert triggered", "an illegal memory access was encountered"],
)
def test_what_lasts_is_told_in_its_first_line(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    # As torch raises it, with its advice on the lines below.
    error = f"CUDA error: {text}\nCUDA kernel errors might be asynchronously reported"
    assert answer(monkeypatch, error) == f"CUDA error: {text}"


@pytest.mark.parametrize(
    "text",
    ["operation not permitted when stream is capturing", "out of memory", "invalid argument"],
)
def test_what_passes_costs_nothing(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    assert answer(monkeypatch, f"CUDA error: {text}") is None
