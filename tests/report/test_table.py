from dataclasses import replace

import pytest

from pytest_gpumem.report.record import TestRecord
from pytest_gpumem.report.rows import test_status as status
from pytest_gpumem.report.table import table
from pytest_gpumem.text import Line, TextRun, cells
from tests.report.example_run import (
    MIB,
    failing,
    improved,
    measured,
    passing,
    phase,
    record,
    unknown,
    verdict,
)


def text_of(*records: TestRecord, verbosity: int = 0, width: int = 100) -> list[str]:
    return [line.text for line in table(records, verbosity=verbosity, width=width)]


def span_of(lines: list[Line], row: str, text: str) -> TextRun:
    line = next(line for line in lines if line.text.strip().startswith(row))
    return next(span for span in line.spans if span.text == text)


def test_the_table_has_rows_by_module_test_and_phase() -> None:
    new = unknown("tests/other/test_new.py::test_one")
    assert text_of(failing(), passing(), improved(), new, width=110) == [
        "                    peak    after  reserved  leaked   cuBLAS            allowed",
        "tests/test_model.py",
        "  test_step     80.0 MiB  8.0 MiB  96.0 MiB     0 B  8.1 MiB      max 100.0 MiB  FAIL",
        "    call        80.0 MiB  8.0 MiB  96.0 MiB              0 B",
        "      forward   80.0 MiB  8.0 MiB  96.0 MiB              0 B  baseline 64.0 MiB  FAIL",
        "      step      40.0 MiB  8.0 MiB  96.0 MiB              0 B",
        "  test_small     3.0 MiB  8.0 MiB  96.0 MiB     0 B      0 B      max 100.0 MiB  ok",
        "    forward      3.0 MiB  8.0 MiB  96.0 MiB              0 B",
        "  test_lean[a]  20.0 MiB  8.0 MiB  96.0 MiB     0 B      0 B  baseline 30.0 MiB  better",
        "tests/other/test_new.py",
        "  test_one         512 B  8.0 MiB  96.0 MiB     0 B      0 B                     new",
    ]


def test_a_narrow_terminal_drops_the_least_informative_columns() -> None:
    assert text_of(failing(), improved(), width=60) == [
        "                    peak            allowed",
        "tests/test_model.py",
        "  test_step     80.0 MiB      max 100.0 MiB  FAIL",
        "    call        80.0 MiB",
        "      forward   80.0 MiB  baseline 64.0 MiB  FAIL",
        "      step      40.0 MiB",
        "  test_lean[a]  20.0 MiB  baseline 30.0 MiB  better",
    ]


def test_the_column_of_a_failed_number_is_not_dropped() -> None:
    leak = verdict("leak", 2 * MIB, 0, metric="leaked")
    leaking = record("t.py::test_leak", measured(MIB, leaked=2 * MIB), leak, outcome="failed")
    assert text_of(leaking, width=60) == [
        "                peak  reserved   leaked       allowed",
        "t.py",
        "  test_leak  1.0 MiB  96.0 MiB  2.0 MiB  max leak 0 B  FAIL",
    ]
    assert text_of(leaking, width=52) == [
        "                peak   leaked       allowed",
        "t.py",
        "  test_leak  1.0 MiB  2.0 MiB  max leak 0 B  FAIL",
    ]


def test_the_column_of_a_number_with_a_limit_is_dropped_after_the_others() -> None:
    peak, leak = verdict("limit", MIB, 9 * MIB), verdict("leak", 0, 0, metric="leaked")
    numbers = measured(MIB, workspace=8_519_680)
    limited = record("t.py::test_leak", numbers, peak, leak)
    assert text_of(limited, width=70) == [
        "                peak    after  reserved  leaked      allowed",
        "t.py",
        "  test_leak  1.0 MiB  8.0 MiB  96.0 MiB     0 B  max 9.0 MiB  ok",
    ]
    assert text_of(limited, width=50) == [
        "                peak  leaked      allowed",
        "t.py",
        "  test_leak  1.0 MiB     0 B  max 9.0 MiB  ok",
    ]
    free = record("t.py::test_leak", numbers, peak)
    assert text_of(free, width=70)[0].split() == ["peak", "after", "reserved", "cuBLAS", "allowed"]


def test_of_several_verdicts_the_failed_one_is_shown_then_the_tightest() -> None:
    over = verdict("limit", 3 * MIB, 2 * MIB, metric="peak_reserved")
    limits = [verdict("limit", MIB, limit * MIB) for limit in (9, 4)]
    one = record("t.py::test_x", measured(MIB), *limits)
    assert text_of(one)[-1].endswith("  max 4.0 MiB  ok")
    failed = replace(one, verdicts=(*limits, over), outcome="failed")
    assert text_of(failed)[-1].endswith("  max reserved 2.0 MiB  FAIL")


def test_a_missing_baseline_is_shown_before_limits_that_are_kept() -> None:
    kept, missing = verdict("leak", 0, 0, metric="leaked"), verdict("baseline", MIB, None)
    failed = replace(record("t.py::test_x", measured(MIB), kept, missing), outcome="failed")
    assert text_of(failed)[-1].endswith("  no baseline  FAIL")


def test_a_long_name_is_shortened_in_the_middle_and_no_line_is_wider_than_the_terminal() -> None:
    long = passing("test_attention[causal-head_dim128-sequence_length_16384-bfloat16]")
    lines = text_of(long, width=80)
    assert lines[2].split()[0] == "test_attention…_16384-bfloat16]"
    for width in range(20, 160):
        assert max(map(cells, text_of(long, failing(), width=width))) <= width


def test_a_verbose_table_has_every_column_in_exact_bytes() -> None:
    lines = text_of(failing(), verbosity=1, width=140)
    assert " ".join(lines[0].split()) == (
        "bytes peak allocated allocated after peak reserved leaked cuBLAS workspace allowed"
    )
    assert " ".join(lines[2].split()) == (
        "test_step 83,886,080 8,388,608 100,663,296 0 8,519,680 max 104,857,600 FAIL"
    )


def test_a_verbose_table_in_a_narrow_terminal_has_every_number() -> None:
    lines = text_of(failing(), verbosity=1, width=70)
    assert lines[:9] == [
        "tests/test_model.py",
        "  test_step  FAIL",
        "      peak allocated 83,886,080 B  allocated after 8,388,608 B",
        "      peak reserved 100,663,296 B  leaked 0 B",
        "      cuBLAS workspace 8,519,680 B  max 104,857,600 B",
        "    call",
        "        peak allocated 83,886,080 B  allocated after 8,388,608 B",
        "        peak reserved 100,663,296 B  cuBLAS workspace 0 B",
        "      forward  FAIL",
    ]


def test_of_many_tests_those_with_findings_and_the_largest_are_shown() -> None:
    many = [passing(f"test_{number}", (number + 1) * MIB) for number in range(40)]
    lines = text_of(*many, failing(), width=100)
    assert len(lines) == 2 + 23 + 2 + 1
    assert lines[2].split()[:2] == ["test_17", "18.0"]
    assert [line.split()[0] for line in lines[-3:-1]] == ["test_step", "forward"]
    assert lines[-1] == "  and 17 more tests with smaller peaks (-v shows all)"
    assert len(text_of(*many, failing(), verbosity=1, width=160)) == 2 + 2 * 40 + 4


def failed(name: str, site: str, over: int = MIB) -> TestRecord:
    line = {"bytes": over, "change": "new", "category": "activations", "site": site, "count": 1}
    broken = verdict("baseline", 8 * MIB + over, 8 * MIB, reference=8 * MIB)
    phases = (phase("forward", 8 * MIB + over),)
    return record(
        f"tests/test_model.py::{name}",
        measured(8 * MIB + over, *phases),
        replace(broken, explanation=(line,)),
        replace(broken, phase="forward", explanation=(line,)),
        outcome="failed",
    )


def test_of_very_many_failures_some_of_each_cause_are_shown() -> None:
    one_cause = [failed(f"test_{number}", "net.py:7", number * MIB) for number in range(1, 41)]
    lines = text_of(*one_cause, failed("test_other", "net.py:9"), passing("test_passes"))
    rows = [line.split()[0] for line in lines[2:-1]]
    assert rows == [*(f"test_{number}" for number in range(1, 9)), "test_other"]
    assert lines[-1] == "  and 33 more tests, 32 of them failed (--gpumem-rows all shows all)"


def test_a_limit_in_powers_of_1000_is_shown_in_the_units_of_the_other_numbers() -> None:
    over = replace(verdict("limit", 300_032, 300_000), written="300KB")
    one = record("t.py::test_x", measured(300_032), over, outcome="failed")
    assert text_of(one, width=70)[-1] == (
        "  test_x  293.00 KiB  8.0 MiB  96.0 MiB     0 B  max 292.97 KiB  FAIL"
    )
    close = verdict("baseline", 20 * MIB + 4096, 20 * MIB, reference=20 * MIB)
    one = record("t.py::test_x", measured(20 * MIB + 4096), close, outcome="failed")
    assert text_of(one, width=60)[-1].split() == [
        *("test_x", "20.004", "MiB", "96.0", "MiB", "baseline", "20.000", "MiB", "FAIL")
    ]


def test_rows_and_order_can_be_set() -> None:
    many = [passing(f"test_{number}", (number + 1) * MIB) for number in range(30)]
    names = [
        line.text.split()[0]
        for line in table(many, verbosity=0, width=100, rows=3, sort="peak")
        if "test_model" in line.text
    ]
    assert names == [f"tests/test_model.py::test_{number}" for number in (29, 28, 27)]
    assert len(table(many, verbosity=1, width=160, rows=2)) == 2 + 2 * 2 + 1


def test_of_many_rows_only_phases_with_limit_or_failure_are_shown() -> None:
    limited = record(
        "tests/test_model.py::test_limited",
        measured(MIB, phase("call", MIB), phase("forward", MIB, "call"), phase("step", 512)),
        verdict("limit", MIB, 2 * MIB, phase="forward"),
    )
    lines = text_of(*[passing(f"test_{number}") for number in range(15)], limited)
    assert [line.split()[0] for line in lines[-2:]] == ["test_limited", "forward"]
    assert lines[-1].startswith("    forward"), "indented below what is shown, not below `call`"


def test_a_phase_that_did_not_run_has_a_row_without_numbers() -> None:
    gone = verdict("baseline", 0, MIB, phase="backward", reference=MIB, passed=False)
    lost = record("t.py::test_lost", measured(MIB, phase("forward", MIB)), gone, outcome="failed")
    lines = text_of(lost, width=60)
    assert lines[-1].split() == ["backward", "baseline", "1.0", "MiB", "FAIL"]
    assert lines[2].split()[-1] == "FAIL"


def test_a_further_device_has_its_own_row_and_phases() -> None:
    second = measured(2 * MIB, phase("forward", 2 * MIB), device="cuda:1")
    two = replace(
        record(
            "t.py::test_two",
            measured(MIB, phase("forward", MIB)),
            verdict("limit", MIB, 4 * MIB),
            verdict("limit", 2 * MIB, 4 * MIB, device="cuda:1"),
        ),
        other_devices=(second,),
    )
    assert text_of(two, width=45) == [
        "                  peak      allowed",
        "t.py",
        "  test_two     1.0 MiB  max 4.0 MiB  ok",
        "    forward    1.0 MiB",
        "    cuda:1     2.0 MiB  max 4.0 MiB  ok",
        "      forward  2.0 MiB",
    ]


@pytest.mark.parametrize(
    ("outcome", "limit", "expected"),
    [
        ("passed", 2 * MIB, "ok"),
        ("failed", MIB - 1, "FAIL"),
        ("xfailed", MIB - 1, "xfail"),
        ("skipped", MIB - 1, "xfail"),
        ("failed", 2 * MIB, "-"),
        ("error", 2 * MIB, "-"),
    ],
)
def test_the_last_column_shows_the_verdict(outcome: str, limit: int, expected: str) -> None:
    one = record("t.py::test_x", measured(MIB), verdict("limit", MIB, limit), outcome=outcome)
    assert text_of(one)[-1].split()[-1] == expected


def test_a_test_that_measured_nothing_has_a_row() -> None:
    nothing = verdict("nothing_measured", 0, None)
    lines = text_of(record("t.py::test_cpu", None, nothing, outcome="failed"))
    assert lines[-1].split() == ["test_cpu", "FAIL"]


def test_a_phase_that_improved_or_xfailed_is_marked() -> None:
    better = replace(improved().improvements[0], phase="forward")
    phases = (phase("forward", MIB), phase("step", MIB))
    one = record("t.py::test_x", measured(MIB, *phases))
    assert text_of(replace(one, improvements=(better,)))[-2].split()[-1] == "better"
    over = verdict("limit", MIB, 512, phase="step")
    expected = replace(one, outcome="xfailed", verdicts=(over,))
    assert text_of(expected)[-1].split()[-1] == "xfail"


def test_failures_are_red() -> None:
    lines = table([failing()], verbosity=0, width=100)
    assert span_of(lines, "forward", "80.0 MiB").style == "red"
    assert span_of(lines, "forward", "FAIL").style == "bold red"
    assert span_of(lines, "test_step", "80.0 MiB").style == ""


def test_a_test_within_its_limits_passes_without_a_baseline() -> None:
    assert status(unknown()) == "new"
    assert status(replace(unknown(), verdicts=(verdict("limit", 512, 1024),))) == "ok"
