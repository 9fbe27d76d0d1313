"""The memory of inference beside training, in phases that the test names."""

from __future__ import annotations

import pytest
import torch
from torch.optim import AdamW

from examples.transformer.model import Transformer
from examples.transformer.training import random_tokens, train_step
from pytest_gpumem import Gpumem


@pytest.mark.gpumem(phases={"evaluate": "200MiB"}, max_leak=0, baseline=False)
def test_evaluation(model: Transformer, gpumem: Gpumem) -> None:
    with gpumem.phase("train"):
        train_step(model, AdamW(model.parameters()), random_tokens(4))
    with gpumem.phase("evaluate"), torch.inference_mode(), torch.autocast("cuda", torch.bfloat16):
        model.eval()(random_tokens(4)[:, :-1])
    train, evaluate = gpumem.phases["train"], gpumem.phases["evaluate"]
    assert evaluate.peak_allocated < train.peak_allocated
    assert evaluate.allocated_after == evaluate.allocated_before
