"""The content of the page: all measurements, and no markup or script from names."""

from __future__ import annotations

import re
from base64 import b64encode
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from pytest_gpumem.report.html.page import TOGETHER, render
from pytest_gpumem.report.json_report import write_file
from tests.report.example_run import MIB, failing, measured, passing, record, verdict
from tests.report.html.parsed import Page

HOSTILE = [
    "test_a[<script>alert(1)</script>]",
    "test_b[</script><img src=x onerror=alert(2)>]",
    "test_c[\x1b[31mred]",
    "test_d[line\nbreak]",
    "test_e[\u202egnp.exe]",
    "test_f[&lt;&amp;<!--]",
    "test_g[@@script@@]",
]
SHOWN = {"test_c[\\x1b[31mred]", "test_d[line\\nbreak]", "test_e[\\u202egnp.exe]"}


def test_every_test_has_a_row_and_its_details_in_the_same_order() -> None:
    records = [passing(f"test_{number:03}", number * MIB) for number in range(2 * TOGETHER + 1)]
    page = Page(render(records[::-1]))
    assert [row["peak"] for row in page.overview["tests"]] == [n * MIB for n in range(41)]
    assert [row["id"] for row in page.overview["tests"]] == [d["nodeid"] for d in page.details]
    assert page.overview["together"] == TOGETHER == 20


def test_a_hostile_name_is_text_and_no_element() -> None:
    plain = Page(render([record("test_plain", measured(MIB))] * len(HOSTILE)))
    page = Page(render([record(nodeid, measured(MIB)) for nodeid in HOSTILE]))
    assert page.tags == plain.tags
    assert page.attributes == plain.attributes
    ids = {row["id"] for row in page.overview["tests"]}
    assert ids == {nodeid for nodeid in HOSTILE if nodeid.isprintable()} | SHOWN
    assert {detail["nodeid"] for detail in page.details} == ids


def test_names_of_phases_and_texts_of_notes_are_shown() -> None:
    noted = measured(MIB, notes=("a\x07bell",))
    (detail,) = Page(render([record("test_a", noted)])).details
    assert detail["measurement"]["notes"] == ["a\\x07bell"]


def test_only_the_scripts_of_the_page_may_run_and_nothing_may_be_loaded() -> None:
    text = render([failing()])
    page = Page(text)
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', text)
    running = [script for attrs, script in page.scripts if not attrs]
    hashes = [b64encode(sha256(script.encode()).digest()).decode() for script in running]
    assert len(hashes) == 2
    assert policy == (
        f"default-src 'none'; script-src 'sha256-{hashes[0]}' 'sha256-{hashes[1]}'; "
        "style-src 'unsafe-inline'; img-src data:"
    )
    assert [value for name, value in page.attributes if name in ("src", "srcset")] == []
    assert {value for name, value in page.attributes if name == "href"} == {"#tests", "data:,"}


def test_the_page_without_data_is_small() -> None:
    assert len(render([]).encode()) < 2 * MIB


def test_a_verdict_is_shown_with_its_sentence_and_remedy() -> None:
    (detail,) = Page(render([failing()])).details
    base, limit = detail["verdicts"]
    assert limit["text"] == (
        "the test peaked at 80.0 MiB (83,886,080 B), within its limit of 100.0 MiB "
        "[simulated A100-40GB]"
    )
    assert base["remedy"] == [
        'accept it: pytest --gpumem-update-baselines "tests/test_model.py::test_step"'
    ]


def test_a_page_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Is a directory; give --gpumem-report html:PATH a file"):
        write_file(tmp_path, render([passing()]).encode(), "--gpumem-report html:PATH")


def test_a_run_without_tests_is_a_page_too() -> None:
    assert Page(render([])).overview["tests"] == []


def test_names_of_environments_are_stored_once() -> None:
    other = replace(passing("test_b"), environment=replace(passing().environment, gpu="T4"))
    overview = Page(render([passing("test_a"), other, passing("test_c")])).overview
    assert [one["gpu"] for one in overview["environments"]] == ["A100-40GB", "T4"]
    assert [row["environment"] for row in overview["tests"]] == [0, 1, 0]


def test_limit_and_baseline_are_those_of_the_test_on_its_device() -> None:
    verdicts = (
        verdict("limit", 3 * MIB, 7 * MIB, device="cuda:1"),
        verdict("limit", 3 * MIB, 4 * MIB, phase="forward"),
        verdict("limit", 3 * MIB, 5 * MIB),
        verdict("limit", 3 * MIB, 6 * MIB, metric="peak_reserved"),
        verdict("baseline", 3 * MIB, 2 * MIB, reference=2 * MIB),
    )
    (row,) = Page(render([record("test_a", measured(3 * MIB), *verdicts)])).overview["tests"]
    assert (row["limit"], row["baseline"], row["peak"]) == (5 * MIB, 2 * MIB, 3 * MIB)
