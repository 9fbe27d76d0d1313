"""Reads of values that the dry device does not have: placeholders, and errors that end a run.

A number that is only printed or stored reads as zero, and a note names the line. A read on which
control flow depends raises an error, as on the simulated device; the test then runs again with
values.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, NoReturn

import torch

from pytest_gpumem.dry.values.dispatch import is_followed
from pytest_gpumem.dry.values.known import DryValues
from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.common.callsite import user_line
from pytest_gpumem.simulated.common.patching import Method, Patches
from pytest_gpumem.simulated.machine.values.assumptions import (
    FINITE,
    assumption_of,
    drawn_seed,
    is_printing,
    printing,
    seeds_dropout,
)
from pytest_gpumem.simulated.machine.values.placeholder import (
    PlaceholderFloat,
    PlaceholderInt,
    dots,
    placeholder_integers,
)
from pytest_gpumem.values.errors import UnknownValueError

MOST_DECIDED_BY = 1 << 20
"""The most bytes of a copy to the host on which control flow may depend; longer copies are data."""

_item, _bool, _tolist, _numpy = (raw.base(n) for n in ("item", "__bool__", "tolist", "numpy"))
_array: Any = torch.Tensor.__array__
_repr: Any = torch.Tensor.__repr__
_NUMBERS = ("__float__", "__int__", "__index__", "__complex__")
_SCALER = "torch.amp.grad_scaler"
"""Module that calls ``item()`` only to read whether gradients are infinite."""

_Truth = bool


class ThreadReads(threading.local):
    """The state of one thread's reads."""

    expected = 0
    """Above zero inside :meth:`Reads.expected`, whose caller checks whether the value was known."""
    unknown = 0
    """Number of reads of unknown values."""


class _UnknownError(UnknownValueError):
    """An error raised asynchronously in a Python thread, from its class without arguments."""

    sentence = ""

    def __init__(self) -> None:
        super().__init__(type(self).sentence)


class _TakenBackError(BaseException):
    """An asynchronous error that only :func:`_take_back` raises and catches."""


def _take_back(threads: Iterable[int]) -> None:
    """Remove the pending asynchronous errors of ``threads`` that have not returned to Python.

    After that CPython up to 3.12 keeps checking for an asynchronous error until it finds one. The
    checks take time, and in 3.11 no traced function starts (``CHECK_EVAL_BREAKER`` in
    ``DO_TRACING`` of Python/ceval.c). So an error is raised and caught in this thread.
    """
    set_error = ctypes.pythonapi.PyThreadState_SetAsyncExc
    here = ctypes.c_ulong(threading.get_ident())
    with suppress(_TakenBackError):
        for thread in threads:
            set_error(ctypes.c_ulong(thread), None)
        set_error(here, ctypes.py_object(_TakenBackError))
        while True:
            pass


class Reads:
    """The reads of one device, by tests on it, one after the other."""

    def __init__(
        self,
        values: DryValues,
        following: Callable[[], AbstractContextManager[None]],
        *,
        followed: bool,
        makes_up_integers: bool,
    ) -> None:
        """Read ``values``; ``following`` returns a context in which operators are followed.

        An unknown integer read by ``item()`` is an error, or is made up if allowed.
        """
        self.thread = ThreadReads()
        self.decided_by: str | None = None
        """The reason why this run is invalid: its control flow depends on an unknown value."""
        self.used_placeholder = False
        """Whether an unknown number has been read."""
        self._values = values
        self._storages = values.storages
        self._notes = values.notes
        self._following = following
        self._followed = followed
        self._everything = values.everything
        self._makes_up_integers = makes_up_integers
        self._interrupted: dict[int, type[BaseException]] = {}
        self._patches = Patches()
        # Functions, not bound methods, which would not receive the tensor as ``self``.
        replaced: dict[str, Callable[..., Any]] = {
            "item": lambda tensor: self._read(_item, tensor, "item()"),
            "__bool__": lambda tensor: self._condition(tensor),
            "tolist": lambda tensor: self._list(tensor),
            "numpy": self._refusing_unknown(_numpy),
            "__array__": self._refusing_unknown(_array),
            "__repr__": lambda tensor, **kwargs: self._printed(tensor, **kwargs),
            **{name: self._number(name) for name in _NUMBERS},
            **{name: self._to_host(raw.base(name), f"{name}()") for name in ("cpu", "to")},
        }
        for name, function in replaced.items():
            self._patches.add(torch.Tensor, name, Method(function, getattr(torch.Tensor, name)))

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Check inside whether the values that tensors return are known."""
        try:
            with self._patches.applied():
                yield
        finally:
            if self._interrupted:
                _take_back(self._interrupted)
                self._interrupted.clear()

    def begin(self) -> None:
        """Begin a test."""
        self.decided_by = None
        self.used_placeholder = False
        self._notes.notes.clear()
        self._notes.placeholder_reads.clear()
        self._notes.assumed = False

    @contextmanager
    def expected(self) -> Iterator[None]:
        """Allow reads of unknown values inside; ``thread.unknown`` counts them."""
        self.thread.expected += 1
        try:
            yield
        finally:
            self.thread.expected -= 1

    def unknown_read(self, size: int) -> type[BaseException] | None:
        """Handle a read of ``size`` unknown bytes; return the error that the thread is to raise."""
        self.thread.unknown += 1
        if self.thread.expected or seeds_dropout():
            return None
        self.used_placeholder = True
        if size > MOST_DECIDED_BY or self._followed:
            self._note_first(
                "torch's own code" if size <= MOST_DECIDED_BY else "a copy to the host"
            )
            return None
        sentence = self._values.refusal(f"a read in torch's own code at {user_line()} depends on")
        self.decided_by = self.decided_by or sentence
        # Raised as soon as the thread returns to Python code.
        kind = type("UnknownValueError", (_UnknownError,), {"sentence": sentence})
        self._interrupted[threading.get_ident()] = kind
        return kind

    def refuse(self, read: str) -> NoReturn:
        """Raise :class:`UnknownValueError` for ``read``, and record it."""
        sentence = self._values.refusal(f"{read} at {user_line()} depends on")
        self.decided_by = self.decided_by or sentence
        raise UnknownValueError(sentence)

    def placeholder(self, tensor: torch.Tensor, value: Any, *, in_python: bool = False) -> Any:
        """Return a placeholder for an unknown number read by ``item()``, ``in_python`` or in C++.

        Raises :class:`UnknownValueError` for an integer read in C++, which is usually a size.
        """
        if seeds_dropout():
            return value
        self.used_placeholder = True
        seed = None if tensor.dtype.is_floating_point else drawn_seed(torch.cuda.current_device())
        if seed is not None:
            return seed
        may_be_integer = in_python and self._makes_up_integers
        is_integer = may_be_integer and raw.is_integer(tensor.dtype)
        if self._everything or not (tensor.dtype.is_floating_point or is_integer):
            self.refuse("item()")
        self._note_first("item()")
        if is_integer:
            return PlaceholderInt()
        return PlaceholderFloat(value) if in_python else value

    def _note_first(self, read: str) -> None:
        line = self._notes.count_read(read)
        if len(self._notes.placeholder_reads) == 1 and self._notes.placeholder_reads[line] == 1:
            self._notes.note(
                f"{read} at {line} read a number that no copy has brought and no kernel has "
                f"computed: it got 0, as later such reads of this test did",
                always=True,
            )

    def _known(self, read: Callable[..., Any], tensor: torch.Tensor) -> tuple[Any, _Truth]:
        """Return the result of ``read(tensor)``, and whether its values are known."""
        before = self.thread.unknown
        with self.expected():
            value = read(tensor)
        return value, self.thread.unknown == before and not self._is_outdated(tensor)

    def _read(self, read: Callable[..., Any], tensor: torch.Tensor, name: str) -> Any:
        value, is_known = self._known(read, tensor)
        if is_known or is_printing():
            return value
        if sys._getframe(3).f_globals.get("__name__") == _SCALER:
            self._notes.assume(FINITE)
            return value
        if name == "item()":
            return self.placeholder(tensor, value, in_python=True)
        self.used_placeholder = True
        if self._everything or not tensor.dtype.is_floating_point:
            self.refuse(name)
        self._note_first(name)
        return value

    def _number(self, name: str) -> Callable[[torch.Tensor], Any]:
        read = raw.base(name)
        shown = f"{name.strip('_')}()"
        return lambda tensor: self._read(read, tensor, shown)

    def _condition(self, tensor: torch.Tensor) -> _Truth:
        answer, is_known = self._known(_bool, tensor)
        if is_known or is_printing():
            return _Truth(answer)
        self.used_placeholder = True
        asking = sys._getframe(3)
        granted = assumption_of(asking)
        if granted is None:
            module = str(asking.f_globals.get("__name__", ""))
            self.refuse(f"bool() in {module}" if module.startswith("torch.") else "bool()")
        self._notes.note(granted[1])
        return granted[0]

    def _list(self, tensor: torch.Tensor) -> Any:
        found, is_known = self._known(_tolist, tensor)
        if (is_known and not self._storages.is_unknown_on_cpu(tensor)) or is_printing():
            return found
        self.used_placeholder = True
        if self._everything or not raw.is_integer(tensor.dtype):
            self.refuse("tolist()")
        self._note_first("tolist()")
        return placeholder_integers(tensor.shape) if tensor.dim() else self.refuse("tolist()")

    def _printed(self, tensor: torch.Tensor, **kwargs: Any) -> str:
        """Return torch's text of ``tensor``, with dots for unknown numbers.

        Control flow does not depend on a text, so this is no reason to run the test again.
        """
        if tensor.__class__ not in raw.PLAIN or not tensor.is_cuda:
            return str(_repr(tensor, **kwargs))
        with self._following(), printing():
            text = str(_repr(tensor, **kwargs))
        is_known = self._everything or (
            self._values.holds(tensor) and not self._is_outdated(tensor)
        )
        return text if is_known else dots(tensor, tensor.device)

    def _refusing_unknown(self, read: Callable[..., Any]) -> Callable[..., Any]:
        def array(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._storages.is_unknown_on_cpu(tensor):  # of unknown values
                self.used_placeholder = True
                self.refuse("numpy()")
            return read(tensor, *args, **kwargs)

        return array

    def _is_outdated(self, tensor: torch.Tensor) -> _Truth:
        """Return whether kernels may have changed ``tensor`` since a copy wrote its values.

        That can be so only where operators are not followed. The version of a tensor counts writes
        in place, except in inference mode.
        """
        if self._followed or not tensor.is_cuda:
            return False
        if is_followed() and self._values.has_result(tensor):
            return False
        return tensor.is_inference() or tensor._version > 0

    def _to_host(self, read: Callable[..., Any], shown: str) -> Callable[..., Any]:
        """Return a wrapper of ``read``, a copy to the host, that refuses outdated small values."""

        def copied(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            found = read(tensor, *args, **kwargs)
            if found.is_cpu and tensor.is_cuda and self._is_outdated(tensor):
                self.used_placeholder = True
                if found.numel() * found.element_size() <= MOST_DECIDED_BY:
                    self.refuse(shown)
            return found

        return copied
