"""Reads of values that a shape-only execution does not have."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytest_gpumem import simulate
from pytest_gpumem.simulated.errors import UnknownValueError, UnsupportedOperatorError

HERE = re.escape(Path(__file__).name)


def test_item_of_a_float_is_zero_and_said_once_per_line() -> None:
    with simulate("T4") as gpu:
        loss = torch.ones(3, device="cuda").mean()
        for _ in range(3):
            assert loss.item() == 0.0
        assert len(gpu.notes) == 1
        assert re.fullmatch(
            rf"item\(\) at .*{HERE}:\d+ read a value that shapes do not have: it got 0\.0",
            gpu.notes[0],
        )


@pytest.mark.parametrize(
    "read",
    [
        lambda x: bool((x > 0).all()),
        lambda x: int(x.argmax()),
        lambda x: x.argmax().item(),
        lambda x: x.tolist(),
        lambda x: x.cpu().tolist(),
        lambda x: x.cpu().numpy(),
        lambda x: x.cpu().argmax().item(),
        lambda x: bool(x.cpu().sum() > 0),
        lambda x: torch.equal(x, x),
        lambda x: torch.allclose(x, x),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.unique(x),
        lambda x: torch.zeros(3).copy_(x),
        lambda x: torch.testing.assert_close(x, x + 1),
        # Its lengths may lie on the CPU: not a mix of devices.
        lambda x: nn.functional.ctc_loss(
            torch.zeros(5, 1, 4, device="cuda"),
            x[None].long(),
            torch.tensor([5]),
            torch.tensor([3]),
        ),
        lambda x: torch.testing.assert_close(x.cpu(), torch.ones(3)),
    ],
)
def test_other_reads_are_refused_naming_the_line(read: Callable[[torch.Tensor], Any]) -> None:
    with simulate("T4"):
        x = torch.ones(3, device="cuda")
        with pytest.raises(UnknownValueError, match=rf"{HERE}:\d+.* only shapes are computed$"):
            read(x)


def test_what_was_copied_from_the_cpu_is_known_until_it_is_written_to() -> None:
    with simulate("T4") as gpu:
        x = torch.tensor([1.5, 2.5, 0.0], device="cuda")
        assert x[1].item() == 2.5
        assert x.tolist() == [1.5, 2.5, 0.0]
        assert x.cpu().tolist() == [1.5, 2.5, 0.0]
        assert bool(x[0])
        assert not bool(x[2])
        assert torch.tensor([3, 4]).cuda().view(1, 2)[0, 1].item() == 4
        assert torch.arange(6).to("cuda").view(2, 3).t().tolist() == [[0, 3], [1, 4], [2, 5]]
        x.add_(1)
        notes = [len(gpu.notes), x[1].item(), len(gpu.notes)]
        assert notes == [0, 0.0, 1]
        with pytest.raises(UnknownValueError):
            x.tolist()


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.copy_(torch.zeros(3)),
        lambda x: x.__setitem__(0, 5.0),
        lambda x: torch._foreach_mul_([x], 2),
        lambda x: x[:2].fill_(7),
        lambda x: torch.add(x, 1, out=x),
        lambda x: x.view(3, 1).zero_(),
    ],
)
def test_every_way_to_write_makes_values_unknown(write: Callable[[torch.Tensor], Any]) -> None:
    with simulate("T4"):
        x = torch.tensor([1.0, 2.0, 3.0], device="cuda")
        write(x)
        with pytest.raises(UnknownValueError):
            x.tolist()


def test_large_copies_are_not_kept() -> None:
    with simulate("T4"):
        x = torch.ones(4097).cuda()
        with pytest.raises(UnknownValueError):
            x.tolist()


def test_numpy_of_a_cuda_tensor_is_torchs_error() -> None:
    with simulate("T4"), pytest.raises(TypeError, match="can't convert cuda:0 device type tensor"):
        torch.ones(3, device="cuda").numpy()


def test_copies_on_the_host_are_cpu_tensors_without_cuda_memory() -> None:
    with simulate("T4") as gpu:
        x = torch.ones(256, device="cuda")
        y = x.cpu()
        z = (y * 2).to(torch.float16)
        assert (y.device.type, y.is_cpu, y.is_cuda, y.is_meta) == ("cpu", True, False, False)
        assert z.device.type == "cpu"
        assert y.cpu() is y
        assert repr(y) == "tensor(..., device='cpu', size=(256,), dtype=torch.float32)"
        assert gpu.peak_allocated == 1024
        back = y.cuda()
        assert back.is_cuda
        assert gpu.allocated == 2048
        with pytest.raises(RuntimeError, match="found at least two devices"):
            x + y
        del back


def test_a_model_moved_to_the_host_frees_its_memory() -> None:
    with simulate("T4") as gpu:
        model = nn.Linear(64, 64).cuda()
        weight = model.weight
        model.cpu()
        assert gpu.allocated == 0
        assert model.weight is weight
        model.cuda()
        assert gpu.allocated == 64 * 64 * 4 + 512


def test_gradient_scaler_steps() -> None:
    with simulate("T4"):
        model = nn.Linear(8, 8).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cuda")
        with torch.autocast("cuda"):
            loss = model(torch.ones(2, 8, device="cuda")).float().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert norm.is_cuda
        scaler.step(optimizer)
        scaler.update()


def test_an_operator_without_shapes_is_named() -> None:
    with torch.library._scoped_library("gpumem_test", "DEF") as library:
        library.define("kernel(Tensor x) -> Tensor")
        with (
            simulate("T4"),
            pytest.raises(
                UnsupportedOperatorError,
                match=rf"gpumem_test\.kernel\.default at .*{HERE}:\d+ has no shape-only",
            ),
        ):
            torch.ops.gpumem_test.kernel(torch.ones(3, device="cuda"))


@pytest.mark.parametrize(
    "run",
    [
        lambda x: torch.export.export(nn.Linear(3, 3).cuda(), (x,)),
        lambda x: torch.cuda.CUDAGraph(),
    ],
)
def test_what_needs_a_real_device_is_refused_by_name(run: Callable[[torch.Tensor], Any]) -> None:
    with simulate("T4"), pytest.raises(UnsupportedOperatorError, match=rf"{HERE}:\d+ needs a real"):
        run(torch.ones(1, 3, device="cuda"))


def test_a_custom_operator_without_shapes_is_named() -> None:
    @torch.library.custom_op("gpumem_test::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    with simulate("T4"), pytest.raises(UnsupportedOperatorError, match=r"gpumem_test\.double"):
        double(torch.ones(3, device="cuda"))


def test_repeats_known_only_by_value_are_refused() -> None:
    with simulate("T4"), pytest.raises(UnknownValueError, match="repeat_interleave"):
        x = torch.ones(3, device="cuda")
        x.repeat_interleave(torch.tensor([1, 2, 3], device="cuda"))


def test_notes_do_not_grow_without_end() -> None:
    with simulate("T4") as gpu:
        simulation_note = gpu._gpu.simulation.note
        for number in range(1000):
            simulation_note(f"note {number}")
        assert len(gpu.notes) == 20
