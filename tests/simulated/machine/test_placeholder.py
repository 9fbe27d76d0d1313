"""Placeholders of integers that are not computed: they can be printed and decoded alone."""

from __future__ import annotations

import copy
import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pytest_gpumem import simulate
from pytest_gpumem.values.errors import UnknownValueError

HERE = re.escape(Path(__file__).name)


@pytest.mark.parametrize("read", ["tolist()", "numpy()"])
def test_printing_a_placeholder_leaves_a_note(read: str) -> None:
    with simulate("T4") as gpu:
        tokens = torch.randint(9, (2, 3), device="cuda")
        rows = tokens.tolist() if read == "tolist()" else tokens.cpu().numpy()
        assert f"{list(rows[1])} {rows[0][0]:3d} {rows[0][1] + 1} {rows[0][2] / 3:.1f}" == (
            "[0, 0, 0]   0 0 0.0"
        )
        assert [len(row) for row in rows] == [3, 3]
        assert (
            repr(copy.deepcopy(rows[0][0])) == repr(pickle.loads(pickle.dumps(rows[0][0]))) == "0"
        )
        assert re.fullmatch(
            rf"{re.escape(read)} at .*{HERE}:\d+ read integers that are not computed: each got 0",
            gpu.notes[0],
        )


@pytest.mark.parametrize(
    "use",
    [
        lambda number: number == 0,
        lambda number: number + 1 > 0,
        lambda number: not number,
        lambda number: max(number, 1),
        lambda number: number in {0: "a"},
        lambda number: ["a"][number],
        lambda number: list(range(number)),
        lambda number: "a" * number,
        lambda number: chr(number),
        lambda number: int(number),
        lambda number: float(number),
        lambda number: torch.arange(9)[:number],
        lambda number: np.array([number]).astype(np.int64),
        lambda number: np.array([number]) == 0,
        lambda number: number / 2 == 0,
    ],
)
def test_conditions_and_lookups_by_a_placeholder_are_refused(use: Callable[[Any], Any]) -> None:
    with simulate("T4"):
        number = torch.randint(9, (3,), device="cuda").tolist()[0]
        with pytest.raises(UnknownValueError, match=rf" at .*{HERE}:\d+ depends on a value"):
            use(number)


@pytest.mark.parametrize(
    "use",
    [
        lambda numbers: torch.tensor(numbers),
        lambda numbers: torch.zeros(numbers),
        lambda numbers: torch.arange(9).split(numbers),
        lambda numbers: torch.from_numpy(np.array(numbers)),
    ],
)
def test_tensors_and_arrays_of_placeholders_are_refused(use: Callable[[list[Any]], Any]) -> None:
    with simulate("T4"):
        numbers = torch.randint(9, (3,), device="cuda").tolist()
        with pytest.raises((TypeError, RuntimeError), match=r"PlaceholderInt|object_"):
            use(numbers)


def test_conditions_and_real_numbers_are_refused() -> None:
    with simulate("T4"):
        x = torch.rand(3, device="cuda")
        for tensor in (x > 0, x, x.argmax()):
            with pytest.raises(UnknownValueError, match=rf"tolist\(\) at .*{HERE}:\d+"):
                tensor.tolist()


def test_tokenizers_decode_placeholders() -> None:
    source = "def decode(tokens): return bytes([token.__index__() for token in tokens])"
    module: dict[str, Any] = {"__name__": "tiktoken.core"}
    exec(source, module)
    with simulate("T4"):
        assert module["decode"](torch.randint(9, (3,), device="cuda").tolist()) == b"\0\0\0"


def test_known_integers_are_plain_integers() -> None:
    with simulate("T4") as gpu:
        assert torch.arange(3, device="cuda").tolist() == [0, 1, 2]
        assert torch.arange(3, device="cuda").cpu().numpy().dtype == np.int64
        assert gpu.notes == ()


@pytest.mark.parametrize("indent", [None, 2])
def test_json_writes_a_placeholder_as_zero(indent: int | None) -> None:
    with simulate("T4"):
        loss = torch.randn(4, device="cuda").sum().item()
        assert json.loads(json.dumps({"loss": loss}, indent=indent)) == {"loss": 0.0}
        with pytest.raises(UnknownValueError):
            bool(loss > 1)
