"""Write the pages of ``docs/reference``: everything that can be set, called or read.

``python docs/make_reference.py`` makes them from the package itself: from the options as pytest
gets them, the marker's fields, the parsers of the subcommands and the JSON schemas. The docs build
runs it, and a test fails where a page is not what it would write, or where something that a page
lists does not say what it is.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import pytest

from pytest_gpumem import marker, options
from pytest_gpumem.cli import COMMANDS, parser_of

FOLDER = Path(__file__).parent / "reference"
MADE = "<!-- made by docs/make_reference.py; do not edit -->"
PREFIX = "gpumem_"
Schema = Mapping[str, Any]


class UndescribedError(ValueError):
    """Something has no description; the message names it."""


def pages() -> dict[str, str]:
    """Return the text of every page by its file's name."""
    report, baseline = (
        json.loads(files(f"pytest_gpumem.{name}").joinpath("schema.json").read_text("utf-8"))
        for name in ("report", "baseline")
    )
    return {
        "options.md": _page("Options and ini names", _options(Registered())),
        "marker.md": _page("The marker", _marker()),
        "command.md": _page("The gpumem command", _commands()),
        "report.md": _page(
            "The JSON report", _schema(report, "What `--gpumem-report json:PATH` writes.")
        ),
        "baseline.md": _page(
            "The baseline files", _schema(baseline, "What stands in `baselines/`.")
        ),
    }


def main() -> None:
    """Write the pages."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


class Registered:
    """Stands for pytest's parser, and keeps what the plugin registers."""

    def __init__(self) -> None:
        self.options: dict[str, tuple[str, str]] = {}
        """How each is written and what it does, by its ini name."""
        self.ini: dict[str, str] = {}
        """Names in the ini file, and what they set."""
        options.add_options(cast(pytest.Parser, self))

    def getgroup(self, name: str, description: str) -> Registered:
        """Pytest's groups take options as its parser does."""
        return self

    def addoption(self, *names: str, **attributes: Any) -> None:
        """Take an option; of ``--a`` and ``--a=all`` the values stand in brackets."""
        values = [name.partition("=")[2] for name in names[1:]]
        form = attributes.get("metavar", "").replace("%%", "%")
        choice = f"[={'|'.join(values)}]" if values else ""
        written = f"{names[0]}{choice} {form}".strip()
        self.options[attributes["dest"]] = written, attributes.get("help", "").replace("%%", "%")

    def addini(self, name: str, help: str, **attributes: Any) -> None:
        """Take a name of the ini file."""
        self.ini[name] = help


def _options(registered: Registered) -> Iterator[str]:
    yield "Every option of pytest that the plugin adds, with its twin in the ini file; the command"
    yield "line wins. Flags are `true` or `false` there, and several reports stand on lines of"
    yield "their own."
    yield ""
    yield from _table(
        ("option, name in the ini file", "meaning"),
        [
            (f"{_code(written)}<br>{_code(name)}", _sentence(name, meaning))
            for name, (written, meaning) in registered.options.items()
        ],
    )
    yield ""
    yield "## Defaults of the marker"
    yield ""
    yield "In the ini file alone: for every marked test whose [marker](marker.md) does not say"
    yield "otherwise."
    yield ""
    yield from _table(
        ("ini name", "meaning"),
        [
            (_code(name), _sentence(name, meaning))
            for name, meaning in registered.ini.items()
            if name not in registered.options
        ],
    )


def _marker() -> Iterator[str]:
    yield "`@pytest.mark.gpumem(...)`; `max` may also be given without its keyword, and `None` is"
    yield "as if nobody had given the keyword. What is nearest to a test counts, keyword by"
    yield "keyword: function, class, module, ini file."
    yield ""
    meanings = _documented(marker.Expectation)
    defaults = {name: field.default for name, field in _fields(marker.Expectation).items()}
    yield from _table(
        ("keyword", "accepts", "default", "meaning"),
        [
            (
                _code(keyword),
                _sentence(keyword, accepts),
                _default(keyword, defaults),
                _sentence(keyword, meanings.get(keyword)),
            )
            for keyword, (accepts, _) in marker._PARSERS.items()
        ],
    )


def _fields(kind: Any) -> Mapping[str, Any]:
    fields: Mapping[str, Any] = kind.__dataclass_fields__
    return fields


def _default(keyword: str, defaults: Mapping[str, Any]) -> str:
    default = defaults[keyword]
    plain = isinstance(default, bool | int | str)
    return _code(json.dumps(default) if isinstance(default, str) else str(default)) if plain else ""


def _documented(kind: type) -> dict[str, str]:
    """Return the text behind each field of a class, which Python itself does not keep."""
    (defined,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(defined, ast.ClassDef)
    found = {}
    for field, text in zip(defined.body, defined.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            assert isinstance(field.target, ast.Name)
            found[field.target.id] = ast.literal_eval(text.value)
    return found


def _commands() -> Iterator[str]:
    parser = parser_of(COMMANDS)
    (found,) = (one for one in parser._actions if isinstance(one, argparse._SubParsersAction))
    yield "Exit codes: 0 where all is well, 1 for a regression or a disagreement, 2 for input that"
    yield "cannot be used, with one sentence that says why."
    for name, one in _leaves(found):
        yield ""
        yield f"## gpumem {name}"
        yield ""
        yield _sentence(name, one.description)
        yield ""
        if examples := one.get_default("command").examples:
            yield from ("```text", *examples, "```", "")
        yield from _table(
            ("argument", "meaning"),
            [
                (_code(_written(action)), _sentence(f"{name} {action.dest}", _help(action)))
                for action in one._actions
                if not isinstance(action, argparse._HelpAction)
            ],
        )


def _leaves(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], prefix: str = ""
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield every subcommand; one that has subcommands of its own stands for them."""
    for name, parser in sorted(commands.choices.items()):
        own = [one for one in parser._actions if isinstance(one, argparse._SubParsersAction)]
        if own:
            yield from _leaves(own[0], f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", parser


def _help(action: argparse.Action) -> str:
    text = action.help or ""
    # As argparse fills it in.
    return text % {**vars(action), "prog": "gpumem"} if "%" in text else text


def _written(action: argparse.Action) -> str:
    shown = action.metavar or (action.dest.upper() if action.nargs != 0 else "")
    if isinstance(shown, tuple):
        shown = " ".join(shown)
    if action.choices and action.metavar is None:
        shown = "|".join(map(str, action.choices))
    if action.nargs == "?":
        shown = f"[{shown}]"
    if action.nargs in ("*", "+"):
        shown = f"{shown}..."
    return f"{', '.join(action.option_strings)} {shown}".strip()


def _schema(schema: Schema, what: str) -> Iterator[str]:
    yield f"{what} {_sentence('schema', schema.get('description'))} The schema itself is"
    yield "`schema.json` in the package."
    definitions = schema["$defs"]
    yield from _object("the file", schema, definitions)
    for name, one in definitions.items():
        one = one.get("items", one)
        if "properties" in one:
            yield from _object(name, one, definitions)


def _object(name: str, schema: Schema, definitions: Schema) -> Iterator[str]:
    """Yield a table of an object's fields, and of those of the objects inside it."""
    yield ""
    yield f"## {name}"
    if name != "the file" and "description" in schema:
        yield ""
        yield _sentence(name, schema["description"])
    yield ""
    inner = []
    rows = []
    for field, value in schema["properties"].items():
        title = f"{name}: {field}"
        required = "yes" if field in schema.get("required", ()) else ""
        rows.append(
            (
                _code(field),
                _type(value, definitions),
                required,
                _sentence(title, value.get("description")),
            )
        )
        of_each = value.get("additionalProperties") or value.get("items")
        below = of_each if isinstance(of_each, Mapping) else value
        if "properties" in below:
            inner.append((title, below))
    yield from _table(("field", "type", "always", "meaning"), rows)
    for title, below in inner:
        yield from _object(title, {**below, "description": "The fields of one."}, definitions)


def _type(value: Schema, definitions: Schema) -> str:
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        named = definitions[name]
        has_table = "properties" in named.get("items", named)
        return f"[{name}](#{name})" if has_table else _type(named, definitions)
    if "anyOf" in value:
        return " or ".join(_type(one, definitions) for one in value["anyOf"])
    if "const" in value:
        return _code(json.dumps(value["const"]))
    if "enum" in value:
        return ", ".join(_code(json.dumps(one)) for one in value["enum"])
    kinds = [value["type"]] if isinstance(value["type"], str) else value["type"]
    return " or ".join(_of(kind, value, definitions) for kind in kinds)


def _of(kind: str, value: Schema, definitions: Schema) -> str:
    if kind == "array" and "items" in value:
        return f"array of {_type(value['items'], definitions)}"
    of_each = value.get("additionalProperties")
    if kind == "object" and isinstance(of_each, Mapping) and "properties" not in of_each:
        return f"object of {_type(of_each, definitions)}"
    return kind


def _page(title: str, lines: Iterator[str]) -> str:
    return "\n".join((f"# {title}", "", MADE, "", *lines)) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    for row in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


def _code(text: str) -> str:
    return f"`{text}`"


def _sentence(name: str, text: str | None) -> str:
    """Return ``text`` on one line, as a sentence; raises :class:`UndescribedError` without any."""
    words = " ".join((text or "").split())
    if not words:
        raise UndescribedError(f"{name} has no description")
    words = words.replace("<", "&lt;").replace("*", r"\*") if "`" not in words else words
    return f"{words[0].upper()}{words[1:]}{'' if words.endswith('.') else '.'}"


if __name__ == "__main__":
    main()
