"""Bindings in the sources of an extension, and a description of one that is not compiled.

``torch.utils.cpp_extension.load()`` makes a module of the bindings of ``PYBIND11_MODULE``, and
operators of the definitions of ``TORCH_LIBRARY`` (torch/utils/cpp_extension.py, torch/library.h).
Where nothing is compiled, a description of ``load`` itself stands for both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.operators.suggested import (
    CHECK,
    WIDEST,
    Parameter,
    parameters_of,
    results_of,
    signature,
)

_COMMENT = re.compile(r'("(?:[^"\\\n]|\\.)*")|//[^\n]*|/\*.*?\*/', re.DOTALL)
_BLOCK = re.compile(
    r"\b(PYBIND11_MODULE|TORCH_LIBRARY(?:_FRAGMENT|_IMPL)?)\s*\(\s*(\w+)\s*,\s*(\w+)[^)]*\)\s*\{"
)
_TEXT = r'(?:"(?:[^"\\]|\\.)*"\s*)+|R"\w*\(.*?\)\w*"'
_DEFINITION = r"\b{variable}\s*\.\s*def\s*\(\s*(?:torch::schema\s*\(\s*)?({text})"
_CHAINED = rf"\)\s*\.\s*def\s*\(\s*({_TEXT})"
_PIECE = re.compile(r'R"\w*\((.*?)\)\w*"|"((?:[^"\\]|\\.)*)"', re.DOTALL)


@dataclass(frozen=True)
class Bound:
    """The bindings of some sources."""

    functions: tuple[str, ...] = ()
    """Functions of the module, in the order of the source."""
    operators: tuple[str, ...] = ()
    """Schemas with their namespace: ``mylib::fused(Tensor x) -> Tensor``."""


def bound_in(sources: Iterable[str]) -> Bound:
    """Return the bindings of the files ``sources``; one that cannot be read binds nothing."""
    functions: dict[str, None] = {}
    operators: dict[str, None] = {}
    for source in sources:
        try:
            text = Path(source).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        for macro, name, definitions in _blocks(_COMMENT.sub(r"\1", text)):
            if macro == "PYBIND11_MODULE":
                functions.update(dict.fromkeys(d for d in definitions if d.isidentifier()))
            elif macro != "TORCH_LIBRARY_IMPL":
                operators.update(dict.fromkeys(f"{name}::{d}" for d in definitions if "(" in d))
    return Bound(tuple(functions), tuple(operators))


def of_module(loader: str, name: str, bound: Bound, line: str) -> str:
    """Return a description of the module ``name`` that ``loader``, called at ``line``, compiles."""
    functions = bound.functions or (() if bound.operators else ("forward",))
    operators = [found for schema in bound.operators if (found := _parsed(schema))]
    body = [text for schema, written in operators for text in _defining(schema, written)]
    if functions:
        body += _functions(name, functions)
    return "\n".join(
        [
            f"# {loader}(name={json.dumps(name)}, ...) was called at {line}",
            *(["from types import SimpleNamespace"] if functions else []),
            "import torch",
            "from pytest_gpumem import simulate_operator",
            f'@simulate_operator("torch.utils.cpp_extension.{loader}")',
            f"def {loader}(name, *args, **options):",
            *(f"    {text}" for text in body),
            *(_described(schema) for schema, _ in operators),
        ]
    )


def _functions(name: str, functions: Iterable[str]) -> list[str]:
    made = ", ".join(f"{function}=kernel" for function in functions)
    return [
        f"kernel = lambda x, *_, **__: torch.empty_like(x){CHECK}",
        f"return {{{json.dumps(name)}: SimpleNamespace({made})}}[name]",
    ]


def _defining(schema: Any, written: str) -> list[str]:
    namespace, _, operator = schema.name.partition("::")
    overload = f".{schema.overload_name}" if schema.overload_name else ""
    has = f'hasattr(torch.ops.{namespace}, "{operator}")'
    if overload:
        has += f' and hasattr(torch.ops.{namespace}.{operator}, "{schema.overload_name}")'
        has = f"({has})"
    arguments = written[written.index("(") :]
    return [
        f"if not {has}:",
        f'    torch.library.define("{schema.name}{overload}", {json.dumps(arguments)})',
    ]


def _described(schema: Any) -> str:
    tensors = {a.name: _example(str(a.type)) for a in schema.arguments}
    parameters: list[Parameter] = parameters_of(schema, tensors)
    result, check = results_of(schema, parameters)
    kernel = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
    made = f"({result})" if len(schema.returns) > 1 else result
    head = f'simulate_operator("{kernel}")(lambda '
    arguments = signature(parameters, result, WIDEST - len(f"{head}: {made}){check}"))
    return f"{head}{arguments}: {made}){check}"


def _example(kind: str) -> Any:
    """Return an example of the type, as far as a description needs one."""
    if "Tensor" not in kind:
        return None
    tensor = raw.empty(0, device=raw.META)
    return [tensor] if kind.startswith("List[") else tensor


def _parsed(schema: str) -> tuple[Any, str] | None:
    try:
        return torch._C.parse_schema(schema), schema
    except RuntimeError:
        return None


def _blocks(text: str) -> Iterable[tuple[str, str, list[str]]]:
    """Yield macro, name and definitions of every block that binds something."""
    found = list(_BLOCK.finditer(text))
    for block, following in zip(found, [*found[1:], None], strict=False):
        inside = text[block.end() : following.start() if following else len(text)]
        pattern = _DEFINITION.format(variable=re.escape(block[3]), text=_TEXT)
        starts = re.finditer(f"{pattern}|{_CHAINED}", inside, re.DOTALL)
        yield block[1], block[2], [_joined(start[1] or start[2]) for start in starts]


def _joined(text: str) -> str:
    """Return the string that adjacent literals of C++ make, on one line."""
    pieces = (raw or plain.replace('\\"', '"') for raw, plain in _PIECE.findall(text))
    return " ".join("".join(pieces).split())
