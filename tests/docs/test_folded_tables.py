"""Tables of the page on fidelity: equal rows are counted, and repeated text is shown once."""

from __future__ import annotations

from folded_tables import folded

HEADER = [
    "| what | source | measured | simulated | off |  |",
    "| --- | --- | --- | --- | --- | --- |",
]


def test_equal_and_near_rows_are_counted_by_source() -> None:
    rows = [
        "| a | here | 1 GiB | equal |  |  |",
        "| b | here | 2 GiB | equal |  | a note |",
        "| c | there | 1000 MB | 999 MB | -0.1% |  |",
        "| d | there | 4 GiB | 3 GiB | -25.0% |  |",
    ]
    assert list(folded([*HEADER, *rows, "text"])) == [
        *HEADER,
        rows[3],
        "",
        "Equal, and not listed: 2 of here.",
        "",
        "Within 0.1 %, and not listed: 1 of there.",
        "text",
    ]


def test_text_of_several_rows_is_moved_below_the_table() -> None:
    rows = [
        "| a | here | 1 GiB | 2 GiB | +100.0% | tails |",
        "| b | here | 1 GiB | 2 GiB | +100.0% | tails |",
        "| c | there | 1 GiB | 2 GiB | +100.0% | alone |",
    ]
    assert list(folded([*HEADER, *rows])) == [
        *HEADER,
        "| a | [1] | 1 GiB | 2 GiB | +100.0% | (a) |",
        "| b | [1] | 1 GiB | 2 GiB | +100.0% | (a) |",
        "| c | there | 1 GiB | 2 GiB | +100.0% | alone |",
        "",
        "- (a) tails",
        "- [1] here",
    ]


def test_other_tables_and_text_are_unchanged() -> None:
    lines = ["# A title", "", "| a | b |", "| --- | --- |", "| 1 | 2 |", "", "text"]
    assert list(folded(lines)) == lines


def test_a_table_of_equal_rows_is_one_line() -> None:
    rows = ["| a | here | 1 GiB | equal |  |  |"]
    assert list(folded([*HEADER, *rows])) == ["", "Equal, and not listed: 1 of here."]
