"""Arguments that a kernel may write to: each kernel's name says how it stores."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pytest_gpumem.simulated.operators.triton_stores import Stores
from tests.simulated.surface.triton_kernels.stand_in import JITFunction, triton

__all__ = ["triton"]

tl: Any = None
X, OUT = "x_ptr", "out_ptr"


@pytest.fixture(autouse=True)
def language(triton: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "tl", vars(triton)["language"])


def moved(x_ptr: Any, out_ptr: Any, n: Any) -> None:
    row = tl.program_id(0)
    out_ptr += row * n
    x_ptr += row * n
    here = out_ptr + tl.arange(0, n)
    tl.store(here, tl.load(x_ptr + tl.arange(0, n)))


def by_index(x_ptr: Any, out_ptr: Any, n: Any) -> None:
    tl.store(out_ptr + tl.load(x_ptr), n)


def by_name(x_ptr: Any, out_ptr: Any) -> None:
    tl.store(value=tl.load(x_ptr), mask=None, pointer=out_ptr)


def added(x_ptr: Any, out_ptr: Any) -> None:
    tl.atomic_add(out_ptr, tl.load(x_ptr))


def in_a_loop(x_ptr: Any, out_ptr: Any, n: Any) -> None:
    place = tl.arange(0, n)
    for at in range(n):
        tl.store(place, tl.load(x_ptr))
        place = out_ptr + at


def block(x_ptr: Any, out_ptr: Any, n: Any) -> None:
    source = tl.make_block_ptr(base=x_ptr, shape=(n,))
    target = tl.advance(tl.make_block_ptr(base=out_ptr, shape=(n,)), (n,))
    tl.store(target, tl.load(source))


def descriptor(x_ptr: Any, out_ptr: Any, n: Any) -> None:
    source = tl.make_tensor_descriptor(x_ptr, shape=[n])
    target = tl.make_tensor_descriptor(out_ptr, shape=[n])
    target.store([0], source.load([0]).to(n))


def pairs(x_ptr: Any, out_ptr: Any) -> None:
    source, (target, _) = x_ptr, (out_ptr, 3)
    tl.store(target, tl.load(source))


def helped(x_ptr: Any, out_ptr: Any) -> None:
    helper(out_ptr, value=x_ptr)


def through_a_result(x_ptr: Any, out_ptr: Any) -> None:
    tl.store(second(x_ptr, out_ptr), tl.load(x_ptr))


ONLY_OUT = [moved, added, in_a_loop, block, descriptor, pairs, helped, through_a_result, by_name]


def _helper(place: Any, value: Any) -> None:
    tl.store(place, tl.load(value))


def _second(one: Any, other: Any) -> Any:
    return other


helper: Any = JITFunction(_helper)
second: Any = JITFunction(_second)


@pytest.mark.parametrize("kernel", ONLY_OUT)
def test_pointers_are_followed_to_the_arguments(kernel: Callable[..., Any]) -> None:
    written = Stores().of(JITFunction(kernel))
    assert {X, OUT} & written == {OUT}


def test_loaded_values_are_not_pointers() -> None:
    assert Stores().of(JITFunction(by_index)) == {OUT}


def given_a_function(x_ptr: Any, out_ptr: Any, FN: Any) -> None:  # noqa: N803
    FN(x_ptr)


def casts(x_ptr: Any, out_ptr: Any, address: Any) -> None:
    tl.store(address.to(tl.pointer_type(3)), 1)


def assembles(x_ptr: Any, out_ptr: Any) -> None:
    tl.inline_asm_elementwise("st.global", args=[x_ptr, out_ptr])


def with_a_strange_method(x_ptr: Any, out_ptr: Any) -> None:
    x_ptr.pushed(out_ptr)


def calls_itself(x_ptr: Any, out_ptr: Any) -> None:
    itself(x_ptr, out_ptr)


itself: Any = JITFunction(calls_itself)


@pytest.mark.parametrize("kernel", [casts, assembles, with_a_strange_method, calls_itself])
def test_pointers_in_unknown_calls_count_as_written(kernel: Callable[..., Any]) -> None:
    assert {X, OUT} <= Stores().of(JITFunction(kernel))


def test_arguments_of_a_function_parameter_count_as_written() -> None:
    assert {X, OUT} & Stores().of(JITFunction(given_a_function)) == {X}


def test_a_kernel_without_source_may_write_to_everything() -> None:
    space: dict[str, Any] = {}
    exec("def made(x_ptr, out_ptr): pass", space)
    assert Stores().of(SimpleNamespace(fn=space["made"])) == {X, OUT}
