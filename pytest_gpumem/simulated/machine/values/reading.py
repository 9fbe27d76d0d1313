"""Known values of tensors for their readers, and results that operators compute from them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.machine.cpu_kernels.kernels import in_float32
from pytest_gpumem.simulated.machine.generators import drawn_from
from pytest_gpumem.simulated.machine.notes import Notes
from pytest_gpumem.simulated.machine.signatures import Args, Kwargs
from pytest_gpumem.simulated.machine.storages import Storages, storage_key
from pytest_gpumem.simulated.machine.values import finite
from pytest_gpumem.simulated.machine.values.assumptions import is_printing
from pytest_gpumem.simulated.machine.values.facts import ValueFacts
from pytest_gpumem.simulated.machine.values.kept import KnownValues
from pytest_gpumem.simulated.machine.values.operator import Operator
from pytest_gpumem.simulated.machine.values.views import arbitrary, layout_of, on_device, view_of
from pytest_gpumem.simulated.machine.values.work import Work


class Reading(KnownValues):
    """Known values for readers: by tensor, and by an operator that is applied to tensors."""

    why_unknown = "which a simulated GPU does not have: only shapes are computed"
    """The reason why values are unknown where not everything is computed."""

    def __init__(self, storages: Storages, notes: Notes, *, everything: bool) -> None:
        super().__init__(storages, everything=everything)
        self.notes = notes
        """The notes that assumptions go to."""
        self.facts = ValueFacts(self.single, storages.is_unknown_on_cpu, self._stated)
        self.work = Work()
        self.uncomputed: str | None = None
        """The first operator or kernel that the CPU cannot compute, where all is computed."""
        self.begin()

    def begin(self) -> None:
        """Look up how much memory the host has; reset failures to compute on the CPU."""
        self.uncomputed = None
        self.work.begin()
        if self.everything:
            self._limit = self._held + available_memory() // 2

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a CPU view of the values of ``tensor``; ``None`` if they are unknown."""
        if not self._bases and not self.facts.by_key:
            return None
        base = self._bases.get(storage_key(tensor))
        if base is not None:
            return view_of(base, layout_of(tensor))
        uniform = self.facts.uniform(tensor)
        return None if uniform is None else uniform.expand(tensor.shape)

    def single(self, tensor: torch.Tensor) -> Any:
        """Return the one number that ``tensor`` holds, once or repeated; ``None`` if not known."""
        is_strided = tensor.layout is torch.strided
        repeated = is_strided and (tensor.numel() == 1 or not any(tensor.stride()))
        if not repeated or not tensor.numel() or self.storages.is_unknown_on_cpu(tensor):
            return None
        with torch._C._DisableTorchDispatch():
            real = self.of(tensor) if raw.is_on_device(tensor) else tensor
            return None if real is None else raw.as_strided(real, (), ()).item()

    def if_finite(self, func: Any, args: Args) -> bool | None:
        """Return the result of ``func`` for finite numbers; ``None`` if that is not enough."""
        return finite.answer(self.single, self.facts.infinity, func, args)

    def known(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a CPU copy of the values of ``tensor``; ``None`` if they are unknown."""
        if not self._bases and not self.facts.by_key:
            return None
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            view = self.of(tensor)
            known = None if view is None else view.clone()
        if known is not None:
            self.note_read((tensor,))
        return known

    def of_storage(self, storage: torch.UntypedStorage) -> torch.UntypedStorage | None:
        """Return the contents of a storage, on the CPU; ``None`` if they are unknown."""
        base = self._bases.get(storage._cdata)
        return None if base is None else base.untyped_storage()

    def computed(self, operator: Operator, args: Args, kwargs: Kwargs) -> Any:
        """Return the result of ``operator`` on the CPU; ``None`` if an argument is unknown."""
        computed = None
        if self.facts.by_key and operator.name == "aten::nonzero":
            computed = self.facts.nonzero_of(args[0])
        elif self.facts.by_key and operator.name == "aten::_to_copy":
            uniform = self.facts.uniform(args[0])
            if uniform is not None:
                whole = uniform.expand(args[0].shape)
                computed = self._compute(operator, (whole, *args[1:]), kwargs, [])
        if computed is None and self._known(args, kwargs):
            computed = self._compute(operator, args, kwargs, [])
        if computed is not None:
            self.note_read(args)
        return computed

    def on_host(self, operator: Operator, args: Args, kwargs: Kwargs) -> Any:
        """Return the result of ``operator`` in host memory; ``None`` if its values are unknown."""
        if operator.shaped_like and self._keeps(args[0]):
            return operator.func(arbitrary(args[0]), *args[1:], **kwargs)
        return self.computed(operator, args, kwargs)

    @property
    def assumes(self) -> bool:
        """Whether unknown numbers are taken for finite.

        Where everything is computed, that begins with the first operator the CPU cannot compute.
        """
        return not self.everything or self.uncomputed is not None

    def refusal(self, read: str) -> str:
        """Return the error text for ``read``, such as ``bool() at test.py:3 reads``."""
        value = f"{read} a value of a CUDA tensor"
        if self.uncomputed is not None:
            because = f"because {self.uncomputed} cannot be computed on the CPU"
            return f"{value} that is not known, {because}"
        if self.everything:
            return f"{value} that is not known: nothing has written it"
        return f"{value}, {self.why_unknown}"

    def note_read(self, values: Iterable[Any]) -> None:
        """Note the assumptions on ``values``, which are read."""
        if self.facts.by_key and self.facts.is_assumed(values) and not is_printing():
            self.notes.note_finite()

    def _is_computable(self, operator: Operator, result: Any) -> bool:
        if self.everything or operator.undefined:
            return self.everything
        return all(map(self._keeps, on_device(result)))

    def _compute(
        self, operator: Operator, args: Args, kwargs: Kwargs, used: list[torch.Tensor]
    ) -> Any:
        on_cpu = [self._on_cpu(value, used) for value in args]
        named = {name: self._on_cpu(value, used) for name, value in kwargs.items()}
        return self.run(operator, on_cpu, named)

    def _on_cpu(self, value: Any, used: list[torch.Tensor]) -> Any:
        if isinstance(value, torch.Tensor):
            base = self._bases.get(storage_key(value))
            used.append(value if base is None else view_of(base, layout_of(value)))
            return used[-1]
        if isinstance(value, (list, tuple)):
            return type(value)([self._on_cpu(item, used) for item in value])
        return raw.CPU if isinstance(value, torch.device) else value

    def run(self, operator: Operator, args: Sequence[Any], kwargs: Kwargs) -> Any:
        """Return the result of ``operator`` on CPU tensors; ``None`` if the CPU has no kernel."""
        generator = kwargs.get("generator")
        if generator is not None:
            kwargs = {**kwargs, "generator": self.source_of(generator)}
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

    def _run(self, operator: Operator, args: Sequence[Any], kwargs: Kwargs) -> Any:
        try:
            if operator.random and kwargs.get("generator") is None:
                with _drawing(self.source_of(self.generator_of(None))):
                    return operator.compute(*args, **kwargs)
            return operator.compute(*args, **kwargs)
        except Exception as error:
            lacks_half = isinstance(error, RuntimeError) and "not implemented for" in str(error)
            if not self.everything or not lacks_half:
                raise
        return in_float32(operator.compute, args, kwargs, writes=bool(operator.written))

    def generator_of(self, given: torch.Generator | None) -> torch.Generator:
        """Return ``given``, or the current device's own generator."""
        return given or torch.cuda.default_generators[torch.cuda.current_device()]

    def source_of(self, generator: torch.Generator) -> torch.Generator:
        """Return the CPU's generator that draws the numbers of ``generator``, one of a GPU."""
        return drawn_from(generator)


@contextmanager
def _drawing(source: torch.Generator) -> Iterator[None]:
    """Make the CPU's default generator, the only one of most operators, draw from ``source``."""
    default = torch.default_generator
    before = default.get_state()
    default.set_state(source.get_state())
    try:
        yield
    finally:
        source.set_state(default.get_state())
        default.set_state(before)


_GROUPS = (
    # cgroup v2 and v1: the limit and the use, in bytes.
    ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
    ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes that can still be allocated, within the system's and container's limits.

    Only Linux has files with these numbers; elsewhere psutil reads them.
    """
    bounds = []
    with suppress(OSError):
        known = (root / "proc/meminfo").read_text(encoding="ascii")
        found = re.search(r"^MemAvailable:\s+(\d+) kB", known, re.M)
        bounds += [int(found[1]) * 1024] if found else []
    if not bounds:
        bounds.append(psutil.virtual_memory().available)
    for limit, used in _GROUPS:
        with suppress(OSError, ValueError):  # "max": no limit
            most, taken = (int((root / name).read_text(encoding="ascii")) for name in (limit, used))
            bounds.append(max(most - taken, 0))
    return min(bounds)
