"""Rules: allocations of a CUDA operator beyond its outputs."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import OutOfMemoryError, Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad

from pytest_gpumem.simulated.common.callsite import clear_own_frames, provenance
from pytest_gpumem.simulated.common.patching import having
from pytest_gpumem.simulated.gpu.device import GpuState
from pytest_gpumem.simulated.machine.machine import GPU, SimulatedMachine
from pytest_gpumem.simulated.machine.signatures import Args, Kwargs, Signature
from pytest_gpumem.simulated.operators.layout import copied, suggested_format


@dataclass(frozen=True)
class Rule:
    """Allocations on the device before and after an operator's outputs.

    Each part is a function that names the values it uses: ``gpu``, arguments of the operator by the
    names in its schema and, once there is one, ``result``. Arguments that some overloads lack
    have a default.
    """

    before: Callable[..., Scratch | None] | None = None
    """Allocates before the outputs; the memory of the scratch it returns lives until the end."""
    shapes: Callable[..., Any] | None = None
    """Makes the outputs on ``meta`` where torch's own kernel for it gets them wrong."""
    outputs: Callable[..., Iterable[Tensor]] | None = None
    """The outputs that take device memory, in the order CUDA allocates them; by default all."""
    after: Callable[..., Scratch | None] | None = None
    """Allocates after the outputs; the memory of the scratch it returns is freed at once."""


class BoundRule:
    """A rule, as one overload of an operator follows it."""

    def __init__(self, rule: Rule, schema: torch.FunctionSchema) -> None:
        signature = Signature(schema)
        self.given, self.result_at = signature.given, signature.result_at
        taking = signature.taking
        self.before = None if rule.before is None else taking(rule.before)
        self.shapes = None if rule.shapes is None else taking(rule.shapes)
        self.outputs = None if rule.outputs is None else taking(rule.outputs)
        self.after = None if rule.after is None else taking(rule.after)


class Call:
    """A call of an operator that has a rule; its constructor runs the part before the outputs."""

    __slots__ = ("_given", "_rule", "_scratch")

    def __init__(self, rule: BoundRule, gpu: GPU, args: Args, kwargs: Kwargs) -> None:
        self._rule = rule
        self._given = given = rule.given(gpu, args, kwargs)
        self._scratch = None if rule.before is None else rule.before(given)

    def shapes(self) -> Any:
        """Return the outputs as the rule makes them."""
        assert self._rule.shapes is not None
        return self._rule.shapes(self._given)

    def outputs(self, result: Any) -> Any:
        """Return the parts of ``result`` that take memory, in order; rules may allocate between."""
        rule = self._rule
        if rule.outputs is None:
            return result
        self._given[rule.result_at] = result
        return rule.outputs(self._given)

    def end(self, result: Any) -> None:
        """Run the part after the outputs were allocated."""
        rule = self._rule
        if rule.after is not None:
            self._given[rule.result_at] = result
            rule.after(self._given)
        self.free_before()

    def free_before(self) -> None:
        """Free the memory taken before the outputs: at the end, also after an error."""
        if self._scratch is not None:
            self._scratch.free()


class Scratch:
    """Temporaries of one operator call; :meth:`free` frees the newest first, as C++ does.

    The first ones, of ``sizes`` bytes, are allocated at once. As in C++ all are freed at the latest
    when the block or function that has them ends, also with an error.
    """

    def __init__(self, gpu: GpuState, *sizes: int) -> None:
        self._gpu = gpu
        self._addresses: list[int] = []
        self._estimated: dict[int, int] = {}
        self.take(*sizes)

    def take(self, *sizes: int) -> int:
        """Allocate ``sizes`` bytes one after the other; nothing for an empty tensor.

        Returns the last address, 0 for none.
        """
        address = 0
        for nbytes in sizes:
            address = 0
            if nbytes:
                address = self._gpu.allocator.malloc(nbytes, self._gpu.stream)
                self._addresses.append(address)
        return address

    def estimate(self, nbytes: int, library: str, what: str) -> int:
        """Allocate a workspace of ``library`` whose size is an estimate.

        The purpose ``what`` is shown in the notes of the simulation.
        """
        if not nbytes:
            return 0
        context = provenance()
        context.library = library
        address = self._gpu.allocator.malloc(nbytes, self._gpu.stream, context)
        self._addresses.append(address)
        self._estimated[address] = self._gpu.allocator.block(address)
        self._gpu.estimates.taken(self._estimated[address], f"{library}'s workspace for {what}")
        return address

    def drop(self, *addresses: int) -> None:
        """Free temporaries early, in this order."""
        for address in filter(None, addresses):
            self._addresses.remove(address)
            self._give_back(address)

    def free(self, *error: object) -> None:
        """Free the rest, newest first."""
        while self._addresses:
            self._give_back(self._addresses.pop())

    def __enter__(self) -> Scratch:
        return self

    __exit__ = __del__ = free

    def _give_back(self, address: int) -> None:
        self._gpu.allocator.free(address)
        nbytes = self._estimated.pop(address, 0) if self._estimated else 0
        if nbytes:
            self._gpu.estimates.freed(nbytes)


def borrow(gpu: GPU, *sizes: int, is_read: bool = False) -> None:
    """Allocate ``sizes`` bytes in turn, then free them, newest first; the host waits for a read."""
    with Scratch(gpu, *sizes):
        if is_read:
            gpu.waits()


def copies_of(*names: str, like: str | None = None) -> Callable[..., Scratch]:
    """Return a part of a rule that takes copies of the arguments ``names``, or of ``result``.

    They are copied where they are not contiguous, or laid out as the argument ``like`` suggests.
    """

    given = (*names, like) if like and like not in names else names

    def take(gpu: GPU, *tensors: Tensor) -> Scratch:
        wanted = suggested_format(tensors[given.index(like)]) if like else torch.contiguous_format
        return Scratch(gpu, *copied(*tensors[: len(names)], memory_format=wanted))

    kind = inspect.Parameter.POSITIONAL_ONLY
    parameters = [inspect.Parameter(name, kind) for name in ("gpu", *given)]
    take.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # inspect's
    return take


Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""By an input, by its weight and by its bias."""

Composite = Callable[..., Any]
"""A Python function that runs an operator as several; it names values as rules do."""


def on_machine(
    composite: Composite, func: OpOverload, machine: SimulatedMachine
) -> Callable[..., Any]:
    """Return ``composite`` as ``func`` calls it: on the GPU of its first tensor, if any."""
    given, taken = _bound(composite, func)

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return taken(given(machine.device_of(args, kwargs), args, kwargs))
        except OutOfMemoryError as error:
            clear_own_frames(error.__traceback__)
            del args, kwargs
            raise

    return call


_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


def decompose(operator: OpOverload, *args: Any, **kwargs: Any) -> Tensor:
    """Run the parts of ``operator`` in C++: its own ``decompose`` prefers those for compilers."""
    result: Tensor = operator._op_dk(_COMPOSITE, *args, **kwargs)
    return result


@cache
def _bound(
    composite: Composite, func: OpOverload
) -> tuple[Callable[..., list[Any]], Callable[[list[Any]], Any]]:
    signature = Signature(func._schema)
    return signature.given, signature.taking(composite)


class _Within(threading.local):
    in_place: dict[OpOverload, OpOverload] = {}  # noqa: RUF012 - never changed, but replaced
    """In-place operators of the running composite, by those that it calls once for subclasses."""
    passes_over = False
    """Whether autocast for CUDA is on, and has no kernel for the operator that runs."""


within = _Within()
CALLED_IN_PLACE: set[OpOverload] = set()
"""All operators that a composite may call in place."""


def with_in_place(composite: OpOverload, operators: Mapping[OpOverload, OpOverload]) -> Composite:
    """Return ``composite`` with some of its operators in place, as for tensors of no subclass.

    Source: the uses of isTensorSubclassLike and areAnyTensorSubclassLike in aten/src/ATen/native.
    """
    CALLED_IN_PLACE.update(operators)

    def call(*args: Any) -> Any:
        given, named = passed(composite, args)
        with having(within, "in_place", {} if is_dual(*args) else dict(operators)):
            return decompose(composite, *given, **named)

    return call


def is_dual(*values: Any) -> bool:
    """Return whether a tensor has a tangent of forward mode, and is no wrapper of torch.func."""
    return forward_ad._current_level >= 0 and any(
        isinstance(one, Tensor)
        and not torch._C._functorch.is_functorch_wrapped_tensor(one)
        and forward_ad.unpack_dual(one).tangent is not None
        for one in values
    )


def passed(operator: OpOverload, args: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    """Return all arguments of a call by position, and those that are passed by name."""
    named = [each.name for each in operator._schema.arguments if each.kwarg_only]
    count = len(args) - len(named)
    return args[:count], dict(zip(named, args[count:], strict=True))


def first_of(results: Iterable[Any]) -> Any:
    """Return the first result; the others are freed first to last, as in a std::tuple."""
    held = list(results)
    del results
    first = held.pop(0)
    while held:
        del held[0]
    return first


def is_traced(tensor: Tensor) -> bool:
    """Return whether a compiler traces ``tensor``, so that a composite must stay in parts."""
    return isinstance(tensor, (FakeTensor, FunctionalTensor))


def eligible(tensor: Any) -> bool:
    """Return whether CUDA's autocast casts ``tensor``."""
    return (
        isinstance(tensor, Tensor)
        and tensor.is_cuda
        and tensor.dtype.is_floating_point
        and tensor.dtype != torch.float64
    )
