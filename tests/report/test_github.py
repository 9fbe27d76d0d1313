from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pytest_gpumem.report.github import workflow_command, workflow_commands, write_summary
from pytest_gpumem.report.record import ReportedRun, TestRecord
from tests.report.example_run import failing, improved, passing
from tests.report.test_markdown import HOSTILE


def run(*records: TestRecord) -> ReportedRun:
    lines = {record.nodeid: ("tests/test_model.py", 12) for record in records}
    return ReportedRun(records, Path("/repo/package"), lines)


def test_a_command_is_escaped_as_the_toolkit_does() -> None:
    assert workflow_command("error", "percent % cr \r lf \n : ,", title="x") == (
        "::error title=x::percent %25 cr %0D lf %0A : ,"
    )
    assert workflow_command("error", "", title="percent % cr \r lf \n colon : comma ,") == (
        "::error title=percent %25 cr %0D lf %0A colon %3A comma %2C::"
    )


def parsed(line: str) -> tuple[str, dict[str, str], str]:
    """Return a command's name, properties and message as GitHub's runner reads a line.

    ``ActionCommand.TryParseV2`` in src/Runner.Common/ActionCommand.cs of actions/runner.
    """
    assert line.startswith("::")
    head, message = line[2:].split("::", 1)
    name, _, given = head.partition(" ")
    pairs = (pair.split("=", 1) for pair in given.strip().split(",") if pair)
    properties = {key: _read(value, ("\r", "\n", ":", ",", "%")) for key, value in pairs}
    return name, properties, _read(message, ("\r", "\n", "%"))


def _read(text: str, characters: tuple[str, ...]) -> str:
    for character in characters:
        text = text.replace(f"%{ord(character):02X}", character)
    return text


@pytest.mark.parametrize(
    "text", ["plain", "a::b", "50%, %0A as written, %25", "one\ntwo\r\nthree", "f(x=1,y=2): z"]
)
def test_the_runner_reads_the_original_text(text: str) -> None:
    line = workflow_command("error", text, file="a,b:c%.py", line=3, title=text)
    assert "\n" not in line
    assert parsed(line) == ("error", {"file": "a,b:c%.py", "line": "3", "title": text}, text)


def test_a_message_with_a_long_name_is_within_the_runner_s_limit() -> None:
    """``_maxIssueMessageLength`` in src/Runner.Worker/ExecutionContext.cs of actions/runner."""
    (line,) = workflow_commands(run(replace(failing(), nodeid=f"t.py::test_x[{'long ' * 2000}]")))
    _, _, message = parsed(line)
    assert len(message) <= 4096
    assert message.startswith("forward peaked at 80.0 MiB")


def test_a_failure_marks_the_line_of_its_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_WORKSPACE", "/repo")
    assert workflow_commands(run(passing(), failing())) == [
        "::error file=package/tests/test_model.py,line=12,"
        "title=GPU memory%3A tests/test_model.py%3A%3Atest_step"
        "::forward peaked at 80.0 MiB (83,886,080 B), 16.0 MiB over its baseline of 64.0 MiB "
        "(+25.0 %25, tolerance 0) [simulated A100-40GB]%0A"
        'accept it: pytest --gpumem-update-baselines "tests/test_model.py::test_step"'
    ]


def test_an_improvement_is_a_notice() -> None:
    (line,) = workflow_commands(run(improved()))
    assert line.startswith("::notice file=/repo/package/tests/test_model.py,line=12,title=less ")


def test_annotations_beyond_github_s_limit_are_counted() -> None:
    lines = workflow_commands(
        run(*[replace(failing(), nodeid=f"t.py::test_{n}") for n in range(14)])
    )
    assert len(lines) == 10
    assert lines[-1] == "::error title=GPU memory::5 tests more: see the summary of this step"


def test_a_hostile_name_starts_no_workflow_command() -> None:
    (line,) = workflow_commands(run(replace(failing(), nodeid=HOSTILE)))
    assert line.isprintable()
    properties = line.removeprefix("::error ").partition("::")[0]
    assert properties.count(",") == 2
    assert "title=GPU memory%3A t.py%3A%3Atest_x[<script>a</script>" in properties


def test_the_summary_is_appended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("of another step\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    write_summary(run(failing()))
    assert summary.read_text().startswith("of another step\n<!-- pytest-gpumem -->\n### GPU memory")


def test_an_unwritable_summary_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path))
    with pytest.raises(ValueError, match=r"cannot be written: Is a directory; give"):
        write_summary(run(failing()))
