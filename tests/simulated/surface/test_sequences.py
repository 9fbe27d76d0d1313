"""Lists of tensors, and sequences as indices, on the GPU and on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pytest_gpumem import simulate
from pytest_gpumem.simulated.surface.factories import is_sequence


def on_cpu() -> torch.Tensor:
    return torch.tensor([torch.tensor(1.5), 2, torch.tensor(True)])


def test_lists_of_cpu_tensors_keep_their_values() -> None:
    with simulate("T4"):
        assert on_cpu().tolist() == [1.5, 2.0, 1.0]
        assert not is_sequence(torch.tensor(1.0))
        assert not is_sequence(torch.nn.Parameter(torch.ones(())))
        assert torch.arange(3, device="cuda")[[2, 0]].tolist() == [2, 0]
    assert on_cpu().tolist() == [1.5, 2.0, 1.0]
    assert not is_sequence(torch.tensor(1.0))


@pytest.mark.parametrize("real_values", [False, True])
def test_lists_of_known_gpu_tensors_keep_their_values(real_values: bool) -> None:
    with simulate("T4", real_values=real_values):
        x = torch.tensor(3.0, device="cuda")
        row = torch.tensor([1, 2], device="cuda")
        half = x.half()
        made: list[tuple[Any, Any, str, torch.dtype]] = [
            (torch.tensor([x, x / 2]), [3.0, 1.5], "cpu", torch.float32),
            (torch.tensor(data=(x, 1)), [3.0, 1.0], "cpu", torch.float32),
            (torch.tensor([half, half]), [3.0, 3.0], "cpu", torch.float16),
            (torch.tensor([[x, 1], [2, x]], device="cuda"), [[3, 1], [2, 3]], "cuda", x.dtype),
            (torch.tensor([row, row]), [[1, 2], [1, 2]], "cpu", torch.int64),
            (torch.tensor([x], dtype=torch.int32), [3], "cpu", torch.int32),
            (torch.as_tensor([x, 2.5]), [3.0, 2.5], "cpu", torch.float32),
            (torch.as_tensor([x], device="cuda"), [3.0], "cuda", torch.float32),
            (row.new_tensor([x]), [3], "cuda", torch.int64),
        ]
        for found, expected, device, dtype in made:
            assert (found.tolist(), found.device.type, found.dtype) == (expected, device, dtype)


def test_a_second_positional_argument_is_refused() -> None:
    with simulate("T4"):
        x = torch.tensor(3.0, device="cuda")
        with pytest.raises(TypeError, match="takes 1 positional argument but 2 were given"):
            torch.tensor([x], torch.int32)  # the mistake


def test_unknown_values_in_a_list_are_zero_with_a_note() -> None:
    with simulate("T4") as gpu:
        losses = torch.tensor([torch.randn((), device="cuda") for _ in range(3)])
        assert (losses.shape, losses.device.type) == ((3,), "cpu")
        assert any("item()" in note for note in gpu.notes)


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
@pytest.mark.parametrize(
    "index",
    [
        *([2, 0], [-1], [], range(2), range(0), [np.int64(2), 0], [True, False, True]),
        *(((2, 0),), (range(2), [1, 2]), ((0, 2), (1, 2)), (slice(None), [False, True, True])),
        *((slice(None), [[0, 1], [1, 2]]), [[0, 1], [1, 2]], (..., None, range(2)), ([], 0)),
        *(np.array([0, 2]), (0, np.array([0, 2])), [np.array([0, 1]), [1, 2]]),
    ],
    ids=repr,
)
def test_sequences_are_known_indices(index: Any) -> None:
    expected = torch.arange(9).view(3, 3)
    with simulate("T4"):
        x = torch.arange(9, device="cuda").view(3, 3)
        assert x[index].tolist() == expected[index].tolist()
        x[index] = 7
        expected[index] = 7
        assert x.tolist() == expected.tolist()
