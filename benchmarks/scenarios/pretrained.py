"""Models of the transformers library, as initialised, of real size; nothing is downloaded."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch

from scenarios import Scenario

IMPORTED_LATER = ("models",)

CASES = (
    "BERT-base 32x128",
    "GPT-2-small 8x1024",
    "T5-base 16x512",
    "ViT-B/16 64x224",
    "Whisper-small 8x30s",
)
"""Those of benchmarks/models.py that fit on many GPUs."""


def trained(name: str, *, autocast: bool = False, recomputes: bool = False) -> Any:
    """Return a program that does two steps with AdamW."""

    def run() -> Any:
        case = _case(name)
        with torch.device("cuda"):
            model = case.make().train()
        if recomputes:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        inputs = {key: tensor.cuda() for key, tensor in case.inputs().items()}
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            with torch.autocast("cuda", dtype=torch.bfloat16) if autocast else nullcontext():
                loss = model(**inputs).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer, inputs

    return run


def used(name: str) -> Any:
    """Return a program that makes one forward pass without gradients."""

    def run() -> Any:
        case = _case(name)
        with torch.device("cuda"):
            model = case.make().eval()
        inputs = {key: tensor.cuda() for key, tensor in case.inputs().items()}
        with torch.inference_mode():
            return model, inputs, model(**inputs)

    return run


def _case(name: str) -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.simplefilter("ignore")
    import models

    return models.CASES[name]


def scenarios() -> Iterator[Scenario]:
    """Yield every model in its ways."""
    for name in CASES:
        for ending, run in (
            ("", trained(name)),
            (" autocast", trained(name, autocast=True)),
            (" checkpointing", trained(name, recomputes=True)),
            (" inference", used(name)),
        ):
            short = name.replace("/", "-")
            yield Scenario(f"transformers/{short}{ending}", run, __name__, package="transformers")
