"""Dataclasses as builtin types, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pytest_gpumem.values.serialization import KEY, OMITTED, Plain


class Process(NamedTuple):
    pid: int
    started: float


@dataclass(frozen=True)
class Phase(Plain):
    name: str = field(metadata=KEY)
    peak: int


@dataclass(frozen=True)
class Everything(Plain):
    number: int
    shape: tuple[int, ...] | None = None
    nested: tuple[tuple[int, ...], ...] = ()
    process: Process | None = None
    folder: Path = Path("a")
    sites: tuple[Mapping[str, Any], ...] = ()
    phases: Mapping[str, Phase] = field(default_factory=dict)
    inner: Phase | None = None
    extra: tuple[tuple[str, str], ...] = field(default=(), metadata=OMITTED)
    facts: Mapping[str, Any] = field(default_factory=dict, metadata=OMITTED)


FULL = Everything(
    number=1,
    shape=(2, 3),
    nested=((1,), ()),
    process=Process(7, 0.5),
    folder=Path("b/c"),
    sites=({"bytes": 512},),
    phases={"forward": Phase("forward", 4096)},
    extra=(("a", "b"), ("c", "d")),
    facts={"models": 2},
)


def test_each_field_is_written_by_its_type_in_the_class_s_order() -> None:
    assert list(FULL.to_dict().items()) == [
        ("number", 1),
        ("shape", [2, 3]),
        ("nested", [[1], []]),
        ("process", [7, 0.5]),
        ("folder", "b/c"),
        ("sites", [{"bytes": 512}]),
        ("phases", {"forward": {"peak": 4096}}),
        ("inner", None),
        ("extra", {"a": "b", "c": "d"}),
        ("facts", {"models": 2}),
    ]


def test_omitted_fields_are_written_where_they_differ_from_their_default() -> None:
    assert Everything(1).to_dict().keys() == Everything(1).to_dict().keys() - {"extra", "facts"}
    assert "shape" in Everything(1).to_dict()


@pytest.mark.parametrize("one", [FULL, Everything(1)])
def test_a_dataclass_survives_a_round_trip_through_json(one: Everything) -> None:
    assert Everything.from_dict(json.loads(json.dumps(one.to_dict()))) == one


def test_missing_values_are_the_defaults_and_unknown_ones_are_refused() -> None:
    assert Everything.from_dict({"number": 1}) == Everything(1)
    with pytest.raises(TypeError, match="colour"):
        Everything.from_dict({"number": 1, "colour": "red"})


def test_a_dataclass_survives_a_round_trip_through_a_file(tmp_path: Path) -> None:
    FULL.to_file(tmp_path / "it.json")

    assert Everything.from_file(tmp_path / "it.json") == FULL
