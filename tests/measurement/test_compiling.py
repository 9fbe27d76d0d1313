"""Memory that torch takes and frees while it compiles is in no peak."""

from __future__ import annotations

import gc
import importlib
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch

from pytest_gpumem.late_modules import when_imported
from pytest_gpumem.measurement.compiling import Compiling
from pytest_gpumem.measurement.meter import compiled_beside
from pytest_gpumem.measurement.phases import PhaseTracker
from pytest_gpumem.measurement.statistics import Bytes
from tests.fake_statistics import FakeStatistics

pytestmark = pytest.mark.filterwarnings(
    "ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"
)


@pytest.fixture
def statistics() -> FakeStatistics:
    return FakeStatistics()


@pytest.fixture
def tracker(statistics: FakeStatistics) -> Iterator[PhaseTracker]:
    tracker = PhaseTracker(statistics)
    torch._dynamo.reset()
    with Compiling(tracker).watched():
        yield tracker
    torch._dynamo.reset()


def compiler(act: Callable[[], object]) -> Callable[..., Any]:
    """Return a backend that calls ``act`` while it compiles."""

    def backend(graph: Any, inputs: Any) -> Any:
        act()
        return graph.forward

    return backend


def test_memory_freed_by_the_end_of_compiling_is_in_no_peak(
    tracker: PhaseTracker, statistics: FakeStatistics
) -> None:
    run: Any = torch.compile(torch.sin, backend=compiler(lambda: statistics.use(5000)))
    with tracker.window("call"), tracker.window("forward"):
        statistics.allocate(100)
        run(torch.ones(3))
        statistics.use(30)
    records = tracker.records(0, Bytes())
    assert records["forward"].peak_allocated == records["call"].peak_allocated == 130
    assert records["forward"].allocated_before == 0
    assert tracker.compiled == {0: 5000}


def test_memory_kept_by_compiling_counts_afterwards(
    tracker: PhaseTracker, statistics: FakeStatistics
) -> None:
    run: Any = torch.compile(torch.sin, backend=compiler(lambda: statistics.allocate(700)))
    with tracker.window("call"):
        run(torch.ones(3))
    assert tracker.records(0, Bytes())["call"].peak_allocated == 700
    assert tracker.compiled == {0: 0}


def test_a_reset_of_dynamo_does_not_end_the_watch(
    tracker: PhaseTracker, statistics: FakeStatistics
) -> None:
    torch._dynamo.reset()
    run: Any = torch.compile(torch.sin, backend=compiler(lambda: statistics.use(5000)))
    with tracker.window("call"):
        run(torch.ones(3))
    assert tracker.records(0, Bytes())["call"].peak_allocated == 0


IMPORTED_INSIDE = """
    import sys
    import torch
    from pytest_gpumem.measurement.compiling import Compiling
    from pytest_gpumem.measurement.phases import PhaseTracker
    from pytest_gpumem.measurement.statistics import Bytes
    from tests.fake_statistics import FakeStatistics

    def backend(graph, inputs):
        statistics.use(5000)
        return graph.forward

    statistics = FakeStatistics()
    tracker, before = PhaseTracker(statistics), torch.compile
    assert "torch._dynamo" not in sys.modules
    with Compiling(tracker).watched(), tracker.window("call"):
        torch.compile(backend=backend)(torch.sin)(torch.ones(3))
    assert tracker.records(0, Bytes())["call"].peak_allocated == 0
    assert tracker.compiled == {0: 5000}
    assert torch.compile is before
"""


def test_an_import_of_dynamo_is_noticed_from_any_importer() -> None:
    subprocess.run([sys.executable, "-c", dedent(IMPORTED_INSIDE)], check=True)


def test_autotuning_of_inductor_s_kernels_counts_as_compiling(
    statistics: FakeStatistics, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    def measure(*_: Any, **__: Any) -> None:
        statistics.use(5000)

    monkeypatch.setattr(CachingAutotuner, "autotune_to_one_config", measure)
    tracker = PhaseTracker(statistics)
    with Compiling(tracker).watched(), tracker.window("call"):
        CachingAutotuner.autotune_to_one_config(None)  # type: ignore[arg-type]
        statistics.use(10)
    assert tracker.records(0, Bytes())["call"].peak_allocated == 10
    assert CachingAutotuner.autotune_to_one_config is measure


@pytest.mark.skipif(
    find_spec("triton") is not None, reason="Triton's native code cannot be imported twice"
)
def test_autotuning_of_triton_counts_as_compiling_for_any_importer(
    statistics: FakeStatistics, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "triton" / "runtime"
    package.mkdir(parents=True)
    (package / "autotuner.py").write_text(
        "class Autotuner:\n    def _bench(self, use):\n        use(5000)\n"
    )
    (tmp_path / "triton" / "__init__.py").write_text("import triton.runtime.autotuner\n")
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    tracker = PhaseTracker(statistics)

    def of_device(tuner: Any, use: Any) -> None:
        use(3000)

    def replace(module: Any) -> None:
        module.runtime.autotuner.Autotuner._bench = of_device

    with when_imported({"triton": replace}):
        with Compiling(tracker).watched(), tracker.window("call"):
            tuner = importlib.import_module("triton.runtime.autotuner").Autotuner()
            tuner._bench(statistics.use)
            statistics.use(10)
        assert type(tuner)._bench is of_device, "the device's stays for the tests that follow"
    assert tracker.records(0, Bytes())["call"].peak_allocated == 10
    for name in ("triton", "triton.runtime", "triton.runtime.autotuner"):
        del sys.modules[name]  # not by monkeypatch, which would restore it


def test_torch_compiles_in_the_given_context(statistics: FakeStatistics) -> None:
    entered: list[str] = []

    @contextmanager
    def apart() -> Iterator[None]:
        entered.append("begins")
        yield
        entered.append("ends")

    torch._dynamo.reset()
    tracker = PhaseTracker(statistics)
    run: Any = torch.compile(torch.sin, backend=compiler(lambda: entered.append("compiles")))
    with Compiling(tracker, apart).watched(), tracker.window("call"):
        run(torch.ones(3))
    torch._dynamo.reset()
    assert entered == ["begins", "compiles", "ends"]


def test_frames_that_compilers_leave_keep_no_variable_of_the_test(
    statistics: FakeStatistics,
) -> None:
    """A cycle keeps the frame, as for an exception of Inductor's pattern matcher."""

    def fail() -> None:
        try:
            raise ValueError
        except ValueError as error:
            kept = error
        assert kept

    def body() -> weakref.ref[torch.Tensor]:
        variable = torch.ones(3)
        torch.compile(torch.sin, backend=compiler(fail))(torch.ones(2))
        return weakref.ref(variable)

    torch._dynamo.reset()
    tracker = PhaseTracker(statistics)
    gc.disable()
    try:
        with Compiling(tracker, nullcontext).watched(), tracker.window("call"):
            assert body()() is None
    finally:
        gc.enable()
    torch._dynamo.reset()


def test_a_note_tells_the_memory_of_compiling() -> None:
    assert compiled_beside(0) == ()
    (note,) = compiled_beside(256 * 1024 * 1024)
    assert note == (
        "torch.compile used up to 256.0 MiB while the test ran. This is not part of the allocated "
        "peaks, but it is part of the reserved ones; warmup=1 compiles before the measured run."
    )
