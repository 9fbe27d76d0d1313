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
BINDS = 'PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("fused", &fused); }'


def snippets(lines: list[str]) -> str:
    """What the terminal says is to be pasted, as it is printed."""
    blocks = "\n".join("" if line.startswith("====") else line for line in lines).split("\n\n")
    heads = [i for i, block in enumerate(blocks) if block.startswith("to simulate ")]
    return "".join(blocks[i + 1].strip() + "\n" for i in heads)


@pytest.mark.parametrize("workers", [(), ("-n1",)], ids=["one process", "a worker"])
def test_what_the_terminal_shows_can_be_pasted(project: Project, workers: tuple[str, ...]) -> None:
    project.write(test_kernel=PASTED.format(name="pasted"))
    (project.path / "kernel.cu").write_text(BINDS)

    refused = project.run_apart(*workers)

    refused.assert_outcomes(skipped=3)
    refused.stdout.fnmatch_lines(
        [
            "to simulate gpumem_shop::pasted, paste this into conftest.py, or take the dry*",
            "# gpumem_shop.pasted(Tensor (128,) float32 cuda:0, 0.5) was called at *.py:*",
            'to simulate load(name="pasted_ext", ...), paste this into conftest.py, or take*',
            '# load(name="pasted_ext", ...) was called at test_kernel.py:*',
        ]
    )
    # Two tests call the operator: it is told once.
    told = [line for line in refused.outlines if "was skipped:" in line or "were skipped:" in line]
    assert [line.partition(": gpumem_shop")[0].partition(": load(")[0] for line in told] == [
        "note: test_kernel.py::test_kernel[0.5] and 1 more test were skipped",
        "note: test_kernel.py::test_compiled was skipped",
    ]
    headings = [line for line in refused.outlines if line.startswith("to simulate ")]
    assert len(headings) == 2
    text = snippets(refused.outlines)
    assert len(text.splitlines()) == 6 + 8

    (project.path / "conftest.py").write_text(text)
    project.run_apart(*workers).assert_outcomes(passed=3)


def test_a_quiet_run_shows_no_snippet(project: Project) -> None:
    project.write(test_kernel=KERNEL.format(name="quiet"))
    result = project.run("-q")
    result.stdout.no_fnmatch_line("*into conftest.py:")


def test_a_verbose_run_names_every_test_of_a_kernel(project: Project) -> None:
    project.write(test_kernel=PASTED.format(name="verbose"))
    result = project.run("-v", "-k", "test_kernel[")
    result.stdout.fnmatch_lines(
        [
            "note: test_kernel.py::test_kernel[[]0.5] was skipped: *",
            "note: test_kernel.py::test_kernel[[]0.25] was skipped: *",
        ]
    )
