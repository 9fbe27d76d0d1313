"""Rules and kernels receive the arguments that they name, by the operator's schema."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from pytest_gpumem.simulated.execution.custom import is_composite
from pytest_gpumem.simulated.machine.signatures import Signature
from pytest_gpumem.simulated.operators import sparse, tables

_ADDMM = torch.ops.aten.addmm.default._schema
# addmm(Tensor self, Tensor mat1, Tensor mat2, *, Scalar beta=1, Scalar alpha=1) -> Tensor


def test_positional_and_keyword_arguments_are_found_by_name() -> None:
    signature = Signature(_ADDMM)
    taken = signature.taking(lambda alpha, mat1, self: (alpha, mat1, self))
    assert taken(signature.given(None, ("bias", "a", "b"), {"alpha": 2})) == (2, "a", "bias")
    assert taken(signature.given(None, ("bias",), {"mat2": "b", "mat1": "a"})) == (1, "a", "bias")


def test_gpu_and_result_are_arguments_too() -> None:
    signature = Signature(_ADDMM)
    gpu: Any = object()
    given = signature.given(gpu, ("bias", "a", "b"), {})
    given[signature.result_at] = "sum"
    assert signature.taking(lambda result, gpu: (result, gpu))(given) == ("sum", gpu)


def test_args_receives_every_argument() -> None:
    signature = Signature(_ADDMM)
    taken = signature.taking(lambda *args: args)
    assert taken(signature.given(None, ("bias", "a", "b"), {"beta": 0})) == ("bias", "a", "b", 0, 1)


def test_an_argument_outside_of_the_schema_needs_a_default() -> None:
    signature = Signature(_ADDMM)
    both = signature.taking(lambda self, dim=None, keepdim=True: (self, dim, keepdim))
    one = signature.taking(lambda dim=3: dim)
    given = signature.given(None, ("bias", "a", "b"), {})
    assert (both(given), one(given)) == (("bias", None, True), 3)
    with pytest.raises(TypeError, match=r"names dim, which is not in aten::addmm\(Tensor self"):
        signature.taking(lambda dim: dim)


def _overloads(name: str) -> Iterator[Any]:
    """Return the overloads of ``aten::name`` that have own kernels."""
    packet = getattr(torch.ops.aten, name.removeprefix("aten::"), None)
    for overload in () if packet is None else packet.overloads():
        func = getattr(packet, overload)
        if torch._C._dispatch_has_kernel(func.name()) and not is_composite(func):
            yield func


_TYPES = {
    "Tensor": "Tensor",
    "Tensor?": "Tensor | None",
    "Tensor[]": "Sequence[Tensor]",
    "Tensor?[]": "Sequence[Tensor | None]",
    "int": "int",
    "str": "str",
    "str?": "str | None",
    "SymInt": "int",
    "SymInt?": "int | None",
    "int?": "int | None",
    "int[]": "Sequence[int]",
    "SymInt[]": "Sequence[int]",
    "int[]?": "Sequence[int] | None",
    "bool": "bool",
    "bool?": "bool | None",
    "bool[]": "Sequence[bool]",
    "float": "float",
    "float?": "float | None",
    "Scalar": "float",
    "Scalar?": "float | None",
    "ScalarType?": "torch.dtype | None",
    "Layout?": "torch.layout | None",
}
"""A type of a schema, as rules write it."""
_ALIASES = {
    "torch.Tensor": "Tensor",
    "list[": "Sequence[",
    "complex": "float",
    "_Indices": "Sequence[Tensor | None]",
    "_Sizes": "Sequence[int]",
    "Over": "Sequence[int] | int | None",
}


def _type_in(schema: Any, name: str) -> str:
    """Return the type of an argument; ``int[1]? dim=[]`` is an ``int[]?``."""
    found = re.search(rf"([^ ,(]+)(\(\w!\))?(\[\])? {name}[=,)]", str(schema))
    assert found is not None, (schema, name)
    return re.sub(r"\d", "", found[1] + (found[3] or ""))


def _assert_fits(function: Callable[..., Any], schema: Any) -> None:
    Signature(schema).taking(function)
    names = {argument.name for argument in schema.arguments}
    for name, parameter in inspect.signature(function).parameters.items():
        assert parameter.kind is not parameter.KEYWORD_ONLY
        written = str(parameter.annotation)
        if name in names and written != "Any" and parameter.annotation is not parameter.empty:
            for alias, plain in _ALIASES.items():
                written = written.replace(alias, plain)
            expected = _TYPES[_type_in(schema, name)]
            assert set(expected.split(" | ")) <= set(written.split(" | ")), (function, schema)


@pytest.mark.parametrize("name", tables.RULES)
def test_rules_name_arguments_and_types_of_every_overload(name: str) -> None:
    rule = tables.RULES[name]
    for func in _overloads(name):
        if tables.rule_of(func) is not None:
            for part in filter(None, (rule.before, rule.shapes, rule.outputs, rule.after)):
                _assert_fits(part, func._schema)


@pytest.mark.parametrize("name", [*tables.ABOVE_AUTOGRAD, *tables.BELOW_AUTOGRAD, *sparse.PARTS])
def test_composite_operators_name_arguments_of_their_overload(name: str) -> None:
    packet, _, overload = name.removeprefix("aten.").partition(".")
    func = getattr(getattr(torch.ops.aten, packet), overload)
    for table in (tables.ABOVE_AUTOGRAD, tables.BELOW_AUTOGRAD, sparse.PARTS):
        if name in table:
            _assert_fits(table[name], func._schema)


def test_numbers_of_operators_take_memory_beside_meta_tensors_of_the_user(on: Any) -> None:
    gpu = on()
    x = torch.rand(8, 17, device="cuda")
    before = gpu.of(lambda: torch.cosine_similarity(x, x))
    on_meta = torch.rand(4, 4, device="meta")
    torch.cosine_similarity(on_meta, on_meta)
    assert 4 in before  # the least norm
    assert gpu.of(lambda: torch.cosine_similarity(x, x)) == before
    assert gpu.of(lambda: torch.cosine_similarity(on_meta, on_meta)) == []


def test_angles_of_complex_numbers_are_contiguous(on: Any) -> None:
    gpu = on()
    columns = torch.rand(8, 8, device="cuda").t()
    numbers = torch.complex(columns, columns)
    assert numbers.angle().is_contiguous()
    assert numbers.abs().stride() == columns.angle().stride() == (1, 8)
    assert gpu.of(lambda: numbers.angle().flatten()) == [512, 256, -512]
