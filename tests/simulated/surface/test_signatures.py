"""Replacements take all arguments of the functions they replace, in the installed release."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_gpumem.simulated.simulation import SimulatedGPU

_OF_GPUS = ("_cuda_", "_accelerator_", "_host_", "_graph_")
_STUBS = Path(torch.__file__).parent / "_C" / "__init__.pyi"


def planned() -> Iterator[tuple[Any, str, Any]]:
    (gpu,) = SimulatedGPU.machine("T4")
    yield from gpu.simulation._patches.added


def stubs() -> dict[str, ast.arguments]:
    """Return the functions of ``torch._C`` and their arguments, from the release's stubs."""
    tree = ast.parse(_STUBS.read_text(encoding="utf-8"))
    return {node.name: node.args for node in tree.body if isinstance(node, ast.FunctionDef)}


def refusal(replacement: Callable[..., Any], count: int, names: tuple[str, ...]) -> str:
    """Return why ``replacement`` refuses so many positional and these named arguments, or ''."""
    try:
        inspect.signature(replacement).bind(*range(count), **dict.fromkeys(names))
    except TypeError as error:
        return str(error)
    return ""


def test_replacements_of_c_functions_take_every_argument() -> None:
    declared = stubs()
    refused = {}
    for owner, name, value in planned():
        if owner is not torch._C or name not in declared or not name.startswith(_OF_GPUS):
            continue
        arguments = declared[name]
        count = len(arguments.posonlyargs) + len(arguments.args)
        why = refusal(value, count, tuple(each.arg for each in arguments.kwonlyargs))
        why = why or refusal(value, count - len(arguments.defaults), ())
        if why:
            refused[name] = why
    assert not refused
    assert "_cuda_record_memory_history" in declared


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="a build without CUDA has no copies")
def test_every_copy_that_dynamo_holds_is_replaced() -> None:
    pytest.importorskip("torch._inductor.compile_fx")
    from pytest_gpumem.simulated.compiled.tracing import _COPIES

    replaced = {
        id(function): name
        for owner, name, _ in planned()
        if owner is torch._C and (function := getattr(torch._C, name, None)) is not None
    }
    from torch._dynamo import device_interface
    from torch._dynamo.variables import ctx_manager

    copies = {
        (owner, name)
        for module in (device_interface, ctx_manager)
        for owner in vars(module).values()
        if isinstance(owner, type) and owner.__module__ == module.__name__
        for name, value in vars(owner).items()
        if id(getattr(value, "__func__", value)) in replaced and callable(value)
    }
    known = {(owner, name) for owner, names in _COPIES.items() for name in names}
    assert copies <= known
