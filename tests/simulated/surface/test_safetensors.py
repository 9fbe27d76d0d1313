"""safetensors, which reads memory by address: unknown ones are written as marker bytes."""

from __future__ import annotations

import ctypes
import types
from typing import Any

import pytest
import torch

from pytest_gpumem import simulate
from pytest_gpumem.values.errors import UnknownValueError

CODE = """
import ctypes

def written(tensor):
    tensor = tensor.to("cpu")
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())

def address(tensor):
    return tensor.untyped_storage().data_ptr()
"""


@pytest.fixture
def safetensors() -> Any:
    """Functions like those of ``safetensors.torch``, in a module of that name."""
    module = types.ModuleType("safetensors.torch")
    exec(compile(CODE, "site-packages/safetensors/torch.py", "exec"), vars(module))
    return module


@pytest.mark.parametrize("elements", [10, 100_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_unknown_values_are_written_as_marker_bytes(
    safetensors: Any, elements: int, dtype: torch.dtype
) -> None:
    with simulate("T4") as gpu:
        tensor = torch.rand(elements, device="cuda").to(dtype)
        assert safetensors.written(tensor) == b"\xff" * elements * dtype.itemsize
        (note,) = gpu.notes
    assert note.startswith("safetensors at ")
    assert "test_safetensors.py" in note


def test_views_of_one_storage_have_its_addresses(safetensors: Any) -> None:
    with simulate("T4"):
        whole = torch.rand(1000, 1000, device="cuda").cpu()
        begin = safetensors.address(whole)
        assert safetensors.address(whole[10:]) == begin
        assert safetensors.written(whole[10:]) == b"\xff" * 990 * 1000 * 4
        assert safetensors.address(torch.rand(1000, 1000, device="cuda").cpu()) != begin


def test_known_values_are_written_as_they_are(safetensors: Any) -> None:
    with simulate("T4"):
        written = safetensors.written(torch.tensor([1, 2], device="cuda"))
        assert written == bytes([1] + [0] * 7 + [2] + [0] * 7)
    with simulate("T4", real_values=True):
        numbers = torch.rand(3, device="cuda")
        expected = numbers.cpu().numpy().tobytes()
        assert safetensors.written(numbers) == expected


def test_other_code_cannot_read_the_address_of_unknown_values() -> None:
    with simulate("T4"):
        tensor = torch.rand(3, device="cuda").cpu()
        with pytest.raises(UnknownValueError, match=r"^data_ptr\(\) at "):
            ctypes.string_at(tensor.data_ptr(), 12)
