"""Refusals of kernels without a description, which name the call and the dry device."""

from __future__ import annotations

import importlib.machinery
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.utils import cpp_extension

from pytest_gpumem import simulate, simulate_operator
from pytest_gpumem.simulated.surface.kernels import Extensions
from pytest_gpumem.values.errors import (
    UndescribedKernelError,
    UnknownValueError,
    UnsupportedOperatorError,
)
from tests.forked import quick

HERE = "tests/simulated/test_undescribed.py:"
ops = torch.ops.gpumem_paste

pytestmark = pytest.mark.usefixtures("no_descriptions")


@pytest.fixture(autouse=True)
def _no_cuda_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch is a CUDA build and nvcc is there, extensions are compiled."""
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    made = torch.library.Library("gpumem_paste", "DEF")
    yield made
    made._destroy()


def refusal(call: Callable[[], Any]) -> UndescribedKernelError:
    with pytest.raises(UndescribedKernelError) as caught:
        call()
    return caught.value


def x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape or (2, 3), dtype=dtype, device="cuda")


def test_a_refused_operator_is_named_with_a_description(library: torch.library.Library) -> None:
    library.define("fused(Tensor x, *, float eps=1e-6) -> Tensor")
    with simulate("T4"):
        error = refusal(lambda: ops.fused(x(), eps=1e-5))
    assert str(error).startswith(f"gpumem_paste.fused.default at {HERE}")
    assert str(error).endswith(
        'say what it allocates with pytest_gpumem.simulate_operator("gpumem_paste::fused"), '
        "or run pytest --gpumem-device=dry, which needs no description"
    )
    assert error.kernel == "gpumem_paste::fused"


def test_the_line_is_the_users_and_not_the_librarys(
    library: torch.library.Library, tmp_path: Path
) -> None:
    library.define("inside(Tensor x) -> Tensor")
    source = "import torch\n\ndef wrapper(x):\n    return torch.ops.gpumem_paste.inside(x)\n"
    path = tmp_path / "site-packages" / "mylib.py"
    space: dict[str, Any] = {}
    exec(compile(source, str(path), "exec"), space)
    with simulate("T4"):
        error = refusal(lambda: space["wrapper"](x()))
    assert str(error).startswith(f"gpumem_paste.inside.default at {HERE}")


def test_a_known_value_that_the_kernel_writes_is_forgotten(library: torch.library.Library) -> None:
    library.define("fill_(Tensor(a!) x) -> Tensor(a!)")
    simulate_operator("gpumem_paste::fill_")(lambda x: x)
    with simulate("T4"):
        lengths = torch.tensor([3, 4]).cuda()
        ops.fill_(lengths)
        with pytest.raises(UnknownValueError):
            lengths.sum().item()


def test_a_refusal_can_be_pickled(library: torch.library.Library) -> None:
    library.define("sent(Tensor x) -> Tensor")
    with simulate("T4"):
        error = refusal(lambda: ops.sent(x()))
    copied = pickle.loads(pickle.dumps(error))
    assert (str(copied), copied.kernel) == (str(error), error.kernel)


def test_handing_memory_to_other_code_has_its_own_error() -> None:
    with simulate("T4"), pytest.raises(UnsupportedOperatorError, match="hands over") as caught:
        _ = x().__cuda_array_interface__
    assert not isinstance(caught.value, UndescribedKernelError)


# Compiled extensions.


class Compiled:
    def __init__(self, doc: str) -> None:
        self.__doc__ = doc

    def __call__(self, *args: Any, **options: Any) -> Any:
        raise AssertionError("a compiled function saw a simulated tensor")


def test_a_compiled_function_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("gpumem_pasted_ext")
    loader = importlib.machinery.ExtensionFileLoader("gpumem_pasted_ext", "gpumem_pasted_ext.so")
    module.__spec__ = importlib.machinery.ModuleSpec("gpumem_pasted_ext", loader)
    module.norm = Compiled("norm(x: torch.Tensor, eps: float = 1e-05) -> torch.Tensor\n")
    monkeypatch.setitem(sys.modules, "gpumem_pasted_ext", module)
    monkeypatch.setattr("pytest_gpumem.simulated.simulation.EXTENSIONS", Extensions())
    with simulate("T4"):
        given = x()
        error = refusal(lambda: module.norm(given, 1e-6))
    assert str(error).startswith(f"gpumem_pasted_ext.norm at {HERE}")
    assert 'simulate_operator("gpumem_pasted_ext.norm"), or run pytest --gpumem' in str(error)


# Extensions that are compiled while a test runs.


def test_a_jit_extension_is_described_by_its_functions() -> None:
    def build() -> Any:
        return cpp_extension.load(name="gpumem_jit", sources=["kernel.cu"])

    with simulate("T4") as gpu:
        error = refusal(build)
        assert str(error).startswith(f'load(name="gpumem_jit", ...) at {HERE}')
        assert str(error).endswith('simulate_operator("torch.utils.cpp_extension.load")')
        simulate_operator("torch.utils.cpp_extension.load")(
            lambda name, *args, **options: SimpleNamespace(forward=lambda x, n: torch.empty_like(x))
        )
        built = build()
        lengths = torch.tensor([3, 4]).cuda()
        before = gpu.allocated
        result = built.forward(lengths, 2)
        assert gpu.allocated == before + 512
        assert result.is_cuda
        with pytest.raises(UnknownValueError):
            lengths.sum().item()
        with pytest.raises(UnsupportedOperatorError, match=r"^forward at .* tensors of the CPU"):
            built.forward(torch.ones(3), 2)


def test_load_inline_is_refused_by_its_own_name() -> None:
    with simulate("T4"):
        error = refusal(
            lambda: cpp_extension.load_inline(
                name="gpumem_inline", cpp_sources="", cuda_sources="// ...", functions=["twice"]
            )
        )
    assert str(error).startswith('load_inline(name="gpumem_inline", ...) at ')


def test_cuda_extension_names_the_line() -> None:
    with simulate("T4"), pytest.raises(UnsupportedOperatorError, match=rf"at {HERE}\d+ "):
        cpp_extension.CUDAExtension("gpumem_ext", ["kernel.cu"])


def test_a_cpu_extension_is_not_called_with_simulated_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, compiling = ModuleType("gpumem_cpu"), cast(Any, cpp_extension)
    function = Compiled("forward(arg0: torch.Tensor) -> torch.Tensor\n")
    extensions = Extensions()
    for place in ("surface.kernels", "simulation"):
        monkeypatch.setattr(f"pytest_gpumem.simulated.{place}.EXTENSIONS", extensions)

    vars(made)["forward"] = function

    def compiled(name: str, sources: list[str], *, with_cuda: bool | None) -> ModuleType:
        return made

    monkeypatch.setattr(cpp_extension, "_jit_compile", compiled)
    with simulate("T4"):
        compiling._jit_compile("gpumem_cpu", ["kernel.cpp"], with_cuda=None)
        error = refusal(lambda: made.forward(x()))
        assert str(error).startswith(f"gpumem_cpu.forward at {HERE}")
        assert 'simulate_operator("torch.utils.cpp_extension.load")' in str(error)
    assert made.forward is function
    with simulate("T4"):  # a fixture of several tests has compiled it
        refusal(lambda: made.forward(x()))


def test_a_loader_imported_in_the_simulation_is_refused_too() -> None:
    code = (
        "import sys\n"
        "from pytest_gpumem import simulate\n"
        "from pytest_gpumem.values.errors import UndescribedKernelError\n"
        "with simulate('T4'):\n"
        "    assert 'torch.utils.cpp_extension' not in sys.modules\n"
        "    from torch.utils import cpp_extension\n"
        "    from torch.utils.cpp_extension import load\n"
        "    cpp_extension.CUDA_HOME = None\n"
        "    try:\n"
        "        load('gpumem_late', ['kernel.cu'])\n"
        "    except UndescribedKernelError as error:\n"
        "        print(error.kernel)\n"
        "from torch.utils import cpp_extension\n"
        "assert cpp_extension._jit_compile.__module__ == cpp_extension.__name__\n"
        "assert not hasattr(cpp_extension._jit_compile, '__wrapped__')\n"
    )
    ran = subprocess.run([quick(), "-c", code], check=True, capture_output=True, text=True)
    assert ran.stdout == 'load(name="gpumem_late", ...)\n'
