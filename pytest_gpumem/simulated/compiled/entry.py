"""``torch.compile`` for a simulated GPU: torch's own, with another backend.

The function that ``torch.compile`` returns asks ``_callback_from_stance`` for a compiler of frames
at each call; here it gets the same with another backend. So a function that was compiled before the
simulation began is followed, too, and code compiled for one machine is not used for another: Dynamo
finds it by its backend.

Source: torch/_dynamo/eval_frame.py, convert_frame.py, torch 2.11 and 2.13.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from traceback import walk_stack
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from pytest_gpumem.garbage import FramesCleared
from pytest_gpumem.late_modules import Context, changing, watched
from pytest_gpumem.simulated.common.callsite import is_own, refusing, user_line
from pytest_gpumem.simulated.common.compiled_notes import FOLLOWED_SINCE, RUNS_EAGERLY
from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.compiled import fakes
from pytest_gpumem.simulated.compiled.settings import (
    HELPERS,
    CompiledCodeError,
    MarkedSteps,
    launched,
    no_helpers,
    not_followed,
    note_at_line,
    streams_refused,
    traced_only_if_asked_for,
)
from pytest_gpumem.simulated.machine.machine import SimulatedMachine

if TYPE_CHECKING:
    from pytest_gpumem.simulated.compiled.tracing import Tracing


AUTO, ALWAYS, EAGER = HOW = ("auto", "always", "eager")
"""Modes: follow if possible, refuse otherwise, or run compiled code eagerly."""

_NOT_FOLLOWED = "aotinductor onnxrt openxla openxla_eval tensorrt torch_tensorrt tvm".split()
"""Backends that run graphs in C++ or in a library, which allocates by itself."""

_INDUCTOR = "torch._inductor.compile_fx"
"""The module in which Inductor gets a graph, from any frontend."""

_INNER = ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable")
"""Attributes of Dynamo's callbacks for the wrapped function, by release."""

_SIMULATED = f"{Path(__file__).parents[1]}{os.sep}"
"""The folder of files that simulate, and compute for compiled code."""

_LIBRARY = f"{Path(torch.__file__).parent / '_library'}{os.sep}"
"""The folder of torch that calls shape functions of custom operators, which run on no GPU."""

_CAPTURES = (
    f"{Path(torch.__file__).parent / '_higher_order_ops'}{os.sep}",
    str(Path(torch.__file__).parent / "nn" / "attention" / "flex_attention.py"),
)
"""Files in which torch compiles code that runs eagerly, with backend ``"eager"``: branches, loops,
and attention whose scores a function changes. Their gradients need the tensors of its closure."""

libraries_compile: set[CodeType] = set()
"""Functions of this package that replace those a library passes to ``torch.compile``."""

_compiled: dict[CodeType, weakref.ref[Compilation]] = {}
"""All frames of the process that were compiled for a machine, as Dynamo keeps them."""


class Compilation:
    """The compiler, for ``machine``, of functions that are passed to ``torch.compile``.

    ``how`` is one of :data:`HOW`. In the context ``unpatched()`` nothing is replaced, in
    ``answering()`` only the functions that answer for the GPU, and in ``code()`` within it
    everything again. In ``exclusively()`` no other thread uses torch.
    """

    def __init__(
        self,
        machine: SimulatedMachine,
        how: str,
        answering: Context,
        unpatched: Context,
        code: Context,
        exclusively: Context,
    ) -> None:
        if how not in HOW:
            raise ValueError(f"compile={how!r}: write one of {', '.join(map(repr, HOW))}")
        self._machine = machine
        self._how = how
        self._answering = answering
        self._unpatched = unpatched
        self._code = code
        self._exclusively = exclusively
        self._callbacks: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._tracing: Tracing | None = None
        self._patches: Patches | None = None
        self._by_itself = ExitStack()
        """Hooks of Inductor, for callers that do not use ``torch.compile``."""
        self._ran_eagerly = False
        self._inside = ExitStack()
        self._steps = MarkedSteps()

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Install Dynamo hooks for the duration of the context; Dynamo has been imported."""
        if self._patches is None:
            self._patches = self._new_patches()
        self.forget(own=False)
        with ExitStack() as self._inside:
            wrote = self._machine.kernel_wrote
            self._inside.enter_context(mock.patch.object(launched, "wrote", wrote))
            self._inside.enter_context(traced_only_if_asked_for())
            self._inside.enter_context(self._steps.counted())
            self._inside.enter_context(self._patches.applied())
            if self._tracing is not None:
                self._inside.enter_context(self._tracing.keeping())
            else:
                self._inside.callback(self._by_itself.close)
                imported = changing({_INDUCTOR: self._await_inductor}, self._unpatched)
                self._inside.enter_context(watched(imported))
            yield

    def _await_inductor(self, inductor: ModuleType) -> None:
        """Trace when Inductor is called: a graph need not come from Dynamo."""
        if self._tracing is not None or torch.__version__ < FOLLOWED_SINCE:
            return
        write = "_compile_fx_inner"

        def compile_fx_inner(*args: Any, **options: Any) -> Any:
            self._tracer()
            return getattr(inductor, write)(*args, **options)

        self._by_itself.enter_context(mock.patch.object(inductor, write, compile_fx_inner))
        helped = sys.modules["torch._inductor.async_compile"]
        self._by_itself.enter_context(mock.patch.object(helped, HELPERS, no_helpers))

    def _new_patches(self) -> Patches:
        from torch._dynamo import compiled_autograd, convert_frame, eval_frame

        of_stance, reset = eval_frame._callback_from_stance, torch._dynamo.reset

        def callback_from_stance(callback: Any) -> Any:
            chosen = of_stance(callback)
            if chosen in (None, False) or isinstance(chosen, _WithBackend):
                return chosen
            if hasattr(chosen, "hooks"):
                return self._callback(chosen)
            # The callback of a stance, around a compiler: it waits, or refuses to compile again.
            own = self._callback(callback)
            return None if own is None else of_stance(own)

        def forget() -> None:
            if self._tracing is not None:  # else nothing was compiled here
                reset()

        patches = Patches()
        patches.add(eval_frame, "_callback_from_stance", callback_from_stance)
        patches.wrap(convert_frame, "_compile", self._compile)
        patches.add(torch._dynamo, "reset", forget)
        counting = "set_fullgraph_compiled_frame_count"
        if (count := getattr(eval_frame, counting, None)) is not None:
            # For a graph of fullgraph=True torch checks whether there was any.
            patches.add(eval_frame, counting, lambda value: count(value) or int(self._ran_eagerly))
        if torch.__version__ >= FOLLOWED_SINCE:
            wrapped = eval_frame._create_wrapped_callback
            patches.add(
                eval_frame,
                "_create_wrapped_callback",
                lambda backend: self._callback(wrapped(backend)),
            )
            backward = compiled_autograd.AutogradCompilerInstance
            refuse_backward = refusing(
                "torch.compile",
                "compiles a backward pass (compiled autograd), which a simulated GPU does not "
                "follow: run pytest --gpumem-device=dry",
            )
            patches.add(backward, "begin_capture", refuse_backward)
            fakes.add_gradients(patches, self._tracer, self._code)
        return patches

    def _callback(self, callback: Any) -> Any:
        """Return the compiler in the place of ``callback``; ``None`` to run eagerly."""
        if callback not in self._callbacks:
            # torch may have to import modules for compiling
            with nullcontext() if self._how == EAGER else self._exclusively():
                self._callbacks[callback] = self._replaced(callback)
        found = self._callbacks[callback]
        self._ran_eagerly |= found is None
        return found

    def _replaced(self, callback: Any) -> Any:
        backend = callback
        while (inner := _inner(backend)) is not None:
            backend = inner
        name = str(getattr(backend, "compiler_name", getattr(backend, "__name__", backend)))
        reason = None
        if name == "eager":
            if torch.__version__ < FOLLOWED_SINCE or not _is_captured_by_torch():
                return None
        elif torch.__version__ < FOLLOWED_SINCE:
            reason = f"which follows Inductor since torch {FOLLOWED_SINCE}"
        elif self._how == EAGER:
            reason = "as it was asked to"
        elif name in _NOT_FOLLOWED:
            reason = f"where backend {name!r} is not followed"
        if reason is not None:
            self._ran_eagerly = True
            what = f"{RUNS_EAGERLY} on a simulated GPU, {reason}"
            if self._how == ALWAYS:
                raise CompiledCodeError(f"torch.compile at {user_line()} {what}")
            note_at_line(self._machine, f"{what}: compiled code allocates less")
            return None
        from pytest_gpumem.simulated.compiled.backend import Backend

        own = backend
        if not isinstance(backend, Backend):
            own = Backend(self._machine, self._tracer(), backend, refuses=self._how == ALWAYS)
        hooks = dataclasses.replace(
            callback.hooks, guard_filter_fn=_filtered(callback.hooks.guard_filter_fn)
        )
        return _WithBackend(type(callback)(_inner(callback)._clone_with_backend(own), hooks))

    def _tracer(self) -> Tracing:
        if self._tracing is None:
            # By then torch's progress bars have started a thread, so other threads have to rest.
            with self._exclusively():
                self._by_itself.close()
                with self._unpatched():
                    from pytest_gpumem.simulated.compiled.tracing import Tracing

                    self._tracing = Tracing(
                        self._machine, self._answering, self._code, self._exclusively
                    )
            self._inside.enter_context(self._tracing.keeping())
        return self._tracing

    def _compile(
        self, compile: Callable[..., Any], code: CodeType, *args: Any, **kwargs: Any
    ) -> Any:
        _compiled[code] = weakref.ref(self)
        from torch._dynamo.exc import InternalTorchDynamoError, TorchRuntimeError
        from torch._dynamo.types import ConvertFrameReturn

        with (
            self._exclusively(),
            FramesCleared(),
            self._tracer().entered(),
            streams_refused() as refusals,
        ):
            try:
                return compile(code, *args, **kwargs)
            except (InternalTorchDynamoError, TorchRuntimeError) as error:
                if not refusals and isinstance(error, TorchRuntimeError):
                    raise  # it is the user's
                self._ran_eagerly = True
                # Neither gets a name: it would keep the contents of the frames.
                not_followed(
                    self._machine,
                    CompiledCodeError(refusals[0]) if refusals else error,
                    refuses=self._how == ALWAYS,
                )
        return ConvertFrameReturn()

    def forget(self, *, own: bool = True) -> None:
        """Reset the code that was compiled for other machines, with ``own`` for this one, too.

        Dynamo keeps only a few results of each frame, and takes sizes that changed for dynamic:
        without this, a test's allocations would depend on the tests before it.
        """
        if own:
            self._steps.forget()
        ended = [code for code, other in _compiled.items() if own or other() is not self]
        if not ended:
            return
        from torch._C._dynamo.eval_frame import reset_code
        from torch._dynamo.pgo import reset_code_state

        for code in ended:
            reset_code(code)
            del _compiled[code]
        reset_code_state()


def _is_captured_by_torch() -> bool:
    """Return whether one of torch's own functions calls ``torch.compile``."""
    frames = walk_stack(sys._getframe(1))
    return any(frame.f_code.co_filename.startswith(_CAPTURES) for frame, _ in frames)


_MODULE_CALL = torch.nn.Module._wrapped_call_impl.__code__
"""The frame of every call of a module, which this package makes where it finds phases."""


class _WithBackend:
    """A callback that does not compile calls of this package while compiled code runs."""

    def __init__(self, callback: Any) -> None:
        self._callback = callback
        self._torchdynamo_orig_backend = _inner(callback)
        """The attribute of torch's callbacks that is searched for their backend."""

    def __call__(self, frame: Any, *state: Any) -> Any:
        filename = sys._getframe(1).f_code.co_filename
        is_this_packages = is_own(frame.f_code.co_filename)
        passed_on = frame.f_code is _MODULE_CALL or frame.f_code in libraries_compile
        is_shapes = filename.startswith(_LIBRARY)
        if passed_on or not (is_this_packages or is_shapes or is_own(filename)):
            return self._callback(frame, *state)
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy
        from torch._dynamo.types import ConvertFrameReturn

        if is_this_packages:
            return ConvertFrameReturn()

        # Measuring wraps ``Module.__call__``, which calls the code to be compiled.
        is_simulated = is_shapes or filename.startswith(_SIMULATED)
        below = _FrameAction.SKIP if is_simulated else _FrameAction.DEFAULT
        skipped = _FrameExecStrategy(_FrameAction.SKIP, below)
        return ConvertFrameReturn(frame_exec_strategy=skipped, apply_to_code=False)


def _inner(callback: Any) -> Any:
    return next((found for name in _INNER if (found := getattr(callback, name, None))), None)


def _filtered(others: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return a filter that also drops guards on torch's names: they are restored by then."""

    def keep(guards: Sequence[Any]) -> Sequence[bool]:
        kept = [True] * len(guards) if others is None else others(guards)
        return [
            wanted and not (guard.is_global and _is_of_torch(guard))
            for guard, wanted in zip(guards, kept, strict=True)
        ]

    return keep


def _is_of_torch(guard: Any) -> bool:
    value = guard.value if guard.has_value else None
    module = getattr(value, "__module__", None)
    if isinstance(value, FunctionType) and str(guard.name).endswith(f".{value.__name__}"):
        return str(module).partition(".")[0] == "torch"  # in a module, not a name of the user's
    return callable(value) and module in (None, "torch")
