"""Commands that a run suggests work when pasted into the shell that started pytest."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.forked import quick
from tests.pytest_project import LOADED, PLUGINS_OF_SOME_TESTS, Project

NAMES = ["it's", 'a "b"', "x $HOME `y`", "wow!", "a\\b", "[z]::w", "ü"]
"""Parameters with characters that a shell interprets."""

MODULE = """
    @pytest.mark.gpumem(baseline=True)
    @pytest.mark.parametrize("name", {names!r}, ids=str)
    def test_size(name):
        torch.empty({size}, dtype=torch.uint8, device="cuda")


    @pytest.mark.gpumem(baseline=True)
    def test_other():
        torch.empty({size}, dtype=torch.uint8, device="cuda")
"""

FOLDER, NAME = "tests/my tests", "test_it's $a"


@pytest.fixture
def repository(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A project with hostile names, and ``pytest`` on the shell's path."""
    write(project, 4096)
    program = tmp_path / "bin" / "pytest"
    program.parent.mkdir()
    off = " ".join(f"-p no:{name}" for name in PLUGINS_OF_SOME_TESTS if name != "cacheprovider")
    command = f"{quick()} -c 'import pytest; raise SystemExit(pytest.main())'"
    program.write_text(f'#!/bin/sh\nexec {command} {shlex.join(LOADED)} {off} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    return project


def write(project: Project, size: int) -> None:
    project.write_in(FOLDER, NAME, MODULE.format(names=NAMES, size=size))


def pasted(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/sh", "-c", command], cwd=folder, capture_output=True, text=True, check=False
    )


def sizes(project: Project) -> dict[str, int]:
    """Return the stored peaks by test; check that there is one file of baselines."""
    (tests,) = project.baselines().values()
    assert list(project.baselines()) == [
        next(iter(project.baselines())).partition("/")[0] + f"/{FOLDER}/{NAME}.py.json"
    ]
    return {test: entry["peak_allocated"] for test, entry in tests.items()}


PLACES = {
    "root": (".", [], True),
    "root, without a configuration": (".", [], False),
    "the tests' folder": ("tests", [], True),
    "a folder beside, paths given": ("docs", ["../tests"], True),
    "--rootdir": ("tests/my tests", ["--rootdir", "../.."], False),
    "a configuration by its name": ("docs", ["-c", "../tox.ini", "../tests"], True),
}


@pytest.mark.skipif(os.name == "nt", reason="a shell of POSIX")
@pytest.mark.parametrize("place", PLACES)
def test_a_suggested_command_runs_when_pasted(
    repository: Project, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    folder, args, configured = PLACES[place]
    if configured:
        repository.write_ini("")
    started = repository.path / folder
    started.mkdir(exist_ok=True)
    monkeypatch.chdir(started)
    baselines = f"--gpumem-baselines={os.path.relpath(repository.path / 'baselines', started)}"
    given = [*args, baselines, "-rA", "--tb=short", "--durations", "3"]
    repository.run(*given, "--gpumem-update-baselines", use=("cacheprovider",))
    write(repository, 8192)

    result = repository.run(*given, "-vv", use=("cacheprovider",))

    accepting = re.findall(r"^accept it: (.*)$", result.stdout.str(), re.MULTILINE)
    assert len(accepting) == len(NAMES) + 1
    hostile = next(line for line in accepting if "$HOME" in line)
    ran = pasted(hostile, started)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert sorted(sizes(repository).values()) == [4096] * len(NAMES) + [8192]
    (everything,) = re.findall(r"^accept all \d+: (.*)$", result.stdout.str(), re.MULTILINE)
    assert "--lf" in everything
    if place not in ("root", "a folder beside, paths given"):
        return  # the command is the same, and runs for a minute
    ran = pasted(everything, started)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert set(sizes(repository).values()) == {8192}


@pytest.mark.skipif(os.name == "nt", reason="a shell of POSIX")
def test_every_test_id_survives_the_shell(repository: Project) -> None:
    repository.run("--gpumem-update-baselines")
    write(repository, 8192)
    result = repository.run("-vv")
    accepting = re.findall(r"^accept it: (.*)$", result.stdout.str(), re.MULTILINE)

    words = "\n".join(f"printf '%s\\n' {line.partition('baselines ')[2]}" for line in accepting)

    named = pasted(words, repository.path).stdout.splitlines()
    failed = [line for line in result.outlines if line.startswith("FAILED ")]
    assert sorted(named) == sorted(re.sub(r"^FAILED (.*) - \+.*", r"\1", line) for line in failed)
    assert len(named) == len(NAMES) + 1


def test_missing_baselines_have_one_command_for_all(repository: Project) -> None:
    project = repository
    project.write_in(FOLDER, NAME, MODULE.format(names=["a"], size=512).replace("True", "None"))

    result = project.run("-k", "size", "--maxfail=3")

    (line,) = [line for line in result.outlines if line.startswith("  record them: ")]
    assert line == (
        "  record them: pytest --gpumem-device=sim:T4 --gpumem-update-baselines=new -k size"
    )


def test_options_that_select_tests_are_repeated_in_the_command(repository: Project) -> None:
    repository.write_in(
        ".",
        "conftest",
        """
        def pytest_addoption(parser):
            parser.addoption("--runslow", action="store_true")
        """,
    )
    result = repository.run("--runslow", "-o", "console_output_style=count", "-x", "--color", "no")
    commands = [line for line in result.outlines if line.startswith("record it: ")]
    assert commands[0].startswith(
        "record it: pytest --gpumem-device=sim:T4 --runslow -o console_output_style=count "
        "--gpumem-update-baselines "
    )


def test_a_worker_suggests_the_command_line_of_its_controller(
    repository: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = repository.path / "tests"
    repository.write_ini("")
    monkeypatch.chdir(started)
    ran = pasted("pytest --gpumem-device=sim:T4 -n 1 --junitxml ../junit.xml -k other", started)
    command = 'pytest --gpumem-device=sim:T4 --gpumem-update-baselines "my tests/'
    assert f"record it: {command}" in ran.stdout
    # As on a worker.
    assert "record it: pytest --gpumem-device=sim:T4" in (repository.path / "junit.xml").read_text()
