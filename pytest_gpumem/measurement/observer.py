"""Observations of a running test: the addresses of its tensors, and when its modules run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from pytest_gpumem.attribution.history import GRADIENTS, INPUTS, OPTIMIZER_STATE, OTHER, PARAMETERS
from pytest_gpumem.measurement import contents
from pytest_gpumem.measurement.facts import Facts
from pytest_gpumem.measurement.leaks import part_of
from pytest_gpumem.measurement.phases import Positions
from pytest_gpumem.measurement.recorded import Recorder

Function = Callable[..., Any]

_FSDP = "_fsdp_wrapped_module"
"""The name under which ``FullyShardedDataParallel`` holds a module, part of every path."""

DEEPEST_INPUT = 4
"""The levels of containers in which the arguments of a module are searched."""


def _errors_recorded(observe: Function) -> Function:
    """Return a wrapper of the method ``observe`` that records errors instead of raising them."""

    @functools.wraps(observe)
    def observed(self: MemoryObserver, *args: Any) -> Any:
        try:
            return observe(self, *args)
        except Exception as error:
            self.notes = self.notes or (
                "the names of the memory are incomplete, because reading modules and optimizers "
                f"failed with {type(error).__name__}: {error}",
            )
            return None

    return observed


class MemoryObserver:
    """A record of what memory holds during a test, which cannot be determined afterwards.

    Watched objects are referenced weakly, so that their memory is not kept alive.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._positions = recorder.positions
        self.facts = Facts(recorder)
        """The facts of the current run of the body."""
        self._roots: WeakSet[torch.nn.Module] = WeakSet()
        self._paths: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()
        self._called: WeakSet[torch.nn.Module] = WeakSet()
        """The outermost modules called since a module was last moved to another device or dtype."""
        self._optimizers: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._stepped: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._running: list[str] = []
        """Paths of the modules whose call has not returned, outermost first."""
        self._moves = False
        self._span: tuple[str, Positions] | None = None
        self.marks: list[tuple[Positions, str]] = []
        """The positions at which modules began to run, and their paths."""
        self.spans: list[tuple[str, Positions, Positions]] = []
        """The automatic phases, in order."""
        self.observations: list[tuple[Positions, int, str, str, str]] = []
        """Positions, and the remaining fields of an :class:`Observation`."""
        self.notes: tuple[str, ...] = ()
        """The sentence on an observation that raised an error."""

    def watch(self, holder: torch.nn.Module | torch.optim.Optimizer) -> None:
        """Watch the module or optimizer ``holder`` from now on."""
        if isinstance(holder, torch.optim.Optimizer):
            self._optimizers.add(holder)
            self._see_optimizer(self._positions(), holder)
        else:
            self._name(holder)
            self._see_module(self._positions(), holder)

    def begin_run(self) -> None:
        """Begin a run of the body, with new facts."""
        self.facts = Facts(self._recorder)

    def observe_optimizers(self) -> None:
        """Record the state of optimizers that have not stepped, which may have been loaded.

        All other observations are made during the run.
        """
        for optimizer in list(self._optimizers - self._stepped):
            self._see_optimizer(self._positions(), optimizer)

    @_errors_recorded
    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the state of ``optimizer``, which has just stepped."""
        self._stepped.add(optimizer)
        self.facts.stepped(optimizer)
        self.watch(optimizer)

    @contextmanager
    def unmeasured(self) -> Iterator[None]:
        """Drop the records of code inside, but keep modules and optimizers that still exist."""
        notes: tuple[list[Any], ...] = (self.marks, self.spans, self.observations)
        known, span = [len(each) for each in notes], self._span
        try:
            yield
        finally:
            self._span = span  # the end of a step that ran out of memory was not reported
            for each, count in zip(notes, known, strict=True):
                del each[count:]
            for module in list(self._roots):
                self.watch(module)
            for optimizer in list(self._optimizers):
                self.watch(optimizer)

    # Wrappers of torch's functions while a test runs.

    def wrappers(self) -> tuple[tuple[Any, str, Function], ...]:
        """Return owner, name and wrapper of functions; a wrapper receives the original first."""
        return (
            (torch.nn.Module, "_apply", self._move),
            (torch.nn.Module, "__setstate__", self._restore),
            (torch.nn.Parameter, "__new__", self._make),
            (torch.optim.Optimizer, "zero_grad", self._zero),
            (torch.nn.functional, "scaled_dot_product_attention", self._attend),
        )

    def calling(self, call: Function) -> Function:
        """Return a wrapper of ``call``, ``Module.__call__``, that records it.

        Its parameter is named ``self`` for the reason given in :class:`AutomaticPhases`.
        """
        observer = self

        @functools.wraps(call)
        def called(self: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            # Reading sizes would become part of the graph, or break it.
            if torch.compiler.is_compiling() or torch._C._is_tracing():
                return call(self, *args, **kwargs)
            outermost = not observer._running
            first = outermost and observer._outermost_called(self, (args, kwargs))
            mine = outermost and observer.begin("forward")
            path = observer._paths.get(self) or type(self).__name__
            observer._call(self, path, (args, kwargs), outermost, mine, first)
            observer._running.append(path)
            observer.marks.append((observer._positions(), path))
            try:
                return call(self, *args, **kwargs)
            finally:
                observer._running.pop()
                now = observer._positions()
                observer.marks.append((now, observer._running[-1] if observer._running else ""))
                if first:  # the call may have padded the shards, which allocates new storages
                    observer._see_module(observer._positions(), self)
                if mine:
                    observer.end()
                    observer.facts.carried.end = observer._positions()

        return called

    @_errors_recorded
    def _call(
        self,
        module: torch.nn.Module,
        path: str,
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
        is_outermost: bool,
        is_forward: bool,
        is_first: bool,
    ) -> None:
        """Record the facts of a call."""
        if is_forward:
            self.facts.forward(self._owned, lambda: contents.tensors_in(arguments, DEEPEST_INPUT))
            if is_first:
                self.facts.model(module)
        elif is_outermost and self._span is not None and self._span[0] == "backward":
            self.facts.recomputed(path)
        self.facts.called(path, arguments[0])

    def _move(self, apply: Function, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call ``Module._apply``, as ``cuda()`` and ``to()`` do."""
        if self._moves:
            return apply(module, *args, **kwargs)
        self._moves = True
        try:
            result = apply(module, *args, **kwargs)
        finally:
            self._moves = False
        self._called.clear()
        self.watch(module)
        return result

    def _make(self, new: Function, *args: Any, **kwargs: Any) -> Any:
        """Call ``Parameter.__new__`` and record the result, as its module may never be called."""
        parameter = new(*args, **kwargs)
        self._see(self._positions(), parameter, PARAMETERS, "", "")
        return parameter

    def _restore(self, set_state: Function, module: torch.nn.Module, state: Any) -> None:
        """Call ``Module.__setstate__``, as ``deepcopy`` does."""
        set_state(module, state)
        now, owner = self._positions(), type(module).__name__
        for name, buffer in module._buffers.items():
            self._see(now, buffer, OTHER, owner, name)

    def run_backward(self, run: Function, *args: Any, **kwargs: Any) -> Any:
        """Call ``run``, autograd's entry, and record it."""
        mine = self.begin("backward")
        self.facts.backward(bool(args[2:3] and args[2]))
        try:
            return run(*args, **kwargs)
        finally:
            self._see_gradients()
            if mine:
                self.end()

    def _zero(self, zero: Function, owner: Any, set_to_none: bool = True) -> Any:
        self.facts.zeroed(set_to_none)
        return zero(owner, set_to_none)

    def _attend(
        self,
        attend: Function,
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **others: Any,
    ) -> Any:
        params = query, key, value, attn_mask, dropout_p, is_causal
        if torch.compiler.is_compiling() or torch._C._is_tracing():
            return attend(*params, **others)
        why = self._attends(*params, bool(others.get("enable_gqa"))) or ""
        try:
            return attend(*params, **others)
        except torch.OutOfMemoryError:
            self.facts.failed_unfused = why
            raise

    @_errors_recorded
    def _attends(self, *params: Any) -> str:
        return self.facts.attends(*params)

    def begin(self, name: str) -> bool:
        """Begin an automatic phase; do nothing and return ``False`` within another one."""
        if self._span is not None:
            return False
        self._span = name, self._positions()
        return True

    def end(self) -> None:
        """End the phase that :meth:`begin` began."""
        if self._span is not None:
            name, begin = self._span
            self.spans.append((name, begin, self._positions()))
            self._span = None

    @_errors_recorded
    def _outermost_called(self, module: torch.nn.Module, arguments: Any) -> bool:
        """Record an outermost call; return whether it is the module's first since a move."""
        first = module not in self._called
        if first:
            self._called.add(module)
            if module not in self._paths:
                self._name(module)
            self._see_module(self._positions(), module)
        now = self._positions()
        for tensor in contents.tensors_in(arguments, DEEPEST_INPUT):
            if part_of(tensor, "grad_fn") is None:
                self._see(now, tensor, INPUTS, "", "")
                self.facts.given(tensor)
        return first

    @_errors_recorded
    def _name(self, module: torch.nn.Module) -> None:
        self._roots.add(module)
        for name, part in module.named_modules():
            path = ".".join(step for step in name.split(".") if step != _FSDP)
            self._paths[part] = path or type(part).__name__

    @_errors_recorded
    def _see_module(self, now: Positions, module: torch.nn.Module) -> None:
        for path, name, parameter in self._parameters_of(module):
            self._see(now, parameter, PARAMETERS, path, name)
        self._see_gradients_of(now, module)
        for part in module.modules():
            for name, buffer in part._buffers.items():
                self._see(now, buffer, OTHER, self._paths.get(part, ""), name)

    @_errors_recorded
    def _see_gradients(self) -> None:
        now = self._positions()
        for module in list(self._roots):
            self._see_gradients_of(now, module)
        for optimizer in list(self._optimizers):
            for held in _parameters(optimizer):
                self._see(now, held.grad, GRADIENTS, "", "")

    def _see_gradients_of(self, now: Positions, module: torch.nn.Module) -> None:
        for path, name, parameter in self._parameters_of(module):
            self._see(now, parameter.grad, GRADIENTS, path, name)
        for part in module.modules():
            for owner, name, gradient in contents.accumulated_gradients(part):
                self._see(now, gradient, GRADIENTS, self._paths.get(owner, ""), name)

    def _parameters_of(self, module: torch.nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yield the path of the owner, the name and the parameter."""
        for part in module.modules():
            path = self._paths.get(part, "")
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    yield path, name, parameter
            for owner, name, sharded in contents.sharded_parameters(part):
                yield self._paths.get(owner, ""), name, sharded

    @_errors_recorded
    def _see_optimizer(self, now: Positions, optimizer: torch.optim.Optimizer) -> None:
        owners = {
            id(parameter): path
            for module in list(self._roots)
            for path, _, parameter in self._parameters_of(module)
        }
        kind = type(optimizer).__name__
        for parameter in _parameters(optimizer):
            if not owners.get(id(parameter)):
                self._see(now, parameter, PARAMETERS, "", "")
        for key, name, value in contents.states_of(optimizer):
            self._see(now, value, OPTIMIZER_STATE, owners.get(id(key), ""), f"{kind}.{name}")

    def _owned(self) -> Iterator[int]:
        """Yield the addresses of the tensors that known modules and optimizers hold now."""
        held: list[Any] = []
        for module in list(self._roots):
            for tensor in (*module.parameters(), *module.buffers()):
                held += (tensor, tensor.grad)
        for optimizer in list(self._optimizers):
            held += (value for _, _, value in contents.states_of(optimizer))
        for value in held:
            if isinstance(value, torch.Tensor):
                yield from map(contents.storage_address, contents.parts_of(value))

    def _see(self, now: Positions, value: Any, category: str, path: str, name: str) -> None:
        """Record the memory of ``value`` if it is a tensor."""
        for part in contents.parts_of(value) if isinstance(value, torch.Tensor) else ():
            if address := contents.storage_address(part):
                self.observations.append((now, address, category, path, name))


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
