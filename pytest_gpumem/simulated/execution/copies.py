"""``copy_``: between host and GPU, between GPUs, and on one of them."""

from __future__ import annotations

from typing import Any

import torch

from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.execution.runner import HOST, Runner
from pytest_gpumem.simulated.machine.checks import NO_DATA
from pytest_gpumem.simulated.machine.dispatch import Handler
from pytest_gpumem.simulated.machine.values.operator import Operator
from pytest_gpumem.simulated.operators import sparse, transfers


def copy(runner: Runner, func: Any) -> Handler:
    """Return a handler that writes a tensor's contents to another, on any devices."""
    operator = Operator.of(func)

    def handle(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target, source = args[0], args[1]
        if not isinstance(source, torch.Tensor):
            # A number is a tensor of the host here too: it was taken out of it on the way.
            source = torch.tensor(source)
            args = (target, source, *args[2:])
        if runner.storages.of(target) is None and runner.is_users_own(target):
            return runner.run_elsewhere(func, args, kwargs)
        if runner.storages.of(source) is None and runner.is_users_own(source):
            raise NotImplementedError(NO_DATA)
        if sparse.is_sparse(target) and raw.is_meta(target):
            with runner.mode:
                return sparse.copy_(target, source)
        if not raw.is_meta(target) and runner.owner((source,), {}) is not None:
            _stage(runner, target, source, args, kwargs)
            if runner.values.everything and runner.values.records(operator, args, kwargs, None):
                return target
            if runner.values.computed(operator, args, kwargs) is None:
                runner.on_host.lose(func, target)
            return target
        if runner.storages.on_host and runner.owner(args, kwargs) == HOST:
            return runner.run_on_host(operator, args, kwargs)
        if not raw.is_meta(source):
            _stage(runner, target, source, args, kwargs)
        result = runner.run(func, args, kwargs)
        runner.values.follow(operator, args, kwargs, result)
        return result

    return handle


def _stage(
    runner: Runner, target: torch.Tensor, source: torch.Tensor, args: Any, kwargs: dict[str, Any]
) -> None:
    """Allocate the memory that ``copy_`` between host and GPU takes for the time of the call."""
    non_blocking = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))
    to, of = runner.storages.of(target), runner.storages.of(source)
    if non_blocking and (of or to):
        for tensor, record in ((target, of), (source, to)):
            if record is not None:
                runner.machine.pinned.used_by(tensor, record.device.index)
    if to is not None and of is None:
        transfers.stage_upload(to.device, target, source, non_blocking)
    elif of is not None and to is None:
        transfers.stage_download(of.device, target, source, non_blocking)
