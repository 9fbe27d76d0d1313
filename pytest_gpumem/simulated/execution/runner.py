"""The running of operators of any kind: on ``meta``, on the host, or as without a simulation."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import GeneratorType
from typing import Any

import torch

from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.common.callsite import callers_line, user_line
from pytest_gpumem.simulated.common.raw import CPU, META, tensors_in
from pytest_gpumem.simulated.execution.on_host import OnHost
from pytest_gpumem.simulated.execution.shapes import NEW, TORCHS_OWN, Shapes
from pytest_gpumem.simulated.machine import checks
from pytest_gpumem.simulated.machine.dispatch import Dispatch
from pytest_gpumem.simulated.machine.machine import GPU, SimulatedMachine
from pytest_gpumem.simulated.machine.storages import storage_key
from pytest_gpumem.simulated.machine.values import finite
from pytest_gpumem.simulated.machine.values.operator import Operator
from pytest_gpumem.simulated.operators.described import how_to_describe
from pytest_gpumem.values.errors import (
    UndescribedKernelError,
    UnknownValueError,
    UnsupportedOperatorError,
)

CUDA = "cuda"
HOST = "cpu"
DATA_DEPENDENT = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
"""Tags of operators whose results have sizes that values decide."""
_OF_LISTS = frozenset({torch.int64, torch.bool, torch.uint8})
"""Types of the tensors that C++ makes of lists of indices."""
_SEVERAL = (tuple, list, GeneratorType)
"""Types of an operator's results, and of a rule that allocates between them."""
_SIGNS_OF_NO_SHAPES = ("no fake impl", "not linked with support for cuda", "INTERNAL ASSERT")


class Runner:
    """Runs the operators of one machine, for the handlers of every kind.

    In the context ``mode`` the parts of an operator are seen one by one.
    """

    def __init__(
        self, machine: SimulatedMachine, dispatch: Dispatch, mode: AbstractContextManager[object]
    ) -> None:
        self.machine = machine
        self.mode = mode
        self.storages = machine.storages
        self.values = machine.values
        self.shapes = Shapes(machine.storages, self.place, alike=machine.gpus[0].version)
        self.on_host = OnHost(self.storages, self.run, self.unknown)
        self._dispatch = dispatch

    def run(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, unknown: bool = False
    ) -> Any:
        """Run a kernel of torch's; ``unknown``: it stands for one of unknown values."""
        self._dispatch.inside = True
        try:
            return func(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            if unknown or kwargs.get("device") == META or self._is_ours(args, kwargs):
                self._explain(error, func, args, kwargs)
            raise
        finally:
            self._dispatch.inside = False

    def run_once(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a kernel of torch's that makes a tensor, or repeat its result for such arguments."""
        key, make = self.shapes.find(func, args, kwargs)
        if make is not NEW and make is not None:
            return make(args)
        result = self.run(func, args, kwargs)
        if key is not None and make is NEW:
            self.shapes.learn(key, args, kwargs, result)
        return result

    def run_seeded(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a kernel of torch's without drawing random numbers."""
        if kwargs.get("generator") is not None and any(map(raw.is_meta, tensors_in(args))):
            kwargs = {**kwargs, "generator": None}
        return self.run(func, *self.concealed(args, kwargs))

    def run_elsewhere(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator that no CUDA tensor has part in, with torch's own errors."""
        self._dispatch.inside = True
        try:
            result = func(*args, **kwargs)
        finally:
            self._dispatch.inside = False
        self.storages.adopt_users_own(tensors_in(result))
        return result

    def run_on_host(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator of CPU tensors whose values are unknown."""
        func = operator.func
        result = self.on_host.run(operator, args, kwargs)
        if func in finite.QUESTIONS and self.storages.is_on_host(args[0]):
            answer = self.values.if_finite(func, args)
            if answer is not None:
                self.machine.note_finite()
                return torch.full(result.shape, answer, device=CPU)
        self.values.follow_on_host(func, args, result)
        return result

    def concealed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments, with CPU tensors of unknown values on ``meta``."""
        return self.on_host.concealed((args, kwargs)) if self.storages.on_host else (args, kwargs)

    def is_elsewhere(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Check arguments of a new kind: raise the errors of a GPU, which meta kernels do not.

        Returns whether they are on ``meta``, although not by a request in this simulation.
        """
        place = self._place_of_index if func._schema.name in checks.INDEXING else self.place
        tensors = checks.placed(func, args, kwargs, place)
        where = {each.device for each in tensors}
        if "meta" in where and where <= {"meta", "cpu"}:
            self.machine.has_real_meta = True
            return True
        checks.refuse_mixed(func, tensors)
        checks.refuse_types(func, tensors, (*args, *kwargs.values()))
        return False

    def adopt(self, result: Any, device: GPU) -> None:
        """Give every new storage in ``result`` a block on ``device``."""
        if isinstance(result, torch.Tensor):
            if raw.is_meta(result):
                self.storages.adopt(result, device)
        elif isinstance(result, _SEVERAL):
            for item in result:
                self.adopt(item, device)

    def owner(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Return the owner of the memory that the tensors among the arguments stand for."""
        owner = None
        is_number = False
        machine = self.machine
        of = self.storages.of
        first = args[0] if args and not machine.has_real_meta else None
        if isinstance(first, torch.Tensor) and of(first) is not None:  # nearly always
            return CUDA
        for tensor in tensors_in((args, kwargs)):
            if of(tensor) is not None:
                if machine.has_real_meta:
                    machine.thread_state.on_meta = False
                return CUDA
            if self.storages.is_on_host(tensor):
                owner = HOST
            elif raw.is_meta(tensor):
                if storage_key(tensor) in self.storages.numbers:
                    is_number = True
                elif machine.has_real_meta:
                    machine.thread_state.on_meta = True
        if owner is None and is_number and not machine.thread_state.on_meta:
            # C++ made it for the CUDA tensors of the operator before, as quantile() does.
            return CUDA
        return owner

    def is_users_own(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is on ``meta`` because user code requested that."""
        return raw.is_meta(tensor) and self.place(tensor) == "meta"

    def place(self, tensor: torch.Tensor) -> str:
        """Return the device on which ``tensor`` would be on a machine with a GPU, or ``NUMBER``."""
        record = self.storages.of(tensor)
        if record is not None:
            return str(record.device.torch_device)
        if not raw.is_meta(tensor):
            return HOST
        return checks.NUMBER if storage_key(tensor) in self.storages.numbers else "meta"

    def _place_of_index(self, tensor: torch.Tensor) -> str:
        """Return where an indexing operand is: of x[:, [0, 1]] C++ makes a tensor out of sight."""
        place = self.place(tensor)
        if place != "meta" or tensor.dtype not in _OF_LISTS:
            return place
        return place if storage_key(tensor) in self.storages.users_own else checks.NUMBER

    def unknown(self, func: Any) -> str:
        """Return the sentence that ``func`` reads an unknown value."""
        return self.values.refusal(f"{func} at {user_line()} reads")

    def _is_ours(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether a tensor stands for memory of a GPU; others have errors of their own."""
        if self.machine.has_real_meta:
            return self.owner(args, kwargs) is not None
        return any(map(raw.is_meta, tensors_in((args, kwargs))))

    def _explain(
        self, error: Exception, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Raise the error of a simulated GPU for ``error``, of a kernel without values."""
        text = str(error)
        if isinstance(error, NotImplementedError):
            if DATA_DEPENDENT & set(func.tags):
                raise UnknownValueError(self.unknown(func)) from error
            raise no_shapes(self, func, args, kwargs) from error
        if any(sign in text for sign in _SIGNS_OF_NO_SHAPES):
            raise no_shapes(self, func, args, kwargs) from error
        if "meta tensor" in text:
            raise UnknownValueError(self.unknown(func)) from error


def no_shapes(
    runner: Runner, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> UnsupportedOperatorError:
    """Return the refusal of the operator ``func``, called with these arguments."""
    own = func.namespace in TORCHS_OWN
    line = user_line() if own else callers_line()
    sentence = (
        f"{func} at {line} has no shape-only implementation, so it cannot run on a simulated GPU"
    )
    if own:
        return UnsupportedOperatorError(sentence)
    return UndescribedKernelError(
        f"{sentence}: {how_to_describe(func)}",
        func._schema.name,
    )
