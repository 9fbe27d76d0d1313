"""Reads of values that a shape-only execution does not have."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pytest_gpumem import simulate
from pytest_gpumem.values.errors import UnknownValueError, UnsupportedOperatorError

HERE = re.escape(Path(__file__).name)


def test_item_of_an_unknown_float_is_zero_and_noted_once_per_line() -> None:
    with simulate("T4") as gpu:
        loss = torch.rand(3, device="cuda").mean()
        for _ in range(3):
            assert f"{loss.item():.2f} {loss.item() + 1} {float(loss)}" == "0.00 1.0 0.0"
        assert len(gpu.notes) == 1
        assert re.fullmatch(
            rf"item\(\) at .*{HERE}:\d+ read a value that is not computed: it got 0\.0",
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
        lambda x: x.cpu().data_ptr(),
        lambda x: x.cpu().untyped_storage().data_ptr(),
        lambda x: x.cpu().argmax().item(),
        lambda x: bool(x.cpu().sum() > 0),
        lambda x: torch.equal(x, x + 1),
        lambda x: torch.allclose(x, x),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.unique(x),
        lambda x: torch.zeros(3).copy_(x).numpy(),
        lambda x: torch.zeros(3, dtype=torch.long).copy_(x),
        lambda x: torch.testing.assert_close(x, x + 1),
        lambda x: torch.testing.assert_close(x.cpu(), torch.ones(3)),
    ],
)
def test_other_reads_are_refused_with_their_line(read: Callable[[torch.Tensor], Any]) -> None:
    with simulate("T4"):
        x = torch.rand(3, device="cuda")
        with pytest.raises(UnknownValueError, match=rf"{HERE}:\d+.* only shapes are computed$"):
            read(x)


@pytest.mark.parametrize(
    "use",
    [
        lambda number: number == 0.0,
        lambda number: number != 0.0,
        lambda number: number < 1,
        lambda number: number.__ge__(1),
        lambda number: number - 1 >= 0,
        lambda number: max([number, 1.0]),
        lambda number: not number,
        lambda number: number == pytest.approx(0.0),
        lambda number: int(number),
        lambda number: math.ceil(number),
        lambda number: range(round(number)),
    ],
)
def test_conditions_on_a_neutral_number_are_refused(use: Callable[[float], Any]) -> None:
    with simulate("T4"):
        number = torch.rand((), device="cuda").item()
        with pytest.raises(
            UnknownValueError, match=rf"of an (item\(\)|integer of a tensor) at .*{HERE}:\d+"
        ):
            use(number)


def test_a_neutral_number_combines_with_tensors() -> None:
    with simulate("T4"):
        number = torch.rand((), device="cuda").item()
        assert (number * torch.ones(2)).tolist() == [0.0, 0.0]
        assert (number + torch.ones(2)).tolist() == [1.0, 1.0]


def test_a_loop_that_waits_for_a_number_ends() -> None:
    with simulate("T4"):
        x = torch.rand((), device="cuda")
        with pytest.raises(UnknownValueError, match=rf"{HERE}:\d+ .* 10,000 times"):
            while float(x) < 1:
                pass


def test_constants_and_copies_are_known() -> None:
    with simulate("T4") as gpu:
        x = torch.tensor([1.5, 2.5, 0.0], device="cuda")
        assert x[1].item() == 2.5
        assert x.tolist() == [1.5, 2.5, 0.0]
        assert x.cpu().tolist() == [1.5, 2.5, 0.0]
        assert bool(x[0])
        assert not bool(x[2])
        assert int(torch.full((2,), 7, device="cuda").sum()) == 14
        assert torch.tensor([3, 4]).cuda().view(1, 2)[0, 1].item() == 4
        assert torch.arange(6).to("cuda").view(2, 3).t().tolist() == [[0, 3], [1, 4], [2, 5]]
        assert torch.equal(torch.eye(3, device="cuda").cumsum(0), torch.ones(3, 3).tril().cuda())
        assert gpu.notes == ()


def test_known_values_decide_shapes() -> None:
    with simulate("T4"):
        mask = torch.arange(6, device="cuda") % 2 == 0
        x = torch.rand(6, 4, device="cuda", requires_grad=True)
        assert x[mask].shape == (3, 4)
        assert x.masked_select(mask[:, None]).shape == (12,)
        assert mask.nonzero().tolist() == [[0], [2], [4]]
        assert torch.where(mask)[0].tolist() == [0, 2, 4]
        assert mask.unique().tolist() == [False, True]
        repeats = mask.long()[:3] + 1
        assert repeats.repeat_interleave(repeats).tolist() == [2, 2, 1, 2, 2]
        x[mask].sum().backward()
        assert x.grad is not None
        assert x.grad.shape == (6, 4)


def test_a_mask_takes_the_memory_of_its_indices() -> None:
    with simulate("T4") as gpu:
        x = torch.rand(600, 4, device="cuda")
        mask = torch.arange(600, device="cuda") < 300
        before = len(gpu.trace)
        chosen = x[mask]
        events = [(event.action, event.size) for event in gpu.trace[before:]]
        assert chosen.shape == (300, 4)
    # 300 indices of 8 bytes are there while 300 rows of 16 are made, and then no more.
    indices, rows = events.index(("alloc", 300 * 8)), events.index(("alloc", 300 * 16))
    assert indices < rows < events.index(("free_completed", 300 * 8))


def test_a_list_of_indices_is_a_tensor_on_the_device() -> None:
    with simulate("T4") as gpu:
        x = torch.arange(6, device="cuda").view(2, 3)
        before = gpu.allocated
        assert x[:, [-1, 0]].tolist() == [[2, 0], [5, 3]]
        assert x[[1]].tolist() == [[3, 4, 5]]
        assert gpu.allocated == before
        # The indices, and then the selected elements.
        sizes = [event.size for event in gpu.trace if event.action == "alloc"]
        assert sizes[-4:] == [16, 32, 8, 24]


def test_printing_shows_known_values() -> None:
    with simulate("T4"):
        assert repr(torch.arange(3, device="cuda")) == "tensor([0, 1, 2], device='cuda:0')"
        weight = torch.ones(2, device="cuda", requires_grad=True)
        assert repr(weight) == "tensor([1., 1.], device='cuda:0', requires_grad=True)"
        assert repr(torch.rand(2, device="cuda")) == (
            "tensor(..., device='cuda:0', size=(2,), dtype=torch.float32)"
        )


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (lambda x: x.copy_(torch.zeros(3)), [0, 0, 0]),
        (lambda x: x.__setitem__(0, 5.0), [5, 2, 3]),
        (lambda x: torch._foreach_mul_([x], 2), [2, 4, 6]),
        (lambda x: x[:2].fill_(7), [7, 7, 3]),
        (lambda x: torch.add(x, 1, out=x), [2, 3, 4]),
        (lambda x: x.view(3, 1).zero_(), [0, 0, 0]),
        (lambda x: x.masked_fill_(x > 1, 0), [1, 0, 0]),
        (lambda x: x.detach().add_(1), [2, 3, 4]),
        (lambda x: x.index_put_((x[:1].long(),), x[2].clone()), [1, 3, 3]),
        (lambda x: setattr(x, "data", torch.arange(3.0, device="cuda")), [0, 1, 2]),
        (lambda x: x.resize_(2), [1, 2]),
        (lambda x: x.set_(torch.full((2,), 4.0, device="cuda")), [4, 4]),
    ],
)
def test_writes_of_known_values_are_followed(
    write: Callable[[torch.Tensor], Any], expected: list[float]
) -> None:
    with simulate("T4"):
        x = torch.tensor([1.0, 2.0, 3.0], device="cuda")
        write(x)
        assert x.tolist() == expected


@pytest.mark.parametrize(
    "write",
    [
        lambda x, y: x.copy_(y),
        lambda x, y: x.__setitem__(0, y[0]),
        lambda x, y: torch._foreach_mul_([x], [y]),
        lambda x, y: x[:2].normal_(),
        lambda x, y: torch.add(x, y, out=x),
        lambda x, y: x.view(3, 1).add_(y[0]),
        lambda x, y: x.masked_fill_(y > 1, 0),
        lambda x, y: x.index_put_((y[:1].long(),), x[:1]),
        lambda x, y: setattr(x, "data", y),
        lambda x, y: x.set_(y),
        lambda x, y: x.resize_(2000),
        lambda x, y: nn.functional.dropout(x, 0.5, True, inplace=True),
        lambda x, y: torch._fused_sgd_([x], [y], [], weight_decay=0.0, momentum=0.0, lr=0.1,
                                       dampening=0.0, nesterov=False, maximize=False,
                                       is_first_step=False),
    ],
)  # fmt: skip
def test_writes_of_unknown_values_make_a_tensor_unknown(
    write: Callable[[torch.Tensor, torch.Tensor], Any],
) -> None:
    with simulate("T4"):
        x = torch.tensor([1.0, 2.0, 3.0], device="cuda")
        write(x, torch.rand(3, device="cuda"))
        with pytest.raises(UnknownValueError):
            x.tolist()


def test_running_statistics_become_unknown_with_an_unknown_input() -> None:
    for dimensions, layer in ((2, nn.BatchNorm1d(3)), (4, nn.BatchNorm2d(3))):
        with simulate("T4"):
            layer.cuda()
            layer(torch.rand((4, 3, 5, 5)[:dimensions], device="cuda"))
            statistics = layer.state_dict()
            assert statistics["num_batches_tracked"].item() == 1
            with pytest.raises(UnknownValueError):
                statistics["running_mean"].tolist()


def test_known_values_are_dropped_with_their_storage() -> None:
    with simulate("T4"):
        for _ in range(50):
            torch.arange(4, device="cuda")
            with pytest.raises(UnknownValueError):
                torch.empty(4, dtype=torch.long, device="cuda")[0].item()


@pytest.mark.parametrize("made", [torch.zeros, torch.empty])
@pytest.mark.parametrize(
    "call",
    [
        lambda x, out, at: torch.max(x, 0, out=(out, at)),
        lambda x, out, at: torch.topk(x, 1, 0, out=(out, at)),
        lambda x, out, at: torch.sort(x[-1:], 0, out=(out, at)),
        lambda x, out, at: (torch.mul(x[-1], 1, out=out), torch.argmax(x, 0, out=at)),
    ],
)
def test_results_are_written_to_tensors_that_grow(call: Any, made: Any) -> None:
    with simulate("T4"):
        x = torch.arange(512.0, device="cuda").view(2, 256)
        out, at = made(0, device="cuda"), made(0, dtype=torch.long, device="cuda")
        before = torch.cuda.memory_allocated()
        call(x, out, at)
        assert (out.numel(), at.numel()) == (256, 256)
        assert torch.cuda.memory_allocated() - before == 256 * (4 + 8)
        assert out.flatten()[-1] == 511


def test_values_of_large_tensors_are_not_computed() -> None:
    with simulate("T4"):
        for x in (torch.ones(4097).cuda(), torch.ones(65_537, dtype=torch.long, device="cuda")):
            with pytest.raises(UnknownValueError):
                bool(x[0])
        mask = torch.ones(16, 4096, dtype=torch.bool, device="cuda")
        assert mask.all()


def test_numpy_of_a_cuda_tensor_is_torchs_error() -> None:
    with simulate("T4"), pytest.raises(TypeError, match="can't convert cuda:0 device type tensor"):
        torch.ones(3, device="cuda").numpy()


def test_copies_on_the_host_are_cpu_tensors_without_cuda_memory() -> None:
    with simulate("T4") as gpu:
        x = torch.rand(256, device="cuda")
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


def test_cpu_memory_into_which_unknown_values_are_copied_is_unknown() -> None:
    with simulate("T4"):
        x = torch.rand(8, device="cuda")
        shared = np.ones(8, dtype=np.float32)
        y = torch.from_numpy(shared)
        y.copy_(x)
        assert np.isnan(shared).all()  # reads of it cannot be seen
        total = torch.zeros(8).add_(y)
        for unknown in (y, y[2:4], y + 1, y.sum(), total, y.cuda()):
            with pytest.raises(UnknownValueError, match=rf"tolist\(\) at .*{HERE}:\d+"):
                unknown.tolist()
        assert f"{y.sum().item()}" == "0.0"
        y.zero_()
        assert y.sum().item() == 0.0
        assert y.tolist() == [0.0] * 8
        assert torch.zeros(3).copy_(torch.ones(3, device="cuda")).tolist() == [1.0] * 3


def test_an_optimizer_on_the_cpu_steps_with_gradients_of_the_gpu() -> None:
    with simulate("T4") as gpu:
        weight = torch.ones(8, requires_grad=True)
        weight.grad = torch.zeros(8)
        optimizer = torch.optim.AdamW([weight])
        for _ in range(2):
            weight.grad.copy_(torch.rand(8, device="cuda"))
            optimizer.step()
        assert weight.cuda().is_cuda
        assert gpu.allocated == 0
        with pytest.raises(UnknownValueError):
            weight.tolist()


def test_unknown_arguments_that_torch_validates_are_assumed_valid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # torch.compile turns validation off for the rest of the process.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    with simulate("T4") as gpu:
        mean, scale = torch.rand(3, device="cuda"), torch.rand(3, device="cuda")
        torch.distributions.Normal(mean, scale).log_prob(mean)
        torch.distributions.Categorical(logits=torch.rand(3, 4, device="cuda")).sample()
        torch.distributions.MultivariateNormal(mean, torch.rand(3, 3, device="cuda"))
        nn.functional.gaussian_nll_loss(mean, mean, scale)
        assert [note for note in gpu.notes if "cuSOLVER" not in note] == [
            "torch.distributions validated arguments whose values are not computed: they were "
            "taken for valid",
            "gaussian_nll_loss looked for negative variances, which are not computed: none was "
            "found",
        ]
        # Known values are validated.
        with pytest.raises(ValueError, match="to satisfy the constraint"):
            torch.distributions.Normal(torch.zeros(3, device="cuda"), -torch.ones(3, device="cuda"))


def test_a_condition_in_torchs_own_code_is_refused_by_name() -> None:
    with simulate("T4"):
        weight = torch.rand(100, 100, device="cuda", requires_grad=True)
        optimizer = torch.optim.LBFGS([weight])

        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            loss = weight.pow(2).sum()
            loss.backward()
            return loss

        sentence = rf"bool\(\) in torch\.optim\.lbfgs at .*{HERE}:\d+ depends on a value"
        with pytest.raises(UnknownValueError, match=sentence):
            optimizer.step(loss)


def test_a_model_moved_to_the_host_frees_its_memory() -> None:
    with simulate("T4") as gpu:
        model = nn.Linear(64, 64).cuda()
        weight = model.weight
        model.cpu()
        assert gpu.allocated == 0
        assert model.weight is weight
        model.cuda()
        assert gpu.allocated == 64 * 64 * 4 + 512


def test_a_gradient_scaler_steps_without_values() -> None:
    with simulate("T4"):
        model = nn.Linear(8, 8).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cuda")
        with torch.autocast("cuda"):
            loss = model(torch.rand(2, 8, device="cuda")).float().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert norm.is_cuda
        scaler.step(optimizer)
        scaler.update()
        assert scaler.state_dict()["_growth_tracker"] == 1
        assert scaler.get_scale() == 65536.0


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantizing_on_the_device_is_refused() -> None:
    with simulate("T4"):
        assert torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8).is_quantized
        with pytest.raises(UnsupportedOperatorError, match="quantize_per_tensor"):
            torch.quantize_per_tensor(torch.ones(4, device="cuda"), 0.1, 0, torch.quint8)


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
    ],
)
def test_functions_of_a_device_are_refused_by_name(
    run: Callable[[torch.Tensor], Any],
) -> None:
    with simulate("T4"), pytest.raises(UnsupportedOperatorError, match=rf"{HERE}:\d+ needs a real"):
        run(torch.ones(1, 3, device="cuda"))


def test_a_custom_operator_without_shapes_is_named() -> None:
    @torch.library.custom_op("gpumem_test::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    with simulate("T4"), pytest.raises(UnsupportedOperatorError, match=r"gpumem_test\.double"):
        double(torch.ones(3, device="cuda"))


def test_unknown_repeats_are_refused() -> None:
    with simulate("T4"), pytest.raises(UnknownValueError, match="repeat_interleave"):
        torch.ones(3, device="cuda").repeat_interleave(torch.rand(3, device="cuda").long())


def test_the_number_of_notes_is_bounded() -> None:
    with simulate("T4") as gpu:
        simulation_note = gpu._gpu.simulation.note
        for number in range(1000):
            simulation_note(f"note {number}")
        assert len(gpu.notes) == 20


def test_expanded_tensors_are_computed_up_to_a_size() -> None:
    with simulate("T4"):
        one = torch.ones(1, dtype=torch.int64, device="cuda")
        assert one.expand(1 << 20).sum().item() == 1 << 20
        many = one.expand(1 << 30)
        assert many[5].item() == 1
        with pytest.raises(UnknownValueError, match="only shapes are computed"):
            many.sum().item()
