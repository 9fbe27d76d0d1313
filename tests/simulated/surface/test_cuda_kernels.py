"""Operators with CUDA kernels alone: their real values are computed, or refused by name."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pytest_gpumem import simulate
from pytest_gpumem.values.errors import UnknownValueError

aten = torch.ops.aten


def matrices(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.skipif(not hasattr(aten.mm, "dtype"), reason="since torch 2.8")
def test_products_with_another_result_dtype_are_computed() -> None:
    a, b, added = matrices(torch.bfloat16, (4, 8), (8, 6), (4, 6))
    product, wide = a.float() @ b.float(), added.float()
    with simulate("H100", real_values=True):
        x, y, z = a.cuda(), b.cuda(), added.cuda()
        nan = torch.full_like(wide, torch.nan).cuda()
        found = {
            "mm": torch.mm(x, y, out_dtype=torch.float32),
            "bmm": torch.bmm(x[None], y[None], out_dtype=torch.float32)[0],
            "addmm": torch.addmm(z, x, y, beta=2, alpha=3, out_dtype=torch.float32),
            "baddbmm": torch.baddbmm(z[None], x[None], y[None], out_dtype=torch.float32)[0],
            "without": torch.addmm(nan, x, y, beta=0, out_dtype=torch.float32),
            "out": torch.mm(
                x, y, out_dtype=torch.float32, out=torch.empty(4, 6, device="cuda")
            ),
        }  # fmt: skip
        assert torch.mm(x, y, out_dtype=torch.float32).sum().item() == pytest.approx(
            product.sum().item()
        )
        expected = {
            "addmm": 2 * wide + 3 * product,
            "baddbmm": wide + product,
        }
        for name, result in found.items():
            torch.testing.assert_close(result.cpu(), expected.get(name, product))


def test_scaled_products_are_computed() -> None:
    a, b = matrices(torch.float8_e4m3fn, (16, 32), (48, 32))
    product = a.float() @ b.float().T
    rows, columns = torch.arange(1.0, 17)[:, None], torch.arange(1.0, 49)[None]
    with simulate("H100", real_values=True):
        x, y = a.cuda(), b.cuda().T
        two = torch.tensor(2.0, device="cuda")
        whole = torch._scaled_mm(x, y, two, two, out_dtype=torch.bfloat16)
        by_row = torch._scaled_mm(x, y, rows.cuda(), columns.cuda(), out_dtype=torch.bfloat16)
        torch.testing.assert_close(whole.cpu(), (4 * product).bfloat16())
        torch.testing.assert_close(by_row.cpu(), (rows * product * columns).bfloat16())


def test_four_bit_weights_are_packed_in_the_layout_of_tensor_cores() -> None:
    numbers = torch.arange(16 * 64).view(16, 64) * 7 % 16
    weight = (numbers[:, ::2] << 4 | numbers[:, 1::2]).to(torch.uint8)
    x = torch.arange(3 * 64).view(3, 64).bfloat16() / 64
    scales = torch.arange(1.0, 33).view(2, 16)
    with simulate("A100-40GB", real_values=True):
        packed = torch.ops.aten._convert_weight_to_int4pack(weight.cuda(), 2)
        assert packed.shape == (2, 2, 32, 1)
        # Thread 5 has columns 2, 3, 10, 11 of row 1, in both tiles of the second pair.
        columns = [34, 42, 50, 58, 35, 43, 51, 59]
        word = sum(int(numbers[1, at]) << 4 * place for place, at in enumerate(columns))
        assert int(packed[0, 1, 5, 0]) & 0xFFFFFFFF == word
        both = torch.stack([scales, scales / 2], -1).bfloat16().cuda()
        found = torch.ops.aten._weight_int4pack_mm(x.cuda(), packed, 32, both).cpu()
    each = scales.repeat_interleave(32, 0).t()
    expected = x.float() @ ((numbers - 8) * each + each / 2).t()
    torch.testing.assert_close(found, expected.bfloat16())


def test_fused_dropout_scales_what_it_keeps() -> None:
    with simulate("T4", real_values=True):
        out, mask = torch._fused_dropout(torch.full((1000,), 3.0, device="cuda"), 0.75)
        assert 650 < int(mask.sum()) < 850
        torch.testing.assert_close(out, mask * 4.0)
        again = torch._masked_scale(torch.ones(1000, device="cuda"), mask, 2.0)
        torch.testing.assert_close(again, mask * 2.0)


@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_attend_within_themselves(causal: bool) -> None:
    lengths = [5, 1, 10]
    ends = torch.tensor([0, 5, 6, 16], dtype=torch.int32)
    q, k, v = (m.requires_grad_() for m in matrices(torch.float32, *[(16, 2, 8)] * 3))
    parts = []
    for sequence in zip(*(m.split(lengths) for m in (q, k, v)), strict=True):
        x, y, z = (one.transpose(0, 1) for one in sequence)
        parts.append(F.scaled_dot_product_attention(x, y, z, is_causal=causal).transpose(0, 1))
    expected = torch.cat(parts)
    gradients = torch.autograd.grad(expected.square().sum(), (q, k, v))
    with simulate("A100-40GB", real_values=True):
        x, y, z = (m.detach().bfloat16().cuda() for m in (q, k, v))
        e = ends.cuda()
        out, total, seed, offset, _ = aten._flash_attention_forward(
            x, y, z, e, e, 10, 10, 0.0, causal, False
        )
        torch.testing.assert_close(out.cpu().float(), expected.detach(), rtol=0.05, atol=0.05)
        found = aten._flash_attention_backward(
            2 * out, x, y, z, out, total, e, e, 10, 10, 0.0, causal, seed, offset
        )
        x, y, z = (m.detach()[None].cuda() for m in (q, k, v))
        efficient, total, seed, offset, *_ = aten._efficient_attention_forward(
            x, y, z, None, e, e, 10, 10, 0.0, int(causal), True
        )
        torch.testing.assert_close(efficient.cpu()[0], expected.detach())
        for one, gradient in zip(found, gradients, strict=True):
            torch.testing.assert_close(one.cpu().float(), gradient, rtol=0.1, atol=0.1)


@pytest.mark.skipif(not hasattr(aten, "_fused_rms_norm_backward"), reason="since torch 2.9")
def test_backward_of_the_fused_norm_is_computed() -> None:
    x, gradient, weight = matrices(torch.float32, (4, 6), (4, 6), (6,))
    x.requires_grad_(), weight.requires_grad_()
    expected = torch.autograd.grad(F.rms_norm(x, (6,), weight, 1e-6), (x, weight), gradient)
    root = (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt().detach()
    with simulate("A100-40GB", real_values=True):
        given = gradient.cuda(), x.detach().cuda(), [6], root.cuda(), weight.detach().cuda()
        found = aten._fused_rms_norm_backward(*given, [True, True])
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.cpu(), other)


def test_an_operator_that_cannot_be_computed_is_refused_by_name() -> None:
    with simulate("A100-40GB", real_values=True) as gpu:
        y = torch._cslt_compress(torch.ones(32, 64, device="cuda").half()).float()
        sentence = r"aten\._cslt_compress\.default cannot be computed on the CPU"
        for read in (lambda: y.sum().item(), lambda: bool((y > 0).any()), lambda: y.tolist()):
            with pytest.raises(UnknownValueError, match=sentence):
                read()
        assert gpu.notes == ()
