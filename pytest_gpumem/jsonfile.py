"""JSON files that follow a schema of ours: whole or not at all, checked on the way in and out."""

from __future__ import annotations

import os
import secrets
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jsonschema.protocols import Validator


def replace_file(path: Path, content: bytes) -> None:
    """Make ``content`` the file ``path``: a reader sees the old file or the new one, never a part.

    Folders that are missing are made. Raises :class:`OSError`, and leaves nothing behind then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Named for this write alone: two writers never share a temporary file, and unlike tempfile's
    # the new one gets the permissions that the user's umask asks for.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def schema_problem(package: str, data: Any) -> str | None:
    """Return where and how ``data`` departs from ``package``'s ``schema.json``, ``None`` if not."""
    from jsonschema.exceptions import best_match

    if (error := best_match(_validator(package).iter_errors(data))) is None:
        return None
    message = error.message if len(error.message) <= 120 else f"{error.message[:117]}..."
    return f"{message} at {error.json_path}"


@cache
def _validator(package: str) -> Validator:
    import json
    from importlib.resources import files

    from jsonschema import Draft202012Validator

    schema = files(package).joinpath("schema.json").read_text(encoding="utf-8")
    return Draft202012Validator(json.loads(schema))
