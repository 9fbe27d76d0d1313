"""Values beside shapes: what CUDA tensors hold, kept on the CPU for as long as it is known.

Small tensors made from constants, or copied from the CPU, stay known through deterministic
operators: each of these is computed on the CPU beside its shapes. With ``everything`` the same is
done for tensors of any size and for random numbers, so that no value is unknown. Either way the
simulated device allocates what it would allocate without: nothing here touches its memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch

from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.common.errors import HostMemoryError
from pytest_gpumem.simulated.common.nesting import tensors_in
from pytest_gpumem.simulated.common.raw import CPU
from pytest_gpumem.simulated.machine.generators import drawn_from
from pytest_gpumem.simulated.machine.real import kernels as real_kernels
from pytest_gpumem.simulated.machine.real import packed_attention as real_packed_attention
from pytest_gpumem.simulated.machine.real import products as real_products
from pytest_gpumem.simulated.machine.storages import storage_key
from pytest_gpumem.simulated.machine.values import finite
from pytest_gpumem.simulated.machine.values.assumptions import ASSUMPTIONS, Assumption
from pytest_gpumem.simulated.machine.values.facts import Fact, Facts, of_result
from pytest_gpumem.simulated.machine.values.host import available_memory
from pytest_gpumem.simulated.machine.values.work import Work

if TYPE_CHECKING:
    from pytest_gpumem.simulated.machine.pool_contents import PoolContents
    from pytest_gpumem.simulated.machine.replayed_values import Recording
    from pytest_gpumem.simulated.machine.storages import SimulatedStorage
    from pytest_gpumem.simulated.simulation import Simulation

MOST_INTEGERS = 65_536
"""Elements of an integer or boolean tensor whose values are kept."""
MOST_FLOATS = 4_096

_empty = torch.empty
_empty_strided = torch.empty_strided
_as_strided = torch.as_strided

_WRITES_UNDECLARED: dict[str, tuple[int, ...]] = {
    "aten::native_batch_norm": (3, 4),
    "aten::cudnn_batch_norm": (3, 4),
    "aten::batch_norm_gather_stats": (3, 4),
    "aten::batch_norm_gather_stats_with_counts": (3, 4),
    "aten::batch_norm_update_stats": (1, 2),
    "aten::rrelu_with_noise": (1,),
}
"""Arguments that an operator writes to although its schema does not say so (2.6 to 2.15): running
statistics in native_functions.yaml; the noise of ``rrelu_with_noise`` up to 2.6."""

_KERNELS: dict[str, Callable[..., Any]] = {
    **real_kernels.KERNELS,
    **real_packed_attention.KERNELS,
    **real_products.KERNELS,
}

OVERWRITES = frozenset(
    f"aten::{name}_"
    for name in (
        "fill zero copy uniform normal bernoulli random exponential log_normal cauchy geometric"
    ).split()
)
"""In-place operators whose target's old values do not matter."""


@dataclass(frozen=True, eq=False)
class Operator:
    """What has to be known of an operator to follow its values."""

    func: Any
    name: str
    """With its namespace, without its overload."""
    written: tuple[tuple[int, str], ...]
    """Position and name of each argument that it writes to."""
    overwrites: bool
    """Whether what it writes to does not depend on what was there."""
    moves_views: bool
    """Whether it changes only sizes and strides: ``t_``, ``squeeze_``, ``set_``."""
    undefined: bool
    """Whether its results are random, or those of a stranger's kernel."""
    blank: bool
    """Whether its results are memory that nobody has written to."""
    random: bool
    shaped_like: bool
    """Whether it looks at the shapes of its tensors only: ``zeros_like``, ``new_full``."""
    compute: Callable[..., Any]
    assumption: Assumption | None
    """What is taken for granted where an argument is not known."""
    fills: bool
    """Whether programs write infinities and NaN by it."""

    @classmethod
    def of(cls, func: Any) -> Operator:
        """Describe ``func`` by its schema and tags."""
        schema, name = func._schema, func._schema.name
        undeclared = _WRITES_UNDECLARED.get(name, ())
        written = tuple(
            (at, argument.name)
            for at, argument in enumerate(schema.arguments)
            if at in undeclared or (argument.alias_info and argument.alias_info.is_write)
        )
        plain = name.removeprefix("aten::")
        random = torch.Tag.nondeterministic_seeded in func.tags
        return cls(
            func=func,
            name=name,
            written=written,
            overwrites=name in OVERWRITES or "out" in schema.overload_name,
            moves_views=torch.Tag.inplace_view in func.tags or plain in ("resize_", "set_"),
            undefined=random or plain == name,
            blank=plain.startswith(("empty", "new_empty")),
            random=random,
            shaped_like=plain.endswith("_like") or plain.startswith("new_"),
            compute=_KERNELS.get(func.name(), _KERNELS.get(name, func)),
            assumption=ASSUMPTIONS.get(func),
            fills=name in finite.FILLING,
        )

    def targets(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The meta tensors among ``args`` and ``kwargs`` that it writes to."""
        found: list[torch.Tensor] = []
        for at, name in self.written:
            _collect(args[at] if at < len(args) else kwargs.get(name), found)
        return found


class Values:
    """The known values of one simulation, by the address of the storage they belong to."""

    def __init__(self, simulation: Simulation, *, everything: bool) -> None:
        self._simulation = simulation
        self.everything = everything
        """Whether values of any size are computed, and random numbers drawn."""
        self._bases: dict[int, torch.Tensor] = {}
        """By key: all elements of the storage, flat, on the CPU."""
        self._loose: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        """Storages without a block: their values must not outlive them either."""
        self._blank: set[int] = set()
        """Keys of storages that nobody has written to, where everything is computed."""
        self.facts = Facts(self)
        self.work = Work()
        self._ignoring = False
        self.pooled: WeakValueDictionary[int, PoolContents] = WeakValueDictionary()
        """By key: where values go when a storage in a graph's pool dies."""
        self.recording: Callable[[], Recording | None] | None = None
        """Says where operators of a capture go, while there is one."""
        self._held = 0
        self._limit = 0
        self.uncomputed: str | None = None
        """The first operator that had no kernel on the CPU, where everything is computed."""
        self.begin()

    def begin(self) -> None:
        """See what the host has room for, and what the CPU can compute."""
        self.uncomputed = None
        self.work.begin()
        if self.everything:
            self._limit = self._held + available_memory() // 2

    # Reading.

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a CPU view of what ``tensor`` holds; ``None`` if that is not known."""
        if not self._bases and not self.facts.by_key:
            return None
        base = self._bases.get(storage_key(tensor))
        if base is not None:
            return view_of(base, tensor)
        uniform = self.facts.uniform(tensor)
        return None if uniform is None else uniform.expand(tensor.shape)

    def single(self, tensor: torch.Tensor) -> Any:
        """Return the one number that ``tensor`` holds, once or repeated; ``None`` if not known."""
        repeated = tensor.numel() == 1 or not any(tensor.stride())
        if not repeated or not tensor.numel() or self.is_unknown_on_host(tensor):
            return None
        with torch._C._DisableTorchDispatch():
            real = self.of(tensor) if raw.is_meta(tensor) else tensor
            return None if real is None else _as_strided(real, (), ()).item()

    def known(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a CPU copy of what ``tensor`` holds; ``None`` if that is not known."""
        if not self._bases and not self.facts.by_key:
            return None
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            view = self.of(tensor)
            known = None if view is None else view.clone()
        if known is not None:
            self._note_read((tensor,))
        return known

    def of_storage(self, storage: torch.UntypedStorage) -> torch.UntypedStorage | None:
        """Return what a storage holds, on the CPU; ``None`` if that is not known."""
        base = self._bases.get(storage._cdata)
        return None if base is None else base.untyped_storage()

    def computed(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what ``operator`` yields on the CPU; ``None`` if an argument is not known."""
        computed = self._by_fact(operator, args, kwargs) if self.facts.by_key else None
        if computed is None and self._known(args, kwargs):
            computed = self._compute(operator, args, kwargs, [])
        if computed is not None:
            self._note_read(args)
        return computed

    def on_host(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what ``operator`` makes in host memory; ``None`` if nobody knows its values."""
        if operator.shaped_like and self._keeps(args[0]):
            return operator.func(_blank(args[0]), *args[1:], **kwargs)
        return self.computed(operator, args, kwargs)

    def refusal(self, read: str) -> str:
        """Say that ``read``, such as ``bool() at test.py:3 reads``, is of an unknown value."""
        if self.uncomputed is not None:
            return (
                f"{read} a value of a CUDA tensor that is not known, because {self.uncomputed} "
                f"cannot be computed on the CPU"
            )
        if self.everything:
            return f"{read} a value of a CUDA tensor that is not known: nothing has written it"
        return (
            f"{read} a value of a CUDA tensor, which a simulated GPU does not have: only shapes "
            f"are computed"
        )

    # Following operators.

    def follow(
        self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Do to the values what an operator has just done to the shapes."""
        if self._ignoring:
            return
        if self.recording is not None and self.records(operator, args, kwargs, result):
            return
        fact = None
        if self.facts.by_key or operator.fills:
            fact = self._fact(operator, args, kwargs)
        if operator.written:
            self._write(operator, args, kwargs, result)
        elif self._bases and self._known(args, kwargs):
            self._derive(operator, args, kwargs, result)
        elif operator.assumption is not None and not self.everything:
            operator.assumption(self._simulation, args, result)
        if fact is not None:
            self._state(fact, operator, args, kwargs, result)

    def records(
        self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> bool:
        """Let a capture under way, if there is one here, take the call for when its graph runs."""
        recording = None if self.recording is None else self.recording()
        if recording is None:
            return False
        recording.add(operator, args, kwargs, result)
        return True

    @contextmanager
    def ignoring(self) -> Iterator[None]:
        """Follow no operator that runs inside."""
        before, self._ignoring = self._ignoring, True
        try:
            yield
        finally:
            self._ignoring = before

    def replace(
        self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Know of ``result`` and of what was written what ``operator`` as a whole says of it."""
        if self._ignoring:
            return
        if self.recording is not None and self.records(operator, args, kwargs, result):
            return
        fact = None
        if self.facts.by_key or operator.fills:
            fact = self._fact(operator, args, kwargs)
        if operator.targets(args, kwargs):
            self._write(operator, args, kwargs, result)
            if fact is not None:
                self._state(fact, operator, args, kwargs, result)
            return
        given = {storage_key(tensor) for tensor in _collect((*args, *kwargs.values()), [])}
        made = [tensor for tensor in _collect(result, []) if storage_key(tensor) not in given]
        computed = None
        if self._bases and self._known(args, kwargs) and self._is_computable(operator, made):
            self.work.expect(operator.func, args, kwargs, result)
            computed = self._compute(operator, args, kwargs, [])
        for tensor in made:
            self.forget(storage_key(tensor))
        if computed is not None:
            self._keep_all(result, computed, set(), parts=True)
        elif operator.assumption is not None and made and not self.everything:
            operator.assumption(self._simulation, args, result)
        if fact is not None:
            self._state(fact, operator, args, kwargs, made)

    def assign(self, result: Any, function: Callable[..., Any], *args: Any) -> None:
        """Know of ``result`` what ``function`` returns on the CPU, and nothing else.

        For composite operators whose parts have the right shapes and not the right values.
        """
        if self._ignoring:
            return
        operator = Operator(
            (), "", (), False, False, False, False, False, False, function, None, False
        )
        with torch._C._DisableTorchDispatch():
            self.replace(operator, args, {}, result)

    def make(
        self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Know what a factory, or a copy between devices, has just made."""
        if self._ignoring:
            return
        if self.recording is not None and self.records(operator, args, kwargs, result):
            return
        fact = None
        if self.facts.by_key or operator.fills or not _all_meta(args[:1]):
            fact = self._fact(operator, args, kwargs)
        if self.everything or not operator.undefined:
            self._make(operator, args, kwargs, result)
        if fact is not None:
            self._state(fact, operator, args, kwargs, result)

    def _make(
        self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        if operator.blank and result.numel():
            if self.everything:
                self._blank.add(storage_key(result))
                self._watch(result)
            return
        if operator.shaped_like:
            if self._keeps(result):
                args = (_blank(args[0]), *args[1:])
                self._derive(operator, args, kwargs, result)
        elif self._unknown_among(args) is not True:
            self._derive(operator, args, kwargs, result)

    def keep(self, tensor: torch.Tensor, source: torch.Tensor) -> None:
        """Know that ``tensor`` holds what ``source``, a CPU tensor of its shape, holds."""
        if raw.is_meta(source):
            return
        if source.shape == tensor.shape and source.layout is torch.strided:
            self._keep(tensor, source, shared=True)

    def died(self, key: int) -> None:
        """Drop the values of a storage that has died; a graph's pool keeps what is left there."""
        contents = self.pooled.pop(key, None) if self.pooled else None
        if contents is not None:
            contents.died(key, self._bases.get(key))
        self.forget(key)

    def record(self, key: int) -> SimulatedStorage | None:
        """Return the block of a storage."""
        return self._simulation.storages.by_key.get(key)

    def forget(self, key: int) -> None:
        """Drop the values of a storage, because they are no longer known or it has died."""
        self._blank.discard(key)
        if self.facts.by_key:
            self.facts.by_key.pop(key, None)
        base = self._bases.pop(key, None)
        if base is not None and self.everything:
            self._held -= base.numel() * base.element_size()

    def assume(self, tensor: torch.Tensor, value: bool) -> None:
        """Take ``value`` for what every element of ``tensor`` holds; reading it says so."""
        uniform = torch.tensor(value, device=CPU)
        self._set_fact(tensor, Fact(uniform, assumed=True))

    def follow_on_host(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Remember of copies in host memory, whose values nobody knows, what is not finite."""
        if not self.facts.by_key:
            return
        given = list(map(self.facts.infinity, tensors_in(args)))
        infinite = finite.passed_on(func._schema.name, given)
        for tensor in tensors_in(result) if infinite else ():
            self._set_fact(tensor, Fact(infinite=infinite))

    def _set_fact(self, tensor: torch.Tensor, fact: Fact) -> None:
        if fact.value is not None and self._keeps(tensor):
            self._keep(tensor, fact.value.expand(tensor.shape), shared=True)
        self.facts.by_key[storage_key(tensor)] = fact
        self._watch(tensor)

    def _fact(
        self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Fact | None:
        return None if self.everything else self.facts.of_results(operator, args, kwargs)

    def _state(
        self,
        fact: Fact,
        operator: Operator,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        """Let ``fact`` hold of what an operator has just made, or written to."""
        targets = operator.targets(args, kwargs)
        for tensor in targets or _collect(result, []):
            stated = of_result(operator, fact, args[0], tensor)
            if targets or self.facts.of(tensor) is None:
                if targets and not covers(tensor):
                    stated = Fact(None, stated.assumed, stated.infinite)
                if stated != Fact():
                    self._set_fact(tensor, stated)
                elif self.facts.of(tensor) is not None:
                    del self.facts.by_key[storage_key(tensor)]

    def _by_fact(
        self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor | None:
        """What ``operator`` yields of a tensor whose elements are all equal, where it is read."""
        if operator.name == "aten::nonzero":
            return self.facts.counted(args[0])
        uniform = self.facts.uniform(args[0]) if operator.name == "aten::_to_copy" else None
        if uniform is None:
            return None
        whole = uniform.expand(args[0].shape)
        computed: torch.Tensor | None = self._compute(operator, (whole, *args[1:]), kwargs, [])
        return computed

    def _note_read(self, values: Iterable[Any]) -> None:
        if self.facts.by_key and self.facts.is_assumed(values):
            self._simulation.note_finite()

    def is_unknown_on_host(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is a CPU tensor of unknown values."""
        return self._simulation.storages.is_on_host(tensor)

    def resized(self, tensor: torch.Tensor) -> None:
        """Follow a storage that was resized in place: what was added is undefined."""
        key = storage_key(tensor)
        base = self._bases.get(key)
        if base is None:
            return
        size = _elements(tensor, base.dtype)
        if size <= base.numel():
            return
        if not self.everything:
            self.forget(key)
            return
        grown = _empty(size, dtype=base.dtype, device=CPU)
        grown[: base.numel()] = base
        self._bases[key] = grown
        self._hold((size - base.numel()) * base.element_size())

    def _write(
        self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        bases = self._bases
        if operator.moves_views or (not bases and not operator.overwrites):
            return
        targets = operator.targets(args, kwargs)
        for target in targets:
            if storage_key(target) in self._blank:
                self._put_blank(target)
        if operator.overwrites:
            if not self._can_overwrite(operator, args, kwargs, targets):
                return
        elif not any(storage_key(target) in bases for target in targets):
            return
        elif not self._known(args, kwargs):
            assume = operator.assumption
            spared = assume(self._simulation, args, result) if assume else None
            for target in targets:
                if target is not spared:
                    self.forget(storage_key(target))
            return
        self._derive(operator, args, kwargs, result, targets)

    def _can_overwrite(
        self,
        operator: Operator,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        targets: list[torch.Tensor],
    ) -> bool:
        """Whether what is written, and all around it, is known; else nothing is any more."""
        names = {name for _, name in operator.written}
        places = {at for at, _ in operator.written}
        read = [value for at, value in enumerate(args) if at not in places]
        read += [value for name, value in kwargs.items() if name not in names]
        if targets and self._unknown_among(read) is not True:
            for target in targets:
                key = storage_key(target)
                if key in self._bases:
                    continue
                if not self._keeps(target) or not covers(target):
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
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        targets: Iterable[torch.Tensor] = (),
    ) -> None:
        used: list[torch.Tensor] = []
        computed = None
        if self._is_computable(operator, _collect(result, [])):
            self.work.expect(operator.func, args, kwargs, result)
            computed = self._compute(operator, args, kwargs, used)
        if computed is None:
            for target in targets:
                self.forget(storage_key(target))
        self._keep_all(result, computed, {tensor.untyped_storage()._cdata for tensor in used})

    def _is_computable(self, operator: Operator, results: Iterable[torch.Tensor]) -> bool:
        return self.everything or (not operator.undefined and all(map(self._keeps, results)))

    def _compute(
        self,
        operator: Operator,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        used: list[torch.Tensor],
    ) -> Any:
        on_cpu = [self._on_cpu(value, used) for value in args]
        named = {name: self._on_cpu(value, used) for name, value in kwargs.items()}
        return self.run(operator, on_cpu, named)

    def run(self, operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return what ``operator`` yields of CPU tensors; ``None`` if the CPU cannot compute it."""
        generator = kwargs.get("generator")
        if generator is not None:
            kwargs = {**kwargs, "generator": drawn_from(generator)}
        try:
            with self.work.computing():
                computed = self._run(operator, args, kwargs)
        except IndexError:
            if self.everything:
                raise  # a GPU would stop there too
            return None
        except Exception:
            if self.everything and self.uncomputed is None:
                self.uncomputed = str(operator.func)
            return None
        return () if computed is None else computed

    def _run(self, operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        try:
            if operator.random and kwargs.get("generator") is None:
                with _drawing(torch.cuda.default_generators[self._simulation.current_index]):
                    return operator.compute(*args, **kwargs)
            return operator.compute(*args, **kwargs)
        except Exception as error:
            if not self.everything or not _lacks_half(error):
                raise
        writes = bool(operator.written)
        return real_kernels.in_float32(operator.compute, list(args), kwargs, writes=writes)

    def _on_cpu(self, value: Any, used: list[torch.Tensor]) -> Any:
        if isinstance(value, torch.Tensor):
            base = self._bases.get(storage_key(value))
            real = value if base is None else view_of(base, value)
            used.append(real)
            return real
        if isinstance(value, (list, tuple)):
            return type(value)([self._on_cpu(item, used) for item in value])
        return CPU if isinstance(value, torch.device) else value

    # What is known.

    def _known(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        first = self._unknown_among(args)
        if first is True:
            return False
        second = self._unknown_among(kwargs.values()) if kwargs else None
        return second is not True and (first is False or second is False)

    def _unknown_among(self, values: Iterable[Any]) -> bool | None:
        """Whether a tensor among ``values`` is unknown; ``None`` if none has values kept here."""
        bases = self._bases
        is_on_host = self._simulation.storages.is_on_host
        answer = None
        for value in values:
            if isinstance(value, torch.Tensor):
                if storage_key(value) in bases:
                    answer = False
                elif raw.is_meta(value) or is_on_host(value):
                    return True
            elif isinstance(value, (list, tuple)):
                inner = self._unknown_among(value)
                if inner:
                    return True
                answer = answer if inner is None else inner
        return answer

    def _keeps(self, tensor: torch.Tensor) -> bool:
        """Whether values of a tensor of this size are kept."""
        if tensor.layout is not torch.strided:
            return False
        if self.everything:
            return True
        dtype = tensor.dtype
        most = MOST_FLOATS if dtype.is_floating_point or dtype.is_complex else MOST_INTEGERS
        return tensor.numel() <= most and _elements(tensor) <= 2 * most

    # Keeping.

    def _keep_all(self, result: Any, computed: Any, used: set[int], *, parts: bool = False) -> None:
        """Keep what was ``computed`` of ``result``, whose tensors may be ``parts`` of storages."""
        if isinstance(result, (list, tuple)):
            if isinstance(computed, (list, tuple)):
                for one, other in zip(result, computed, strict=False):
                    self._keep_all(one, other, used, parts=parts)
            return
        if not isinstance(result, torch.Tensor) or not raw.is_meta(result):
            return
        if computed is real_kernels.UNREAD or isinstance(computed, int):
            filling = 0 if computed is real_kernels.UNREAD else computed
            computed = torch.full(result.shape, filling, dtype=result.dtype, device=CPU)
        if not isinstance(computed, torch.Tensor) or computed.layout is not torch.strided:
            return
        if computed.shape == (*result.shape, 1):
            # What cuDNN's attention sums had no last dimension yet in 2.6.
            computed = computed.squeeze(-1)
        if computed.shape != result.shape:
            return
        base = self._bases.get(storage_key(result))
        if base is None:
            self._keep(result, computed, computed.untyped_storage()._cdata in used)
            used.add(computed.untyped_storage()._cdata)
        elif parts:
            view_of(base, result).copy_(computed)

    def _keep(self, tensor: torch.Tensor, source: torch.Tensor, shared: bool) -> None:
        if not self._keeps(tensor) or tensor.layout is not torch.strided:
            return
        if (
            not shared
            and source.dtype == tensor.dtype
            and source.is_contiguous()
            and not source.storage_offset()
            and covers(tensor)
        ):
            self._put(tensor, source.view(-1))
            return
        base = _empty(_elements(tensor), dtype=tensor.dtype, device=CPU)
        view_of(base, tensor).copy_(source)
        self._put(tensor, base)

    def _put(self, tensor: torch.Tensor, base: torch.Tensor) -> None:
        self.put(storage_key(tensor), base)
        self._watch(tensor)

    def put(self, key: int, base: torch.Tensor) -> None:
        """Let ``base``, flat, be what a storage holds that is watched already."""
        self.forget(key)
        if self.everything:
            self._hold(base.numel() * base.element_size())
        self._bases[key] = base

    def base(self, key: int) -> torch.Tensor | None:
        """Return all elements of a storage, flat; ``None`` if they are not known."""
        return self._bases.get(key)

    def _put_blank(self, tensor: torch.Tensor) -> None:
        self._put(tensor, _empty(_elements(tensor), dtype=tensor.dtype, device=CPU))

    def _watch(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._simulation.storages.by_key or key in self._loose:
            return

        def died(reference: weakref.ref[torch.UntypedStorage]) -> None:
            # Another storage may have the address by now.
            if self._loose.get(key) is reference:
                del self._loose[key]
                self.forget(key)

        self._loose[key] = weakref.ref(storage, died)

    def _hold(self, nbytes: int) -> None:
        if self._held + nbytes > self._limit:
            raise HostMemoryError(
                f"real values take more than {self._limit:,} bytes of host memory, half of what "
                f"was free"
            )
        self._held += nbytes


def view_of(base: torch.Tensor, tensor: Any) -> torch.Tensor:
    """Return of ``base``, all elements of a storage, what ``tensor`` is of that storage."""
    offset = tensor.storage_offset()
    if base.dtype == tensor.dtype:
        view = _as_strided(base, tensor.shape, tensor.stride(), offset)
    else:
        view = _empty(0, dtype=tensor.dtype, device=CPU)
        view.set_(base.untyped_storage(), offset, tensor.shape, tensor.stride())
    if tensor.is_conj():
        view = view.conj()
    return torch._neg_view(view) if tensor.is_neg() else view


def _elements(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> int:
    """Elements of ``dtype`` in the whole storage."""
    size: int = (dtype or tensor.dtype).itemsize
    nbytes: int = tensor.untyped_storage().nbytes()
    return nbytes // size


def covers(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is all of its storage."""
    return tensor.is_contiguous() and tensor.numel() == _elements(tensor)


def _blank(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return _empty_strided(value.shape, value.stride(), dtype=value.dtype, device=CPU)


def _all_meta(values: tuple[Any, ...]) -> bool:
    return all(raw.is_meta(value) for value in values if isinstance(value, torch.Tensor))


def _collect(value: Any, found: list[torch.Tensor]) -> list[torch.Tensor]:
    """Append the meta tensors in ``value`` to ``found``."""
    if isinstance(value, torch.Tensor):
        if raw.is_meta(value):
            found.append(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect(item, found)
    return found


def _lacks_half(error: Exception) -> bool:
    return isinstance(error, RuntimeError) and "not implemented for" in str(error)


@contextmanager
def _drawing(generator: torch.Generator) -> Iterator[None]:
    """Draw the CPU's random numbers from ``generator``: most operators take no other way."""
    default = torch.default_generator
    before = default.get_state()
    source = drawn_from(generator)
    default.set_state(source.get_state())
    try:
        yield
    finally:
        source.set_state(default.get_state())
        default.set_state(before)
