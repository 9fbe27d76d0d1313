"""Dataclasses as builtin types and back: in files, in reports, and between processes."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping
from dataclasses import MISSING, fields
from enum import IntEnum
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T", bound="Plain")
_Convert = Callable[[Any], Any]

OMITTED = {"omitted": True}
"""Metadata of a field that is not written if it has its default value."""

KEY = {"key": True}
"""Metadata of a field that is not written, because it is the key of its object in a mapping."""

_NEVER = object()
"""A default that equals no value."""


class Plain:
    """A dataclass that can be written as builtin types, by the types of its fields."""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form: builtin types only, which pytest-xdist can send, too."""
        found, kind = {}, cast("Hashable", type(self))
        for name, write, left_out in _written(kind):
            value = getattr(self, name)
            if value != left_out:
                found[name] = write(value) if write else value
        return found

    @classmethod
    def from_dict(cls: type[T], data: Mapping[str, Any]) -> T:
        """Return the object from :meth:`to_dict`'s form."""
        values = dict(data)
        for name, read in _read(cast("Hashable", cls)):
            if name in values:
                values[name] = read(values[name])
        return cls(**values)

    def to_file(self, path: Path) -> None:
        """Write the JSON form to ``path``, for :meth:`from_file`."""
        path.write_text(json.dumps(self.to_dict()), encoding="utf-8")

    @classmethod
    def from_file(cls: type[T], path: Path) -> T:
        """Return the object that :meth:`to_file` wrote."""
        return cls.from_dict(json.loads(path.read_text(encoding="utf-8")))


@cache
def _written(cls: Any) -> list[tuple[str, _Convert | None, object]]:
    """Return the fields of a class: name, conversion, and the value that is left out."""
    hints = get_type_hints(cls)
    found = []
    for field in fields(cls):
        default: object = _NEVER
        if "omitted" in field.metadata:
            made = field.default_factory
            default = field.default if made is MISSING else made()
        if "key" not in field.metadata:
            found.append((field.name, _conversions(hints[field.name])[0], default))
    return found


@cache
def _read(cls: Any) -> list[tuple[str, _Convert]]:
    hints = get_type_hints(cls)
    pairs = [(field.name, _conversions(hints[field.name])[1]) for field in fields(cls)]
    return [(name, read) for name, read in pairs if read is not None]


def _conversions(hint: Any) -> tuple[_Convert | None, _Convert | None]:
    """Return functions that write and read a value of type ``hint``, ``None`` if unchanged."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType) and NoneType in args:
        write, read = _conversions(Union[tuple(arg for arg in args if arg is not NoneType)])  # noqa: UP007
        return _or_none(write), _or_none(read)
    if args == (tuple[str, str], ...):
        return dict, lambda data: tuple(sorted(data.items()))
    if origin is tuple:
        write, read = _conversions(args[0])
        return _each(list, write), _each(tuple, read)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        write, read = _conversions(args[1])
        return _of_values(write) or dict, _of_values(read, _key_of(args[1]))
    if isinstance(hint, type) and issubclass(hint, Plain):
        return hint.to_dict, hint.from_dict
    if hint is Path:
        return str, Path
    if isinstance(hint, type) and issubclass(hint, IntEnum):
        return int, hint
    if isinstance(hint, type) and issubclass(hint, tuple):  # a NamedTuple
        return list, lambda data: hint(*data)
    return None, None


def _or_none(convert: _Convert | None) -> _Convert | None:
    return convert and (lambda value: None if value is None else convert(value))


def _each(sequence: type[Any], convert: _Convert | None) -> _Convert:
    return sequence if convert is None else lambda values: sequence(map(convert, values))


def _of_values(convert: _Convert | None, key: str = "") -> _Convert | None:
    if convert is None:
        return None
    if key:
        return lambda found: {k: convert({key: k, **value}) for k, value in found.items()}
    return lambda found: {k: convert(value) for k, value in found.items()}


def _key_of(hint: Any) -> str:
    """Return the field of a class that is the key of its values, empty for none."""
    if not (isinstance(hint, type) and issubclass(hint, Plain)):
        return ""
    return next((one.name for one in fields(hint) if "key" in one.metadata), "")  # type: ignore[arg-type]  # a dataclass
