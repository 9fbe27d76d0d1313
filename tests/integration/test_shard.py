"""--gpumem-shard K/N: each machine of a CI matrix runs its part."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.pytest_project import Project

CACHE = ("cacheprovider",)

SUITE = """
    @pytest.mark.parametrize("number", range(7))
    def test_plain(number):
        pass

    @pytest.mark.parametrize("size", [1, 2, 3])
    @pytest.mark.gpumem(max="1GiB")
    def test_marked(size):
        torch.ones(size, device="cuda")
"""
EVERY = {
    *(f"test_it.py::test_plain[{number}]" for number in range(7)),
    *(f"test_it.py::test_marked[{size}]" for size in (1, 2, 3)),
}


def ran(project: Project, *args: str, apart: bool = False, **options: Any) -> list[str]:
    run = project.run_apart if apart else project.run
    result = run("-v", *args, **options)
    assert result.ret == 0
    # "PASSED [ 50%] test_it.py::..." of workers, "test_it.py::... PASSED" without them.
    found = [re.search(r"(test_it\.py::\S+)", line) for line in result.outlines if "PASSED" in line]
    return [match[1] for match in found if match]


def shard_note(result: pytest.RunResult) -> str:
    (line,) = (line for line in result.outlines if line.startswith("note: shard"))
    return line


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_every_test_runs_on_one_machine(project: Project, count: int) -> None:
    project.write(test_it=SUITE)
    parts = [ran(project, f"--gpumem-shard={number}/{count}") for number in range(1, count + 1)]
    assert sorted(test for part in parts for test in part) == sorted(EVERY)
    assert all(parts)


def test_all_workers_collect_the_same_shard(project: Project) -> None:
    project.write(test_it=SUITE)
    parts = [ran(project, f"--gpumem-shard={n}/2", "-n2", apart=True, use=CACHE) for n in (1, 2)]
    assert sorted(test for part in parts for test in part) == sorted(EVERY)


def test_shards_divide_the_selected_tests(project: Project) -> None:
    project.write(test_it=SUITE)
    parts = [ran(project, f"--gpumem-shard={number}/2", "-ktest_plain") for number in (1, 2)]
    assert sorted(map(len, parts)) == [3, 4]


def test_shards_do_not_depend_on_the_order_of_tests(project: Project) -> None:
    project.write(test_it=SUITE)
    parts = [
        ran(project, f"--gpumem-shard={number}/2", f"--randomly-seed={number}", use=("randomly",))
        for number in (1, 2)
    ]
    assert sorted(test for part in parts for test in part) == sorted(EVERY)


def durations(project: Project) -> Path:
    """Write a file as pytest-split does: one test takes as long as all others together."""
    path = project.path / ".test_durations"
    path.write_text(json.dumps({**dict.fromkeys(EVERY, 1.0), "test_it.py::test_plain[3]": 9.0}))
    return path


def test_durations_of_pytest_split_balance_the_shards(project: Project) -> None:
    project.write_ini("")
    project.write(test_it=SUITE)
    durations(project)
    assert sorted(len(ran(project, f"--gpumem-shard={number}/2")) for number in (1, 2)) == [1, 9]


def test_durations_of_earlier_runs_balance_the_shards(project: Project) -> None:
    project.write(
        test_it="""
        import time

        @pytest.mark.parametrize("number", range(8))
        @pytest.mark.gpumem(max="1GiB")
        def test_it(number):
            torch.ones(1, device="cuda")
            time.sleep(1.0 if number == 3 else 0.0)
        """
    )
    project.run(use=CACHE).assert_outcomes(passed=8)
    # By the marker's limit alone they would be four and four.
    folder = project.path / ".pytest_cache" / "d" / "gpumem" / "learned.json"
    data = json.loads(folder.read_text())
    (tests,) = data["environments"].values()
    assert tests["test_it.py::test_it[3]"]["seconds"] >= 1.0
    for nodeid, lesson in tests.items():
        lesson["seconds"] = 7.0 if nodeid.endswith("[3]") else 1.0
    folder.write_text(json.dumps(data))
    assert ran(project, "--gpumem-shard=1/2", use=CACHE) == ["test_it.py::test_it[3]"]


def test_a_group_of_xdist_is_in_one_shard(project: Project) -> None:
    project.write(
        test_it="""
        @pytest.mark.parametrize("number", range(4))
        @pytest.mark.xdist_group("group")
        def test_together(number):
            pass

        @pytest.mark.parametrize("number", range(4))
        def test_alone(number):
            pass
        """
    )
    parts = [
        ran(project, f"--gpumem-shard={n}/2", "-n2", "--dist=loadgroup", apart=True) for n in (1, 2)
    ]
    groups = [[test for test in part if "together" in test] for part in parts]
    assert sorted(map(len, groups)) == [0, 4]


def test_durations_of_a_report_balance_the_shards(project: Project) -> None:
    project.write(test_it=SUITE)
    project.report("--gpumem-all")
    path = project.path / "report.json"
    data = json.loads(path.read_text())
    for test in data["tests"]:
        test["duration"] = 5.0 if test["nodeid"].endswith("marked[1]") else 1.0
    path.write_text(json.dumps(data))
    parts = [
        ran(project, f"--gpumem-shard={n}/2", f"--gpumem-shard-by={path}", "-ktest_marked")
        for n in (1, 2)
    ]
    assert parts[0] == ["test_it.py::test_marked[1]"]
    assert len(parts[1]) == 2


def plan(project: Project, *parts: list[str]) -> Path:
    path = project.path / "shards.json"
    shards = [
        {"runner": f"R{index}", "memory": index, "price": index, "tests": tests}
        for index, tests in enumerate(parts, 1)
    ]
    data = {"schema_version": 1, "matrix": {}, "shards": shards, "seconds": {}, "bytes": {}}
    path.write_text(json.dumps(data))
    return path


def test_a_plan_decides_and_its_unknown_tests_go_where_they_fit(project: Project) -> None:
    project.write(test_it=SUITE)
    path = plan(project, ["test_it.py::test_marked[1]", "test_gone.py::test_it"], [])
    options = (f"--gpumem-shard-by={path}", "--gpumem-shard")
    # Unknown ones that use a GPU need the largest; those that do not, the cheapest.
    large = {f"test_it.py::test_marked[{size}]" for size in (2, 3)}
    assert {*ran(project, *options, "2/2")} == large
    assert {*ran(project, *options, "1/2")} == EVERY - large


def test_a_plan_of_another_number_of_shards_is_refused(project: Project) -> None:
    project.write(test_it=SUITE)
    path = plan(project, [], [])
    result = project.run_apart(f"--gpumem-shard-by={path}", "--gpumem-shard=3/3")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        [f"ERROR: --gpumem-shard=3/3: {path} has 2 shards; write 2/2 or plan anew"]
    )


def test_a_run_names_its_shard(project: Project) -> None:
    project.write_ini("")
    project.write(test_it=SUITE)
    durations(project)
    notes = [shard_note(project.run(f"--gpumem-shard={number}/2")) for number in (1, 2)]
    one = re.fullmatch(
        r"note: shard 1/2: 1 of 10 tests, 1 of them known to take 9.0 s; cut (\w{8}), which is the "
        r"same on every machine or tests are left out",
        notes[0],
    )
    assert one
    assert notes[1].startswith(
        f"note: shard 2/2: 9 of 10 tests, 9 of them known to take 9.0 s; cut {one[1]}, "
    )
    # A machine with other durations divides differently, and its note differs.
    (project.path / ".test_durations").unlink()
    assert one[1] not in shard_note(project.run("--gpumem-shard=1/2"))
    assert one[1] not in shard_note(project.run_apart("--gpumem-shard=1/2", "-n2"))


def test_pruning_keeps_baselines_of_tests_in_other_shards(project: Project) -> None:
    project.write(test_it=SUITE)
    project.run("--gpumem-update-baselines")
    before = project.baselines()
    project.run("--gpumem-shard=1/5", "--gpumem-prune-baselines", "--gpumem-update-baselines")
    assert project.baselines() == before


def test_memory_balances_the_shards_where_tests_share_a_gpu(project: Project) -> None:
    project.write(
        test_it="""
        @pytest.mark.parametrize("number", range(4))
        @pytest.mark.gpumem(max="4GiB")
        def test_large(number):
            torch.ones(1, device="cuda")

        @pytest.mark.parametrize("number", range(4))
        @pytest.mark.gpumem(max="1MiB")
        def test_small(number):
            torch.ones(1, device="cuda")
        """
    )
    large = dict.fromkeys((f"test_it.py::test_large[{number}]" for number in range(4)), 1.0)
    small = {f"test_it.py::test_small[{n}]": 4.0 if n == 0 else 1.0 for n in range(4)}
    (project.path / "took.json").write_text(json.dumps({**large, **small}))
    options = ("--gpumem-shard-by=took.json", "--gpumem-shard")
    # 11 s: of time alone 6 and 5, the long one with two others, and all large ones may be there.
    parts = [ran(project, "--gpumem-share", *options, f"{n}/2") for n in (1, 2)]
    assert [sum("large" in test for test in part) for part in parts] == [2, 2]


@pytest.mark.parametrize("workers", [(), ("-n1",)])
def test_a_file_without_durations_is_refused(project: Project, workers: tuple[str, ...]) -> None:
    project.write(test_it=SUITE)
    (project.path / "took.json").write_text("{")
    result = project.run_apart("--gpumem-shard=1/2", "--gpumem-shard-by=took.json", *workers)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["ERROR: *took.json does not say what tests take: not valid JSON *"]
    )


def test_each_job_of_a_matrix_runs_its_tests(project: Project) -> None:
    from pytest_gpumem.cli import main

    project.write(
        test_it="""
        @pytest.mark.parametrize("gib", [1, 2, 3, 14, 20])
        @pytest.mark.gpumem
        def test_it(gib):
            torch.empty(gib << 30, dtype=torch.uint8, device="cuda")

        def test_plain():
            pass
        """
    )
    project.report(device="--gpumem-device=sim:H100")
    runners = ("--runner=L4:0.80", "--runner=T4:0.35")
    assert main(["plan", *runners, "--output=shards.json", "report.json"]) == 0
    jobs = json.loads((project.path / "shards.json").read_text())["matrix"]["include"]
    assert [(job["runner"], job["shard"]) for job in jobs] == [("L4", "1/2"), ("T4", "2/2")]
    parts = [
        ran(
            project,
            f"--gpumem-shard={job['shard']}",
            "--gpumem-shard-by=shards.json",
            device=f"--gpumem-device=sim:{job['runner']}",
        )
        for job in jobs
    ]
    on_l4 = {"test_it.py::test_it[14]", "test_it.py::test_it[20]"}
    assert {*parts[0]} == on_l4
    others = {f"test_it.py::test_it[{gib}]" for gib in (1, 2, 3)}
    assert {*parts[1]} == {*others, "test_it.py::test_plain"}
