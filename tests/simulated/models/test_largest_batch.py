"""The largest batch of a real model on every simulated GPU: it runs, the next one does not."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from examples.cnn_memory.models import train_alexnet
from pytest_gpumem import fit_batch, simulate
from pytest_gpumem.prediction.batch import unfilled
from pytest_gpumem.simulated.gpu.catalogue import GPUS

Step = Callable[[int], None]

GIB = 1 << 30
TOKENS = 1024

NUMBERS = 124_439_808 - 10 * 7_087_872
"""Parameters of GPT-2 with two of its twelve layers."""


def gpt2_step() -> Step:
    """Return a training step of a two-layer GPT-2, whose memory is mostly logits."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers")
    made: list[Any] = []

    def step(batch: int) -> None:
        if not made:
            with torch.device("cuda"):
                model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=2))
            made.extend((model, torch.optim.AdamW(model.parameters())))
        model, optimizer = made
        tokens = torch.zeros(batch, TOKENS, dtype=torch.long, device="cuda")
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def runs(step: Step, gpu: str, *batches: int) -> bool:
    """Run ``batches`` one after the other on a new GPU; return whether all fit."""
    with simulate(gpu), unfilled():
        for batch in batches:
            gc.collect()
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
            try:
                step(batch)
            except torch.OutOfMemoryError:
                return False
        return True


@pytest.mark.parametrize("gpu", sorted(GPUS)[::4])
def test_the_largest_batch_of_alexnet_is_exact(gpu: str) -> None:
    fit = fit_batch(train_alexnet, [256, 512, 1024], gpu=gpu)
    assert fit.largest is not None
    assert runs(train_alexnet, gpu, fit.largest)
    assert not runs(train_alexnet, gpu, fit.largest + 1)
    # Small batches stay below Adam's peak; each sample of a large one takes some 4 MiB.
    assert 3.5 * 2**20 < (fit.total_memory - 1.2 * GIB) / fit.largest < 6 * 2**20


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("gpu", sorted(GPUS)[1::2])
def test_the_largest_batch_of_gpt2_is_exact(gpu: str) -> None:
    fit = fit_batch(gpt2_step(), [1, 2, 4], gpu=gpu)
    assert fit.largest is not None
    assert runs(gpt2_step(), gpu, 1, fit.largest)
    assert not runs(gpt2_step(), gpu, 1, fit.largest + 1)
    assert fit.larger_that_ran == ()
    # Weights, two moments and, in the step, gradients of so many numbers; a workspace.
    assert 16 * NUMBERS * 0.7 < fit.model_bytes < 16 * NUMBERS
