from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_gpumem.report.markdown import MOST_LINES, code, code_block, document, marker
from pytest_gpumem.report.markdown import explained as first_lines
from pytest_gpumem.report.record import TestRecord
from tests.report.example_run import (
    MIB,
    failing,
    improved,
    measured,
    passing,
    record,
    unknown,
    verdict,
)

HOSTILE = "t.py::test_x[<script>a</script> `b`|c\\|d \x1b[31m\n::error::e @you <!-- -->]"
SHOWN = (
    "<code>t.py::test&#95;x&#91;&#60;script&#62;a&#60;/script&#62; &#96;b&#96;&#124;c&#92;&#124;d "
)


def explained() -> TestRecord:
    line = {
        "bytes": 16 * MIB,
        "change": "new",
        "category": "activations",
        "site": "model.py:71",
        "operator": "torch.softmax",
        "count": 2,
        "dtype": "float32",
    }
    base, broken = failing().verdicts
    return replace(failing(), verdicts=(base, replace(broken, explanation=(line,))))


def test_a_comment_shows_growth_its_line_and_the_accepting_command() -> None:
    text = document([passing(), explained(), improved(), unknown()])
    assert text == (
        "<!-- pytest-gpumem -->\n"
        "### GPU memory: 1 of 4 tests failed\n"
        "\n"
        "Measured on `simulated A100-40GB (torch 2.13)`.\n"
        "\n"
        "| test | measured | allowed | over |\n"
        "| :-- | --: | --: | --: |\n"
        "| `tests/test_model.py::test_step` | `forward` 80.0 MiB | baseline 64.0 MiB "
        "| +16.0 MiB (+25.0 %) |\n"
        "\n"
        "`tests/test_model.py::test_step`\n"
        "```text\n"
        "forward peaked at 80.0 MiB (83,886,080 B), 16.0 MiB over its baseline of 64.0 MiB "
        "(+25.0 %, tolerance 0) [simulated A100-40GB]\n"
        "  +16.0 MiB  activations  model.py:71  torch.softmax  2 × 8.0 MiB float32 (new)\n"
        'accept it: pytest --gpumem-update-baselines "tests/test_model.py::test_step"\n'
        "```\n"
        "\n"
        "**Improved**\n"
        "\n"
        "| test | measured | baseline | change |\n"
        "| :-- | --: | --: | --: |\n"
        "| `tests/test_model.py::test_lean[a]` | 20.0 MiB | 30.0 MiB | -10.0 MiB (-33.3 %) |\n"
        "\n"
        "```text\n"
        'lock it in: pytest --gpumem-update-baselines "tests/test_model.py::test_lean[a]"\n'
        "```\n"
        "\n"
        "**Without baseline**\n"
        "\n"
        "| test | peak |\n"
        "| :-- | --: |\n"
        "| `tests/other/test_new.py::TestNew::test_one` | 512 B |\n"
        "\n"
        "```text\n"
        "record them: pytest --gpumem-update-baselines=new\n"
        "```\n"
    )


def test_tests_that_fail_alike_without_a_size_are_counted() -> None:
    nothing = verdict("nothing_measured", 0, None)
    records = [
        replace(failing(), nodeid=f"t.py::test_{name}", verdicts=(nothing,)) for name in "ab"
    ]

    assert "the same cause in 1 test: `t.py::test_b`" in document(records)


def test_a_run_without_findings_is_two_lines() -> None:
    assert document([passing()], name="gpu job").splitlines()[:2] == [
        "<!-- pytest-gpumem: gpu-job -->",
        "### GPU memory: 1 test measured, none failed by it",
    ]
    assert "no test was measured" in document([])


def test_a_test_that_ran_out_of_memory_counts_as_failed() -> None:
    sentence = "out of memory: 3.0 MiB asked for by model.py:3, 1.0 MiB free of 8.0 MiB"
    facts = {"requested": 3 * MIB, "free": MIB, "sentence": sentence}
    broken = replace(record("t.py::test_x", measured(MIB), outcome="failed"), out_of_memory=facts)
    text = document([broken])
    assert "### GPU memory: 1 of 1 test failed" in text
    assert "| `t.py::test_x` | asked for 3.0 MiB | 1.0 MiB free | out of memory |" in text
    assert f"\n{sentence}\n" in text


def test_tests_that_were_not_checked_are_listed() -> None:
    assert "| `t.py::test_x` | `it needs values` |" in document(
        [passing()], skipped={"t.py::test_x": "it needs values"}
    )


def test_a_hostile_name_is_shown_as_text() -> None:
    text = document([replace(failing(), nodeid=HOSTILE), replace(unknown(), nodeid=HOSTILE)])
    outside = "".join(text.split("```")[::2])
    assert SHOWN in text
    for bad in ("<script", "\x1b", "`b`", "\n::error", "<!-- -->"):
        assert bad not in outside, bad
    rows = [line for line in text.splitlines() if line.startswith("| <code>")]
    assert [row.count("|") for row in rows] == [5, 3]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a::b[x-1]", "`a::b[x-1]`"),
        ("<b>*_", "`<b>*_`"),
        ("a|b", "<code>a&#124;b</code>"),
        ("a\nb", "<code>a&#92;nb</code>"),
        (" ", ""),
    ],
)
def test_a_code_span_shows_any_text_unchanged(text: str, shown: str) -> None:
    assert code(text) == shown


def test_a_code_block_is_not_ended_by_its_content() -> None:
    assert code_block(["a", "````", "b"]) == "`````text\na\n````\nb\n`````"


def test_the_marker_is_one_html_comment_for_any_name() -> None:
    assert marker("a --> <b>\n") == "<!-- pytest-gpumem: a-b -->"


def test_lines_that_are_left_out_are_counted() -> None:
    lines = [f"line {number}" for number in range(MOST_LINES + 2)]
    assert [*first_lines(lines[:-1])] == [*lines[:MOST_LINES], "  and 1 more line"]
    assert [*first_lines(lines)][-1] == "  and 2 more lines"


def test_a_thousand_failures_fit_into_a_comment() -> None:
    names = [f"t.py::test_x[{'y' * 5000}-{n}]" for n in range(1000)]
    text = document([replace(explained(), nodeid=name) for name in names])
    assert len(text) <= 65_536
    assert "and 980 tests more" in text
    assert "pytest --gpumem-update-baselines\n" in text
