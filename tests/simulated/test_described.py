"""``simulate_operator()``: descriptions of what a library's kernels allocate and return."""

from __future__ import annotations

import importlib.machinery
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from pytest_gpumem import simulate, simulate_operator
from pytest_gpumem.simulated.surface.kernels import Extensions
from pytest_gpumem.values.errors import UnknownValueError, UnsupportedOperatorError

KIB = 1024

pytestmark = pytest.mark.usefixtures("no_descriptions")


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    made = torch.library.Library("gpumem_mylib", "DEF")
    yield made
    made._destroy()


@pytest.fixture
def mylib(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A library whose kernels need a GPU."""
    module = ModuleType("gpumem_mylib")
    source = """
import torch

def launch(x, scale=1.0, *, out=None):
    raise AssertionError("the kernel ran without a GPU") if x.is_cuda else LookupError("on the CPU")

def decorated(amount):
    def call(x):
        return launch(x, amount)
    return call

half = decorated(0.5)

class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return launch(x)
    @staticmethod
    def backward(ctx, gradient):
        return launch(gradient)

def stream():
    yield 1
"""
    exec(source, module.__dict__)
    for value in list(vars(module).values()):
        if callable(value) and hasattr(value, "__module__"):
            value.__module__ = "gpumem_mylib"
    monkeypatch.setitem(sys.modules, "gpumem_mylib", module)
    return module


# Operators of torch.library.


def test_outputs_of_a_described_operator_are_allocated_in_their_order(
    library: torch.library.Library,
) -> None:
    library.define("two(Tensor x) -> (Tensor, Tensor)")

    @simulate_operator("gpumem_mylib::two")
    def two(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.new_empty(256), torch.empty(512, device="cuda")

    with simulate("T4") as gpu:
        x = torch.ones(128, device="cuda")
        first, second = torch.ops.gpumem_mylib.two(x)
        assert [entry.size for entry in gpu.trace if entry.action == "alloc"] == [512, 1024, 2048]
        assert first.is_cuda
        assert second.shape == (512,)
        assert gpu.allocated == 512 + 1024 + 2048


def test_temporaries_of_a_description_are_freed_when_they_are_dropped(
    library: torch.library.Library,
) -> None:
    library.define("norm(Tensor x) -> Tensor")

    @simulate_operator("gpumem_mylib::norm")
    def norm(x: torch.Tensor) -> torch.Tensor:
        workspace = torch.empty(64 * KIB, dtype=torch.uint8, device=x.device)
        del workspace
        return torch.empty_like(x)

    with simulate("T4") as gpu:
        x = torch.ones(16 * KIB, device="cuda")
        y = torch.ops.gpumem_mylib.norm(x)
        actions = [(entry.action, entry.size) for entry in gpu.trace]
        assert actions[1:] == [
            ("alloc", 64 * KIB),
            ("alloc", 64 * KIB),
            ("free_requested", 64 * KIB),
            ("free_completed", 64 * KIB),
            ("alloc", 64 * KIB),
        ]
        assert gpu.allocated == gpu.peak_allocated == 128 * KIB
        del y


def test_an_operator_may_be_described_during_a_simulation(
    library: torch.library.Library,
) -> None:
    library.define("late(Tensor x) -> Tensor")
    with simulate("T4"):
        x = torch.ones(3, device="cuda")
        with pytest.raises(UnsupportedOperatorError):
            torch.ops.gpumem_mylib.late(x)
        simulate_operator("gpumem_mylib::late")(torch.empty_like)
        assert torch.ops.gpumem_mylib.late(x).is_cuda


def test_a_refusal_of_an_operator_shows_a_description_to_write(
    library: torch.library.Library,
) -> None:
    library.define("fused(Tensor x) -> Tensor")
    library.impl("fused", lambda x: x * 2, "CUDA")
    simulate_operator("gpumem_mylib::fussed")(torch.empty_like)

    with simulate("T4"), pytest.raises(UnsupportedOperatorError) as caught:
        torch.ops.gpumem_mylib.fused(torch.ones(3, device="cuda"))

    text = str(caught.value)
    assert text.startswith("gpumem_mylib.fused.default at tests/simulated/test_described.py:")
    assert 'simulate_operator("gpumem_mylib::fused")' in text
    assert 'no operator is called "gpumem_mylib::fussed", which is described' in text


def test_an_operator_with_a_fake_implementation_needs_no_description() -> None:
    @torch.library.custom_op("gpumem_mylib::doubled", mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the kernel ran")

    @doubled.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    doubled.register_autograd(lambda ctx, gradient: doubled(gradient))
    with simulate("T4") as gpu:
        x = torch.ones(256, device="cuda", requires_grad=True)
        y = doubled(x)
        assert (y.is_cuda, y.requires_grad, gpu.allocated) == (True, True, 2048)
        y.sum().backward()
        assert x.grad is not None
        assert x.grad.is_cuda


def test_a_description_overrides_the_fake_and_keeps_autograd() -> None:
    @torch.library.custom_op("gpumem_mylib::tripled", mutates_args=())
    def tripled(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    tripled.register_fake(torch.empty_like)
    tripled.register_autograd(lambda ctx, gradient: gradient * 3)
    simulate_operator(tripled)(
        lambda x: x.new_empty(x.shape) if x.new_empty(512) is None else x + 1
    )
    with simulate("T4") as gpu:
        x = torch.ones(256, device="cuda", requires_grad=True)
        y = tripled(x)
        assert gpu.peak_allocated == 1024 + 2048
        y.sum().backward()
        assert x.grad is not None
    assert tripled(torch.ones(1)).item() == 3


def test_an_overload_may_have_a_description_of_its_own(library: torch.library.Library) -> None:
    library.define("mix(Tensor x) -> Tensor")
    library.define("mix.large(Tensor x, int size) -> Tensor")
    simulate_operator("gpumem_mylib::mix")(torch.empty_like)
    simulate_operator(torch.ops.gpumem_mylib.mix.large)(lambda x, size: x.new_empty(size))
    with simulate("T4"):
        x = torch.ones(3, device="cuda")
        assert torch.ops.gpumem_mylib.mix(x).shape == (3,)
        assert torch.ops.gpumem_mylib.mix(x, 7).shape == (7,)


def test_outputs_that_do_not_fit_the_schema_are_one_sentence(
    library: torch.library.Library,
) -> None:
    library.define("pair(Tensor x) -> (Tensor, Tensor)")
    simulate_operator("gpumem_mylib::pair")(torch.empty_like)
    with (
        simulate("T4"),
        pytest.raises(ValueError, match=r"returns 2 values, and its description 1"),
    ):
        torch.ops.gpumem_mylib.pair(torch.ones(3, device="cuda"))


# Python functions.


def test_a_function_is_described_wherever_it_was_imported(mylib: ModuleType) -> None:
    launch = mylib.launch
    calls = []

    @simulate_operator("gpumem_mylib.launch")
    def described(x: torch.Tensor, scale: float = 1.0, *, out: Any = None) -> torch.Tensor:
        calls.append((scale, out))
        return x.new_empty(512)

    with simulate("T4") as gpu:
        x = torch.ones(256, device="cuda")
        y = launch(x, 2.0, out=None)
        z = mylib.half(x)
        assert (y.shape, z.shape) == ((512,), (512,))
        assert calls == [(2.0, None), (0.5, None)]
        assert gpu.allocated == 1024 + 2 * 2048
    with pytest.raises(LookupError, match="on the CPU"):
        launch(torch.ones(3))


def test_cpu_tensors_reach_the_function_itself(mylib: ModuleType) -> None:
    simulate_operator(mylib.launch)(lambda x, *_: x.clone())
    with simulate("T4"):
        with pytest.raises(LookupError, match="on the CPU"):
            mylib.launch(torch.ones(3))
        assert mylib.launch(torch.ones(3, device="cuda")).is_cuda


def test_functions_with_a_closure_and_methods_are_described_too(mylib: ModuleType) -> None:
    simulate_operator("gpumem_mylib.half")(torch.empty_like)
    simulate_operator("gpumem_mylib.Norm.forward")(lambda ctx, x: torch.empty_like(x))
    simulate_operator("gpumem_mylib.Norm.backward")(lambda ctx, g: torch.empty_like(g))
    with simulate("T4"):
        x = torch.ones(3, device="cuda", requires_grad=True)
        mylib.Norm.apply(mylib.half(x.detach()).requires_grad_()).sum().backward()
        mylib.Norm.apply(x).sum().backward()
        assert x.grad is not None
    with pytest.raises(LookupError):
        mylib.half(torch.ones(3))


def test_a_function_described_in_a_simulation_is_restored_afterwards(
    mylib: ModuleType,
) -> None:
    with simulate("T4"):
        x = torch.ones(3, device="cuda")
        simulate_operator(mylib.launch)(torch.empty_like)
        assert mylib.launch(x).is_cuda
        simulate_operator(mylib.launch)(lambda x: x.new_empty(7))
        assert mylib.launch(x).shape == (7,)
    with pytest.raises(LookupError):
        mylib.launch(torch.ones(3))
    with simulate("T4"):
        assert mylib.launch(torch.ones(3, device="cuda")).shape == (7,)


def test_tensors_that_a_described_kernel_may_write_become_unknown(mylib: ModuleType) -> None:
    simulate_operator("gpumem_mylib.launch")(lambda x: None)
    with simulate("T4"):
        lengths = torch.tensor([3, 4]).cuda()
        assert lengths.tolist() == [3, 4]
        mylib.launch(lengths)
        with pytest.raises(UnknownValueError):
            lengths.sum().item()


# Compiled extensions.


class Compiled:
    """A function as pybind11 makes them: its docstring begins with the signature."""

    __doc__ = "rms_norm(arg0: torch.Tensor) -> torch.Tensor\n"
    __name__ = "rms_norm"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        assert not x.is_cuda
        return x + 1


@pytest.fixture
def extension(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("gpumem_ext")
    loader = importlib.machinery.ExtensionFileLoader("gpumem_ext", "gpumem_ext.so")
    module.__spec__ = importlib.machinery.ModuleSpec("gpumem_ext", loader)
    module.rms_norm = Compiled()  # type: ignore[attr-defined]  # a stand-in module
    monkeypatch.setitem(sys.modules, "gpumem_ext", module)
    monkeypatch.setattr(
        "pytest_gpumem.simulated.simulation.EXTENSIONS",
        Extensions(),
    )
    return module


def test_a_compiled_function_is_not_called_with_simulated_tensors(extension: ModuleType) -> None:
    original = extension.rms_norm
    with simulate("T4"):
        assert extension.rms_norm(torch.ones(1)).item() == 2
        with pytest.raises(UnsupportedOperatorError) as caught:
            extension.rms_norm(torch.ones(1, device="cuda"))
    assert str(caught.value).startswith("gpumem_ext.rms_norm at tests/simulated/test_described.py:")
    assert "is a function of a compiled extension" in str(caught.value)
    assert extension.rms_norm is original


def test_a_compiled_function_is_described_by_its_path(extension: ModuleType) -> None:
    original = extension.rms_norm
    simulate_operator("gpumem_ext.rms_norm")(torch.empty_like)
    with simulate("T4"):
        assert extension.rms_norm(torch.ones(3, device="cuda")).is_cuda
        assert extension.rms_norm(torch.ones(1)).item() == 2
    assert extension.rms_norm is original


# Mistakes.


@pytest.mark.parametrize(
    ("kernel", "text"),
    [
        ("norm", r"write an operator, \"mylib::fused_norm\", or the path"),
        ("my lib::norm", r"an operator is named like \"mylib::fused_norm\""),
        ("aten::add", r"an operator of PyTorch itself"),
        ("gpumem_mylib.lanch", r"gpumem_mylib has no 'lanch'; did you mean \"launch\"\?"),
        ("gpumem_mylib.Norm.sideward", r"Norm has no 'sideward'"),
        ("gpumem_nolib.launch", r"cannot import gpumem_nolib: No module named 'gpumem_nolib'"),
        ("gpumem_mylib.stream", r"a generator launches no kernel"),
    ],
)
def test_wrong_names_are_refused_in_a_sentence(mylib: ModuleType, kernel: str, text: str) -> None:
    with pytest.raises(ValueError, match=rf"^simulate_operator\(.*\): .*{text}") as caught:
        simulate_operator(kernel)
    assert "\n" not in str(caught.value)


def test_descriptions_and_kernels_of_wrong_types_are_refused() -> None:
    with pytest.raises(TypeError, match="takes a function that makes the kernel's outputs"):
        simulate_operator("gpumem_mylib::x")(3)  # type: ignore[type-var]  # the mistake
    with pytest.raises(TypeError, match="neither an operator, a function nor a Triton kernel"):
        simulate_operator(3)


def test_describing_imports_no_torch() -> None:
    code = (
        "import sys, pytest_gpumem\n"
        "@pytest_gpumem.simulate_operator('mylib::fused_norm')\n"
        "def norm(x): ...\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_functions_are_restored_after_the_simulation(mylib: ModuleType) -> None:
    code = mylib.launch.__code__
    simulate_operator(mylib.launch)(torch.empty_like)
    with simulate("T4"):
        assert mylib.launch.__code__ is not code
    assert mylib.launch.__code__ is code
