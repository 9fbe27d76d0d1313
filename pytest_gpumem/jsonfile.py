"""JSON files with a schema of this package: written whole or not at all, checked both ways.

A baseline of 40,000 tests is read at every run, and jsonschema takes a minute for it. So a document
is first passed by functions made of its schema, some two hundred times faster, that know the usual
values; where one does not, jsonschema decides, and has the message.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gpumem.quoting import MOST, printable

if TYPE_CHECKING:
    from jsonschema import ValidationError


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
    if (error := _check(package)(data)) is None:
        return None
    message = error.message if len(error.message) <= 120 else f"{error.message[:117]}..."
    return f"{printable(message)} at {printable(error.json_path, MOST)}"


Schema = Mapping[str, Any]
Check = Callable[[Any], "ValidationError | None"]


@cache
def _check(package: str) -> Check:
    import json
    from importlib.resources import files

    schema = files(package).joinpath("schema.json").read_text(encoding="utf-8")
    return compiled(json.loads(schema))


def compiled(schema: Schema) -> Check:
    """Return the function that finds what is wrong with a document, ``None`` where nothing is."""
    is_usual = _passing(schema, schema, {})

    def check(document: Any) -> ValidationError | None:
        if is_usual(document):
            return None
        from jsonschema import Draft202012Validator
        from jsonschema.exceptions import best_match

        error: ValidationError | None = best_match(
            Draft202012Validator(schema).iter_errors(document)
        )
        return error

    return check


_Passing = Callable[[Any], bool]
"""A function that returns true only for values that follow a schema, and for nearly all of them."""

_ANNOTATIONS = {"$schema", "$defs", "title", "description"}
_ALONE = {"$ref", "const", "enum", "anyOf"}
"""Keywords beside which a part of a schema has annotations only."""
_TOGETHER = {
    *("type", "minimum", "maximum", "minLength", "items"),
    *("required", "properties", "additionalProperties"),
}
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


def _passing(schema: Schema, root: Schema, named: dict[str, _Passing]) -> _Passing:
    """Return the function for a part of ``root``; ``named`` are those of its ``$defs``."""
    keywords = schema.keys() - _ANNOTATIONS
    if not keywords <= _TOGETHER and not (len(keywords) == 1 and keywords <= _ALONE):
        raise NotImplementedError(f"JSON schema keywords {sorted(keywords)}")
    if "$ref" in schema:
        reference = schema["$ref"]
        if reference not in named:
            part = root
            for name in reference.removeprefix("#/").split("/"):
                part = part[name]
            named[reference] = _passing(part, root, named)
        return named[reference]
    if "anyOf" in schema:
        choices = [_passing(choice, root, named) for choice in schema["anyOf"]]
        return lambda value: any(choice(value) for choice in choices)
    if "const" in schema or "enum" in schema:
        constants = {(type(one), one) for one in schema.get("enum", [schema.get("const")])}
        return lambda value: type(value) in (str, int) and (type(value), value) in constants
    names = schema.get("type", [])
    kinds = {
        kind for name in ([names] if isinstance(names, str) else names) for kind in _USUAL[name]
    }
    low: float = schema.get("minimum", schema.get("minLength", float("-inf")))
    high: float = schema.get("maximum", float("inf"))
    required = frozenset(schema.get("required", ()))
    known = {
        name: _passing(part, root, named) for name, part in schema.get("properties", {}).items()
    }
    further = schema.get("additionalProperties", True)
    other = _passing(further, root, named) if isinstance(further, Mapping) else None
    inner = _passing(schema["items"], root, named) if "items" in schema else None
    numbers = schema.get("items", {}).keys() <= {"type", "description"}
    numbers = numbers and schema.get("items", {}).get("type") == "integer"

    def passes(value: Any) -> bool:
        kind = type(value)
        if kind not in kinds:
            return False
        if kind is dict:
            names = value.keys()
            if not required <= names or (further is False and not names <= known.keys()):
                return False
            for name, item in value.items():
                check = known.get(name, other)
                if check is not None and not check(item):
                    return False
            return True
        if kind is list:
            if inner is None or (numbers and set(map(type, value)) <= {int}):
                return True  # long ones are checked in C only
            return all(map(inner, value))
        size: float = len(value) if kind is str else value if kind in (int, float) else low
        return low <= size <= high

    return passes
