"""Rules and kernels are given what they name, as the operator's schema calls it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pytest_gpumem.simulated.execution.composites import is_composite
from pytest_gpumem.simulated.operators import tables
from pytest_gpumem.simulated.operators.calls import Signature

_ADDMM = torch.ops.aten.addmm.default._schema
# addmm(Tensor self, Tensor mat1, Tensor mat2, *, Scalar beta=1, Scalar alpha=1) -> Tensor


def test_arguments_are_found_by_name_wherever_they_were_given() -> None:
    signature = Signature(_ADDMM)
    taken = signature.taking(lambda alpha, mat1, self: (alpha, mat1, self))
    assert taken(signature.given(None, ("bias", "a", "b"), {"alpha": 2})) == (2, "a", "bias")
    assert taken(signature.given(None, ("bias",), {"mat2": "b", "mat1": "a"})) == (1, "a", "bias")


def test_the_gpu_and_the_result_are_names_too() -> None:
    signature = Signature(_ADDMM)
    gpu: Any = object()
    given = signature.given(gpu, ("bias", "a", "b"), {})
    given[signature.result_at] = "sum"
    assert signature.taking(lambda result, gpu: (result, gpu))(given) == ("sum", gpu)


def test_every_argument_can_be_had_at_once() -> None:
    signature = Signature(_ADDMM)
    taken = signature.taking(lambda *args: args)
    assert taken(signature.given(None, ("bias", "a", "b"), {"beta": 0})) == ("bias", "a", "b", 0, 1)


def test_what_an_overload_does_not_have_is_its_default_and_has_to_have_one() -> None:
    signature = Signature(_ADDMM)
    both = signature.taking(lambda self, dim=None, keepdim=True: (self, dim, keepdim))
    one = signature.taking(lambda dim=3: dim)
    given = signature.given(None, ("bias", "a", "b"), {})
    assert (both(given), one(given)) == (("bias", None, True), 3)
    with pytest.raises(TypeError, match=r"names dim, which is not in aten::addmm\(Tensor self"):
        signature.taking(lambda dim: dim)


def _overloads(name: str) -> Iterator[Any]:
    """The overloads of ``aten::name`` that have kernels of their own."""
    packet = getattr(torch.ops.aten, name.removeprefix("aten::"), None)
    for overload in () if packet is None else packet.overloads():
        func = getattr(packet, overload)
        if torch._C._dispatch_has_kernel(func.name()) and not is_composite(func):
            yield func


_TYPES = {
    "Tensor": "Tensor",
    "Tensor?": "Tensor | None",
    "Tensor[]": "Sequence[Tensor]",
    "Tensor?[]": "_Indices",
    "int": "int",
    "SymInt": "int",
    "int?": "int | None",
    "int[]": "Sequence[int]",
    "SymInt[]": "Sequence[int]",
    "int[]?": "Sequence[int] | None",
    "bool": "bool",
    "bool?": "bool | None",
    "bool[]": "Sequence[bool]",
    "float": "float",
    "Scalar": "float",
    "ScalarType?": "torch.dtype | None",
}
"""A type of a schema, as rules write it."""


def _type_in(schema: Any, name: str) -> str:
    """The type of an argument; ``int[1]? dim=[]`` is an ``int[]?``."""
    found = re.search(rf"([^ ,(]+)(\(\w!\))?(\[\])? {name}[=,)]", str(schema))
    assert found is not None, (schema, name)
    return re.sub(r"\d", "", found[1] + (found[3] or ""))


def _is_type_of(written: str, expected: str) -> bool:
    written = written.replace("torch.Tensor", "Tensor").replace("complex", "float")
    return set(expected.split(" | ")) <= set(written.split(" | "))


@pytest.mark.parametrize("name", tables.RULES)
def test_rules_name_arguments_as_every_overload_does_and_of_its_types(name: str) -> None:
    rule = tables.RULES[name]
    for func in _overloads(name):
        if tables.rule_of(func) is None:
            continue
        names = {argument.name for argument in func._schema.arguments}
        for part in filter(None, (rule.before, rule.shapes, rule.placed, rule.after)):
            for argument, parameter in inspect.signature(part).parameters.items():
                if argument in names:
                    expected = _TYPES[_type_in(func._schema, argument)]
                    assert _is_type_of(parameter.annotation, expected), (part, func._schema)
