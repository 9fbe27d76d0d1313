"""``checkpoint``: transformer_engine/pytorch/distributed.py of 2.8.

(``_CheckpointFunction``, ``_checkpoint_hook``, ``_recomputation_hook``.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from pytest_gpumem.simulated.stand_ins.transformer_engine.attention import DotProductAttention
from pytest_gpumem.simulated.stand_ins.transformer_engine.base import Module
from pytest_gpumem.simulated.stand_ins.transformer_engine.fp8 import manager
from pytest_gpumem.simulated.stand_ins.transformer_engine.kernels import refuse
from pytest_gpumem.simulated.stand_ins.transformer_engine.norms import LayerNorm, RMSNorm

_MODULES = (LayerNorm, RMSNorm, Module, DotProductAttention)


class _Then:
    """What held when the function first ran: generators and autocast."""

    def __init__(self) -> None:
        self._states = torch.get_rng_state(), torch.cuda.get_rng_state()
        self._autocasts = [
            torch.amp.autocast(
                kind,
                enabled=torch.is_autocast_enabled(kind),
                dtype=torch.get_autocast_dtype(kind),
                cache_enabled=torch.is_autocast_cache_enabled(),
            )
            for kind in ("cuda", "cpu")
        ]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Let it hold inside, with gradients."""
        now = torch.get_rng_state(), torch.cuda.get_rng_state()
        _set(self._states)
        try:
            with ExitStack() as stack:
                stack.enter_context(torch.enable_grad())
                for each in self._autocasts:
                    stack.enter_context(each)
                yield
        finally:
            _set(now)


def _set(states: tuple[Tensor, Tensor]) -> None:
    torch.set_rng_state(states[0])
    torch.cuda.set_rng_state(states[1])


class _Checkpointing(torch.autograd.Function):
    """_CheckpointFunction."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], options: dict[str, Any], *args: Any) -> Any:
        """Keep the inputs alone."""
        ctx.function, ctx.options, ctx.then = function, options, _Then()
        with torch.no_grad():
            outputs = function(*args, **options)
        ctx.others = [None if isinstance(each, Tensor) else each for each in args]
        ctx.save_for_backward(*(each if isinstance(each, Tensor) else None for each in args))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Run the function again."""
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError(
                "Checkpointing is not compatible with .grad(), please use .backward() if possible"
            )
        inputs = [
            other if tensor is None else tensor
            for tensor, other in zip(ctx.saved_tensors, ctx.others, strict=True)
        ]
        detached = torch.utils.checkpoint.detach_variable(tuple(inputs))
        with ctx.then.again():
            outputs = ctx.function(*detached, **ctx.options)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        wanted = [
            (output, grad)
            for output, grad in zip(outputs, grads, strict=True)
            if isinstance(output, Tensor) and output.requires_grad
        ]
        if not wanted:
            raise RuntimeError(
                "none of output has requires_grad=True, this checkpoint() is not necessary"
            )
        torch.autograd.backward([each for each, _ in wanted], [grad for _, grad in wanted])
        found = (each.grad if isinstance(each, Tensor) else None for each in detached)
        return None, None, *found


_reentrant: Callable[..., Any] = _Checkpointing.apply


class _Frame:
    """_CheckpointFrame: tensors of the second run, in the order they are saved in."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self._run = run
        self._then = _Then()
        self._found: list[Tensor | None] = []
        self._count = 0

    def pack(self, tensor: Tensor) -> int:
        """Keep its place alone."""
        self._count += 1
        return self._count - 1

    def unpack(self, place: int) -> Tensor:
        """Run again, the first time, all of it."""
        if not self._found:
            hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor)
            with hooks, self._then.again():
                self._run()
        tensor, self._found[place] = self._found[place], None
        if tensor is None:
            raise RuntimeError("a checkpoint's tensors can be taken once")
        return tensor

    def _keep(self, tensor: Tensor) -> Tensor:
        self._found.append(tensor.detach())
        return tensor.detach()


@_disable_dynamo
def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Any = None,
    tp_group: Any = None,
    use_reentrant: bool = True,
    context_fn: Any = None,
    determinism_check: str = "default",
    debug: bool = False,
    **options: Any,
) -> Any:
    """Run ``function`` once more in the backward pass instead of keeping what it makes."""
    for name, value in (
        ("distribute_saved_activations", distribute_saved_activations),
        ("get_rng_state_tracker", get_rng_state_tracker),
        ("tp_group", tp_group),
        ("context_fn", context_fn),
    ):
        if value:
            refuse(f"checkpoint({name}={value!r})")
    state = manager()
    if state.recipe is not None:
        refuse("checkpoint in fp8")
    state.is_reentrant = use_reentrant
    if isinstance(function, nn.Module) and not any(
        isinstance(each, _MODULES) for each in function.modules()
    ):
        return torch.utils.checkpoint.checkpoint(
            function,
            *args,
            use_reentrant=use_reentrant,
            determinism_check=determinism_check,
            debug=debug,
            **options,
        )
    if use_reentrant:
        return _reentrant(function, options, *args)
    frame = _Frame(lambda: function(*args, **options))
    with torch.autograd.graph.saved_tensors_hooks(frame.pack, frame.unpack):
        return function(*args, **options)
