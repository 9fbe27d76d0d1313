"""``simulate_operator()``: allocations and results of a kernel that only its library defines."""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from types import CodeType, FunctionType, MethodType, SimpleNamespace
from typing import Any, TypeVar

Description = Callable[..., Any]
Wrote = Callable[..., None]
_D = TypeVar("_D", bound=Description)

_OPERATOR = re.compile(r"\w+::\w+(\.\w+)?")
_PATH = re.compile(r"\w+(\.\w+)+")
_TARGET = "the description"
OR_DRY = "or run pytest --gpumem-device=dry, which needs no description"
"""The end of a sentence on a kernel without a description."""
_TORCHS_OWN = frozenset({"aten", "prim", "prims", "profiler", "quantized"})


def simulate_operator(kernel: Any) -> Callable[[_D], _D]:
    """Describe a custom kernel on a simulated GPU; the decorated function stands for it.

    ``kernel`` is the name of an operator of ``torch.library`` (``"mylib::fused_norm"``), the path
    of a Python function, method or compiled function that launches the kernel
    (``"mylib.kernels.rms_norm"``), the path of a Triton kernel, or any of these objects itself.
    The function is called in its place, with the arguments of the call (for a Triton kernel
    without the grid), and returns the kernel's results. Tensors that it makes by torch's functions
    are allocated in that order, and freed when it drops them. A Triton kernel that only writes its
    arguments allocates nothing: ``simulate_operator(kernel)(lambda *args, **options: None)``.
    A ``SimpleNamespace`` that it returns stands for a module, and its functions for kernels.

    It holds for every simulation from now on, and only for calls with tensors on a simulated GPU:
    on a real GPU, and for CPU tensors, the kernel itself runs. A second description replaces the
    first. Raises ``ValueError`` for a name that is none or that nothing has, ``TypeError`` for
    anything else.
    """

    def register(function: _D) -> _D:
        if not callable(function):
            raise TypeError(
                f"simulate_operator({_shown(kernel)}) takes a function that makes the kernel's "
                f"outputs, and not {function!r}"
            )
        found(function)
        return function

    found = _registration(kernel)
    return register


class Descriptions:
    """Every description of this process."""

    def __init__(self) -> None:
        self.operators: dict[str, Description] = {}
        """By qualified name, with or without its overload: ``mylib::fused_norm``."""
        self.kernels: dict[Any, Description] = {}
        """By the Python function that a Triton kernel was made from."""
        self._functions: dict[tuple[Any, str], _Replaced] = {}
        self._open: tuple[ExitStack, Wrote] | None = None

    def find(self, name: str, overload: str) -> Description | None:
        """Return the description of the operator ``name``, a qualified one."""
        if overload and (description := self.operators.get(f"{name}.{overload}")) is not None:
            return description
        return self.operators.get(name)

    def replace(self, owner: Any, name: str, function: Any, description: Description) -> None:
        """Replace ``function``, which is ``owner.name``, by ``description``."""
        before = self._functions.get((owner, name))
        replaced = before or _Replaced(owner, name, function, description)
        replaced.description = description
        if before is None:
            self._functions[owner, name] = replaced
            if self._open is not None:
                stack, wrote = self._open
                stack.enter_context(replaced.applied(wrote))

    @contextmanager
    def replace_described(self, wrote: Wrote) -> Iterator[None]:
        """Replace every described function by its description inside.

        ``wrote`` is called with the arguments and results of a kernel.
        """
        with ExitStack() as stack:
            for replaced in self._functions.values():
                stack.enter_context(replaced.applied(wrote))
            self._open = stack, wrote
            try:
                yield
            finally:
                self._open = None


@dataclass(eq=False)
class _Replaced:
    """A function that is described: ``owner.name``."""

    owner: Any
    name: str
    function: Any
    description: Description
    _wrote: Wrote = lambda *values: None
    _codes: tuple[CodeType, CodeType] | None = None
    """The function's own code, and code that calls the description instead."""

    @contextmanager
    def applied(self, wrote: Wrote) -> Iterator[None]:
        """Call the description instead, whatever name the function was imported under."""
        owner, name, function = self.owner, self.name, self.function
        own: Any = function
        replacement: Any
        if isinstance(function, FunctionType):
            owner, name = function, "__code__"
            own, replacement = self._coded(function)
        else:
            replacement = self._chosen(getattr(owner, name))
        setattr(owner, name, replacement)
        outer, self._wrote = self._wrote, wrote
        try:
            yield
        finally:
            setattr(owner, name, own)
            self._wrote = outer

    def _coded(self, function: FunctionType) -> tuple[CodeType, CodeType]:
        if self._codes is None or self._codes[0] is not function.__code__:
            own = function.__code__
            real = FunctionType(
                own,
                function.__globals__,
                function.__name__,
                function.__defaults__,
                function.__closure__,
            )
            real.__kwdefaults__ = function.__kwdefaults__
            code, chosen = _template(own.co_freevars), self._chosen(real)
            constants = tuple(chosen if each == _TARGET else each for each in code.co_consts)
            self._codes = own, code.replace(co_consts=constants, co_name=own.co_name)
        return self._codes

    def _chosen(self, real: Callable[..., Any]) -> Callable[..., Any]:
        return _instead_of(
            real,
            lambda *args, **options: self.description(*args, **options),
            lambda *values: self._wrote(*values),
        )


def _instead_of(
    real: Callable[..., Any], description: Description, wrote: Wrote
) -> Callable[..., Any]:
    """Return a function that calls ``description`` on a GPU, and ``real`` elsewhere."""

    def call(*args: Any, **options: Any) -> Any:
        if not on_gpu(args, options):
            return real(*args, **options)
        result = description(*args, **options)
        wrote(args, options, result)
        if isinstance(result, SimpleNamespace):
            # The module of a described loader, whose functions stand for kernels too.
            for name, one in vars(result := SimpleNamespace(**vars(result))).items():
                if isinstance(one, FunctionType):
                    setattr(result, name, _instead_of(_refusal(name), one, wrote))
        return result

    return call


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **options: Any) -> Any:
        from pytest_gpumem.simulated.common.callsite import callers_line
        from pytest_gpumem.values.errors import UnsupportedOperatorError

        raise UnsupportedOperatorError(
            f"{name} at {callers_line()} is given tensors of the CPU, and is described for a "
            f"simulated GPU only"
        )

    return refuse


DESCRIPTIONS = Descriptions()


def on_gpu(*values: Any) -> bool:
    """Return whether a call with ``values`` is for the GPU: not if all tensors are elsewhere."""
    kinds = {tensor.device.type for tensor in tensors_in(values)}
    return not kinds or "cuda" in kinds


def tensors_in(value: Any) -> Iterator[Any]:
    """Yield the tensors among arguments."""
    if isinstance(value, sys.modules["torch"].Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_in(tuple(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def checked_outputs(schema: Any, outputs: Any) -> Any:
    """Return ``outputs`` of a description, if they are as many as the operator returns.

    Raises ``ValueError`` otherwise.
    """
    expected = len(schema.returns)
    given = 0 if outputs is None else len(outputs) if isinstance(outputs, (tuple, list)) else 1
    of_list = expected == 1 and str(schema.returns[0].type).startswith("List[")
    if of_list and isinstance(outputs, (tuple, list)):
        return list(outputs)
    if given != expected:
        raise ValueError(
            f'simulate_operator("{schema.name}"): the operator returns {expected} '
            f"{'value' if expected == 1 else 'values'}, and its description {given}"
        )
    return outputs[0] if expected == 1 and isinstance(outputs, tuple) else outputs


def how_to_describe(func: Any) -> str:
    """Return a hint how to describe ``func`` so that it runs on a simulated GPU."""
    import torch

    unknown = [
        name
        for name in DESCRIPTIONS.operators
        if not torch._C._jit_get_schemas_for_operator(name.partition(".")[0])
    ]
    name = func._schema.name
    hint = f'say what it allocates with pytest_gpumem.simulate_operator("{name}")'
    near = difflib.get_close_matches(name, unknown, 1)
    wrong = f' (no operator is called "{near[0]}", which is described)' if near else ""
    return f"{hint}{wrong}, {OR_DRY}"


def base_function(kernel: Any) -> Any:
    """Return the Python function that a Triton kernel was made from, under all its decorators."""
    while not isinstance(kernel, FunctionType) and hasattr(kernel, "fn"):
        kernel = kernel.fn
    return kernel


def path_of(function: Any) -> str:
    """Return ``module.name`` of a function."""
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", None) or getattr(function, "__name__", repr(function))
    return f"{module}.{name}" if module else str(name)


@cache
def _template(free: tuple[str, ...]) -> CodeType:
    # A function's closure has to fit its code: the free variables are named, and not used.
    names = ", ".join(free)
    source = (
        f"def make({names}):\n"
        f"    def call(*args, **options):\n"
        f"        ({names + ',' if names else ''})\n"
        f"        target = {_TARGET!r}\n"
        f"        return target(*args, **options)\n"
        f"    return call\n"
    )
    space: dict[str, Any] = {}
    exec(compile(source, __file__, "exec"), space)
    code: CodeType = space["make"](*[None] * len(free)).__code__
    return code


# From the caller's name to the described object.


def _registration(kernel: Any) -> Callable[[Description], None]:
    if not isinstance(kernel, str):
        return _of_object(kernel, None, "", _shown(kernel))
    if "::" in kernel:
        return _of_operator(kernel)
    if not _PATH.fullmatch(kernel):
        raise ValueError(
            f'simulate_operator({kernel!r}): write an operator, "mylib::fused_norm", or the path '
            f'of a Python function or Triton kernel, "mylib.kernels.rms_norm"'
        )
    owner, name, found = _resolve(kernel)
    return _of_object(found, owner, name, repr(kernel))


def _of_operator(name: str) -> Callable[[Description], None]:
    if not _OPERATOR.fullmatch(name):
        raise ValueError(
            f'simulate_operator({name!r}): an operator is named like "mylib::fused_norm", with '
            f'its overload like "mylib::fused_norm.out"'
        )
    if name.partition("::")[0] in _TORCHS_OWN:
        raise ValueError(
            f"simulate_operator({name!r}): this is an operator of PyTorch itself, which the "
            f"simulated GPU knows"
        )
    overload = name.removesuffix(".default")
    return lambda description: DESCRIPTIONS.operators.update({overload: description})


def _of_object(found: Any, owner: Any, name: str, shown: str) -> Callable[[Description], None]:
    for attribute in ("_qualname", "_qualified_op_name"):  # of torch.library.custom_op, torch.ops
        qualified = getattr(found, attribute, None)
        if isinstance(qualified, str) and _OPERATOR.fullmatch(qualified):
            return _of_operator(qualified)
    if hasattr(found, "_schema") and callable(getattr(found, "name", None)):
        return _of_operator(found.name())
    if isinstance(found, MethodType):
        found = found.__func__
    if isinstance(found, FunctionType):
        if inspect.isgeneratorfunction(found) or inspect.iscoroutinefunction(found):
            raise ValueError(f"simulate_operator({shown}): a generator launches no kernel")
        function = found
        return lambda description: DESCRIPTIONS.replace(function, "", function, description)
    base = base_function(found)
    if base is not found and isinstance(base, FunctionType):
        return lambda description: DESCRIPTIONS.kernels.update({base: description})
    if callable(found) and owner is not None:
        return lambda description: DESCRIPTIONS.replace(owner, name, found, description)
    raise TypeError(
        f"simulate_operator({shown}): this is neither an operator, a function nor a Triton kernel"
        + (f"; write the path of the compiled function {path_of(found)}" if callable(found) else "")
    )


def _resolve(path: str) -> tuple[Any, str, Any]:
    """Return the owner, last name and value of a dotted path, whose modules are imported."""
    parts = path.split(".")
    value, module = None, ""
    for count in range(1, len(parts)):
        module = ".".join(parts[:count])
        try:
            value = importlib.import_module(module)
        except ImportError as error:
            is_missing = isinstance(error, ModuleNotFoundError) and error.name == module
            if value is not None and is_missing:
                module = ".".join(parts[: count - 1])
                break
            raise ValueError(
                f"simulate_operator({path!r}): cannot import {module}: {error}"
            ) from error
    owner: Any = None
    for name in parts[module.count(".") + 1 :]:
        owner = value
        try:
            value = getattr(owner, name)
        except AttributeError:
            close = difflib.get_close_matches(name, dir(owner), 1)
            hint = f'; did you mean "{close[0]}"?' if close else ""
            raise ValueError(
                f"simulate_operator({path!r}): {getattr(owner, '__name__', owner)} has no "
                f"{name!r}{hint}"
            ) from None
    return owner, parts[-1], value


def _shown(kernel: Any) -> str:
    return repr(kernel) if isinstance(kernel, str) else path_of(base_function(kernel))
