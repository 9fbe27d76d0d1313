"""JSON files with a schema of this package: written whole or not at all, checked both ways."""

from __future__ import annotations

import os
import secrets
from functools import cache
from pathlib import Path
from typing import Any

from pytest_gpumem.echo import MOST, printable
from pytest_gpumem.schemas import Check, compiled


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
    """Return the JSON of ``content``; ``hooks`` as json.loads takes them.

    Raises :class:`DocumentError` where it is none, or nested too deeply.
    """
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
