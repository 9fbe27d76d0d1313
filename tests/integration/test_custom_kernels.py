"""Custom kernels: skipped with a sentence, or described in a conftest.py."""

from __future__ import annotations

import pytest

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


def test_an_unknown_kernel_skips_the_test_with_a_description_to_paste(project: Project) -> None:
    project.write(test_kernel=KERNEL.format(name="alone"))

    result = project.run("-rs")

    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(
        ['*gpumem_shop.alone.default at test_kernel.py:*simulate_operator("gpumem_shop::alone")*']
    )


def test_a_conftest_describes_a_kernel(project: Project) -> None:
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


def test_memory_that_a_description_allocates_counts(project: Project) -> None:
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


PASTED = """
    torch.library.define("gpumem_shop::{name}", "(Tensor x, float eps) -> Tensor")

    @pytest.mark.gpumem(max="1KiB")
    @pytest.mark.parametrize("eps", [0.5, 0.25])
    def test_kernel(eps):
        x = torch.ones(128, device="cuda")
        assert torch.ops.gpumem_shop.{name}(x, eps).is_cuda

    @pytest.mark.gpumem(max="1KiB")
    def test_compiled():
        from torch.utils import cpp_extension
        from torch.utils.cpp_extension import load

        cpp_extension.CUDA_HOME = None  # as on a machine without CUDA's compiler
        built = load(name="{name}_ext", sources=["kernel.cu"])
        assert built.fused(torch.ones(128, device="cuda")).shape == (128,)
"""


@pytest.mark.parametrize("workers", [(), ("-n1",)], ids=["one process", "a worker"])
def test_an_unknown_kernel_is_named_once_for_all_its_tests(
    project: Project, workers: tuple[str, ...]
) -> None:
    project.write(test_kernel=PASTED.format(name="pasted"))

    refused = project.run_apart(*workers)

    refused.assert_outcomes(skipped=3)
    skips = [line for line in refused.outlines if "was skipped:" in line or "were skipped:" in line]
    assert [line.partition(": gpumem_shop")[0].partition(": load(")[0] for line in skips] == [
        "note: test_kernel.py::test_kernel[0.5] and 1 more test were skipped",
        "note: test_kernel.py::test_compiled was skipped",
    ]
    assert "--gpumem-device=dry" in " ".join(refused.outlines)


def test_a_verbose_run_names_every_test_of_an_unknown_kernel(project: Project) -> None:
    project.write(test_kernel=PASTED.format(name="verbose"))
    result = project.run("-v", "-k", "test_kernel[")
    result.stdout.fnmatch_lines(
        [
            "note: test_kernel.py::test_kernel[[]0.5] was skipped: *",
            "note: test_kernel.py::test_kernel[[]0.25] was skipped: *",
        ]
    )
