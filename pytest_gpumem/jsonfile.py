"""JSON files with a schema of this package: written whole or not at all, checked both ways.

A JSON schema as functions that check a document: some two hundred times faster than jsonschema.

A baseline of 40,000 tests is read at every run, and jsonschema takes a minute for it. The error
message still comes from jsonschema, for the one wrong value.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pytest_gpumem.quoting import MOST, printable


def replace_file(path: Path, content: bytes, draft: Path | None = None) -> None:
    """Make ``content`` the file ``path``: a reader sees the old file or the new one, never a part.

    It is written to ``draft`` first, by default beside ``path``. Folders that are missing are made.
    Raises :class:`OSError`, and leaves nothing behind then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if draft is None or draft.parent.stat().st_dev != path.parent.stat().st_dev:
        # Named for this write alone: two writers never share a temporary file, and unlike
        # tempfile's the new one gets the permissions of the user's umask.
        draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with draft.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


class DocumentError(ValueError):
    """Bytes that are no valid document; the message is the cause, as the end of a sentence."""


class NewerError(DocumentError):
    """A document of a later version than this one reads; the message begins with a verb."""


def decoded(content: bytes, **hooks: Any) -> Any:
    """Return the JSON of ``content``, by the ``hooks`` of json.loads; raises DocumentError."""
    import json

    try:
        return json.loads(content, **hooks)
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"not valid JSON ({printable(str(error), MOST)})") from error


def document(content: bytes, package: str, version: int, **hooks: Any) -> dict[str, Any]:
    """Return the document of ``content``, valid by ``package``'s schema, of ``version`` at most.

    Raises :class:`DocumentError` where it is not, :class:`NewerError` for a later version.
    """
    data = decoded(content, **hooks)
    found = data.get("schema_version") if isinstance(data, dict) else None
    if isinstance(found, int) and found > version:
        raise NewerError(
            f"has schema_version {printable(str(found), MOST)} and this pytest-gpumem reads "
            f"{version}; install a newer one"
        )
    if problem := schema_problem(package, data):
        raise DocumentError(problem)
    whole: dict[str, Any] = data
    return whole


def schema_problem(package: str, data: Any) -> str | None:
    """Return where and how ``data`` departs from ``package``'s ``schema.json``, ``None`` if not."""
    if (fault := _check(package)(data)) is None:
        return None
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match

    error = best_match(Draft202012Validator(fault.schema).iter_errors(fault.value))
    outermost = error
    while outermost.parent is not None:
        outermost = outermost.parent
    outermost.path.extendleft(reversed(fault.path))
    message = error.message if len(error.message) <= 120 else f"{error.message[:117]}..."
    return f"{printable(message)} at {printable(error.json_path, MOST)}"


@cache
def _check(package: str) -> Check:
    import json
    from importlib.resources import files

    schema = files(package).joinpath("schema.json").read_text(encoding="utf-8")
    return compiled(json.loads(schema))


Schema = Mapping[str, Any]


@dataclass
class Fault:
    """The first value that departs from its schema, and its path in the document."""

    schema: Schema
    """The schema of this value, without those of values inside it."""
    value: Any
    path: list[str | int]


Check = Callable[[Any], Fault | None]

_ANNOTATIONS = frozenset({"$schema", "$defs", "title", "description"})
_OF_VALUES = frozenset({"type", "const", "enum", "minimum", "maximum", "minLength", "anyOf"})
_OF_OBJECTS = frozenset({"required", "properties", "additionalProperties"})
_USUAL: dict[str, tuple[type, ...]] = {
    "null": (type(None),),
    "boolean": (bool,),
    "string": (str,),
    "array": (list,),
    "object": (dict,),
    "number": (int, float),
    "integer": (int,),
}
"""The Python types of JSON values, in nearly all cases: 1.0 is an integer, too."""


def compiled(schema: Schema) -> Check:
    """Return the function that finds the first fault of a document, ``None`` where it has none."""
    return _Compiler(schema).check(schema)


class _Compiler:
    def __init__(self, root: Schema) -> None:
        self._root = root
        self._named: dict[str, Check] = {}

    def check(self, schema: Schema) -> Check:
        """Return the check of ``schema``; a value itself is checked before values inside it."""
        known = _ANNOTATIONS | _OF_VALUES | _OF_OBJECTS | {"items", "$ref"}
        if unknown := schema.keys() - known:
            raise NotImplementedError(f"JSON schema keywords {sorted(unknown)}")
        checks = []
        if "$ref" in schema:
            reference = schema["$ref"]
            if reference not in self._named:
                named = self._root
                for part in reference.removeprefix("#/").split("/"):
                    named = named[part]
                self._named[reference] = self.check(named)
            checks.append(self._named[reference])
        if of_value := {key: schema[key] for key in schema if key in _OF_VALUES}:
            checks.append(self._value(of_value))
        if schema.keys() & _OF_OBJECTS:
            if of_value == {"type": "object"}:  # which the next check sees first
                checks.pop()
            checks.append(self._object(schema))
        if "items" in schema:
            checks.append(self._array(schema["items"]))
        if len(checks) == 1:
            return checks[0]
        return lambda value: next(filter(None, (check(value) for check in checks)), None)

    def _value(self, schema: Schema) -> Check:
        if "anyOf" in schema:
            schema = {**schema, "$defs": self._root["$defs"]}
        choices = [self.check(choice) for choice in schema.get("anyOf", ())]
        constants = schema.get("enum", [schema["const"]] if "const" in schema else [])
        plain = {(type(one), one) for one in constants if isinstance(one, str | int)}
        low = schema.get("minimum", schema.get("minLength", float("-inf")))
        high = schema.get("maximum", float("inf"))
        names = [] if choices or constants else schema["type"]
        names = [names] if isinstance(names, str) else names
        usual = {kind for name in names for kind in _USUAL[name]}

        def check(value: Any) -> Fault | None:
            kind = type(value)
            if kind in usual:  # most values of a document
                size = len(value) if kind is str else value if kind in (int, float) else low
                if low <= size <= high:
                    return None
            elif kind in (str, int) and (kind, value) in plain:
                return None
            if any(choice(value) is None for choice in choices):
                return None
            from jsonschema import Draft202012Validator

            is_valid = Draft202012Validator(schema).is_valid(value)
            return None if is_valid else Fault(schema, value, [])

        return check

    def _object(self, schema: Schema) -> Check:
        required = frozenset(schema.get("required", ()))
        known = {name: self.check(sub) for name, sub in schema.get("properties", {}).items()}
        further = schema.get("additionalProperties", True)
        closed = further is False
        other = self.check(further) if isinstance(further, Mapping) else None
        own = {key: schema[key] for key in ("type", "required") if key in schema}
        if closed:
            own |= {"properties": dict.fromkeys(known, True), "additionalProperties": False}

        def check(value: Any) -> Fault | None:
            if not isinstance(value, dict):
                return Fault(own, value, []) if own.get("type") == "object" else None
            names = value.keys()
            if not required <= names or (closed and not names <= known.keys()):
                return Fault(own, value, [])
            for name, item in value.items():
                inner = known.get(name, other)
                if inner is not None and (fault := inner(item)) is not None:
                    fault.path.insert(0, name)
                    return fault
            return None

        return check

    def _array(self, items: Schema) -> Check:
        inner = self.check(items)
        plain = items.get("type") == "integer" and items.keys() <= {"type", "description"}

        def check(value: Any) -> Fault | None:
            if plain and isinstance(value, list) and set(map(type, value)) <= {int}:
                return None  # long ones are checked in C only
            if isinstance(value, list):
                for index, item in enumerate(value):
                    if (fault := inner(item)) is not None:
                        fault.path.insert(0, index)
                        return fault
            return None

        return check
