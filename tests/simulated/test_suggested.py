"""The refusal of a kernel brings a description made from its call, which runs as it is."""

from __future__ import annotations

import importlib.machinery
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch
from torch.utils import cpp_extension

from pytest_gpumem import simulate
from pytest_gpumem.simulated.operators.bound import Bound, bound_in
from pytest_gpumem.simulated.operators.described import DESCRIPTIONS
from pytest_gpumem.simulated.surface.kernels import Extensions
from pytest_gpumem.values.errors import (
    UndescribedKernelError,
    UnknownValueError,
    UnsupportedOperatorError,
)
from tests.forked import quick

CHECK = "  # check: shape, dtype, what else it takes"
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


def pasted(call: Callable[[], Any]) -> Any:
    """What ``call`` returns when the snippet of its refusal has been pasted."""
    exec(refusal(call).snippet, {})
    return call()


def x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape or (2, 3), dtype=dtype, device="cuda")


# Operators of torch.library.


def test_the_snippet_shows_the_call_and_the_schema(library: torch.library.Library) -> None:
    library.define("fused(Tensor x, Tensor? bias=None, *, float eps=1e-5, str mode='a') -> Tensor")
    with simulate("T4"):
        given = x(8, 128, 64, dtype=torch.bfloat16)
        error = refusal(lambda: ops.fused(given, eps=0.5))
    call, *lines = error.snippet.splitlines()
    assert call.startswith(
        "# gpumem_paste.fused(Tensor (8, 128, 64) bfloat16 cuda:0, eps=0.5) was called at "
        "tests/simulated/test_suggested.py:"
    )
    assert lines == [
        "import torch",
        "from pytest_gpumem import simulate_operator",
        '@simulate_operator("gpumem_paste::fused")',
        "def fused(x, bias=None, *, eps=1e-05, mode='a'):",
        f"    return torch.empty_like(x){CHECK}",
    ]
    assert error.kernel == "gpumem_paste::fused"
    assert "\n" not in str(error)


def test_the_snippet_of_an_operator_runs(library: torch.library.Library) -> None:
    library.define("fused(Tensor x, float eps=1e-5) -> Tensor")
    with simulate("T4") as gpu:
        given = x(256)
        result = pasted(lambda: ops.fused(given))
        assert (result.shape, result.is_cuda, gpu.allocated) == ((256,), True, 2048)


@pytest.mark.parametrize(
    ("schema", "returned"),
    [
        ("two(Tensor x) -> (Tensor, Tensor)", f"torch.empty_like(x), torch.empty_like(x){CHECK}"),
        ("mixed(Tensor x) -> (Tensor, int)", f"torch.empty_like(x), 0{CHECK}"),
        ("none(Tensor x) -> ()", "None  # check: what it takes"),
        ("count(Tensor x) -> int", f"0{CHECK}"),
        ("many(Tensor x) -> Tensor[]", f"[torch.empty_like(x)]{CHECK}"),
        ("place_(Tensor(a!) x) -> Tensor(a!)", "x  # check: what it takes"),
        ("silent(Tensor(a!) x) -> ()", "None  # check: what it takes"),
        ("view(Tensor(a) x) -> Tensor(a)", "x.view_as(x)  # check: what it takes"),
        ("lambda(Tensor x) -> Tensor", f"torch.empty_like(x){CHECK}"),
    ],
)
def test_results_are_those_of_the_schema(
    library: torch.library.Library, schema: str, returned: str
) -> None:
    library.define(schema)
    operator = getattr(ops, schema.partition("(")[0])
    with simulate("T4"):
        given = x()
        error = refusal(lambda: operator(given))
        assert error.snippet.splitlines()[-1] == f"    return {returned}"
        pasted(lambda: operator(given))


def test_what_is_written_to_an_argument_is_returned_by_its_name(
    library: torch.library.Library,
) -> None:
    library.define("into.out(Tensor x, int n, *, Tensor(a!) out) -> Tensor(a!)")
    with simulate("T4") as gpu:
        given, out = x(), x()
        before = gpu.allocated
        result = pasted(lambda: ops.into.out(given, 3, out=out))
        assert result.data_ptr() == out.data_ptr()
        assert gpu.allocated == before
    assert [*DESCRIPTIONS.operators] == ["gpumem_paste::into.out"]


def test_a_list_of_tensors_makes_a_list_like_it(library: torch.library.Library) -> None:
    library.define("each(int n, Tensor[] xs) -> Tensor[]")
    library.define("joined(Tensor[] xs) -> Tensor")
    with simulate("T4"):
        given = [x(size) for size in (1, 2, 3, 4)]
        error = refusal(lambda: ops.each(1, given))
        assert "[Tensor (1,) float32 cuda:0, " in error.snippet
        assert "Tensor (3,) float32 cuda:0, ...])" in error.snippet
        assert [t.shape for t in pasted(lambda: ops.each(1, given))] == [(1,), (2,), (3,), (4,)]
        assert pasted(lambda: ops.joined(given)).shape == (1,)


def test_an_argument_that_was_none_makes_nothing(library: torch.library.Library) -> None:
    library.define("second(Tensor? x, Tensor y) -> Tensor")
    with simulate("T4"):
        given = x(7)
        assert pasted(lambda: ops.second(None, given)).shape == (7,)


def test_many_arguments_stay_on_one_line(library: torch.library.Library) -> None:
    names = [f"argument_number_{i}" for i in range(20)]
    library.define(f"wide(Tensor x, {', '.join(f'int {n}=0' for n in names)}) -> Tensor")
    with simulate("T4"):
        given = x()
        error = refusal(lambda: ops.wide(given, argument_number_3=1))
        assert "def wide(x, *args, **options):" in error.snippet.splitlines()
        assert pasted(lambda: ops.wide(given, argument_number_3=1)).shape == (2, 3)


def test_a_known_value_that_the_kernel_writes_is_forgotten(library: torch.library.Library) -> None:
    library.define("fill_(Tensor(a!) x) -> Tensor(a!)")
    with simulate("T4"):
        lengths = torch.tensor([3, 4]).cuda()
        pasted(lambda: ops.fill_(lengths))
        with pytest.raises(UnknownValueError):
            lengths.sum().item()


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
    here = "tests/simulated/test_suggested.py:"
    assert str(error).startswith(f"gpumem_paste.inside.default at {here}")
    assert f"was called at {here}" in error.snippet


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes came with Python 3.11")
def test_a_traceback_ends_with_the_snippet(library: torch.library.Library) -> None:
    library.define("noted(Tensor x) -> Tensor")
    with simulate("T4"):
        error = refusal(lambda: ops.noted(x()))
    (note,) = error.__notes__
    assert note == (
        f"to simulate gpumem_paste::noted, paste this into conftest.py, or take the dry "
        f"device, which needs no description:\n\n{error.snippet}"
    )


def test_a_refusal_can_be_pickled(library: torch.library.Library) -> None:
    library.define("sent(Tensor x) -> Tensor")
    with simulate("T4"):
        error = refusal(lambda: ops.sent(x()))
    copied = pickle.loads(pickle.dumps(error))
    assert (str(copied), copied.kernel, copied.snippet) == (
        str(error),
        error.kernel,
        error.snippet,
    )


def test_memory_that_is_handed_over_has_a_sentence_of_its_own() -> None:
    with simulate("T4"), pytest.raises(UnsupportedOperatorError, match="hands over") as caught:
        _ = x().__cuda_array_interface__
    assert not isinstance(caught.value, UndescribedKernelError)


# Compiled extensions.


class Compiled:
    def __init__(self, doc: str) -> None:
        self.__doc__ = doc

    def __call__(self, *args: Any, **options: Any) -> Any:
        raise AssertionError("a compiled function saw a simulated tensor")


@pytest.mark.parametrize(
    ("doc", "definition", "returned"),
    [
        (
            "norm(x: torch.Tensor, eps: float = 1e-05) -> torch.Tensor\n",
            "def norm(x, eps):",
            f"torch.empty_like(x){CHECK}",
        ),
        (
            "norm(arg0: torch.Tensor, arg1: float) -> Tuple[torch.Tensor, torch.Tensor]\n",
            "def norm(arg0, arg1):",
            f"torch.empty_like(arg0), torch.empty_like(arg0){CHECK}",
        ),
        (
            "norm(arg0: torch.Tensor, arg1: float) -> list[torch.Tensor]\n",
            "def norm(arg0, arg1):",
            f"[torch.empty_like(arg0)]{CHECK}",
        ),
        (
            "norm(arg0: torch.Tensor, arg1: float) -> None\n",
            "def norm(arg0, arg1):",
            "None  # check: what it takes",
        ),
        (
            "norm(*args, **kwargs)\nOverloaded function.\n\n1. norm(arg0: torch.Tensor) -> int\n",
            "def norm(arg0, arg1):",
            f"torch.empty_like(arg0){CHECK}",
        ),
    ],
)
def test_the_snippet_of_a_compiled_function_runs(
    monkeypatch: pytest.MonkeyPatch, doc: str, definition: str, returned: str
) -> None:
    module: Any = ModuleType("gpumem_pasted_ext")
    loader = importlib.machinery.ExtensionFileLoader("gpumem_pasted_ext", "gpumem_pasted_ext.so")
    module.__spec__ = importlib.machinery.ModuleSpec("gpumem_pasted_ext", loader)
    module.norm = Compiled(doc)
    monkeypatch.setitem(sys.modules, "gpumem_pasted_ext", module)
    monkeypatch.setattr("pytest_gpumem.simulated.simulation.EXTENSIONS", Extensions())
    with simulate("T4"):
        given = x()
        error = refusal(lambda: module.norm(given, 1e-6))
        call, *_ = lines = error.snippet.splitlines()
        assert "gpumem_pasted_ext.norm(Tensor (2, 3) float32 cuda:0, 1e-06) was called" in call
        assert definition in lines
        assert lines[-1] == f"    return {returned}"
        pasted(lambda: module.norm(given, 1e-6))


# Extensions that are compiled while a test runs.

PYBIND = """
    PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
      // m.def("commented", &commented);
      m.def("forward", &forward, "Forward (CUDA)");
      m.def(
          "backward", &backward).def("chained", &chained);
    }
"""
LIBRARY = """
    TORCH_LIBRARY(gpumem_built, m) {
      m.def("scale(Tensor x, float by=2.0) -> Tensor");
      m.def("split(Tensor x, "
            "int n) -> (Tensor, Tensor)");
      m.def(R"(grow.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!))");
    }
    TORCH_LIBRARY_IMPL(gpumem_built, CUDA, m) { m.impl("scale", &scale); }
"""


def test_what_sources_bind_is_read_from_them(tmp_path: Path) -> None:
    (tmp_path / "pybind.cpp").write_text(PYBIND)
    (tmp_path / "library.cu").write_text(LIBRARY)
    files = [str(tmp_path / name) for name in ("pybind.cpp", "library.cu", "missing.cu")]
    assert bound_in(files) == Bound(
        ("forward", "backward", "chained"),
        (
            "gpumem_built::scale(Tensor x, float by=2.0) -> Tensor",
            "gpumem_built::split(Tensor x, int n) -> (Tensor, Tensor)",
            "gpumem_built::grow.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)",
        ),
    )


def test_an_extension_that_cannot_be_compiled_is_described_by_its_functions(
    tmp_path: Path,
) -> None:
    (tmp_path / "kernel.cu").write_text(PYBIND)

    def build() -> Any:
        return cpp_extension.load(name="gpumem_jit", sources=[str(tmp_path / "kernel.cu")])

    with simulate("T4") as gpu:
        error = refusal(build)
        assert str(error).startswith('load(name="gpumem_jit", ...) at tests/simulated/test_sugg')
        assert error.snippet.splitlines()[1:] == [
            "from types import SimpleNamespace",
            "import torch",
            "from pytest_gpumem import simulate_operator",
            '@simulate_operator("torch.utils.cpp_extension.load")',
            "def load(name, *args, **options):",
            f"    kernel = lambda x, *_, **__: torch.empty_like(x){CHECK}",
            '    return {"gpumem_jit": SimpleNamespace('
            "forward=kernel, backward=kernel, chained=kernel)}[name]",
        ]
        built = pasted(build)
        lengths = torch.tensor([3, 4]).cuda()
        before = gpu.allocated
        result = built.forward(lengths, 2)
        assert gpu.allocated == before + 512
        assert built.backward(result).is_cuda
        with pytest.raises(UnknownValueError):
            lengths.sum().item()
        with pytest.raises(UnsupportedOperatorError, match=r"^forward at .* tensors of the CPU"):
            built.forward(torch.ones(3))


def test_the_operators_of_an_extension_are_defined_and_described(tmp_path: Path) -> None:
    (tmp_path / "kernel.cu").write_text(LIBRARY)

    def build() -> Any:
        return cpp_extension.load(
            "gpumem_jit_ops", str(tmp_path / "kernel.cu"), is_python_module=False
        )

    built = torch.ops.gpumem_built
    with simulate("T4"):
        pasted(build)
        build()  # a second test does so too
        given, out = x(), x()
        assert built.scale(given).shape == (2, 3)
        assert len(built.split(given, 2)) == 2
        assert built.grow.out(given, out=out).data_ptr() == out.data_ptr()


def test_sources_in_strings_bind_what_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))

    def build() -> Any:
        return cpp_extension.load_inline(
            name="gpumem_inline", cpp_sources="", cuda_sources="// ...", functions=["twice"]
        )

    with simulate("T4"):
        assert pasted(build).twice(x()).shape == (2, 3)


def test_where_nothing_is_bound_there_is_a_template() -> None:
    with simulate("T4"):
        error = refusal(lambda: cpp_extension.load("gpumem_none", ["missing.cu"]))
    assert "SimpleNamespace(forward=kernel)" in error.snippet


def test_a_module_that_nobody_described_is_an_error_that_names_it() -> None:
    def build(name: str) -> Any:
        return cpp_extension.load(name, ["missing.cu"])

    with simulate("T4"):
        pasted(lambda: build("gpumem_one"))
        with pytest.raises(KeyError, match="gpumem_other"):
            build("gpumem_other")


def test_cuda_extension_names_the_line() -> None:
    with (
        simulate("T4"),
        pytest.raises(UnsupportedOperatorError, match=r"at tests/simulated/test_suggested.py:\d+ "),
    ):
        cpp_extension.CUDAExtension("gpumem_ext", ["kernel.cu"])


def test_what_was_compiled_for_the_cpu_never_sees_a_simulated_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, compiling = ModuleType("gpumem_cpu"), cast(Any, cpp_extension)
    function = Compiled("forward(arg0: torch.Tensor) -> torch.Tensor\n")
    extensions = Extensions()
    for place in ("surface.cpp_extensions", "simulation"):
        monkeypatch.setattr(f"pytest_gpumem.simulated.{place}.EXTENSIONS", extensions)

    vars(made)["forward"] = function

    def compiled(name: str, sources: list[str], *, with_cuda: bool | None) -> ModuleType:
        return made

    monkeypatch.setattr(cpp_extension, "_jit_compile", compiled)
    with simulate("T4"):
        compiling._jit_compile("gpumem_cpu", ["kernel.cpp"], with_cuda=None)
        error = refusal(lambda: made.forward(x()))
        assert str(error).startswith("gpumem_cpu.forward at tests/simulated/test_suggested.py:")
        assert 'simulate_operator("torch.utils.cpp_extension.load")' in error.snippet
    assert made.forward is function
    with simulate("T4"):  # a fixture of several tests has compiled it
        refusal(lambda: made.forward(x()))


def test_a_test_that_imports_the_loader_is_refused_too() -> None:
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
