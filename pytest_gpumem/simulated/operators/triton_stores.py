"""Arguments that a Triton kernel may write to, read from its source.

A kernel writes by ``tl.store``, ``tl.atomic_*``, ``tl.inline_asm_elementwise`` and the methods of
tensor descriptors (triton/language/core.py, releases 3.2 to 3.9); each is followed back to the
parameters that its pointer is computed from. Where the source leaves that open, as with a function
that is a parameter itself, its arguments count as written.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import sys
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from pytest_gpumem.simulated.operators.custom_kernels import base_function

Names = frozenset[str]

_NONE: Names = frozenset()
_LANGUAGE = "triton.language"
_WRITES_TO_ANY = frozenset({"inline_asm_elementwise"})
_TARGETS = frozenset({"pointer", "desc"})
"""Names of the first argument in functions that write."""
_POINTERS_OF_NUMBERS = "pointer_type"
"""A cast of numbers to pointers in a kernel: the memory they point to is unknown."""


@dataclass(frozen=True)
class Effects:
    """Effects of a function of Triton's language on its parameters."""

    written: Names
    """Parameters that it may write to."""
    returned: Names
    """Parameters that its result may point into."""


class Stores:
    """The effects of the kernels read so far."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[FunctionType, Effects] = WeakKeyDictionary()

    def of(self, kernel: Any) -> Names:
        """Return the parameters that ``kernel``, a function of Triton's, may write to."""
        return self.effects(base_function(kernel)).written

    def effects(self, function: Any) -> Effects:
        """Return the effects of ``function``: all possible ones, if its source cannot be read."""
        if not isinstance(function, FunctionType):
            return Effects(_NONE, _NONE)
        found = self._known.get(function)
        if found is None:
            # The functions that it calls may call it again.
            self._known[function] = _anything(function)
            found = self._known[function] = self._read(function)
        return found

    def _read(self, function: FunctionType) -> Effects:
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        except (OSError, SyntaxError, TypeError):
            return _anything(function)
        found = next((node for node in tree.body if isinstance(node, ast.FunctionDef)), None)
        if found is None or _POINTERS_OF_NUMBERS in ast.dump(found):
            return _anything(function)
        variables = inspect.getclosurevars(function)
        return _Reader(self, {**function.__globals__, **variables.nonlocals}).read(found)


def _anything(function: FunctionType) -> Effects:
    names = frozenset(inspect.signature(function).parameters)
    return Effects(names, names)


@dataclass
class _Reader:
    """A reader of one function: ``points`` maps each variable to the parameters it comes from."""

    stores: Stores
    space: Mapping[str, Any]
    points: dict[str, Names] = field(default_factory=dict)
    written: Names = _NONE
    returned: Names = _NONE

    def read(self, function: ast.FunctionDef) -> Effects:
        """Follow all assignments until nothing changes: loops carry variables around."""
        given = function.args
        for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs):
            self.points[argument.arg] = frozenset({argument.arg})
        before: Any = None
        while before != (self.points, self.written, self.returned):
            before = (dict(self.points), self.written, self.returned)
            for statement in function.body:
                self._statement(statement)
        return Effects(self.written, self.returned)

    def _statement(self, statement: ast.AST) -> None:
        for node in ast.walk(statement):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    self._assign(target, node.value)
            elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.NamedExpr)):
                if node.value is not None:
                    self._assign(node.target, node.value)
            elif isinstance(node, (ast.For, ast.comprehension)):
                self._assign(node.target, node.iter)
            elif isinstance(node, ast.withitem) and node.optional_vars is not None:
                self._assign(node.optional_vars, node.context_expr)
            elif isinstance(node, ast.Return) and node.value is not None:
                self.returned |= self._of(node.value)
            elif isinstance(node, ast.Call):
                self._call(node)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            each = isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts)
            for at, item in enumerate(target.elts):
                self._assign(item, value.elts[at] if each else value)  # type: ignore[attr-defined]  # each says so
            return
        while isinstance(target, (ast.Attribute, ast.Subscript, ast.Starred)):
            target = target.value
        if isinstance(target, ast.Name):
            self.points[target.id] = self.points.get(target.id, _NONE) | self._of(value)

    def _of(self, node: ast.AST | None) -> Names:
        """Return the parameters that an expression may point into."""
        if isinstance(node, ast.Name):
            return self.points.get(node.id, _NONE)
        if isinstance(node, ast.Call):
            return self._call(node)
        return _NONE if node is None else self._of_all(ast.iter_child_nodes(node))

    def _of_all(self, nodes: Iterable[ast.AST]) -> Names:
        return _NONE.union(*map(self._of, nodes))

    def _call(self, call: ast.Call) -> Names:
        given = self._of_all([*call.args, *(keyword.value for keyword in call.keywords)])
        known, called = self._resolved(call.func)
        if not known:
            return self._unknown(call, given)
        if getattr(called, "__name__", None) in vars(builtins):
            return given
        module = getattr(called, "__module__", None) or getattr(type(called), "__module__", "")
        if str(module).startswith(_LANGUAGE) and not isinstance(called, ModuleType):
            # Functions of the language are known by name.
            return self._of_language(call, str(getattr(called, "__name__", "")), given)
        function = base_function(called)
        if function is called or not isinstance(function, FunctionType):
            self.written |= given
            return given
        return self._of_function(call, function)

    def _of_language(self, call: ast.Call, name: str, given: Names) -> Names:
        if "store" in name or "atomic" in name or "scatter" in name:
            named = (each.value for each in call.keywords if each.arg in _TARGETS)
            target = next(iter((*call.args, *named)), None)
            self.written |= given if target is None else self._of(target)
        elif name in _WRITES_TO_ANY:
            self.written |= given
        # Values loaded from memory point nowhere: casts to pointers are not followed.
        return _NONE if "load" in name or "gather" in name else given

    def _of_function(self, call: ast.Call, function: FunctionType) -> Names:
        effects = self.stores.effects(function)
        names = list(inspect.signature(function).parameters)
        if any(isinstance(arg, ast.Starred) for arg in call.args) or len(call.args) > len(names):
            given = self._of_all(call.args)
            self.written |= given
            return given
        passed = dict(zip(names, map(self._of, call.args), strict=False))
        passed |= {keyword.arg or "": self._of(keyword.value) for keyword in call.keywords}
        self.written |= _NONE.union(*(passed.get(name, _NONE) for name in effects.written))
        return _NONE.union(*(passed.get(name, _NONE) for name in effects.returned))

    def _unknown(self, call: ast.Call, given: Names) -> Names:
        """Return parameters the result of a method, or of a function value, may point into."""
        if not isinstance(call.func, ast.Attribute):
            self.written |= given
            return given
        name, owner = call.func.attr, self._of(call.func.value)
        if name.startswith(("store", "atomic", "scatter", "reduce_")):
            self.written |= owner
        elif name.startswith(("load", "gather")):
            return _NONE
        elif not hasattr(getattr(sys.modules.get(_LANGUAGE), "tensor", None), name):
            # Of the methods of Triton's tensors only those named above write.
            self.written |= owner | given
        return owner | given

    def _resolved(self, node: ast.expr) -> tuple[bool, Any]:
        """Return whether a (dotted) name is defined outside the function, and its value."""
        if isinstance(node, ast.Name) and node.id not in self.points:
            if node.id in self.space:
                return True, self.space[node.id]
            return hasattr(builtins, node.id), getattr(builtins, node.id, None)
        if isinstance(node, ast.Attribute):
            known, owner = self._resolved(node.value)
            if known and hasattr(owner, node.attr):
                return True, getattr(owner, node.attr)
        return False, None
