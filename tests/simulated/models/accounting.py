"""Checks of a model's parameters, gradients and optimizer state against its tensors' sizes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from pytest_gpumem import simulate

BLOCK = 512
Inputs = dict[str, torch.Tensor]


def blocks(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the blocks behind ``tensors``: each storage once, rounded up to 512."""
    storages = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors
    }
    return sum(-(-nbytes // BLOCK) * BLOCK for nbytes in storages.values())


def assert_holds(gpu: Any, *parts: int) -> None:
    """Check that live blocks sum to ``parts`` without garbage and libraries' workspaces."""
    torch._C._cuda_clearCublasWorkspaces()
    if gpu.allocated != sum(parts):
        gc.collect()  # takes longer than all the rest
    assert gpu.allocated == sum(parts)


def on_gpu() -> Any:
    """Simulate a large GPU whose blocks are never larger than their rounded size."""
    return simulate("A100-80GB", alloc_conf="expandable_segments:True")


def account_for_training(
    make: Callable[[], nn.Module],
    make_inputs: Callable[[], Inputs],
    loss_of: Callable[[nn.Module, Inputs], torch.Tensor],
    *,
    autocast: bool = False,
    kept: int = 0,
) -> tuple[int, int]:
    """Train two steps with AdamW and check every part; return forward's and the step's peak.

    The first forward leaves ``kept`` bytes, which torch never frees.
    """
    with on_gpu() as gpu:
        with torch.device("cuda"):
            model = make()
        parameters = list(model.parameters())
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        held = blocks([*parameters, *model.buffers()])
        assert_holds(gpu, held)

        inputs = {name: tensor.cuda() for name, tensor in make_inputs().items()}
        held += blocks(inputs.values())
        with torch.no_grad():
            model(**inputs)
        held += kept
        assert_holds(gpu, held)

        optimizer = torch.optim.AdamW(trained)
        for repeat in range(2):
            with (
                gpu.phase(f"forward {repeat}"),
                torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast),
            ):
                loss = loss_of(model, inputs)
            loss.backward()
            del loss
            gradients = [p.grad for p in trained if p.grad is not None]
            assert [g.shape for g in gradients] == [p.shape for p in trained if p.grad is not None]
            state = blocks(s for s in _state(optimizer) if s.is_cuda)
            assert_holds(gpu, held, blocks(gradients), state)
            with gpu.phase(f"step {repeat}"):
                optimizer.step()
            state = blocks(s for s in _state(optimizer) if s.is_cuda)
            assert state == 2 * blocks(p for p in trained if p.grad is not None)
            assert_holds(gpu, held, blocks(gradients), state)
            optimizer.zero_grad()
            del gradients
            assert_holds(gpu, held, state)
        return gpu.phases["forward 1"].peak_allocated, gpu.phases["step 1"].peak_allocated


def _state(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    for values in optimizer.state.values():
        yield from (value for value in values.values() if isinstance(value, torch.Tensor))
