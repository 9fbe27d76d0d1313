"""Runs of which each rank is a process, started as torchrun starts them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore

from pytest_gpumem.values.world import World
from tests.forked import quick
from tests.pytest_project import PYTEST, Project, _arguments

TESTS = """
    import os
    import torch.distributed as dist

    @pytest.mark.gpumem(max=6000)
    def test_alike():
        assert (dist.get_rank(), dist.get_world_size()) == (int(os.environ["RANK"]), 2)
        torch.zeros(1024, device="cuda")

    @pytest.mark.gpumem(max=6000)
    def test_worst():
        torch.zeros(1024 * (1 + dist.get_rank()), device="cuda")

    @pytest.mark.gpumem
    def test_fails_there():
        torch.zeros(1024, device="cuda")
        assert dist.get_rank() == 0, "only here"

    @pytest.mark.gpumem(ranks=[2, 8], rank=0)
    def test_named():
        torch.zeros(1024 * (1 + dist.get_rank()), device="cuda")

    def test_unmarked():
        assert os.environ["RANK"] == "0"
"""


def run_ranks(folder: Path, *arguments: str) -> list[tuple[int, str]]:
    """Run a program as two ranks; return exit status and output of each."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    started = []
    for rank in range(2):
        world = World(2, rank, 2).environment
        own = {"MASTER_PORT": str(store.port), "TORCHELASTIC_RUN_ID": "none"}
        started.append(
            subprocess.Popen(
                [quick(), *arguments],
                cwd=folder,
                env={**os.environ, **world, **own},
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    ended = [(process.communicate()[0], process.returncode) for process in started]
    return [(status, output) for output, status in ended]


def test_rank_0_judges_the_worst_rank_and_reports_for_all(project: Project) -> None:
    project.write(test_it=TESTS)
    report = f"--gpumem-report=json:{project.path / 'report.json'}"
    (status, shown), (other, quiet) = run_ranks(
        project.path, "-c", PYTEST, *_arguments((report, "-rs"), "--gpumem-device=sim:H100", ())
    )

    assert (status, other) == (1, 1)
    assert quiet == ""
    assert "2 ranks, a process each" in shown
    tests = {name.partition("::")[2]: one for name, one in project.written_report().items()}
    alike, worst, named = (tests[n] for n in ("test_alike", "test_worst", "test_named[2ranks]"))
    assert alike["outcome"] == "passed"
    assert alike["environment"]["ranks"] == "worst rank of 2"
    assert alike["measurement"]["notes"] == ["all 2 ranks ran and take the same, 4.0 KiB"]
    assert worst["outcome"] == "failed"
    assert worst["measurement"]["peak_allocated"] == 8192
    assert [(one["device"], one["peak_allocated"]) for one in worst["other_devices"]] == [
        ("rank 0", 4096)
    ]
    assert [verdict["passed"] for verdict in worst["verdicts"]] == [False, True]
    assert tests["test_fails_there"]["outcome"] == "failed"
    assert "rank 1 failed: AssertionError: only here" in shown
    assert named["environment"]["ranks"] == "rank 0 of 2"
    assert named["measurement"]["peak_allocated"] == 4096
    assert "is for 8 ranks, and 2 have been started" in shown
    assert "test_it.py::test_unmarked failed on rank 1, and not on rank 0: AssertionErr" in shown


def test_a_rank_that_is_killed_ends_the_run_with_a_sentence(project: Project) -> None:
    project.write(
        test_it="""
        import os, signal

        @pytest.mark.gpumem
        def test_killed():
            torch.zeros(1024, device="cuda")
            if os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)
    """
    )
    (status, shown), (other, _) = run_ranks(
        project.path, "-c", PYTEST, *_arguments((), "--gpumem-device=sim:H100", ())
    )
    assert (status, other) == (pytest.ExitCode.INTERRUPTED, -signal.SIGKILL)
    assert "rank 1 ended before it sent test_it.py::test_killed" in shown


def test_a_script_reads_the_numbers_of_all_ranks(project: Project) -> None:
    script = project.write_in(
        "",
        "script",
        """
        import torch.distributed as dist
        from pytest_gpumem import simulate

        with simulate("H100") as gpu:
            dist.init_process_group("gloo")
            x = torch.zeros(1024 * (1 + dist.get_rank()), device="cuda")
        print([one.peak_allocated for one in gpu.ranks], *gpu.notes)
        """,
    )
    assert run_ranks(project.path, str(script)) == [
        (
            0,
            "[4096, 8192] all 2 ranks ran; rank 1 has the highest peak, 8.0 KiB, 33.3% over the "
            "mean, and rank 0 the lowest, 4.0 KiB\n",
        ),
        (0, "[8192]\n"),
    ]


def test_a_rank_without_marked_tests_needs_no_torch() -> None:
    program = "import sys, pytest_gpumem.session.launched; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_workers_of_xdist_together_with_ranks_are_refused(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in World(2, 0, 2).environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    project.write(test_it=TESTS)
    result = project.run("-n2")
    result.stderr.fnmatch_lines(["ERROR: torchrun has started this process as one of*leave -n out"])
