"""Custom kernels: skipped with a sentence, or described in a conftest.py."""

from __future__ import annotations

from tests.pytest_project import Project

KERNEL = """
    @torch.library.custom_op("gpumem_shop::{name}", mutates_args=())
    def scaled(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no GPU")

    @pytest.mark.gpumem(max="1KiB")
    def test_kernel():
        x = torch.ones(128, device="cuda")
        assert scaled(x).is_cuda
"""


def test_an_unknown_kernel_is_skipped_with_what_to_write(project: Project) -> None:
    project.write(test_kernel=KERNEL.format(name="alone"))

    result = project.run("-rs")

    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(
        ['*gpumem_shop.alone.default at test_kernel.py:*simulate_operator("gpumem_shop::alone")*']
    )


def test_a_conftest_describes_it(project: Project) -> None:
    project.write(
        test_kernel=KERNEL.format(name="described"),
        conftest="""
            from pytest_gpumem import simulate_operator

            @simulate_operator("gpumem_shop::described")
            def described(x):
                return torch.empty_like(x)
        """,
    )

    project.run().assert_outcomes(passed=1)


def test_what_a_description_allocates_counts(project: Project) -> None:
    project.write(
        test_kernel=KERNEL.format(name="large"),
        conftest="""
            from pytest_gpumem import simulate_operator

            @simulate_operator("gpumem_shop::large")
            def described(x):
                workspace = torch.empty(4096, device=x.device)
                return torch.empty_like(x)
        """,
    )

    result = project.run()

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*17,408 B*"])


def test_a_thread_that_cannot_be_simulated_skips_the_test(project: Project) -> None:
    project.write(
        test_thread="""
            import threading

            @torch.library.custom_op("gpumem_shop::in_thread", mutates_args=())
            def scaled(x: torch.Tensor) -> torch.Tensor:
                raise RuntimeError("no GPU")

            @pytest.mark.gpumem
            def test_kernel():
                x = torch.ones(3, device="cuda")
                thread = threading.Thread(target=scaled, args=(x,))
                thread.start()
                thread.join()
        """
    )

    result = project.run("-rs")

    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*gpumem_shop.in_thread.default at *"])
