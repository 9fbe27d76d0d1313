"""Places in the code where something happened."""

from __future__ import annotations

import copy
import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, NamedTuple, NoReturn

import torch
import torch._ops
from torch._C._profiler import gather_traceback, symbolize_tracebacks

from pytest_gpumem.allocator.trace import Contexts, Recording
from pytest_gpumem.values.errors import UnsupportedOperatorError

_graph_task: Callable[[], int] = torch._C._current_graph_task_id
_sequence: Callable[[], int] = torch._C._autograd._get_sequence_nr
_current_node: Callable[[], Any] = torch._C._current_autograd_node

_OWN = str(Path(__file__).resolve().parents[2]) + os.sep

WRAPPERS = "gpumem-wrappers-"
"""Part of the path of files that Inductor writes for a simulated GPU."""
_PACKAGES = frozenset({"site-packages", "dist-packages"})
_STANDARD = sysconfig.get_path("stdlib") + os.sep

_DECORATOR_FILES = ("contextlib.py", "typing_extensions.py")
"""Files of decorators, whose frames stand between torch and its caller."""

MOST_FRAMES = 48
"""Frames kept per event, innermost first."""


FROM_HOST = "Tensor.to"
"""The operator's name where a tensor is copied from the host."""

RELEASED = "free"
"""The operator's name where memory is freed, which no operator does."""

COMPUTED = "computed"
"""The kind of operators' results; a purpose of this kind is compiled code's."""

SourceLine = tuple[str, int, str]
"""Filename, line and function."""


class Purpose(NamedTuple):
    """The purpose of an allocation by a library or compiled code, where no operator shows it."""

    name: str
    """The name in the operator's place: ``all-gather of layers.3``."""
    kind: str
    """The kind that :attr:`Provenance.kind` describes."""
    source_line: SourceLine | None = None
    """The user's line that causes it, where no frame shows that line."""


class Running(threading.local):
    """The work that a thread does at the moment."""

    operator: Any = None
    """The overload that was dispatched last."""
    composite: Any = None
    """The overload that runs as several operators: it counts as the caller of their ``empty``."""
    purpose: Purpose | None = None
    """The purpose of allocations now, whichever operator makes them."""
    sequence = -1
    """Autograd's sequence number at the last allocation, or where a test or fixture began."""

    def begin(self) -> None:
        """Begin a test or the set-up of a fixture: nodes that were made before are not its own."""
        self.sequence = _sequence()


running = Running()
"""The only instance, because a simulation replaces names of the whole process."""


class Provenance:
    """The origin of an allocation: its Python frames, its operator and its contents.

    Lines and names are looked up only when they are read.
    """

    __slots__ = (
        *("_entries", "_frames", "dtype", "has_node", "library", "nbytes", "node", "operator"),
        *("purpose", "recording", "script_frames", "sequence", "shape"),
    )

    def __init__(self, entries: list[tuple[CodeType, int]]) -> None:
        self._entries = entries
        self._frames: list[dict[str, Any]] | None = None
        self.operator: Any = running.operator
        """The overload that ran, ``aten.mm.default``; for ``empty`` of a composite, that one."""
        if running.composite is not None and hasattr(self.operator, "_schema"):
            self.operator = running.composite if _is_factory(self.operator) else self.operator
        self.purpose = running.purpose
        self.nbytes = 0
        """Bytes of the block, after rounding."""
        self.sequence = -1
        """Autograd's sequence number: of the node that runs, else of the next one to be made."""
        self.has_node = True
        """Whether autograd has made a node since the last allocation of this thread.

        A node is made just before its operator runs; without one the operator has none.
        """
        self.node: str | None = None
        """The name of autograd's node that ran: ``AddmmBackward0``; ``None`` outside backward."""
        self.library: str | None = None
        """The library whose workspace this is: ``cuBLAS``."""
        self.shape: Any = None
        self.dtype: Any = None
        self.recording: Recording | None = None
        """The arguments of ``_record_memory_history`` at that time."""
        self.script_frames: Sequence[dict[str, Any]] = ()
        """Frames of TorchScript's interpreter, which stand before Python's."""

    def record(self, recording: Recording) -> None:
        """Note the settings of the recording; if it records stacks, look up TorchScript's."""
        self.recording = recording
        if recording.on and recording.contexts is not Contexts.NEVER:
            gathered = gather_traceback(False, True, False)
            (self.script_frames,) = symbolize_tracebacks([gathered])

    @property
    def frames(self) -> list[dict[str, Any]]:
        """Innermost first, as torch's snapshots show them: filename, line and name."""
        if self._frames is None:
            self._frames = [
                {"filename": code.co_filename, "line": _line(code, offset), "name": code.co_name}
                for code, offset in self._entries
            ]
            if self.purpose is not None and self.purpose.source_line is not None:
                filename, line, function = self.purpose.source_line
                self._frames.insert(0, {"filename": filename, "line": line, "name": function})
        return self._frames

    @property
    def cpp_frames(self) -> list[dict[str, Any]]:
        """C++ frames by which a GPU's trace shows callers: workspace, operator, autograd node."""
        names = []
        if self.library == "cuBLAS":
            names.append("at::cuda::getCUDABlasLtWorkspace()")
        if self.operator is None or self.operator is FROM_HOST:
            names.append("at::_ops::_to_copy::call()")
        elif self.operator is not RELEASED:
            names.append(f"at::_ops::{self.operator._schema.name.partition('::')[2]}::call()")
        if self.node is not None:
            names.append(f"torch::autograd::generated::{self.node}::apply()")
        return [{"filename": "??", "line": 0, "name": name} for name in names]

    @property
    def source_line(self) -> SourceLine | None:
        """Filename, line and function of the innermost frame outside torch and this package."""
        if self.purpose is not None and self.purpose.source_line is not None:
            return self.purpose.source_line
        for code, offset in self._entries:
            if not is_internal(code.co_filename):
                return code.co_filename, _line(code, offset), code.co_name
        return None

    @property
    def operator_name(self) -> str:
        """The operator as users call it: ``torch.softmax``; else the purpose of the allocation."""
        if self.purpose is not None:
            return self.purpose.name
        if self.operator is None or self.operator is FROM_HOST:
            return FROM_HOST
        return shown_operator(self.operator._schema.name)

    @property
    def kind(self) -> str:
        """``copy`` from the host, ``factory`` or ``computed``; ``unsharded`` or ``buffer``."""
        if self.purpose is not None:
            return self.purpose.kind
        if self.operator is None or self.operator is FROM_HOST:
            return "copy"
        return "factory" if _is_factory(self.operator) else COMPUTED


def provenance() -> Provenance:
    """Return the origin of an allocation made now, without this package's innermost frames."""
    entries: list[tuple[CodeType, int]] = []
    frame = sys._getframe(1)
    while frame.f_back is not None and is_own(frame.f_code.co_filename):
        frame = frame.f_back
    following: Any = frame
    while following is not None and len(entries) < MOST_FRAMES:
        entries.append((following.f_code, following.f_lasti))
        following = following.f_back
    purpose = running.purpose
    if (
        purpose is not None
        and purpose.kind == COMPUTED
        and not any(is_written_by_inductor(code.co_filename) for code, _ in entries)
    ):
        # An exception, as where memory ran out, left Inductor's wrapper before it could reset it.
        running.purpose = None
    origin = Provenance(entries)
    if _graph_task() == -1:
        origin.sequence = _sequence()
        origin.has_node = origin.sequence != running.sequence
        running.sequence = origin.sequence
    else:
        node = _current_node()
        if node is not None:
            origin.node, origin.sequence = node.name(), node._sequence_nr()
    return origin


def user_line() -> str:
    """Return ``path:line`` of the innermost frame outside torch and this package.

    A thread of autograd has no such frame: the main thread, which waits for it, has one.
    """
    frame = _outside(sys._getframe(1))
    if is_internal(frame.f_code.co_filename):
        # Not a variable: a function that holds its own frame keeps its callers' objects alive.
        frame = _outside(sys._current_frames()[threading.main_thread().ident or 0])
    return _shown_line(frame)


def _outside(frame: FrameType) -> FrameType:
    """Return the innermost frame from ``frame`` on that is not internal, else the outermost one."""
    while frame.f_back is not None and is_internal(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def refuse(name: str, why: str) -> NoReturn:
    """Raise the error that ``name``, a part of torch that a user's line uses, is not simulated."""
    raise UnsupportedOperatorError(f"{name} at {user_line()} {why}")


def refusing(name: str, why: str) -> Callable[..., NoReturn]:
    """Return a function that calls :func:`refuse`, whatever its arguments."""
    return lambda *_, **__: refuse(name, why)


def callers_line() -> str:
    """Return ``path:line`` of the innermost frame outside installed packages, else the user's line.

    Errors in a kernel's description show it: its author looks for a line of their own.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_installed(frame.f_code.co_filename):
        frame = frame.f_back
    return user_line() if frame is None else _shown_line(frame)


def _shown_line(frame: FrameType) -> str:
    filename = frame.f_code.co_filename
    try:
        shown = os.path.relpath(filename)
    except ValueError:  # another drive on Windows
        shown = filename
    return f"{filename if shown.startswith('..') else shown}:{frame.f_lineno}"


@lru_cache(maxsize=100_000)
def _line(code: CodeType, offset: int) -> int:
    for start, end, line in code.co_lines():
        if start <= offset < end and line is not None:
            return line
    return code.co_firstlineno


_OWNERS = (("torch", torch), ("Tensor", torch.Tensor), ("functional", torch.nn.functional))
"""Namespaces where users find an operator: the first that has it counts."""


@cache
def shown_operator(name: str) -> str:
    """Return ``aten::_softmax`` as users call it: ``torch.softmax``."""
    namespace, _, base = name.partition("::")
    base = base.lstrip("_") if namespace == "aten" else base
    if base == "to_copy":
        return "Tensor.to"
    if namespace == "aten":
        for known in (base, name.partition("::")[2]):
            for shown, owner in _OWNERS:
                if hasattr(owner, known):
                    return f"{shown}.{known}"
    return name


@cache
def _is_factory(operator: Any) -> bool:
    schema = operator._schema
    return schema.name != "aten::_to_copy" and any(
        argument.name == "device" for argument in schema.arguments
    )


@cache
def is_own(filename: str) -> bool:
    """Return whether the file belongs to this package."""
    return filename.startswith(_OWN)


@cache
def _is_installed(filename: str) -> bool:
    standard = filename.startswith(_STANDARD) or "frozen " in filename
    return standard or is_internal(filename) or bool(_PACKAGES & set(Path(filename).parts))


@cache
def is_written_by_inductor(filename: str) -> bool:
    """Return whether Inductor wrote this file."""
    return WRAPPERS in filename or f"{os.sep}torchinductor_" in filename


@cache
def is_internal(filename: str) -> bool:
    """Return whether the file is torch's, Triton's, this package's, or a decorator's."""
    passed = (
        Path(filename).name in _DECORATOR_FILES
        or filename == copy.__file__
        or is_written_by_inductor(filename)
    )
    return passed or filename.startswith((*map(_folder, ("torch", "triton")), _OWN, "<"))


def _folder(package: str) -> str:
    """Return the folder of ``package``, ``"<"``, which matches none, if it is not imported."""
    file = getattr(sys.modules.get(package), "__file__", None)
    return str(Path(file).parent) + os.sep if file else "<"


def clear_own_frames(traceback: TracebackType | None) -> None:
    """Clear the frames of this package and of ``torch._ops`` that have ended.

    In C++ no frame of a failed call holds a tensor either.
    """
    while traceback is not None:
        frame = traceback.tb_frame
        if is_own(frame.f_code.co_filename) or frame.f_code.co_filename == torch._ops.__file__:
            with suppress(RuntimeError):  # it is running
                frame.clear()
        traceback = traceback.tb_next
