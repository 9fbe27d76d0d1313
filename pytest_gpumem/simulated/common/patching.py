"""Attributes replaced while a simulation is active, methods of tensors too, until it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from types import MethodType, ModuleType
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function_unary

from pytest_gpumem.late_modules import when_imported
from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.common.callsite import clear_own_frames

_ABSENT = object()

_Row = tuple[Any, str, Any]
"""Owner, name and replacement."""


def wrapped(original: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement of ``original``: ``function``, which gets it before its arguments."""

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    return call


@dataclass
class _Replaced:
    owner: Any
    name: str
    value: Any
    before: Any

    @property
    def present(self) -> Any:
        if self.name == "__bases__":
            return self.owner.__bases__
        # vars(), not getattr(): an inherited attribute must come back by deletion.
        return vars(self.owner).get(self.name, _ABSENT)

    def replace(self) -> None:
        self.before = self.present
        setattr(self.owner, self.name, self.value)

    def put_back(self) -> None:
        if self.name == "__bases__":  # a tool may have restored an inherited method here
            served = vars(self.value[0])
            for name, value in list(vars(self.owner).items()):
                if callable(value) and served.get(name) is value:
                    delattr(self.owner, name)
        if self.before is _ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.before)


class Patches:
    """A list of attribute replacements that can be applied and undone any number of times."""

    def __init__(self) -> None:
        self.added: list[_Row] = []
        """Owner, name and replacement, in the order they were added."""
        self.attributes: list[_Row] = []
        """The attributes to set for these; one ``__getattr__`` may serve many names."""
        self._replaced: list[_Replaced] = []
        self._is_paused = False
        self._put_back: list[_Replaced] = []
        """Replacements to apply again when a pause ends, last one first."""

    def add(self, owner: Any, name: str, value: Any) -> None:
        """Replace ``owner.name`` by ``value`` whenever the patches are applied."""
        self.added.append((owner, name, value))
        self.attributes.append((owner, name, value))

    def wrap(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Replace ``owner.name`` by ``function``, which gets the original before its arguments."""
        self.add(owner, name, wrapped(getattr(owner, name), function))

    def join_missing(self, module: ModuleType) -> None:
        """Serve the names that ``module`` lacks by one ``__getattr__`` of the module."""
        missing = self._pop_missing(module)

        def __getattr__(name: str) -> Any:  # noqa: N807  # Python's own hook, PEP 562
            if name in missing:
                return missing[name]
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

        self.attributes.append((module, "__getattr__", __getattr__))

    def join_inherited(self, kind: type) -> None:
        """Serve the names that the class ``kind`` inherits by one class in front of its bases."""
        inherited = {"__slots__": (), **self._pop_missing(kind)}
        base = type(f"Simulated{kind.__name__}", (), inherited)
        self.attributes.append((kind, "__bases__", (base, *kind.__bases__)))

    def _pop_missing(self, owner: Any) -> dict[str, Any]:
        """Remove and return the replacements of names that ``owner`` itself does not define."""
        served, self.attributes, rows = {}, [], self.attributes
        for row in rows:
            each, name, value = row
            if each is owner and name not in vars(owner):
                served[name] = value
            else:
                self.attributes.append(row)
        return served

    @property
    def are_applied(self) -> bool:
        """Whether anything is replaced now."""
        return bool(self._replaced) and not self._is_paused

    def apply(self) -> None:
        """Make every replacement, remembering the old values."""
        for owner, name, value in self.attributes:
            replaced = _Replaced(owner, name, value, _ABSENT)
            self._replaced.append(replaced)
            replaced.replace()

    def undo(self) -> None:
        """Put everything back, last replacement first."""
        while self._replaced:
            self._replaced.pop().put_back()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Make every replacement inside."""
        self.apply()
        try:
            yield
        finally:
            self.undo()

    @contextmanager
    def paused(self, but: Callable[[Any, str, Any], bool] | None = None) -> Iterator[None]:
        """Restore the originals inside, but for names that other code has replaced since.

        The value at the end of the pause is the one that :meth:`undo` restores: a module imported
        inside may have set it. ``but`` says by owner, name and replacement which ones stay.
        """
        paused: list[_Replaced] = []
        for replaced in reversed(self._replaced):
            if but is not None and but(replaced.owner, replaced.name, replaced.value):
                continue
            if replaced.present is replaced.value:
                replaced.put_back()
                paused.append(replaced)
        before, self._is_paused = self._is_paused, self._is_paused or but is None
        outer, self._put_back = self._put_back, paused
        try:
            yield
        finally:
            self._put_back = outer
            self._is_paused = before
            for replaced in reversed(paused):
                replaced.replace()

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """Apply again inside the replacements that the innermost :meth:`paused` has undone."""
        resumed, self._put_back = self._put_back, []
        for replaced in reversed(resumed):
            replaced.replace()
        try:
            yield
        finally:
            for replaced in resumed:
                replaced.put_back()
            self._put_back = resumed


@contextmanager
def having(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set ``owner.name`` to ``value`` inside."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


Plan = Callable[[Patches, ModuleType], None]
"""A function that adds the replacements in a module."""


@contextmanager
def patched_when_imported(plans: Mapping[str, Plan]) -> Iterator[None]:
    """Apply the plan of each module that is imported before the end; undo them all there."""
    with ExitStack() as made:

        def change(plan: Plan, module: ModuleType) -> None:
            patches = Patches()
            plan(patches, module)
            made.enter_context(patches.applied())

        with when_imported({name: partial(change, plan) for name, plan in plans.items()}):
            yield


def add_functions(functions: Mapping[str, Any], patches: Patches) -> None:
    """Replace ``functions`` of ``torch._C``, and the copies of their names.

    A build without CUDA has no ``_cuda_`` functions, and the ``_accelerator_`` ones differ by
    release.
    """
    for name, function in functions.items():
        if not name.startswith("_accelerator_") or hasattr(torch._C, name):
            patches.add(torch._C, name, function)
            for module in (torch.cuda.graphs, torch.cuda.memory):
                if name in vars(module):
                    patches.add(module, name, function)


class Method:
    """A method of tensors that asks subclasses first, and equals torch's own, which it replaces.

    Subclasses look up the function they are asked about in tables, by torch's method or this one.
    """

    def __init__(self, function: Callable[..., Any], replaced: Any) -> None:
        self._function = function
        self._replaced = replaced
        # Dynamo traces torch's own method if the two names are equal (is_bound_tensor_method of
        # torch/_dynamo/utils.py, 2.6 to 2.15), and else this one.
        self.__name__ = replaced.__name__

    def __get__(self, tensor: torch.Tensor | None, kind: type) -> Any:
        return self if tensor is None else MethodType(self, tensor)

    def __call__(self, tensor: torch.Tensor, /, *args: Any, **kwargs: Any) -> Any:
        """Run the function, unless the class of ``tensor`` answers for itself.

        Where memory runs out, the error's frames keep no tensor: those of C++ would not.
        """
        try:
            if tensor.__class__ not in raw.PLAIN and has_torch_function_unary(tensor):
                return handle_torch_function(self, (tensor,), tensor, *args, **kwargs)
            return self._function(tensor, *args, **kwargs)
        except torch.OutOfMemoryError as error:
            clear_own_frames(error.__traceback__)
            del tensor, args, kwargs
            raise

    def __eq__(self, other: object) -> bool:
        return other is self or bool(self._replaced == other)

    def __repr__(self) -> str:
        return repr(self._replaced)

    def __hash__(self) -> int:
        return hash(self._replaced)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle it by its name, as functions are: PyTorch's tests copy tables of them."""
        return getattr, (torch.Tensor, self.__name__)
