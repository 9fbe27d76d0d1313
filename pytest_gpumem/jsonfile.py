"""JSON files with a schema of this package: written atomically, validated on reading and writing.

A baseline of 40,000 tests is read at every run, and jsonschema would need a minute for it. So
functions generated from the schema accept values first, some two hundred times faster; jsonschema
only validates values that they refuse, and describes the errors.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pytest_gpumem.quoting import MOST, printable


def replace_file(path: Path, content: bytes, draft: Path | None = None) -> None:
    """Write ``content`` to the file ``path`` atomically: readers see the old or the new file.

    It is written to ``draft`` first, by default in the same folder. Missing folders are made.
    Raises :class:`OSError`, and then leaves no files behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if draft is None or draft.parent.stat().st_dev != path.parent.stat().st_dev:
        # A unique name, so that two writers never share a temporary file. Unlike with tempfile,
        # the new file gets the permissions of the user's umask.
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
    """An invalid document; the message is the cause, as the end of a sentence."""


class NewerError(DocumentError):
    """A document of a later version than this package reads; the message begins with a verb."""


def decoded(content: bytes, **hooks: Any) -> Any:
    """Return the JSON of ``content``, by the ``hooks`` of json.loads; raises DocumentError."""
    import json

    try:
        return json.loads(content, **hooks)
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"not valid JSON ({printable(str(error), MOST)})") from error


def document(content: bytes, package: str, version: int, **hooks: Any) -> dict[str, Any]:
    """Return the document of ``content``, validated by the schema of ``package``.

    Raises :class:`DocumentError` if it is invalid, :class:`NewerError` if it is later than
    ``version``.
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
    """Return the error of ``data`` by ``schema.json`` of ``package``, ``None`` if it is valid."""
    acceptors = _acceptors(package)
    if acceptors.whole(data):
        return None
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match
    from jsonschema.validators import extend

    usual = Draft202012Validator.VALIDATORS["$ref"]

    def ref(validator: Any, reference: str, value: Any, schema: Schema) -> Iterator[Any]:
        if not acceptors.named(reference)(value):
            yield from usual(validator, reference, value, schema)

    kind = extend(Draft202012Validator, {"$ref": ref})  # type: ignore[no-untyped-call]
    validator = kind(acceptors.root)
    error = best_match(validator.iter_errors(data))
    if error is None:
        return None
    message = error.message if len(error.message) <= 120 else f"{error.message[:117]}..."
    return f"{printable(message)} at {printable(error.json_path, MOST)}"


@cache
def _acceptors(package: str) -> Acceptors:
    import json
    from importlib.resources import files

    schema = files(package).joinpath("schema.json").read_text(encoding="utf-8")
    return Acceptors(json.loads(schema))


Schema = Mapping[str, Any]
Accepts = Callable[[Any], bool]

_ANNOTATIONS = frozenset({"$schema", "$defs", "title", "description"})
_CHOICES = frozenset({"$ref", "anyOf", "const", "enum"})
_CONDITIONS = frozenset(
    {
        *("type", "minimum", "maximum", "minLength"),
        *("required", "properties", "additionalProperties", "items"),
    }
)
_TYPES: dict[str, tuple[type, ...]] = {
    "null": (type(None),),
    "boolean": (bool,),
    "string": (str,),
    "array": (list,),
    "object": (dict,),
    "number": (int, float),
    "integer": (int,),
}
"""The Python types of JSON values, except that 1.0 is an integer, too."""


class Acceptors:
    """Functions that accept values which are valid by the schema ``root``, or by a part of it.

    They refuse a few valid values, such as 1.0 for an integer.
    """

    def __init__(self, root: Schema) -> None:
        self.root = root
        self._named: dict[str, Accepts] = {}
        self.whole = self.of(root)
        """The function for a document."""

    def named(self, reference: str) -> Accepts:
        """Return the function for the schema that ``$ref`` names."""
        if reference not in self._named:
            schema = self.root
            for part in reference.removeprefix("#/").split("/"):
                schema = schema[part]
            self._named[reference] = self.of(schema)
        return self._named[reference]

    def of(self, schema: Schema | bool) -> Accepts:
        """Return the function for ``schema``."""
        if isinstance(schema, bool):
            return lambda value: schema
        if unknown := schema.keys() - (_ANNOTATIONS | _CHOICES | _CONDITIONS):
            raise NotImplementedError(f"JSON schema keywords {sorted(unknown)}")
        parts: list[Accepts] = []
        if "$ref" in schema:
            parts.append(self.named(schema["$ref"]))
        if "anyOf" in schema:
            choices = list(map(self.of, schema["anyOf"]))
            parts.append(lambda value: any(choice(value) for choice in choices))
        if constants := schema.get("enum", [schema["const"]] if "const" in schema else []):
            plain = {(type(one), one) for one in constants if isinstance(one, str | int)}
            parts.append(lambda value: type(value) in (str, int) and (type(value), value) in plain)
        if not parts or schema.keys() & _CONDITIONS:
            parts.append(self._typed(schema))
        return parts[0] if len(parts) == 1 else lambda value: all(part(value) for part in parts)

    def _typed(self, schema: Schema) -> Accepts:
        names = schema.get("type", list(_TYPES))
        kinds = {
            kind for name in ([names] if isinstance(names, str) else names) for kind in _TYPES[name]
        }
        low: float = schema.get("minimum", float("-inf"))
        high: float = schema.get("maximum", float("inf"))
        shortest: int = schema.get("minLength", 0)
        required = frozenset(schema.get("required", ()))
        known = {name: self.of(sub) for name, sub in schema.get("properties", {}).items()}
        other = self.of(schema.get("additionalProperties", True))
        item = self.of(schema.get("items", True))
        items = schema.get("items", {})
        are_integers = items.get("type") == "integer" and items.keys() <= {"type", "description"}

        def accepts(value: Any) -> bool:
            kind = type(value)
            if kind not in kinds:
                return False
            if kind is dict:
                return required <= value.keys() and all(
                    known.get(name, other)(inner) for name, inner in value.items()
                )
            if kind is list:
                if are_integers and set(map(type, value)) <= {int}:
                    return True  # long arrays are checked only by functions in C
                return all(map(item, value))
            if kind is str:
                return len(value) >= shortest
            return kind not in (int, float) or low <= value <= high

        return accepts
