"""Values of CUDA tensors, kept on the CPU for as long as they are known.

Small tensors made from constants, or copied from the CPU, stay known through deterministic
operators: each of these is computed on the CPU as well. With ``everything`` the same is
done for tensors of any size and for random numbers, so that no value is unknown. Either way the
simulated device allocates the same as without: this module does not touch its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.common.patching import having
from pytest_gpumem.simulated.machine.notes import Notes
from pytest_gpumem.simulated.machine.signatures import Args, Kwargs
from pytest_gpumem.simulated.machine.storages import Storages, parts_of_sparse, storage_key
from pytest_gpumem.simulated.machine.values import finite
from pytest_gpumem.simulated.machine.values.facts import Fact, of_result
from pytest_gpumem.simulated.machine.values.operator import Operator
from pytest_gpumem.simulated.machine.values.reading import Reading
from pytest_gpumem.simulated.machine.values.recording import Recorder
from pytest_gpumem.simulated.machine.values.views import arbitrary, on_device


class Values(Reading):
    """The known values of one simulation, by the address of the storage they belong to."""

    def __init__(self, storages: Storages, notes: Notes, *, everything: bool) -> None:
        super().__init__(storages, notes, everything=everything)
        self._ignoring = False
        self.recording: Callable[[], Recorder[Any] | None] = lambda: None
        """Returns the recorder of operators, while a capture is under way on this thread."""

    def follow(self, operator: Operator, args: Args, kwargs: Kwargs, result: Any) -> None:
        """Update the values after an operator has run on the shapes."""
        if self._ignoring or self.records(operator, args, kwargs, result):
            return
        fact = self._fact(operator, args, kwargs)
        if operator.written:
            self._write(operator, args, kwargs, result)
        elif self._bases and self._known(args, kwargs):
            self._derive(operator, args, kwargs, result)
        elif self.assumes and (fact is None or fact.value is None):
            self._assume(operator, args, result)
        self._state(fact, operator, args, kwargs, result)

    def records(self, operator: Operator, args: Args, kwargs: Kwargs, result: Any) -> bool:
        """Record the call if a capture is under way on this thread; return whether one is."""
        recording = self.recording()
        if recording is None:
            return False
        recording.add(operator, args, kwargs, result)
        return True

    def ignoring(self) -> AbstractContextManager[None]:
        """Do not follow operators that run inside."""
        return having(self, "_ignoring", True)

    def replace(self, operator: Operator, args: Args, kwargs: Kwargs, result: Any) -> None:
        """Update the values of ``result`` and of written tensors, from a composite as a whole."""
        if self._ignoring or self.records(operator, args, kwargs, result):
            return
        fact = self._fact(operator, args, kwargs)
        if operator.targets(args, kwargs):
            self._write(operator, args, kwargs, result)
            self._state(fact, operator, args, kwargs, result)
            return
        given = set(map(storage_key, on_device((args, kwargs))))
        made = [tensor for tensor in on_device(result) if storage_key(tensor) not in given]
        computed = None
        if self._bases and self._known(args, kwargs) and self._is_computable(operator, made):
            self.work.expect(operator.func, args, kwargs, result)
            computed = self._compute(operator, args, kwargs, [])
        for tensor in made:
            self.forget(storage_key(tensor))
        if computed is not None:
            self._keep_all(result, computed, set(), parts=True)
        elif made and self.assumes:
            self._assume(operator, args, result)
        self._state(fact, operator, args, kwargs, made)

    def assign(self, result: Any, function: Callable[..., Any], *args: Any) -> None:
        """Set the values of a composite's ``result`` to those that ``function`` returns."""
        if self._ignoring:
            return
        with torch._C._DisableTorchDispatch():
            self.replace(Operator.by(function), args, {}, result)

    def shared(self, given: Iterable[Any]) -> list[Any] | None:
        """Return ``given`` with CPU tensors that share the values of its tensors.

        ``None`` if one of them is not known; uninitialised memory is, because it may be written to.
        """
        found = []
        for value in given:
            real = value
            if isinstance(value, torch.Tensor):
                if storage_key(value) in self._uninitialized:
                    self._put_blank(value)
                if not value.numel():
                    real = arbitrary(value)
                elif raw.is_on_device(value):
                    real = self.of(value)
                if real is None or self.storages.is_unknown_on_cpu(value):
                    return None
            found.append(real)
        return found

    def mark_known(
        self, results: Sequence[Any], computed: Sequence[Any], given: Iterable[Any]
    ) -> None:
        """Set the values of ``results``, which are parts of new storages or given ones.

        They are ``computed`` from ``given``, which :meth:`shared` returned and which was written.
        """
        used = {tensor.untyped_storage()._cdata for tensor in raw.tensors_in(given)}
        for result, value in zip(results, computed, strict=True):
            if isinstance(result, torch.Tensor):
                base = self._bases.get(storage_key(result))
                key = None if base is None else storage_key(base)
                if not isinstance(value, torch.Tensor) or storage_key(value) != key:
                    self._keep_all(result, value, used, parts=True)

    def make(self, operator: Operator, args: Args, kwargs: Kwargs, result: Any) -> None:
        """Set the values of a tensor that a factory, or a copy between devices, has just made."""
        if self._ignoring or self.records(operator, args, kwargs, result):
            return
        uploads = len(on_device(args[:1])) < len(list(raw.tensors_in(args[:1])))
        fact = self._fact(operator, args, kwargs, uploads=uploads)
        if self.everything or not operator.undefined:
            self._make(operator, args, kwargs, result)
        self._state(fact, operator, args, kwargs, result)

    def _make(self, operator: Operator, args: Args, kwargs: Kwargs, result: Any) -> None:
        if operator.uninitialized and result.numel():
            if self.everything:
                self._uninitialized.add(storage_key(result))
                self._watch(result)
            return
        if operator.shaped_like:
            if self._keeps(result):
                args = (arbitrary(args[0]), *args[1:])
                self._derive(operator, args, kwargs, result)
        elif self._unknown_among(args) is not True:
            self._derive(operator, args, kwargs, result)

    def _assume(self, operator: Operator, args: Args, result: Any) -> torch.Tensor | None:
        """Assume that unknown numbers are finite if ``operator`` asks, else its own assumption.

        Reading such a result adds a note. Returns the target that is assumed to stay as it was.
        """
        answer = self.if_finite(operator.func, args) if operator.asks else None
        if answer is not None:
            self._set_fact(result, Fact(torch.tensor(answer, device=raw.CPU), assumed=True))
            return None
        return None if operator.assumption is None else operator.assumption(self, args, result)

    def follow_on_host(self, func: Any, args: Args, result: Any) -> None:
        """Remember which copies in host memory, of unknown values, hold infinities."""
        if not self.facts.by_key:
            return
        given = list(map(self.facts.infinity, raw.tensors_in(args)))
        infinite = finite.passed_on(func._schema.name, given)
        for tensor in raw.tensors_in(result) if infinite else ():
            self._set_fact(tensor, Fact(infinite=infinite))

    def _set_fact(self, tensor: torch.Tensor, fact: Fact) -> None:
        if parts := parts_of_sparse(tensor):
            tensor, fact = parts[-1], Fact(None, fact.assumed, fact.infinite)
        if fact.value is not None and self._keeps(tensor):
            self._keep(tensor, fact.value.expand(tensor.shape), shared=True)
        if key := storage_key(tensor):
            self.facts.by_key[key] = fact
            self._watch(tensor)

    def _fact(
        self, operator: Operator, args: Args, kwargs: Kwargs, *, uploads: bool = False
    ) -> Fact | None:
        """Return the fact about the results; ``uploads``: their numbers come from the host."""
        matters = self.facts.by_key or operator.fills or operator.random or uploads
        return self.facts.of_results(operator, args, kwargs) if matters and self.assumes else None

    def _state(
        self, fact: Fact | None, operator: Operator, args: Args, kwargs: Kwargs, result: Any
    ) -> None:
        """Set ``fact`` for the tensors that an operator has just made, or written to."""
        if fact is None:
            if self._stated and not operator.moves_views:
                for tensor in operator.targets(args, kwargs) if operator.written else ():
                    self._stated.pop(storage_key(tensor), None)
            return
        targets = operator.targets(args, kwargs)
        for at, tensor in enumerate(targets or on_device(result)):
            stated = of_result(operator, fact, args[0], tensor)
            if at:  # the indices that ``max`` returns
                stated = replace(stated, value=None)
            if targets or self.facts.of(tensor) is None:
                if targets and not self._covers(tensor):
                    stated = Fact(None, stated.assumed, stated.infinite)
                if stated != Fact():
                    self._set_fact(tensor, stated)
                elif self.facts.of(tensor) is not None:
                    del self.facts.by_key[storage_key(tensor)]

    def _write(self, operator: Operator, args: Args, kwargs: Kwargs, result: Any) -> None:
        bases = self._bases
        if operator.moves_views or (not bases and not operator.overwrites):
            return
        targets = operator.targets(args, kwargs)
        if not targets:  # running statistics may be left out
            if on_device(result) and self._known(args, kwargs):
                self._derive(operator, args, kwargs, result)
            return
        for target in targets:
            if storage_key(target) in self._uninitialized:
                self._put_blank(target)
        if operator.overwrites:
            if not self._can_overwrite(operator, args, kwargs, targets):
                return
        elif not any(storage_key(target) in bases for target in targets):
            return
        elif not self._known(args, kwargs):
            spared = self._assume(operator, args, result)
            for target in targets:
                if target is not spared:
                    self.forget(storage_key(target))
            return
        self._derive(operator, args, kwargs, result, targets)

    def _can_overwrite(
        self, operator: Operator, args: Args, kwargs: Kwargs, targets: list[torch.Tensor]
    ) -> bool:
        """Return whether a write leaves all of its target known; else forget its values."""
        if self._unknown_among(operator.read(args, kwargs)) is not True:
            for target in targets:
                key = storage_key(target)
                if key in self._bases:
                    continue
                if not self._keeps(target) or not self._covers(target):
                    break
                self._put_blank(target)
            else:
                return True
        for target in targets:
            self.forget(storage_key(target))
        return False

    def _derive(
        self,
        operator: Operator,
        args: Args,
        kwargs: Kwargs,
        result: Any,
        targets: Iterable[torch.Tensor] = (),
    ) -> None:
        used: list[torch.Tensor] = []
        computed = None
        if self._is_computable(operator, result):
            self.work.expect(operator.func, args, kwargs, result)
            computed = self._compute(operator, args, kwargs, used)
        if computed is None:
            for target in targets:
                self.forget(storage_key(target))
        self._keep_all(result, computed, {tensor.untyped_storage()._cdata for tensor in used})
