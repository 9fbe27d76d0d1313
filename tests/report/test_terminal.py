import io
from dataclasses import replace
from pathlib import Path

from _pytest._io import TerminalWriter

from pytest_gpumem.baseline.store import BaselineEntry
from pytest_gpumem.baseline.update import Change, UpdateReport
from pytest_gpumem.report.record import TestRecord
from pytest_gpumem.report.remarks import Missing
from pytest_gpumem.report.terminal import describe, section, write_section
from pytest_gpumem.text import cells
from pytest_gpumem.values.environment import Environment
from tests.report.example_run import (
    MIB,
    REAL,
    SIMULATED,
    failing,
    improved,
    measured,
    passing,
    record,
    unknown,
    verdict,
)

ENTRY = BaselineEntry(MIB, 2 * MIB, 0, 0)
READING = {
    "used": 3 * 1024 * MIB,
    "total": 80 * 1024 * MIB,
    "process_used": 1024 * MIB,
    "unattributed": None,
    "others": [
        {"pid": 7, "name": "python", "used": 512 * MIB},
        {"pid": 9, "name": None, "used": None},
    ],
}


def lines_of(
    *records: TestRecord,
    verbosity: int = 0,
    width: int = 100,
    update: UpdateReport | None = None,
    notes: tuple[str, ...] = (),
) -> list[str]:
    lines = section(records, verbosity=verbosity, width=width, update=update, notes=notes)
    return [line.text for line in lines]


def behind_table(lines: list[str]) -> list[str]:
    return lines[lines.index("") + 1 :]


def test_an_environment_is_named_as_simulated_or_real() -> None:
    assert describe(SIMULATED) == "simulated A100-40GB (torch 2.13)"
    assert describe(REAL) == "NVIDIA H200 (torch 2.13, CUDA 12.8, driver 570.86.15)"
    special = replace(
        SIMULATED,
        partition="MIG-1g.5gb",
        alloc_conf="expandable_segments:True",
        cublas_workspace_config=":0:0",
    )
    assert describe(special) == (
        "simulated A100-40GB (torch 2.13, MIG-1g.5gb, expandable_segments:True, "
        "CUBLAS_WORKSPACE_CONFIG=:0:0)"
    )


def test_the_section_of_a_run_with_one_test_of_every_kind() -> None:
    lines = lines_of(failing(), passing(), improved(), unknown(), width=80)
    assert lines[0] == "simulated A100-40GB (torch 2.13)"
    assert behind_table(lines) == [
        "FAIL tests/test_model.py::test_step",
        "  forward peaked at 80.0 MiB (83,886,080 B), 16.0 MiB over its baseline of",
        "    64.0 MiB (+25.0 %, tolerance 0) [simulated A100-40GB]",
        "",
        "better tests/test_model.py::test_lean[a]",
        "  the test peaked at 20.0 MiB (20,971,520 B), 10.0 MiB under its baseline of",
        "    30.0 MiB (-33.3 %, tolerance 0) [simulated A100-40GB]",
        '  lock it in: pytest --gpumem-update-baselines "tests/test_model.py::test_lean[a]"',
        "",
        "no baseline in sim-A100-40GB-torch2.13 for 1 test:",
        "  tests/other/test_new.py::TestNew::test_one",
        "  record them: pytest --gpumem-update-baselines=new",
        "",
        "gpumem: 4 tests on simulated A100-40GB: 1 ok, 1 failed, 1 improved, 1 without",
        "  baseline; highest peak 80.0 MiB (tests/test_model.py::test_step)",
    ]


def test_a_quiet_run_shows_failures_and_one_summary() -> None:
    assert lines_of(failing(), passing(), improved(), unknown(), verbosity=-1, width=160) == [
        "FAIL tests/test_model.py::test_step",
        "  forward peaked at 80.0 MiB (83,886,080 B), 16.0 MiB over its baseline of 64.0 MiB "
        "(+25.0 %, tolerance 0) [simulated A100-40GB]",
        "gpumem: 4 tests on simulated A100-40GB: 1 ok, 1 failed, 1 improved, 1 without baseline; "
        "highest peak 80.0 MiB (tests/test_model.py::test_step)",
    ]
    assert lines_of(passing(), verbosity=-1) == [
        "gpumem: 1 test on simulated A100-40GB: 1 ok; highest peak 3.0 MiB "
        "(tests/test_model.py::test_small)"
    ]


def test_no_line_but_a_command_is_wider_than_the_terminal() -> None:
    for verbosity in (-1, 0, 1):
        for width in range(50, 150, 7):
            lines = lines_of(
                failing(), passing(), improved(), unknown(), verbosity=verbosity, width=width
            )
            wide = [line for line in lines if cells(line) > width]
            assert [line for line in wide if "pytest --gpumem-" not in line] == []


def test_an_expected_failure_is_shown_only_when_verbose() -> None:
    expected = replace(failing(), outcome="xfailed")
    summary = (
        "gpumem: 1 test on simulated A100-40GB: 1 failed as expected; highest peak 80.0 MiB "
        "(tests/test_model.py::test_step)"
    )
    assert lines_of(expected, verbosity=-1, width=120) == [summary]
    assert "xfail tests/test_model.py::test_step" not in lines_of(expected, width=120)
    assert "xfail tests/test_model.py::test_step" in lines_of(expected, verbosity=1, width=120)


def test_each_environment_has_its_own_table() -> None:
    other = Environment(True, "T4", "7.5", "2.13")
    lines = lines_of(passing(), replace(passing(), environment=other), width=120)
    assert lines[0] == "simulated A100-40GB (torch 2.13)"
    assert lines[lines.index("") + 1] == "simulated T4 (torch 2.13)"
    assert lines[-1].startswith("gpumem: 2 tests on simulated A100-40GB, T4: 2 ok")


def test_the_summary_separates_real_from_simulated_numbers() -> None:
    lines = lines_of(passing(), replace(passing(), environment=REAL), verbosity=-1, width=120)
    assert lines[-1].startswith("gpumem: 2 tests on NVIDIA H200 and simulated A100-40GB: 2 ok")


def test_long_lists_are_cut_unless_verbose() -> None:
    many = [unknown(f"t.py::test_{number}") for number in range(12)]
    assert behind_table(lines_of(*many))[9:13] == [
        "  t.py::test_8",
        "  t.py::test_9",
        "  and 2 tests more without baseline (-v lists all)",
        "  record them: pytest --gpumem-update-baselines=new",
    ]
    assert "  t.py::test_11" in lines_of(*many, verbosity=1, width=160)


def test_an_update_lists_its_changes() -> None:
    report = UpdateReport(
        written=(Path("baselines/a.json"),),
        added=(Change("tests/other/test_new.py::TestNew::test_one", SIMULATED, None, ENTRY),),
        changed=(Change("t.py::test_b", SIMULATED, ENTRY, replace(ENTRY, peak_allocated=2 * MIB)),),
        pruned=(Change("t.py::test_c", SIMULATED, ENTRY, None),),
        unchanged=3,
        messages=("1 test not recorded: did not pass",),
        errors=("baseline baselines/b.json is damaged",),
    )
    lines = lines_of(unknown(), update=report, width=120)
    assert behind_table(lines) == [
        "baselines: 1 added, 1 changed, 3 unchanged, 1 pruned (1 file written); 1 error, so the "
        "exit status is not 0",
        "  + tests/other/test_new.py::TestNew::test_one: 1.0 MiB (1,048,576 B) "
        "[sim-A100-40GB-torch2.13]",
        "  ~ t.py::test_b: peak 1.0 MiB -> 2.0 MiB (+100.0 %) [sim-A100-40GB-torch2.13]",
        "  - t.py::test_c: 1.0 MiB (1,048,576 B) [sim-A100-40GB-torch2.13]",
        "  1 test not recorded: did not pass",
        "  baseline baselines/b.json is damaged",
        "",
        "gpumem: 1 test on simulated A100-40GB: 1 ok; highest peak 512 B "
        "(tests/other/test_new.py::TestNew::test_one)",
    ]
    assert lines_of(update=report, verbosity=-1, width=200) == [
        "baselines: 1 added, 1 changed, 3 unchanged, 1 pruned (1 file written); 1 error, so the "
        "exit status is not 0",
        "  baseline baselines/b.json is damaged",
    ]
    assert lines_of(update=UpdateReport()) == ["baselines: nothing to record"]


def test_a_baseline_that_cannot_be_written_is_reported_once() -> None:
    error = "baseline b.json cannot be written: No space left on device; check b"
    assert lines_of(update=UpdateReport(errors=(error,)), notes=(error,)) == [
        "baselines: nothing recorded; 1 error, so the exit status is not 0",
        f"  {error}",
    ]


def test_recorded_tests_are_not_listed_as_without_a_baseline() -> None:
    pruned = UpdateReport(pruned=(Change("t.py::test_c", SIMULATED, ENTRY, None),))
    sentence = "no baseline in sim-A100-40GB-torch2.13 for 1 test:"
    assert sentence in lines_of(unknown(), update=pruned)
    assert sentence not in lines_of(unknown(), update=UpdateReport(unchanged=1))


def test_a_note_is_shown_once_with_the_number_of_tests() -> None:
    note = "torch.cuda.utilization() is 0 on a simulated device"
    noted = [
        record(f"t.py::test_{name}", measured(MIB, notes=(note,)), verdict("limit", MIB, MIB))
        for name in "ab"
    ]
    lines = behind_table(lines_of(*noted, notes=("a plugin ran twice",)))
    assert lines[:3] == ["note: a plugin ran twice", f"note: {note} (2 tests)", ""]


def test_memory_of_the_device_is_shown_apart_from_the_allocator_s() -> None:
    real = replace(passing(), environment=REAL, nvml=READING)
    lines = behind_table(lines_of(real, width=140))
    assert lines[0] == (
        "whole device (NVML): at most 3.00 GiB of 80.00 GiB used, by this process 1.00 GiB; "
        "other processes: python 7 (512.0 MiB), PID 9"
    )
    hidden = {
        **READING,
        "process_used": None,
        "unattributed": "its PID is not listed",
        "others": [],
    }
    lines = behind_table(lines_of(replace(real, nvml=hidden), width=140))
    assert lines[0] == (
        "whole device (NVML): at most 3.00 GiB of 80.00 GiB used, "
        "by this process unattributed (its PID is not listed)"
    )


def test_the_dry_device_has_no_other_processes() -> None:
    environment = Environment(False, "T4", "7.5", "2.13", dry=True)
    dry = replace(passing(), environment=environment, nvml={**READING, "others": []})
    assert not [line for line in lines_of(dry) if "NVML" in line]
    assert [line for line in lines_of(dry, verbosity=1) if "NVML" in line]


def test_a_device_that_nvml_cannot_read_is_shown_when_verbose() -> None:
    absent = replace(passing(), nvml={"absent": "the NVIDIA driver is not loaded"})
    sentence = "whole device: not read, because the NVIDIA driver is not loaded"
    assert sentence in lines_of(absent, verbosity=1, width=160)
    assert sentence not in lines_of(absent, width=160)


def test_a_run_without_measured_tests_writes_nothing() -> None:
    file = io.StringIO()
    write_section(TerminalWriter(file), section([], verbosity=0, width=80), verbosity=0)
    assert file.getvalue() == ""


def test_the_section_has_a_title_unless_quiet_and_no_colour_where_there_is_none() -> None:
    file = io.StringIO()
    writer = TerminalWriter(file)
    writer.fullwidth = 40
    for verbosity in (0, -1):
        lines = section([failing()], verbosity=verbosity, width=40)
        write_section(writer, lines, verbosity=verbosity)
    written = file.getvalue().splitlines()
    assert written[0] == "================ gpumem ================"
    assert sum("= gpumem =" in line for line in written) == 1
    assert "\x1b" not in file.getvalue()


def test_a_failed_run_ends_in_red_and_another_in_green() -> None:
    for one, style in ((failing(), "bold red"), (passing(), "bold green")):
        last = section([one], verbosity=0, width=100)[-1]
        assert [span.style for span in last.spans] == [style]


def test_a_test_that_measured_nothing_is_a_failure_with_its_remedy() -> None:
    nothing = record("t.py::test_cpu", None, verdict("nothing_measured", 0, None), outcome="failed")
    text = " ".join(" ".join(lines_of(nothing, verbosity=-1, width=80)).split())
    assert text.startswith("FAIL t.py::test_cpu nothing was measured")
    assert text.endswith("gpumem: 1 test on simulated A100-40GB: 1 failed")


def test_notes_of_a_verdict_are_shown_once() -> None:
    gone = replace(
        verdict("baseline", 0, MIB, phase="backward", reference=MIB, passed=False),
        notes=("phases that ran: forward",),
    )
    lost = record("t.py::test_lost", measured(MIB), gone, outcome="failed")
    assert " ".join(lines_of(lost)).count("phases that ran") == 1


HOSTILE = "test_a.py::test_[\x1b[31m\n\u202e\0]"
SHOWN = r"test_a.py::test_[\x1b[31m\n\u202e\x00]"


def test_control_characters_of_a_name_are_escaped() -> None:
    hostile = (replace(failing(), nodeid=HOSTILE), replace(passing(), nodeid=HOSTILE + "2"))
    change = Change(HOSTILE, SIMULATED, None, ENTRY)
    update = UpdateReport(added=(change,), messages=(HOSTILE,), errors=(HOSTILE,))
    for verbosity in (-1, 0, 2):
        written = io.StringIO()
        lines = section(hostile, verbosity=verbosity, width=200, update=update, notes=(HOSTILE,))
        write_section(TerminalWriter(written), lines, verbosity=verbosity)
        assert SHOWN in written.getvalue()
        assert not set(written.getvalue()) & {"\x1b", "\u202e", "\0"}


def test_very_long_settings_are_shortened() -> None:
    special = replace(SIMULATED, alloc_conf="x" * 10**7, cublas_workspace_config=":" * 10**7)
    assert len(describe(special)) < 600


def test_tests_with_baselines_of_other_environments_only_are_counted() -> None:
    for elsewhere, sentence in (
        (
            {"sim-T4-torch2.6": 1},
            "1 test has a baseline in sim-T4-torch2.6 and none in this environment: it was "
            "compared with nothing",
        ),
        (
            {"sim-T4-torch2.6": 1, "sim-T4-torch2.13": 2},
            "2 tests have a baseline in sim-T4-torch2.13 (and 1 more) and none in this "
            "environment: they were compared with nothing",
        ),
    ):
        missing = Missing(elsewhere=elsewhere)
        lines = section([passing()], verbosity=0, width=160, missing=missing)
        assert sentence in [line.text for line in lines]
