"""torch.save and torch.load: known values are saved as by torch, unknown ones as shapes."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from pytest_gpumem import simulate
from pytest_gpumem.values.errors import UnknownValueError


def test_known_tensors_are_saved_with_their_device(tmp_path: Path) -> None:
    path = tmp_path / "known.pt"
    with simulate("T4") as gpu:
        torch.save({"x": torch.arange(4, device="cuda")}, path)
        loaded = torch.load(path)["x"]
        assert loaded.is_cuda
        assert loaded.tolist() == [0, 1, 2, 3]
        assert torch.load(path, map_location="cpu")["x"].tolist() == [0, 1, 2, 3]
        assert pickle.loads(pickle.dumps(loaded)).tolist() == [0, 1, 2, 3]
        assert gpu.notes == ()
    assert torch.load(path, map_location="cpu")["x"].tolist() == [0, 1, 2, 3]


def test_a_checkpoint_of_the_cpu_is_loaded_onto_the_device() -> None:
    file = io.BytesIO()
    torch.save(nn.Linear(64, 64).state_dict(), file)
    with simulate("T4") as gpu:
        model = nn.Linear(64, 64).cuda()
        file.seek(0)
        before = gpu.allocated
        state = torch.load(file, map_location="cuda")
        assert gpu.allocated - before == 64 * 64 * 4 + 512
        model.load_state_dict(state)
        assert torch.equal(model.weight, state["weight"])


@pytest.mark.parametrize("place", ["cuda", "cpu", torch.device("cuda:0"), None])
def test_unknown_tensors_are_saved_as_shapes(place: torch.device | str | None) -> None:
    with simulate("T4") as gpu:
        x = torch.rand(100, 100, device="cuda")
        file = io.BytesIO()
        torch.save([x, x[5:].t(), nn.Parameter(x)], file)
        assert "saved tensors whose values were not computed" in gpu.notes[0]
        file.seek(0)
        before = gpu.allocated
        one, part, parameter = torch.load(file, map_location=place)
        assert (one.shape, part.shape, part.stride()) == ((100, 100), (100, 95), (1, 100))
        assert isinstance(parameter, nn.Parameter)
        assert one.device.type == ("cpu" if place == "cpu" else "cuda")
        # The three share one storage, as the saved tensors did.
        assert gpu.allocated - before == (0 if place == "cpu" else 40_448)
        with pytest.raises(UnknownValueError):
            one.tolist()
        assert part.requires_grad is False
        assert (one * 2).shape == (100, 100)


def test_a_checkpoint_of_shapes_is_refused_outside_a_simulation() -> None:
    with simulate("T4"):
        content = pickle.dumps(torch.rand(3, device="cuda"))
    with pytest.raises(RuntimeError, match=r"simulated GPU, which had no values to save"):
        pickle.loads(content)


def test_real_values_are_saved() -> None:
    file = io.BytesIO()
    with simulate("T4", real_values=True):
        x = torch.rand(100, 100, device="cuda")
        torch.save(x, file)
        total = x.sum().item()
    file.seek(0)
    assert torch.load(file, map_location="cpu").sum().item() == pytest.approx(total)


def test_a_shallow_copy_shares_memory() -> None:
    with simulate("T4") as gpu:
        x = torch.rand(100, device="cuda")
        assert copy.copy(x).data_ptr() == x.data_ptr()
        assert copy.copy(torch.arange(3, device="cuda")).tolist() == [0, 1, 2]
        assert gpu.notes == ()
