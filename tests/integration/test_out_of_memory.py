"""Explanations below the failure of a body that runs out of memory or leaks."""

from __future__ import annotations

from tests.pytest_project import Project

OUT_OF_MEMORY = """
    GIB = 1 << 30

    def allocate(nbytes):
        return torch.empty(nbytes, dtype=torch.uint8, device="cuda")

    @pytest.mark.gpumem
    def test_fragmented():
        pieces = [allocate(3 << 20) for _ in range(4000)]
        del pieces[::2]
        allocate(2 * GIB)

    @pytest.mark.gpumem
    def test_too_large():
        kept = allocate(10 * GIB)
        allocate(9 * GIB)

    @pytest.mark.gpumem
    def test_expected():
        kept = allocate(GIB)
        with pytest.raises(torch.OutOfMemoryError):
            allocate(40 * GIB)
"""


def test_out_of_memory_names_the_request_the_holders_and_a_remedy(project: Project) -> None:
    project.write(test_oom=OUT_OF_MEMORY)

    result = project.run(f"--gpumem-report=json:{project.path / 'report.json'}")

    result.assert_outcomes(passed=1, failed=2)
    # 4,000 blocks of 3 MiB, six to a segment of 20 MiB: 667 segments, and half of them freed.
    result.stdout.fnmatch_lines(
        [
            "E *torch.OutOfMemoryError: CUDA out of memory*",
            "test_oom.py:7: OutOfMemoryError",
            "out of memory: 2.00 GiB asked for by test_oom.py:7 torch.empty, "
            "1.72 GiB free of 14.75 GiB, 285.9 MiB too much",
            "  5.86 GiB allocated, 7.17 GiB reserved and not allocated, 0 B held outside PyTorch",
            "  5.86 GiB  other  test_oom.py:7  torch.empty  2000 × 3.0 MiB uint8",
            "  this request would have fitted with PYTORCH_CUDA_ALLOC_CONF="
            "expandable_segments:True (found by replaying the allocations up to it)",
            "  10.00 GiB  other  test_oom.py:7  torch.empty  1 × 10.00 GiB uint8",
            "  no allocator setting would have helped (tried: expandable_segments:True, *",
        ]
    )
    report = project.written_report()
    found = report["test_oom.py::test_fragmented"]["out_of_memory"]
    assert found["requested"] == 2 << 30
    assert found["allocated"] == 2000 * (3 << 20)
    assert found["reserved"] == 667 * (20 << 20)
    assert found["fragmentation"] == found["reserved"] - found["allocated"]
    assert found["avoided_by"][0] == "expandable_segments:True"
    assert report["test_oom.py::test_too_large"]["out_of_memory"]["avoided_by"] == []
    assert "out_of_memory" not in report["test_oom.py::test_expected"]


LEAK = """
    KEPT = {}

    @pytest.mark.gpumem(max_leak=0)
    def test_keeps():
        KEPT["x"] = [torch.ones(1024, device="cuda")]
"""


def test_a_leak_names_the_variable_that_keeps_it(project: Project) -> None:
    project.write(test_leak=LEAK)

    report = project.report()["test_leak.py::test_keeps"]

    (leak,) = [verdict for verdict in report["verdicts"] if verdict["kind"] == "leak"]
    (line,) = leak["explanation"]
    assert line["bytes"] == leak["actual"] == 4096
    assert line["site"] == "test_leak.py:8"
    assert line["held_by"] == "test_leak.KEPT['x'][0]"


LIMITED = """
    GIB = 1 << 30

    def fill():
        return [torch.empty(GIB, dtype=torch.uint8, device="cuda") for _ in range(9)]

    @pytest.mark.gpumem(max="2GB")
    def test_fraction():
        torch.cuda.set_per_process_memory_fraction(0.25)
        fill()

    @pytest.mark.gpumem(quota="3GiB")
    def test_quota():
        fill()
"""


def test_a_smaller_limit_of_the_process_or_of_the_test_is_named(project: Project) -> None:
    project.write(test_limited=LIMITED)

    result = project.run()

    result.assert_outcomes(failed=2)
    # A quarter of the T4's 14.75 GiB.
    result.stdout.fnmatch_lines(
        [
            "out of memory: 1.00 GiB asked for by test_limited.py:7 torch.empty, 703.5 MiB left of "
            "the 3.69 GiB that this process may reserve "
            "(torch.cuda.set_per_process_memory_fraction, or a quota); the device has 11.75 GiB "
            "free of 14.75 GiB",
            "  its limit max=1.86 GiB was passed before: 3.00 GiB were allocated",
            "out of memory: 1.00 GiB asked for *, * left of the 3.00 GiB that this process may *",
        ]
    )
