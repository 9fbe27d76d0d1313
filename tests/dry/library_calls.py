"""Programs that call NVIDIA's libraries, run dry and simulated in one process."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import pytest_gpumem

_CONVOLUTIONS = {
    "Conv1d": 1,
    "Conv2d": 2,
    "Conv3d": 3,
    "ConvTranspose1d": 1,
    "ConvTranspose2d": 2,
    "ConvTranspose3d": 3,
}
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _convolution(
    name: str,
    dtype: torch.dtype = torch.float32,
    *,
    channels: tuple[int, int] = (64, 32),
    size: int = 24,
    backward: bool = True,
    channels_last: bool = False,
    **options: Any,
) -> None:
    dims = _CONVOLUTIONS[name]
    layer = getattr(nn, name)(*channels, options.pop("kernel", 3), padding=1, **options)
    layer = layer.to("cuda", dtype)
    images = torch.randn(4, channels[0], *[size] * dims, device="cuda", dtype=dtype)
    if channels_last:
        layer = layer.to(memory_format=torch.channels_last)
        images = images.to(memory_format=torch.channels_last)
    output = layer(images.requires_grad_(backward))
    if backward:
        output.sum().backward()


def _recurrent(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> None:
    layer = getattr(nn, name)(96, 128, **options).to("cuda", dtype)
    steps = torch.randn(20, 8, 96, device="cuda", dtype=dtype, requires_grad=True)
    layer(steps)[0].sum().backward()


def _packed() -> None:
    layer = nn.LSTM(96, 128, 2, bidirectional=True).cuda()
    steps = torch.randn(20, 8, 96, device="cuda", requires_grad=True)
    lengths = torch.tensor([20, 19, 18, 17, 8, 7, 6, 1])
    layer(nn.utils.rnn.pack_padded_sequence(steps, lengths))[0].data.sum().backward()


def _inference() -> None:
    with torch.no_grad():
        nn.GRU(96, 128, 2).cuda().eval()(torch.randn(20, 8, 96, device="cuda"))


def _batch_norm(dtype: torch.dtype, memory_format: torch.memory_format) -> None:
    images = torch.randn(8, 32, 24, 24, device="cuda", dtype=dtype)
    nn.BatchNorm2d(32).cuda()(images.to(memory_format=memory_format)).sum().backward()


def _connectionist() -> None:
    scores = torch.randn(50, 16, 20, device="cuda").log_softmax(2).detach().requires_grad_()
    targets = torch.randint(1, 20, (16, 30), device="cuda")
    lengths = torch.full((16,), 50), torch.full((16,), 30)
    nn.functional.ctc_loss(scores, targets, *lengths).backward()


def _network() -> None:
    layers = [
        nn.Conv2d(3, 64, 7, 2, 3),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Conv2d(64, 512, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(512, 512, 1),
        nn.ReLU(),
        nn.Conv2d(512, 512, 3, 2, 1, groups=4),
    ]
    model = nn.Sequential(*layers).cuda()
    for _ in range(2):
        model(torch.randn(8, 3, 96, 96, device="cuda")).sum().backward()


def _attention() -> None:
    query, key, value = (
        torch.randn(2, 8, 777, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        output = nn.functional.scaled_dot_product_attention(query, key, value)
    output.sum().backward()


def _without_tf32() -> None:
    torch.backends.cudnn.allow_tf32 = False
    try:
        _convolution("Conv2d", channels=(128, 128))
    finally:
        torch.backends.cudnn.allow_tf32 = True


_FORMATS = (torch.contiguous_format, torch.channels_last)

PROGRAMS: dict[str, Callable[[], object]] = {
    **{
        f"{name}, {str(dtype)[6:]}, {'backward' if backward else 'forward'}": partial(
            _convolution, name, dtype, backward=backward
        )
        for name in _CONVOLUTIONS
        for dtype in _DTYPES
        for backward in (False, True)
    },
    **{
        f"channels last, {str(dtype)[6:]}": partial(
            _convolution, "Conv2d", dtype, channels_last=True
        )
        for dtype in (*_DTYPES, torch.float64)
    },
    "float64": partial(_convolution, "Conv2d", torch.float64),
    "many channels": partial(_convolution, "Conv2d", channels=(512, 512), size=14),
    "a stride": partial(_convolution, "Conv2d", channels=(128, 256), size=28, stride=2),
    "one pixel": partial(_convolution, "Conv2d", channels=(128, 256), size=28, kernel=1),
    "no TF32": _without_tf32,
    "a network, twice": _network,
    **{
        f"{name}, {str(dtype)[6:]}": partial(_recurrent, name, dtype)
        for name in ("LSTM", "GRU", "RNN")
        for dtype in (torch.float32, torch.float16)
    },
    **{
        f"{name}, bidirectional": partial(_recurrent, name, bidirectional=True)
        for name in ("LSTM", "GRU", "RNN")
    },
    **{
        f"{name}, batch first": partial(_recurrent, name, batch_first=True)
        for name in ("LSTM", "GRU", "RNN")
    },
    "a projection": partial(_recurrent, "LSTM", num_layers=2, proj_size=64),
    "no biases": partial(_recurrent, "LSTM", bias=False),
    "packed": _packed,
    "inference": _inference,
    **{
        f"batch norm, {str(dtype)[6:]}, {str(memory_format)[6:]}": partial(
            _batch_norm, dtype, memory_format
        )
        for dtype in (torch.float32, torch.float16)
        for memory_format in _FORMATS
    },
    "attention, bfloat16": _attention,
    "CTC": _connectionist,
    "fft": lambda: torch.fft.fft(torch.randn(64, 1000, device="cuda")),
    "rfft": lambda: torch.fft.rfft(torch.randn(64, 1000, device="cuda")),
    "irfft": lambda: torch.fft.irfft(torch.randn(64, 501, device="cuda", dtype=torch.complex64)),
    "fft2": lambda: torch.fft.fft2(torch.randn(16, 64, 64, device="cuda")),
    # The last one: torch keeps the state of its dropout.
    "a dropout": partial(_recurrent, "GRU", num_layers=3, dropout=0.5),
}


def peaks(gpu: str) -> dict[str, tuple[int, int]]:
    """Return the peak of each program in bytes, on the dry device and on a simulated ``gpu``.

    Below Ampere cuDNN does not take bfloat16: no workspace is asked for.
    """
    takes_bfloat16 = torch.cuda.get_device_capability() >= (8, 0)
    chosen = {
        name: program
        for name, program in PROGRAMS.items()
        if takes_bfloat16 or "bfloat16" not in name
    }
    return {name: (_dry(program), _simulated(program, gpu)) for name, program in chosen.items()}


def _dry(program: Callable[[], object]) -> int:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    program()
    return torch.cuda.max_memory_allocated() - before


def _simulated(program: Callable[[], object], gpu: str) -> int:
    with pytest_gpumem.simulate(gpu) as simulated:
        program()
    return simulated.peak_allocated
