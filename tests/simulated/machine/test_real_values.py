"""Real values of a simulated GPU equal the CPU's, and known values equal real ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pytest_gpumem import simulate
from pytest_gpumem.simulated.machine.values import reading as values
from pytest_gpumem.simulated.simulation import active_simulation
from pytest_gpumem.values.errors import HostMemoryError, UnknownValueError

Program = Callable[[str], Any]


def constants(device: str) -> Any:
    mask = torch.ones(4, 4, dtype=torch.bool, device=device).tril()
    positions = torch.arange(4, device=device)
    x = torch.full((4, 4), 3, device=device)
    x[mask] = 7
    x[1:, 0] = positions[1:]
    x.T[2].add_(5)
    return mask, x, x[mask], mask.nonzero(), positions.repeat_interleave(positions), x.unique()


def views(device: str) -> Any:
    x = torch.arange(24, device=device).view(2, 3, 4)
    y = x.transpose(0, 2)
    y[0] = -1
    z = y.contiguous()
    z.mul_(2)
    x.data = torch.stack((x[0], z[:, :, 0].T.contiguous()))
    a = torch.zeros(4, device=device)
    a.set_(torch.arange(4.0, device=device).untyped_storage(), 1, (3,), (1,))
    b = torch.arange(4.0, device=device).view(torch.int32)
    return x, y, z, a, b, x.t() if x.dim() < 3 else x.unsqueeze_(0).squeeze_(0)


def outs(device: str) -> Any:
    one, two = torch.ones(3, device=device), torch.arange(3.0, device=device)
    out = torch.empty(3, device=device)
    grown = torch.empty(0, device=device)
    torch.add(one, two, out=out)
    torch.mul(out, 2, out=grown)
    joined = torch.cat([one, two], out=torch.empty(0, device=device))
    largest = torch.zeros(0, device=device)
    places = torch.empty(0, dtype=torch.long, device=device)
    torch.topk(joined, 2, out=(largest, places))
    return joined, largest, out, grown, torch.where(two > 1), torch.masked_select(two, two > 0)


def lists(device: str) -> Any:
    tensors = [torch.ones(2, device=device), torch.arange(3.0, device=device)]
    torch._foreach_mul_(tensors, 3.0)
    torch._foreach_add_(tensors, [t.clone() for t in tensors])
    return *tensors, *torch._foreach_sqrt(tensors), torch.stack(torch._foreach_norm(tensors))


def masks(device: str) -> Any:
    lengths = torch.tensor([2, 0, 5], device=device)
    mask = torch.arange(5, device=device)[None] < lengths[:, None]
    flat = torch.arange(15, device=device).view(3, 5)
    flat.masked_fill_(~mask, -1).index_put_((lengths > 1,), torch.tensor(9, device=device))
    kept = flat[None, mask]
    return mask, flat, kept, mask.cumsum(1), torch.bincount(lengths), F.one_hot(lengths, 6)


def training(device: str) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5)
    )
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
    x = torch.linspace(-1, 1, 6 * 48).view(6, 3, 4, 4).to(device)
    losses = []
    for _ in range(3):
        loss = F.cross_entropy(model(x), torch.arange(6, device=device) % 5)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    model.eval()
    return *losses, model(x), *model.state_dict().values()


def attention(device: str) -> Any:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 8, 16).to(device).requires_grad_() for _ in range(3))
    bias = torch.randn(2, 4, 8, 8).to(device).requires_grad_()
    results = [F.scaled_dot_product_attention(q, k, v, is_causal=True)]
    results.append(F.scaled_dot_product_attention(q, k, v, bias))
    results.append(F.scaled_dot_product_attention(q, k, v, scale=0.3))
    torch.stack([one.square().sum() for one in results]).sum().backward()
    return *results, q.grad, k.grad, v.grad, bias.grad


def transformer(device: str) -> Any:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).to(device)
    x = torch.linspace(-1, 1, 2 * 5 * 16).view(2, 5, 16).to(device)
    out = model(x)
    out.square().mean().backward()
    return out, *(parameter.grad for parameter in model.parameters())


def recurrent(device: str) -> Any:
    torch.manual_seed(0)
    results: list[Any] = []
    for layer in (
        nn.LSTM(4, 6, 2, batch_first=True, bidirectional=True),
        nn.GRU(4, 6, 2),
        nn.RNN(4, 6),
        nn.LSTM(4, 6, bias=False),
    ):
        layer.to(device)
        x = torch.linspace(-1, 1, 3 * 5 * 4).view(3, 5, 4).to(device).requires_grad_()
        out, _ = layer(x)
        if layer.batch_first:
            packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3, 1]), True)
            results.append(layer(packed)[0].data)
            results[-1].sum().backward(retain_graph=True)
        out.square().sum().backward()
        results += [out, x.grad, *(parameter.grad for parameter in layer.parameters())]
    return results


def cells(device: str) -> Any:
    torch.manual_seed(0)
    results: list[Any] = []
    for kind in (nn.LSTMCell, nn.GRUCell):
        cell = kind(4, 6).to(device)
        x = torch.linspace(-1, 1, 12).view(3, 4).to(device).requires_grad_()
        state = cell(x)
        again = cell(x, state)
        hidden = again if isinstance(again, Tensor) else again[0] + again[1]
        hidden.square().sum().backward()
        results += [hidden, x.grad, *(parameter.grad for parameter in cell.parameters())]
    return results


def small_losses(device: str) -> Any:
    torch.manual_seed(0)
    x = torch.linspace(-2, 2, 24).view(4, 6).to(device).requires_grad_()
    weight = torch.linspace(1, 2, 6).to(device).requires_grad_()
    y = F.rms_norm(F.mish(x), (6,), weight, 1e-6)
    losses = [
        F.binary_cross_entropy_with_logits(y, (x.detach() > 0).float()),
        F.mse_loss(y, x.detach()),
        y.logsumexp(1).sum(),
        F.logsigmoid(y).mean(),
        F.softmax(y, 1).masked_fill(x.detach() > 1, 0.0).cumprod(1).sum(),
    ]
    torch.stack(losses).sum().backward()
    return *losses, y, x.grad, weight.grad


PROGRAMS = [
    constants, views, outs, lists, masks, training, attention, transformer, recurrent,
    small_losses, cells,
]  # fmt: skip


def flat(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    return [tensor for value in values for tensor in flat(value)]


@pytest.mark.parametrize("program", PROGRAMS)
def test_real_values_equal_those_of_the_cpu(program: Program) -> None:
    expected = flat(program("cpu"))
    with simulate("A100-40GB", real_values=True) as gpu:
        found = flat(program("cuda"))
        assert all(tensor.is_cuda for tensor in found)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-5)
        assert not any("do not have" in note for note in gpu.notes)


@pytest.mark.parametrize("program", PROGRAMS)
def test_known_values_equal_those_of_the_cpu(program: Program) -> None:
    expected = flat(program("cpu"))
    with simulate("A100-40GB"):
        found = flat(program("cuda"))
        simulation = active_simulation()
        assert simulation is not None
        for one, other in zip(found, expected, strict=True):
            known = simulation.values.known(one)
            if known is not None:
                torch.testing.assert_close(known, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("program", PROGRAMS)
def test_real_values_change_no_allocation(program: Program) -> None:
    def events(real_values: bool) -> list[Any]:
        with simulate("A100-40GB", real_values=real_values) as gpu:
            results = program("cuda")
            del results
            return [(event.action, event.size, event.addr) for event in gpu.trace]

    assert events(True) == events(False)


@pytest.mark.parametrize(
    ("gpu", "dtype"),
    [("A100-40GB", torch.float32), ("A100-40GB", torch.bfloat16), ("H100", torch.bfloat16)],
)
def test_attention_drops_the_same_weights_in_both_passes(gpu: str, dtype: torch.dtype) -> None:
    # Three kernels: efficient, flash and cuDNN's.
    with simulate(gpu, torch_version="2.13", real_values=True):
        q, k, v, gradient = (
            torch.randn(2, 4, 16, 32, device="cuda", dtype=dtype) for _ in range(4)
        )
        v.requires_grad_()
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
        again = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
        out.backward(gradient)
        assert v.grad is not None
        assert not torch.equal(out, again)
        # The output is linear in the values.
        by_values = (v.detach().double() * v.grad.double()).sum()
        by_output = (out.detach().double() * gradient.double()).sum()
        assert by_values.item() == pytest.approx(by_output.item(), rel=0.02, abs=0.5)


@pytest.mark.parametrize("real_values", [False, True])
def test_a_mask_of_another_shape_is_refused(real_values: bool) -> None:
    with simulate("T4", real_values=real_values):
        x, mask = torch.ones(4, 5, device="cuda"), torch.ones(4, 3, device="cuda").bool()
        with pytest.raises(IndexError, match=r"mask \[4, 3\] at index 1 .* \[4, 5\] at index 1"):
            x[mask]
        with pytest.raises(IndexError, match=r"mask \[4\] at index 0 .* \[4, 5\] at index 1"):
            x[:, mask[:, 0]]


def test_random_numbers_come_from_the_devices_generator() -> None:
    torch.manual_seed(7)
    on_cpu = torch.rand(3)
    with simulate("T4", real_values=True):
        torch.manual_seed(7)
        on_device = torch.rand(3, device="cuda")
        assert torch.rand(3).tolist() == on_cpu.tolist()
        torch.cuda.manual_seed(7)
        assert torch.equal(torch.rand(3, device="cuda"), on_device)
        generator = torch.Generator("cuda").manual_seed(3)
        first = torch.randn(3, device="cuda", generator=generator)
        assert torch.equal(first, torch.randn(3, device="cuda", generator=generator.manual_seed(3)))


def test_uninitialised_memory_has_no_values() -> None:
    with simulate("T4", real_values=True):
        x = torch.empty(4, device="cuda")
        with pytest.raises(UnknownValueError):
            x.tolist()
        x[:2] = 1
        x[2:] = torch.rand(2, device="cuda")
        assert x.tolist()[:2] == [1, 1]


def test_a_custom_operator_is_computed_by_its_own_kernel() -> None:
    @torch.library.custom_op("gpumem_test::tripled", mutates_args=())
    def tripled(x: Tensor) -> Tensor:
        return x * 3

    @tripled.register_fake
    def shapes(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    with simulate("T4", real_values=True):
        assert tripled(torch.arange(3, device="cuda")).tolist() == [0, 3, 6]
    with simulate("T4"), pytest.raises(UnknownValueError):
        tripled(torch.arange(3, device="cuda")).sum().item()


def test_values_larger_than_the_hosts_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "available_memory", lambda: 100_000)
    with simulate("T4", real_values=True):
        x = torch.rand(10_000, device="cuda")
        with pytest.raises(HostMemoryError, match="real values take more than 50,000 bytes"):
            x + 1
        del x
        torch.rand(10_000, device="cuda")
