"""The reference is generated from the package, and the picture from a run."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from itertools import groupby

import make_picture
import make_reference
import pytest
from make_reference import FOLDER, Registered, UndescribedError, pages

from pytest_gpumem import marker, options
from tests.docs.release import NAMED_RELEASE, is_named_release

PAGES = pages()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_of_the_reference_is_up_to_date(name: str) -> None:
    stored = (FOLDER / name).read_text(encoding="utf-8")
    assert stored == PAGES[name], "run: python docs/make_reference.py"


def test_the_reference_has_no_other_page() -> None:
    assert {path.name for path in FOLDER.iterdir()} == PAGES.keys()


def test_every_option_and_ini_name_is_in_the_reference() -> None:
    registered = Registered()
    assert registered.options.keys() <= registered.ini.keys()
    for name in registered.ini:
        assert f"`{name}`" in PAGES["options.md"]
    # From the module's own tables, to find options that are registered in any other way.
    tables = (options._VALUES, options._FLAGS, options._VALUE_FLAGS, options._MARKER_DEFAULTS)
    assert registered.ini.keys() == {*options._FURTHER, *(name for one in tables for name in one)}


def test_an_option_is_shown_as_it_is_written() -> None:
    page = PAGES["options.md"]
    assert "| `--gpumem-quota SIZE\\|N%\\|auto`<br>`gpumem_quota` | What each worker may" in page
    assert "| `--gpumem-history[=python\\|all]`<br>`gpumem_history` | Record the source" in page
    assert "| `--gpumem-all`<br>`gpumem_all` | Measure and report" in page


def test_every_keyword_of_the_marker_is_in_the_reference() -> None:
    page = PAGES["marker.md"]
    assert all(f"| `{keyword}` | " in page for keyword in marker.Expectation.__dataclass_fields__)
    assert "| `warmup` | An int from 0 up. | `0` | Number of runs" in page
    assert '| `qos` | `"guaranteed"` or `"opportunistic"`. | `"guaranteed"` |' in page


def test_an_option_without_a_description_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(options._FLAGS, "gpumem_all", "")
    with pytest.raises(UndescribedError, match=r"^gpumem_all has no description$"):
        pages()


def test_a_keyword_without_a_description_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_reference, "_documented", lambda kind: {})
    with pytest.raises(UndescribedError, match=r"^max has no description$"):
        pages()


def test_a_field_of_a_schema_shows_its_type_and_if_it_is_required() -> None:
    schema = {
        "description": "All sizes in bytes.",
        "properties": {"a": {"$ref": "#/$defs/one"}, "b": {"$ref": "#/$defs/size"}},
        "required": ["b"],
        "$defs": {
            "size": {"type": "integer"},
            "one": {"properties": {"c": {"description": "of\nc", "type": ["string", "null"]}}},
        },
    }
    for name in ("a", "b"):
        schema["properties"][name]["description"] = name  # type: ignore[index]
    lines = list(make_reference._schema(schema, "It."))
    assert [line for line in lines if line.startswith("| `")] == [
        "| `a` | [one](#one) |  | A. |",
        "| `b` | integer | yes | B. |",
        "| `c` | string or null |  | Of c. |",
    ]


def test_a_field_without_a_description_is_refused() -> None:
    schema = {
        "description": "All sizes in bytes.",
        "properties": {"a": {"type": "integer"}},
        "$defs": {},
    }
    with pytest.raises(UndescribedError, match=r"^the file: a has no description$"):
        list(make_reference._schema(schema, "It."))


@pytest.mark.parametrize(
    "figure", ["| 58,371 | 58,371 |", "34 of 34 equal", "300 training runs", "97.3%"]
)
def test_figures_in_the_guide_are_those_of_the_measured_page(figure: str) -> None:
    docs = FOLDER.parent
    assert figure in (docs / "fidelity.md").read_text(encoding="utf-8")
    quoted = (docs / "simulated.md").read_text(encoding="utf-8")
    assert re.findall(r"[\d,.]*\d%?", figure)[-1] in quoted


@pytest.mark.skipif(not is_named_release(), reason=f"shows numbers of torch {NAMED_RELEASE}")
@pytest.mark.usefixtures("forked_python")
def test_the_picture_shows_what_a_run_prints() -> None:
    printed = [make_picture.without_colours(line).rstrip() for line in make_picture.failure()]
    assert _drawn() == printed, "run: python docs/make_picture.py"


def test_the_failure_explained_in_the_guide_is_that_of_the_picture() -> None:
    page = (FOLDER.parent / "explain.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"failure\.svg -->\n\n```\n(.*?)^```", page, re.M | re.S)
    drawn = _drawn()
    begin = next(number for number, line in enumerate(drawn) if line.startswith("___")) + 1
    lines = shown.splitlines()
    assert lines == drawn[begin : begin + len(lines)]


def _drawn() -> list[str]:
    """Return the lines of the picture, without its title."""
    root = ElementTree.parse(make_picture.PICTURE).getroot()
    words = [element for element in root.iter() if element.tag.endswith("}text")]
    lines = groupby(words[1:], key=lambda element: element.get("y"))
    return ["".join(map(_plain, pieces)).rstrip() for _, pieces in lines]


def _plain(element: ElementTree.Element) -> str:
    return (element.text or "").replace("\xa0", " ")


def test_the_picture_loads_nothing_from_the_network() -> None:
    text = make_picture.PICTURE.read_text(encoding="utf-8")
    assert "url(http" not in text
    assert "@import" not in text
