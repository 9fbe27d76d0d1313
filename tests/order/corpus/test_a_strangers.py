"""Tests that run before all others: they are not measured, or leave objects behind."""

import decimal
import json

import pytest
import torch

LEFT = []


def test_imports_and_objects():
    import xml.dom.minidom  # noqa: F401

    kept = [[number] for number in range(20_000)]
    kept.append(kept)
    assert json.loads(json.dumps({"a": 1})) == {"a": 1}
    assert decimal.Decimal(1) + 1 == 2


@pytest.mark.gpumem
@pytest.mark.parametrize("size", [1 << 20, 5 << 20])
def test_leaves_a_tensor_in_a_module(size):
    LEFT.append(torch.empty(size, dtype=torch.uint8, device="cuda"))


@pytest.mark.gpumem
def test_leaves_a_cycle():
    cycle = [torch.empty(3 << 20, dtype=torch.uint8, device="cuda")]
    cycle.append(cycle)


@pytest.mark.gpumem
def test_makes_meta_tensors():
    shape = torch.empty(3, 4, device="meta")
    torch.zeros(shape.shape, device="cuda")


@pytest.mark.gpumem
def test_changes_what_holds_for_the_process():
    torch.set_default_dtype(torch.float64)
    try:
        torch.ones(1000, device="cuda").sum()
    finally:
        torch.set_default_dtype(torch.float32)
    torch.backends.cuda.matmul.allow_tf32 = False
