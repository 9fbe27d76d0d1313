"""Descriptions to start from, to paste into ``conftest.py`` for a kernel that was called.

Known parts are filled in: names of arguments from the operator's schema, or from the signature
that pybind11 writes (``pybind11.h``, ``cpp_function::initialize_generic``), what is written in
place and returned from the schema's alias annotations. A result's shape is unknown: it is like
the first tensor, with a comment to check it.
"""

from __future__ import annotations

import ast
import keyword
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

MOST_SHOWN = 3
"""Most tensors of a list that are shown."""
WIDEST = 99
"""Columns of a line that names arguments; the arguments beyond are ``*args``."""

CHECK = "  # check: shape, dtype, what else it takes"
IN_PLACE = "  # check: what it takes"

_SIGNATURE = re.compile(r"\w+\((?P<arguments>.*)\) -> (?P<result>\S.*)")
_ARGUMENT = re.compile(r"(\w+): ")
_TENSOR = re.compile(r"(?:torch|at)(?:\.|::)Tensor")
_WRITTEN = (bool, int, float, str, type(None))


Place = Callable[[torch.Tensor], str]


def _device(tensor: torch.Tensor) -> str:
    return str(tensor.device)


@dataclass(frozen=True)
class Parameter:
    """A parameter of a description, and its argument in the call."""

    name: str
    given: Any = None
    default: str | None = None
    """The default in Python's notation; ``None`` where the call has to give a value."""
    only_named: bool = False

    @property
    def written(self) -> str:
        """The parameter in the notation of ``def``."""
        return self.name if self.default is None else f"{self.name}={self.default}"


def of_operator(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], line: str, place: Place
) -> str:
    """Return a description of the operator ``func``, called with these arguments at ``line``.

    ``place`` returns where a tensor is: below the dispatcher it is on ``meta``.
    """
    schema = func._schema
    overload = schema.overload_name
    kernel = f"{schema.name}.{overload}" if overload else schema.name
    given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | dict(kwargs)
    parameters = parameters_of(schema, given)
    return _of_call(
        kernel,
        f"{shown_call(schema.name.replace('::', '.'), args, kwargs, place)} was called at {line}",
        parameters,
        *results_of(schema, parameters),
    )


def of_function(
    path: str, doc: str | None, args: Sequence[Any], options: Mapping[str, Any], line: str
) -> str:
    """Return a description of a compiled function with docstring ``doc``, called so at ``line``."""
    names, returned = _signature(doc)
    names += [f"arg{i}" for i in range(len(names), len(args))]
    parameters = [
        *(Parameter(name, value) for name, value in zip(names, args, strict=False)),
        *(Parameter(name, value, "None") for name, value in options.items()),
    ]
    like, each = _likeness(parameters)
    if returned is None:
        result, check = "None", IN_PLACE
    elif returned.lower().startswith("tuple["):
        result, check = ", ".join([like] * max(1, len(_TENSOR.findall(returned)))), CHECK
    else:
        result, check = (each if returned.lower().startswith("list[") else like), CHECK
    return _of_call(
        path, f"{shown_call(path, args, options)} was called at {line}", parameters, result, check
    )


def shown_call(
    name: str, args: Sequence[Any], options: Mapping[str, Any], place: Place = _device
) -> str:
    """Return the call as its reader would write it, with tensors by shape, dtype and device."""
    named = [f"{key}={_shown(value, place)}" for key, value in options.items()]
    given = [*(_shown(value, place) for value in args), *named]
    return f"{name}({', '.join(given)})"


def parameters_of(schema: Any, given: Mapping[str, Any]) -> list[Parameter]:
    """Return the parameters of an operator, with what a call has ``given`` for them."""
    return [
        Parameter(
            _identifier(argument.name),
            given.get(argument.name),
            _literal(argument.default_value) if argument.has_default_value() else None,
            argument.kwarg_only,
        )
        for argument in schema.arguments
    ]


def results_of(schema: Any, parameters: Sequence[Parameter]) -> tuple[str, str]:
    """Return an expression for an operator's results, and the comment behind it."""
    like, each = _likeness(parameters)
    results, made = [], False
    for returned in schema.returns:
        same = _alias(schema, returned)
        if same is not None:
            name = _identifier(same)
            results.append(name if returned.alias_info.is_write else f"{name}.view_as({name})")
            continue
        made = True
        kind = str(returned.type)
        if "Tensor" in kind:
            results.append(each if kind.startswith("List[") else like)
        else:
            results.append({"int": "0", "float": "0.0", "bool": "False"}.get(kind, "None"))
    return ", ".join(results) or "None", CHECK if made else IN_PLACE


def signature(parameters: Iterable[Parameter], used: str, room: int) -> str:
    """Return parameters for ``def``; those behind the last that is ``used`` only if they fit."""
    parameters = list(parameters)
    whole = ", ".join(_with_star(parameters))
    if len(whole) <= room:
        return whole
    words = set(re.findall(r"\w+", used))
    first = [p.name for p in parameters if not p.only_named]
    last = max((i for i, name in enumerate(first, 1) if name in words), default=0)
    named = [p.written for p in parameters if p.only_named and p.name in words]
    return ", ".join([*first[:last], "*args", *named, "**options"])


def _of_call(
    kernel: str, comment: str, parameters: Sequence[Parameter], result: str, check: str
) -> str:
    name = _identifier(re.sub(r"\W+", "_", re.split(r"::|\.(?=\w+$)", kernel, maxsplit=1)[-1]))
    arguments = signature(parameters, result, WIDEST - len(f"def {name}():"))
    return "\n".join(
        [
            f"# {comment}",
            *(["import torch"] if "torch." in result else []),
            "from pytest_gpumem import simulate_operator",
            f'@simulate_operator("{kernel}")',
            f"def {name}({arguments}):",
            f"    return {result}{check}",
        ]
    )


def _with_star(parameters: Sequence[Parameter]) -> Iterator[str]:
    starred = False
    for parameter in parameters:
        if parameter.only_named and not starred:
            starred = True
            yield "*"
        yield parameter.written


def _likeness(parameters: Sequence[Parameter]) -> tuple[str, str]:
    """Return a tensor like the first, and a list like the first list or of such a tensor."""
    like, each = None, None
    for parameter in parameters:
        name, given = parameter.name, parameter.given
        if isinstance(given, torch.Tensor):
            like = like or f"torch.empty_like({name})"
        elif isinstance(given, (list, tuple)) and any(isinstance(t, torch.Tensor) for t in given):
            like = like or f"torch.empty_like({name}[0])"
            each = each or f"[torch.empty_like(t) for t in {name}]"
    like = like or 'torch.empty(1, device="cuda")'
    return like, each or f"[{like}]"


def _alias(schema: Any, returned: Any) -> str | None:
    """Return the argument that ``returned`` is, or a view of."""
    if returned.alias_info is None:
        return None
    before = returned.alias_info.before_set
    return next(
        (
            str(argument.name)
            for argument in schema.arguments
            if argument.alias_info is not None and argument.alias_info.before_set & before
        ),
        None,
    )


def _signature(doc: str | None) -> tuple[list[str], str | None]:
    """Return argument names and the result's type, ``None`` for a function without one."""
    match = _SIGNATURE.match(doc or "")
    if match is None or "*args" in match["arguments"]:
        return [], "torch.Tensor"
    returned = match["result"].strip()
    return _ARGUMENT.findall(match["arguments"]), None if returned == "None" else returned


def _shown(value: Any, place: Place) -> str:
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"Tensor {tuple(value.shape)} {dtype} {place(value)}"
    if isinstance(value, (list, tuple)):
        items = [_shown(item, place) for item in value[:MOST_SHOWN]]
        return f"[{', '.join([*items, '...'] if len(value) > MOST_SHOWN else items)}]"
    if isinstance(value, (*_WRITTEN, torch.dtype, torch.device)):
        shown = repr(value)
        return shown if len(shown) <= WIDEST else f"{type(value).__name__} of {len(shown)} letters"
    return type(value).__name__


def _literal(value: Any) -> str:
    """Return ``value`` in Python's notation; ``None`` for one without a literal."""
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    try:
        ast.literal_eval(repr(value))
    except (SyntaxError, ValueError):
        return "None"
    return repr(value)


def _identifier(name: str) -> str:
    taken = keyword.iskeyword(name) or name in ("torch", "simulate_operator") or not name
    return f"{name}_" if taken or name[0].isdigit() else name
