from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_gpumem.baseline.collected import Collected, MeasuredTest
from pytest_gpumem.baseline.content import StoredPeak
from pytest_gpumem.baseline.locks import FOLDER
from pytest_gpumem.baseline.store import BaselineEntry
from pytest_gpumem.baseline.update import Change, UpdateReport, update_baselines
from pytest_gpumem.values.environment import Environment
from pytest_gpumem.values.measurement import Measurement, PhaseRecord
from tests.stores import BaselineStore

MIB = 1024**2
T4 = Environment(simulated=True, gpu="T4", compute_capability="7.5", torch="2.13")
A10 = replace(T4, gpu="A10", compute_capability="8.6")
MODULE = "tests/test_a.py"


def entry(peak: int, **phases: int) -> BaselineEntry:
    return BaselineEntry(peak, 20 * MIB, 0, 0, phases)


def ran(name: str, peak: int = 4096, module: str = MODULE, **changes: Any) -> MeasuredTest:
    phases = {key: PhaseRecord(key, n, 0, 0, 0) for key, n in changes.pop("phases", {}).items()}
    measurement = Measurement("cuda:0", True, peak, 20 * MIB, 0, 0, 0, 0, phases=phases)
    values: dict[str, Any] = {"environment": T4, "passed": True, **changes}
    return MeasuredTest(nodeid=f"{module}::{name}", measurement=measurement, **values)


def nodeids(changes: tuple[Change, ...]) -> list[str]:
    return [change.nodeid for change in changes]


def peaks(store: BaselineStore, module: str = MODULE) -> dict[str, int]:
    return {name: stored.peak_allocated for name, stored in store.load(T4, module).items()}


@pytest.fixture
def store(tmp_path: Path) -> BaselineStore:
    """Return a store with two tests of one module."""
    store = BaselineStore(tmp_path / "baselines")
    store.write(T4, MODULE, {"test_old": entry(1000), "test_same": entry(4096)})
    return store


@pytest.fixture
def path(store: BaselineStore) -> Path:
    return store.path(T4.key, MODULE)


def test_mode_all_adds_and_changes_and_keeps_other_tests(store: BaselineStore, path: Path) -> None:
    store.write(T4, MODULE, {**store.load(T4, MODULE), "test_elsewhere": entry(77)})
    tests = [ran("test_new"), ran("test_old", 2000), ran("test_same")]
    report = update_baselines(store, tests, mode="all")
    assert report == UpdateReport(
        written=(path,),
        added=(Change(f"{MODULE}::test_new", T4, None, entry(4096)),),
        changed=(Change(f"{MODULE}::test_old", T4, entry(1000), entry(2000)),),
        unchanged=1,
    )
    assert peaks(store) == {
        "test_elsewhere": 77,
        "test_new": 4096,
        "test_old": 2000,
        "test_same": 4096,
    }


def test_mode_new_only_adds_entries(store: BaselineStore, path: Path) -> None:
    report = update_baselines(store, [ran("test_new"), ran("test_old", 2000)], mode="new")
    assert (nodeids(report.added), report.changed, report.unchanged) == (
        [f"{MODULE}::test_new"],
        (),
        1,
    )
    assert peaks(store) == {"test_new": 4096, "test_old": 1000, "test_same": 4096}
    assert report.written == (path,)


def test_a_file_that_would_not_change_is_not_written(store: BaselineStore, path: Path) -> None:
    before = path.stat().st_mtime_ns, path.stat().st_ino
    report = update_baselines(store, [ran("test_same"), ran("test_old", 1000)], mode="all")
    assert report == UpdateReport(unchanged=2)
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == before


def test_without_a_mode_nothing_is_written(store: BaselineStore) -> None:
    assert update_baselines(store, [ran("test_new")], mode=None) == UpdateReport()
    assert peaks(store) == {"test_old": 1000, "test_same": 4096}


def test_every_environment_and_module_has_its_file(store: BaselineStore) -> None:
    tests = [ran("test_x", environment=A10), ran("test_x", module="test_b.py"), ran("test_x")]
    report = update_baselines(store, tests, mode="all")
    assert [path.relative_to(store.root).as_posix() for path in report.written] == [
        "sim-A10-torch2.13/tests/test_a.py.json",
        "sim-T4-torch2.13/test_b.py.json",
        "sim-T4-torch2.13/tests/test_a.py.json",
    ]
    assert [(change.environment.gpu, change.nodeid) for change in report.added] == [
        ("A10", "tests/test_a.py::test_x"),
        ("T4", "test_b.py::test_x"),
        ("T4", "tests/test_a.py::test_x"),
    ]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"passed": False}, "1 test not recorded: did not pass"),
        ({"rerun": True}, f"{MODULE}::test_old not recorded: passed only when run again"),
        ({"subtest_failed": True}, f"{MODULE}::test_old not recorded: a subtest failed"),
    ],
)
def test_only_a_clean_pass_is_recorded(
    store: BaselineStore, state: dict[str, Any], message: str
) -> None:
    report = update_baselines(store, [ran("test_old", 2000, **state)], mode="all")
    assert report == UpdateReport(messages=(message,))
    assert peaks(store)["test_old"] == 1000


def test_failures_are_counted_in_one_message(store: BaselineStore) -> None:
    tests = [ran(f"test_{i}", passed=False) for i in range(3)]
    assert update_baselines(store, tests, mode="all").messages == (
        "3 tests not recorded: did not pass",
    )


def test_baseline_false_is_neither_written_nor_mentioned(store: BaselineStore) -> None:
    tests = [ran("test_old", 2000, wanted=False), ran("test_x", wanted=False, passed=False)]
    assert update_baselines(store, tests, mode="all") == UpdateReport()


def test_a_test_that_ran_twice_is_recorded_if_both_runs_agree(store: BaselineStore) -> None:
    tests = [ran("test_x"), ran("test_x@group"), ran("test_old", 2000), ran("test_old", 3000)]
    report = update_baselines(store, tests, mode="all")
    assert nodeids(report.added) == [f"{MODULE}::test_x"]
    assert report.messages == (
        f"{MODULE}::test_old not recorded: ran twice, with different numbers",
    )
    assert peaks(store) == {"test_old": 1000, "test_same": 4096, "test_x": 4096}


def test_a_damaged_file_is_an_error_and_the_others_are_still_written(
    store: BaselineStore, path: Path
) -> None:
    path.write_text("<<<<<<< HEAD\n")
    tests = [ran("test_x"), ran("test_y"), ran("test_x", module="test_b.py")]
    report = update_baselines(store, tests, mode="all", prune=True, collected=full(store))
    (error,) = report.errors
    assert error.startswith(
        f"2 tests of tests/test_a.py not recorded: baseline {path} is damaged or not one of "
        "pytest-gpumem: "
    )
    assert nodeids(report.added) == ["test_b.py::test_x"]
    assert path.read_text() == "<<<<<<< HEAD\n"


def test_a_file_that_cannot_be_written_is_an_error_and_reports_no_change(
    store: BaselineStore, path: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target.json"
    path.rename(target)
    path.symlink_to(target)
    report = update_baselines(store, [ran("test_x")], mode="all")
    assert (report.added, report.written) == ((), ())
    assert report.errors == (
        f"1 test of tests/test_a.py not recorded: baseline {path} is a symbolic link and is not "
        "written through; put the file itself in its place",
    )


def test_a_change_names_every_number_that_differs() -> None:
    old = BaselineEntry(100 * MIB, 200 * MIB, 0, 0, {"forward": 80 * MIB, "gone": 5 * MIB})
    new = BaselineEntry(130 * MIB, 200 * MIB, 512, 8192, {"forward": 60 * MIB, "added": 512})
    assert Change("t.py::test_x", T4, old, new).text == (
        "t.py::test_x: peak 100.0 MiB -> 130.0 MiB (+30.0 %); added 512 B (new); "
        "forward 80.0 MiB -> 60.0 MiB (-25.0 %); gone 5.0 MiB (gone); "
        "allocated after 0 B -> 512 B; cuBLAS workspace 0 B -> 8.0 KiB [sim-T4-torch2.13]"
    )


def test_sizes_that_read_the_same_are_told_apart_by_their_bytes() -> None:
    change = Change("t.py::test_x", T4, entry(100 * MIB), entry(100 * MIB + 512))
    assert change.text == (
        "t.py::test_x: peak 104,857,600 B -> 104,858,112 B (+<0.1 %) [sim-T4-torch2.13]"
    )


def test_a_change_of_reserved_bytes_or_of_holders_is_a_change() -> None:
    held = replace(entry(512), peak_reserved=2 * MIB, peak=StoredPeak({"inputs": 512}, ()))
    assert Change("t.py::test_x", T4, entry(512), held).text == (
        "t.py::test_x: reserved 20.0 MiB -> 2.0 MiB (-90.0 %); what holds the bytes "
        "[sim-T4-torch2.13]"
    )


def test_an_added_or_deleted_entry_is_shown_with_its_peak() -> None:
    for old, new in ((None, entry(2 * MIB)), (entry(2 * MIB), None)):
        assert Change("t.py::test_x", T4, old, new).text == (
            "t.py::test_x: 2.0 MiB (2,097,152 B) [sim-T4-torch2.13]"
        )


def full(store: BaselineStore, *names: str, **changes: Any) -> Collected:
    """Return a collection of the whole project; ``tests/test_a.py`` has the tests ``names``."""
    rootpath = store.root.parent
    return Collected(rootpath, [f"{MODULE}::{name}" for name in names], **changes)


def pruned(store: BaselineStore, collected: Collected) -> UpdateReport:
    elsewhere = [ran("test_x", module="tests/test_elsewhere.py")]
    return update_baselines(store, elsewhere, mode=None, prune=True, collected=collected)


def test_a_test_that_no_longer_exists_is_pruned(store: BaselineStore, path: Path) -> None:
    report = pruned(store, full(store, "test_same", "test_unmeasured"))
    assert report == UpdateReport(
        written=(path,), pruned=(Change(f"{MODULE}::test_old", T4, entry(1000), None),)
    )
    assert peaks(store) == {"test_same": 4096}


def test_nothing_is_pruned_unless_asked(store: BaselineStore) -> None:
    tests = [ran("test_same")]
    assert not update_baselines(store, tests, mode="all", collected=full(store)).pruned
    assert not update_baselines(store, tests, mode="all", prune=True).pruned


def test_an_emptied_file_goes_with_its_folders(store: BaselineStore) -> None:
    report = pruned(store, full(store))
    assert nodeids(report.pruned) == [f"{MODULE}::test_old", f"{MODULE}::test_same"]
    assert [path.name for path in store.root.iterdir()] == [FOLDER]


def test_a_module_that_is_gone_from_disk_is_pruned_by_a_full_collection(
    store: BaselineStore,
) -> None:
    assert len(pruned(store, full(store)).pruned) == 2


def test_a_module_that_exists_but_has_no_tests_is_kept(store: BaselineStore) -> None:
    module = store.root.parent / MODULE
    module.parent.mkdir()
    module.write_text("")
    report = pruned(store, full(store))
    assert report == UpdateReport(
        messages=(
            "2 stored tests not pruned: tests/test_a.py exists, but nothing was collected from it",
        )
    )
    assert len(peaks(store)) == 2


def test_a_partial_collection_prunes_only_modules_it_collected_completely(
    store: BaselineStore,
) -> None:
    store.write(T4, "test_b.py", {"test_x": entry(1), "test_y": entry(2)})
    store.write(T4, "test_c.py", {"test_z": entry(3)})
    report = pruned(store, full(store, "test_same", partial="paths were given"))
    assert nodeids(report.pruned) == [f"{MODULE}::test_old"]
    assert report.messages == ("3 stored tests not pruned: paths were given",)
    assert peaks(store, "test_b.py") == {"test_x": 1, "test_y": 2}


def test_a_module_that_was_collected_in_part_is_kept(store: BaselineStore) -> None:
    report = pruned(store, full(store, "test_same", incomplete={MODULE: "node ids were given"}))
    assert report == UpdateReport(messages=("1 stored test not pruned: node ids were given",))
    assert len(peaks(store)) == 2


def test_a_partial_module_whose_tests_all_exist_is_not_mentioned(store: BaselineStore) -> None:
    collected = full(store, "test_same", "test_old", incomplete={MODULE: "node ids were given"})
    assert pruned(store, collected) == UpdateReport()


def test_a_test_that_ran_is_never_pruned(store: BaselineStore) -> None:
    tests = [ran("test_old@group", 1000)]
    collected = full(store, "test_same")
    report = update_baselines(store, tests, mode=None, prune=True, collected=collected)
    assert report == UpdateReport()


def test_other_environments_are_not_pruned(store: BaselineStore) -> None:
    store.write(A10, MODULE, {"test_old": entry(1000)})
    pruned(store, full(store, "test_same"))
    assert BaselineStore(store.root).load(A10, MODULE) == {"test_old": entry(1000)}


def test_update_and_prune_write_a_file_once(store: BaselineStore, path: Path) -> None:
    report = update_baselines(
        store,
        [ran("test_same", 5000), ran("test_new")],
        mode="all",
        prune=True,
        collected=full(store, "test_same", "test_new"),
    )
    assert report.written == (path,)
    assert (len(report.added), len(report.changed), len(report.pruned)) == (1, 1, 1)
    assert peaks(store) == {"test_new": 4096, "test_same": 5000}


def test_collected_ids_are_grouped_by_module_without_xdists_group() -> None:
    collected = Collected(Path("/p"), ["a.py::x@g", "a.py::C::y[1]", "b.py::z"])
    assert collected.ids == {"a.py": {"x", "C::y[1]"}, "b.py": {"z"}}
