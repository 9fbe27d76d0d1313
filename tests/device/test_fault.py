"""Errors after which a process has no usable CUDA context."""

from __future__ import annotations

import pytest
import torch

from pytest_gpumem.device.cuda import fault_of


def fault_after(monkeypatch: pytest.MonkeyPatch, text: str) -> str | None:
    def synchronize(device: int) -> None:
        if text:
            raise RuntimeError(text)

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    return fault_of(0)


def test_a_sound_device_has_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fault_after(monkeypatch, "") is None


@pytest.mark.parametrize(
    "text",
    ["device-side assert triggered", "an illegal memory access was encountered"],
)
def test_a_lasting_error_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    # As torch raises it, with its advice on the lines below.
    error = f"CUDA error: {text}\nCUDA kernel errors might be asynchronously reported"
    assert fault_after(monkeypatch, error) == f"CUDA error: {text}"


@pytest.mark.parametrize(
    "text",
    ["operation not permitted when stream is capturing", "out of memory", "invalid argument"],
)
def test_an_error_that_passes_is_no_fault(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    assert fault_after(monkeypatch, f"CUDA error: {text}") is None
