"""A minimal Triton: the parts of 3.2 to 3.9 that a launch uses, in their order.

Without a GPU it fails at the driver, as Triton does; it compiles and runs nothing.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class Launched:
    """KernelInterface of triton/runtime/jit.py."""

    run: Callable[..., Any]

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: self.run(*args, grid=grid, warmup=False, **kwargs)

    def warmup(self, *args: Any, grid: Any, **kwargs: Any) -> Any:
        return self.run(*args, grid=grid, warmup=True, **kwargs)


class JITFunction(Launched):
    """triton/runtime/jit.py of 3.5."""

    def __init__(self, fn: Any) -> None:
        self.fn = fn
        self.arg_names = list(inspect.signature(fn).parameters)

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        raise AssertionError("a kernel was compiled")


class Config:
    def __init__(self, kwargs: dict[str, Any]) -> None:
        self.kwargs = kwargs


class Autotuner(Launched):
    """triton/runtime/autotuner.py of 3.5."""

    def __init__(self, fn: Any, configs: list[Config], do_bench: Any = None) -> None:
        self.fn, self.configs = fn, configs
        self.arg_names = fn.arg_names
        self.cache: dict[Any, Config] = {}
        self.cache_results = True
        self._do_bench = do_bench

    def _bench(self, *args: Any, config: Config, **kwargs: Any) -> Any:
        raise AssertionError("a kernel was timed")

    def run(self, *args: Any, **kwargs: Any) -> Any:
        key = len(args)
        if key not in self.cache:
            assert not self.cache_results, "timings were looked up in files"
            timings = {each: self._bench(*args, config=each, **kwargs) for each in self.configs}
            self.cache[key] = min(timings, key=timings.__getitem__)
        self.best_config = self.cache[key]
        return self.fn.run(*args, **kwargs, **self.best_config.kwargs)


class Heuristics(Launched):
    def __init__(self, fn: Any, values: dict[str, Callable[[Any], Any]]) -> None:
        self.fn, self.values = fn, values
        self.arg_names = fn.arg_names

    def run(self, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
        return self.fn.run(*args, **kwargs, **{name: of(given) for name, of in self.values.items()})


class GridExecutor:
    """triton/runtime/interpreter.py: a launch with ``TRITON_INTERPRET=1``."""

    def __init__(self, fn: Any) -> None:
        self.fn = fn

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        return "computed on the CPU"


class CudaDriver:
    """triton/backends/nvidia/driver.py, which looks for a device when it is made."""

    def __init__(self) -> None:
        raise AssertionError("the driver was asked for a GPU")

    def get_current_target(self) -> tuple[str, int]:
        major, minor = self.get_device_capability(self.get_current_device())
        return "cuda", 10 * major + minor

    get_device_capability: Callable[..., tuple[int, int]]
    get_current_device: Callable[[], int]
    get_current_stream: Callable[[int], int]
    utils: Any


class DriverConfig:
    """triton/runtime/driver.py since 3.5."""

    def __init__(self) -> None:
        self._active: Any = None

    @property
    def active(self) -> Any:
        if self._active is None:
            raise RuntimeError("0 active drivers ([]). There should only be one.")
        return self._active


driver = DriverConfig()


def _of_language(name: str) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"{name} ran outside a kernel")

    function.__name__, function.__module__ = name, "triton.language.core"
    return function


class Tensor:
    """triton.language.tensor, with the methods that are looked up."""

    def to(self) -> None: ...


LANGUAGE = (
    *("program_id", "arange", "load", "store", "atomic_add", "make_block_ptr", "advance"),
    *("inline_asm_elementwise", "where", "sum", "make_tensor_descriptor", "pointer_type"),
)


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Install the stand-in as the module ``triton``."""
    language = {name: _of_language(name) for name in LANGUAGE}
    monkeypatch.setattr(driver, "_active", None)
    members: dict[str, dict[str, Any]] = {
        "triton": {"jit": JITFunction, "Config": Config},
        "triton.language": {**language, "tensor": Tensor},
        "triton.backends": {"backends": {"nvidia": SimpleNamespace(driver=CudaDriver)}},
        "triton.runtime": {},
        "triton.runtime.jit": {"JITFunction": JITFunction},
        "triton.runtime.autotuner": {"Autotuner": Autotuner, "Heuristics": Heuristics},
        "triton.runtime.interpreter": {"GridExecutor": GridExecutor},
        "triton.runtime.driver": {"driver": driver},
    }
    modules = {name: ModuleType(name) for name in members}
    for name, module in modules.items():
        vars(module).update(members[name])
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(modules[parent], own, module)
    return modules["triton"]
