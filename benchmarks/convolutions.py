"""Convolutions that others measured, most in half precision, against the same under simulation.

    python benchmarks/convolutions.py

The rule for halves (``cudnn._half_bytes``) was made from the ten widths of pytorch#123533, and that
three channels take nothing from the encoder's reserved memory. Nothing was made from other rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import torch
from producers.image_autoencoder import LATENT, Autoencoder
from single_numbers import MIB, Number, print_numbers
from torch import nn

from pytest_gpumem import simulate
from pytest_gpumem.prediction.batch import unfilled

GIB = 2**30
_ISSUES = "github.com/pytorch/pytorch/issues/{}"
WIDTHS = (4.02, 5.52, 6.15, 6.77, 7.40, 8.02, 8.65, 9.27, 9.90, 10.52)
"""GiB reserved after images of 1024, 1152, ... 2176 pixels, each made beside the one before."""


def images() -> Iterator[Number]:
    """One layer over wider and wider images."""
    with simulate("A100-40GB", torch_version="2.6", alloc_conf=""):
        layer = nn.Conv2d(256, 256, 3, padding=1).half().to("cuda")
        for step, measured in enumerate(WIDTHS):
            width = 1024 + 128 * step
            image = torch.empty(1, 256, 2048, width, dtype=torch.half, device="cuda")
            layer(image)
            yield Number(
                f"Conv2d(256, 256, 3), float16, 2048 x {width}: reserved",
                _ISSUES.format(123533),
                measured,
                torch.cuda.memory_reserved() / GIB,
                "GiB",
                "the rule was made from these ten" if not step else "",
                digits=2,
            )
            torch.cuda.empty_cache()


def _refused(run: Callable[[], object]) -> float:
    """GiB that the error says could not be allocated."""
    try:
        run()
    except torch.OutOfMemoryError as error:
        found = re.search(r"Tried to allocate ([\d.]+) GiB", str(error))
        if found:
            return float(found[1])
    return 0.0


def half_volumes() -> Iterator[Number]:
    """64 to 32 channels, at most and one more than cuDNN before 9.3 can index."""
    what, source = (
        "Conv3d(64, 32, 3), float16, {} x 370 x 251: {}",
        _ISSUES.format(95024) + ", A100",
    )
    with simulate("A100-80GB", torch_version="2.6", alloc_conf=""):
        layer = nn.Conv3d(64, 32, 3, padding=1).half().to("cuda")
        volume = torch.empty(1, 64, 361, 370, 251, dtype=torch.half, device="cuda")
        layer(volume)
        peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        del volume
        larger = torch.empty(1, 64, 362, 370, 251, dtype=torch.half, device="cuda")
        refused = _refused(lambda: layer(larger))
    for kind, measured, simulated in zip(
        ("allocated", "reserved"), (12_874_233_344, 12_880_707_584), peaks, strict=True
    ):
        yield Number(what.format(361, kind), source, measured, simulated, "bytes")
    yield Number(what.format(362, "refused"), source, 108.21, refused, "GiB", digits=2)


def cast_volumes() -> Iterator[Number]:
    """128 channels under autocast."""
    what, source = (
        "Conv3d(128, 128, 3), autocast, {0} x {0} x {0}: {1}",
        _ISSUES.format(136479) + ", A100",
    )
    note = "measured is nvidia-smi's, with the CUDA context"
    with simulate("A100-80GB", torch_version="2.6", alloc_conf=""):
        _cast_volume(248)
        reserved = torch.cuda.max_memory_reserved() / MIB
    yield Number(what.format(248, "reserved"), source, 19_171, reserved, "MiB", note)
    with simulate("A100-80GB", torch_version="2.6", alloc_conf=""):
        refused = _refused(lambda: _cast_volume(256))
    yield Number(what.format(256, "refused"), source, 108.00, refused, "GiB", digits=2)


def _cast_volume(size: int) -> None:
    volume = torch.empty(1, 128, size, size, size, device="cuda").half()
    layer = nn.Conv3d(128, 128, 3, padding=1).to("cuda")
    with torch.no_grad(), torch.autocast("cuda"):
        layer(volume)


def single_volumes() -> Iterator[Number]:
    """256 channels of float32."""
    what, source = (
        "Conv3d(256, 64, 3), float32, {} x 1090 x 1922: {}",
        _ISSUES.format(128947) + ", A100",
    )
    settings = "expandable_segments:True"
    with simulate("A100-80GB", torch_version="2.6", alloc_conf=settings):
        layer = nn.Conv3d(256, 64, 3).to("cuda")
        volume = torch.empty(1, 256, 4, 1090, 1922, device="cuda")
        before = torch.cuda.memory_allocated()
        layer(volume)
        peak = torch.cuda.max_memory_allocated()
        del volume
        larger = torch.empty(1, 256, 5, 1090, 1922, device="cuda")
        refused = _refused(lambda: layer(larger))
    yield Number(
        what.format(4, "allocated before"),
        source,
        7.993362903594971,
        before / GIB,
        "GiB",
        "not a multiple of 2 MiB: expandable segments",
        digits=15,
    )
    yield Number(what.format(4, "peak allocated"), source, 17, peak / GIB, "GiB")
    yield Number(what.format(5, "refused"), source, 161.37, refused, "GiB", digits=2)


def three_channels() -> Iterator[Number]:
    """An output that cuDNN before 9.3 cannot index: patches as columns."""
    with simulate("H100", torch_version="2.6", alloc_conf=""), torch.no_grad():
        layer = nn.Conv3d(3, 128, 3, padding=1).to("cuda", dtype=torch.bfloat16)
        layer(torch.empty(1, 3, 24, 740, 1316, dtype=torch.bfloat16, device="cuda"))
        peak = torch.cuda.max_memory_allocated()
    yield Number(
        "Conv3d(3, 128, 3), bfloat16, 24 x 740 x 1316: peak allocated",
        _ISSUES.format(132300),
        9.26,
        peak / GIB,
        "GiB",
        "GPU not stated: with the cuBLAS workspace of an H100, 9.24 with an A100's",
        digits=2,
    )


DECODED = {
    (512, 512): (1.311, 1.274),
    (768, 768): (2.992, 2.563),
    (832, 1248): (5.211, 4.331),
    (1024, 1024): (5.254, 4.369),
    (1088, 1920): (10.408, 8.468),
    (1280, 1280): (8.188, 6.693),
    (1536, 1024): (7.857, 6.434),
    (1536, 1536): (11.736, 9.532),
    (1792, 1792): (15.949, 12.884),
    (2048, 2048): (20.799, 16.754),
}
ENCODED = {
    (512, 512): (0.711, 0.900),
    (768, 768): (1.594, 1.724),
    (832, 1248): (2.824, 2.854),
    (1024, 1024): (2.848, 2.879),
    (1088, 1920): (5.672, 5.498),
    (1280, 1280): (4.459, 4.364),
    (1536, 1024): (4.281, 4.199),
    (1536, 1536): (6.396, 6.179),
}
"""GiB by height and width: reserved beyond the model, and allocated with it."""


def autoencoder(version: str, dtype: torch.dtype, *shape: int) -> tuple[float, float]:
    """GiB reserved beyond the model, and allocated with it, for latents or an image."""
    with simulate("RTX-4090", torch_version=version, alloc_conf=""), torch.no_grad():
        with unfilled():  # its numbers do not matter, and take longer than all the rest
            made = Autoencoder()
        model = made.to("cuda", dtype).eval()
        before = torch.cuda.memory_reserved()
        given = torch.empty(1, *shape, dtype=dtype, device="cuda")
        model.decode(given) if shape[0] == LATENT else model.encode(given)
        grown = torch.cuda.max_memory_reserved() - before
        return grown / GIB, torch.cuda.max_memory_allocated() / GIB


def autoencoders() -> Iterator[Number]:
    """Qwen-Image's autoencoder, image by image."""
    source = "github.com/invoke-ai/InvokeAI/pull/9305, RTX 4090, torch 2.7"
    for name, table in (("decode", DECODED), ("encode", ENCODED)):
        for (height, width), measured in table.items():
            decoding = name == "decode"
            shape = (LATENT, 1, height // 8, width // 8) if decoding else (3, 1, height, width)
            simulated = autoencoder("2.7", torch.half, *shape)
            for kind, stated, here in zip(
                ("reserved", "allocated"), measured, simulated, strict=True
            ):
                what = f"Qwen-Image {name}, float16, {height} x {width}: {kind}"
                yield Number(what, source, stated, here, "GiB", digits=3)


def regressions() -> Iterator[Number]:
    """The same autoencoder where torch leaves cuDNN out for volumes of halves, and before."""
    note = "size not stated: 1664 x 928 is the model's own of 16:9"
    for version, measured in (("2.8", 6.3), ("2.9", 12.7)):
        _, peak = autoencoder(version, torch.bfloat16, LATENT, 1, 928 // 8, 1664 // 8)
        what = f"Qwen-Image decode, bfloat16, torch {version}: allocated"
        yield Number(what, _ISSUES.format(177406), measured, peak, "GiB", note, digits=1)


def convolutions() -> Iterator[Number]:
    """Every row."""
    for source in (
        images,
        half_volumes,
        cast_volumes,
        single_volumes,
        three_channels,
        autoencoders,
        regressions,
    ):
        yield from source()


if __name__ == "__main__":
    print_numbers(convolutions())
