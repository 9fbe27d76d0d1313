"""A marked test is measured and judged; the numbers are those of PyTorch on a T4."""

from __future__ import annotations

import pytest
import torch

from tests.pytest_project import Project

WEIGHT = 256_000  # of Linear(256, 250) in float32
INPUT = OUTPUT = 1_024
WORKSPACE = 8_519_680  # cuBLAS before Hopper
KEPT = WORKSPACE if torch.__version__ < "2.15" else 0  # since 2.15 only while a matmul runs

TRAINING_STEP = """
    import torch.nn as nn

    @pytest.mark.gpumem
    def test_step():
        model = nn.Linear(256, 250, bias=False).cuda()
        x = torch.randn(1, 256, device="cuda")
        loss = model(x).sum()
        loss.backward()
"""


def test_unmodified_cuda_code_is_measured(project: Project) -> None:
    project.write(test_step=TRAINING_STEP)

    measurement = project.report()["test_step.py::test_step"]["measurement"]

    forward = measurement["phases"]["forward"]
    assert forward["allocated_before"] == WEIGHT + INPUT
    assert forward["peak_allocated"] == WEIGHT + INPUT + OUTPUT + WORKSPACE
    assert forward["allocated_after"] == WEIGHT + INPUT + OUTPUT + KEPT
    assert forward["cublas_workspace"] == KEPT
    # Autograd's thread has a cuBLAS handle, and so a workspace, of its own.
    assert measurement["phases"]["backward"]["cublas_workspace"] == 2 * KEPT
    assert measurement["cublas_workspace"] == 2 * KEPT
    assert measurement["phases"]["backward"]["peak_allocated"] == measurement["peak_allocated"]
    assert measurement["peak_allocated"] > 2 * WEIGHT + INPUT + WORKSPACE + KEPT
    assert measurement["allocated_before"] == 0
    assert measurement["allocated_after"] == 0
    assert measurement["leaked"] == 0
    assert measurement["simulated"] is True


@pytest.mark.parametrize(("limit", "outcome"), [(4_194_304, "passed"), (4_194_303, "failed")])
def test_the_peak_is_judged_to_the_byte(project: Project, limit: int, outcome: str) -> None:
    project.write(
        test_limit=f"""
        @pytest.mark.gpumem(max={limit})
        def test_block():
            torch.empty(4 * 1024**2, dtype=torch.uint8, device="cuda")
        """
    )

    result = project.run()

    result.assert_outcomes(**{outcome: 1})


def test_a_failure_is_one_text_without_a_traceback(project: Project) -> None:
    project.write(
        test_limit="""
        @pytest.mark.gpumem("3MiB")
        def test_block():
            torch.empty(4 * 1024**2, dtype=torch.uint8, device="cuda")
        """
    )

    result = project.run()

    result.stdout.fnmatch_lines(
        [
            "*_ test_block _*",
            "the test peaked at 4.0 MiB (4,194,304 B), 1.0 MiB over its limit of 3MiB "
            "?simulated T4?",
            "*= gpumem =*",
        ]
    )
    result.stdout.no_fnmatch_line("*Traceback*")
    result.stdout.no_fnmatch_line("*plugin.py*")


def test_reserved_bytes_phases_and_leaks_have_limits(project: Project) -> None:
    project.write(
        test_limits="""
        kept = []

        @pytest.mark.gpumem(max_reserved="19MiB")
        def test_reserved():
            torch.empty(4 * 1024**2, dtype=torch.uint8, device="cuda")

        @pytest.mark.gpumem(phases={"load": "1MiB"})
        def test_phase(gpumem):
            with gpumem.phase("load"):
                torch.empty(2 * 1024**2, dtype=torch.uint8, device="cuda")

        @pytest.mark.gpumem(max_leak=0)
        def test_leak():
            kept.append(torch.empty(600, dtype=torch.uint8, device="cuda"))
        """
    )

    result = project.run("-v")

    result.assert_outcomes(failed=3)
    result.stdout.fnmatch_lines_random(
        [
            "the test reserved 20.0 MiB (20,971,520 B), 1.0 MiB over its limit of 19MiB; "
            "at most 4.0 MiB were allocated at once *",
            "  4.0 MiB  other  test_*.py:* torch.empty *",
            "load peaked at 2.0 MiB (2,097,152 B), 1.0 MiB over its limit of 1MiB*",
            "1.0 KiB (1,024 B) still allocated after the test, 1.0 KiB over its limit of 0 B*",
        ]
    )


def test_a_marked_test_that_allocates_nothing_fails(project: Project) -> None:
    project.write(
        test_nothing="""
        DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

        @pytest.mark.gpumem
        def test_on_the_cpu():
            torch.ones(3, device=DEVICE)
        """
    )

    result = project.run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["nothing was measured*--gpumem-sim-scope=session*"])

    project.run("--gpumem-sim-scope=session").assert_outcomes(passed=1)


def test_a_failing_body_keeps_its_message_and_is_not_judged(project: Project) -> None:
    project.write(
        test_fails="""
        @pytest.mark.gpumem(max=1, max_leak=0)
        def test_fails():
            x = torch.empty(4096, device="cuda")
            assert x.numel() == 1, "the body's own message"

        @pytest.mark.gpumem(max_leak=0, max="1MiB")
        def test_next():
            torch.empty(1024, device="cuda")
        """
    )

    tests = project.report()

    failed = tests["test_fails.py::test_fails"]
    assert (failed["outcome"], failed["verdicts"]) == ("failed", [])
    assert failed["measurement"]["leaked"] is None
    after = tests["test_fails.py::test_next"]
    assert (after["outcome"], after["measurement"]["peak_allocated"]) == ("passed", 4096)


def test_out_of_memory_is_reported_as_torch_s_own_error(project: Project) -> None:
    project.write(
        test_oom="""
        @pytest.mark.gpumem
        def test_caught():
            with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
                torch.empty(20 * 1024**3, dtype=torch.uint8, device="cuda")
            torch.empty(512, dtype=torch.uint8, device="cuda")

        @pytest.mark.gpumem
        def test_raised():
            torch.empty(20 * 1024**3, dtype=torch.uint8, device="cuda")
        """
    )

    project.run().assert_outcomes(passed=1, failed=1)


def test_outside_marked_tests_there_is_no_gpu(project: Project) -> None:
    project.write(
        test_scope="""
        assert not torch.cuda.is_available()

        @pytest.mark.gpumem
        def test_marked():
            assert torch.cuda.is_available()
            torch.empty(1, device="cuda")

        def test_plain():
            assert not torch.cuda.is_available()
        """
    )

    project.run("-p", "no:randomly").assert_outcomes(passed=2)


def test_session_scope_gives_every_test_and_module_the_gpu(project: Project) -> None:
    project.write(
        test_scope="""
        assert torch.cuda.is_available()
        WEIGHT = torch.empty(1024, device="cuda")

        def test_plain():
            assert torch.cuda.is_available()

        @pytest.mark.gpumem
        def test_marked():
            torch.empty(512, dtype=torch.uint8, device="cuda")
        """
    )

    tests = project.report("--gpumem-sim-scope=session")

    measurement = tests["test_scope.py::test_marked"]["measurement"]
    assert (measurement["peak_allocated"], measurement["stray"]) == (512, 4096)
    assert len(tests) == 1
