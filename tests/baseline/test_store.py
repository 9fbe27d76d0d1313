from __future__ import annotations

import json
import os
import stat
import threading
from dataclasses import fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from pytest_gpumem.attribution.composition import Site
from pytest_gpumem.baseline.content import StoredPeak
from pytest_gpumem.baseline.locks import FOLDER
from pytest_gpumem.baseline.store import (
    BaselineEntry,
    BaselineError,
    read_folder,
    split_nodeid,
)
from pytest_gpumem.values.environment import Environment
from pytest_gpumem.values.measurement import Measurement, PhaseRecord
from tests.stores import BaselineStore

T4 = Environment(simulated=True, gpu="T4", compute_capability="7.5", torch="2.13")
A10 = replace(T4, gpu="A10", compute_capability="8.6")
MODULE = "tests/test_model.py"
STEP = BaselineEntry(4096, 8192, 512, 1024, {"forward": 2048, "backward": 4096})
OTHER = BaselineEntry(512, 2_097_152, 0, 0)

WRITTEN = """\
{
  "environment": {
    "alloc_conf": "",
    "compute_capability": "7.5",
    "cublas_workspace_config": "",
    "cuda": null,
    "driver": null,
    "gpu": "T4",
    "partition": "",
    "simulated": true,
    "torch": "2.13"
  },
  "schema_version": 1,
  "tests": {
    "TestNet::test_step[8]": {
      "allocated_after": 512,
      "cublas_workspace": 1024,
      "peak_allocated": 4096,
      "peak_reserved": 8192,
      "phases": {
        "backward": {
          "peak_allocated": 4096
        },
        "forward": {
          "peak_allocated": 2048
        }
      }
    },
    "test_other": {
      "allocated_after": 0,
      "cublas_workspace": 0,
      "peak_allocated": 512,
      "peak_reserved": 2097152,
      "phases": {}
    }
  }
}
"""


@pytest.fixture
def store(tmp_path: Path) -> BaselineStore:
    return BaselineStore(tmp_path / "baselines")


@pytest.fixture
def path(store: BaselineStore) -> Path:
    return store.root / "sim-T4-torch2.13" / "tests" / "test_model.py.json"


def put(path: Path, content: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


def changed(**changes: Any) -> str:
    return json.dumps({**json.loads(WRITTEN), **changes})


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def refused(store: BaselineStore, path: Path) -> str:
    """Return the sentence that refuses a file on reading and writing; the file is unchanged."""
    before = path.read_bytes()
    with pytest.raises(BaselineError) as reading:
        store.load(T4, MODULE)
    with pytest.raises(BaselineError) as writing:
        store.write(T4, MODULE, {"test_other": OTHER})
    assert str(reading.value) == str(writing.value)
    assert path.read_bytes() == before
    assert names(path.parent) == [path.name]
    sentence = str(reading.value).replace(str(path), "FILE")
    assert "\n" not in sentence
    return sentence


def test_a_file_is_sorted_and_named_by_environment_and_module(
    store: BaselineStore, path: Path
) -> None:
    assert store.write(T4, MODULE, {"test_other": OTHER, "TestNet::test_step[8]": STEP}) == path
    assert path.read_text() == WRITTEN
    assert names(path.parent) == ["test_model.py.json"]


def test_written_entries_are_read_back(store: BaselineStore) -> None:
    tests = {"test_other": OTHER, "TestNet::test_step[8]": STEP}
    store.write(T4, MODULE, tests)
    assert store.load(T4, MODULE) == tests
    assert BaselineStore(store.root).entry(T4, MODULE, "TestNet::test_step[8]") == STEP
    assert store.entry(T4, MODULE, "TestNet::test_step[9]") is None


def test_a_store_without_files_has_no_entries(store: BaselineStore) -> None:
    assert store.load(T4, MODULE) == {}
    assert store.modules(T4) == []
    assert store.elsewhere(MODULE, "test_other", T4) == []


def test_a_file_with_equal_content_is_not_written(store: BaselineStore, path: Path) -> None:
    tests = {"test_other": OTHER, "TestNet::test_step[8]": STEP}
    windows = WRITTEN.replace("\n", "\r\n").encode()
    path.parent.mkdir(parents=True)
    path.write_bytes(windows)
    assert store.write(replace(T4, driver="570.1"), MODULE, tests) is None
    assert path.read_bytes() == windows


def test_the_last_entry_is_deleted_with_its_file_and_empty_folders(
    store: BaselineStore, path: Path
) -> None:
    store.write(T4, MODULE, {"test_other": OTHER})
    store.write(T4, "tests/deep/er/test_a.py", {"test_other": OTHER})
    assert store.write(T4, "tests/deep/er/test_a.py", {}) is not None
    assert names(path.parent) == ["test_model.py.json"]
    assert store.write(T4, MODULE, {}) == path
    assert names(store.root) == [FOLDER]
    assert store.write(T4, MODULE, {}) is None


SITE = Site(
    "activations", 4096, 2, "model.py:7", "forward", "torch.mm", "blocks.*", (32, 32), "float32"
)
PEAK = StoredPeak({"activations": 4096}, (SITE,))


def measured(phase_sites: tuple[Site, ...]) -> Measurement:
    total = sum(site.bytes for site in phase_sites)
    forward = PhaseRecord(
        "forward",
        total,
        8192,
        0,
        0,
        composition={"activations": total},
        sites=tuple(site.to_dict() for site in phase_sites),
    )
    return Measurement(
        "cuda:0",
        True,
        peak_allocated=4096,
        peak_reserved=8192,
        allocated_before=0,
        allocated_after=512,
        leaked=0,
        cublas_workspace=1024,
        phases={"forward": forward},
        composition=PEAK.composition,
        sites=(SITE.to_dict(),),
    )


def test_an_entry_has_the_measured_numbers() -> None:
    half = replace(SITE, bytes=2048, count=1, module=None)
    entry = BaselineEntry.of(measured((half,)))
    assert entry.to_dict() == {
        "peak_allocated": 4096,
        "peak_reserved": 8192,
        "allocated_after": 512,
        "cublas_workspace": 1024,
        "phases": {
            "forward": {
                "peak_allocated": 2048,
                "composition": {"activations": 2048},
                "sites": [
                    {
                        "category": "activations",
                        "bytes": 2048,
                        "count": 1,
                        "site": "model.py:7",
                        "function": "forward",
                        "operator": "torch.mm",
                        "shape": [32, 32],
                        "dtype": "float32",
                    }
                ],
            }
        },
        "composition": {"activations": 4096},
        "sites": [
            {
                "category": "activations",
                "bytes": 4096,
                "count": 2,
                "site": "model.py:7",
                "function": "forward",
                "operator": "torch.mm",
                "module": "blocks.*",
                "shape": [32, 32],
                "dtype": "float32",
            }
        ],
    }
    assert BaselineEntry.from_dict(json.loads(json.dumps(entry.to_dict()))) == entry


def test_a_phase_whose_peak_is_the_test_s_own_stores_it_once() -> None:
    entry = BaselineEntry.of(measured((SITE,)))
    assert entry.to_dict()["phases"] == {"forward": {"peak_allocated": 4096}}
    assert entry.peak_of("forward") == entry.peak_of(None) == PEAK


def test_a_site_is_written_on_one_line(store: BaselineStore, path: Path) -> None:
    store.write(T4, MODULE, {"test_other": replace(OTHER, peak=PEAK)})
    lines = [line.strip() for line in path.read_text().splitlines()]
    assert (
        '{"bytes": 4096, "category": "activations", "count": 2, "dtype": "float32", '
        '"function": "forward", "module": "blocks.*", "operator": "torch.mm", '
        '"shape": [32, 32], "site": "model.py:7"}'
    ) in lines
    assert BaselineStore(store.root).load(T4, MODULE)["test_other"].peak == PEAK


def test_the_composition_is_stored_and_counts_as_a_change(store: BaselineStore) -> None:
    known = replace(OTHER, peak=PEAK)
    assert store.write(T4, MODULE, {"test_other": OTHER})
    assert store.write(T4, MODULE, {"test_other": known})
    assert store.write(T4, MODULE, {"test_other": known}) is None
    assert store.entry(T4, MODULE, "test_other") == known


def test_names_that_are_not_ascii_survive(store: BaselineStore, path: Path) -> None:
    store.write(T4, MODULE, {"test_größe[\ud800]": OTHER})
    assert path.read_bytes().isascii()
    assert BaselineStore(store.root).load(T4, MODULE) == {"test_größe[\ud800]": OTHER}


def test_a_merge_that_conflicts_is_recognised_and_never_overwritten(
    store: BaselineStore, path: Path
) -> None:
    before, number, after = WRITTEN.partition('      "peak_allocated": 4096,\n')
    sides = f'<<<<<<< HEAD\n{number}=======\n      "peak_allocated": 8192,\n>>>>>>> branch\n'
    content = f"{before}{sides}{after}"
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with pytest.raises(BaselineError) as error:
        store.entry(T4, MODULE, "test_x")
    line = before.count("\n") + 1
    assert str(error.value) == (
        f"baseline {path} has the conflict markers of a merge in line {line}; take one side, in "
        'its folder, by git checkout --ours "test_model.py.json" or git checkout --theirs '
        '"test_model.py.json", then record its tests again'
    )
    with pytest.raises(BaselineError):
        store.write(T4, MODULE, {"test_x": OTHER})
    assert path.read_text() == content


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "not valid JSON (Expecting value: line 1 column 1 (char 0))"),
        ("<<<<<<< HEAD\n", "not valid JSON (Expecting value: line 1 column 1 (char 0))"),
        (WRITTEN[:400], "not valid JSON ("),
        ('{"a": 1, "a": 2}', "not valid JSON ('a' stands twice in one object)"),
        ("[" * 200_000, "not valid JSON ("),
        ("[]", "[] is not of type 'object' at $"),
        ("{}", "'schema_version' is a required property at $"),
        (changed(schema_version=0), "1 was expected at $.schema_version"),
        (changed(tests=[]), "[] is not of type 'object' at $.tests"),
        (changed(tests={"t": {}}), "is a required property at $.tests.t"),
        (
            changed(tests={"t": {**OTHER.to_dict(), "peak_allocated": -1}}),
            "-1 is less than the minimum of 0 at $.tests.t.peak_allocated",
        ),
        (
            changed(tests={"t": {**OTHER.to_dict(), "peak_allocated": True}}),
            "True is not of type 'integer' at $.tests.t.peak_allocated",
        ),
        (changed(environment={}), "is a required property at $.environment"),
        (changed(more=1), "Additional properties are not allowed ('more' was unexpected) at $"),
    ],
)
def test_a_damaged_or_foreign_file_is_one_sentence_and_never_overwritten(
    store: BaselineStore, path: Path, content: str, problem: str
) -> None:
    sentence = refused(store, put(path, content))
    assert sentence.startswith("baseline FILE is damaged or not one of pytest-gpumem: ")
    assert problem in sentence
    assert sentence.endswith("; restore it from version control or delete it")


def test_bytes_that_are_not_utf_8_are_refused(store: BaselineStore, path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\x89PNG\xff\xfe")
    assert "not valid JSON (" in refused(store, path)


def test_a_long_problem_is_cut(store: BaselineStore, path: Path) -> None:
    assert len(refused(store, put(path, changed(tests="x" * 5000)))) < 300


def test_a_newer_file_asks_for_a_newer_plugin(store: BaselineStore, path: Path) -> None:
    assert refused(store, put(path, changed(schema_version=2))) == (
        "baseline FILE has schema_version 2 and this pytest-gpumem reads 1; install a newer one"
    )


def test_a_file_of_another_environment_is_refused(store: BaselineStore, path: Path) -> None:
    assert refused(store, put(path, changed(environment=A10.to_dict()))) == (
        "baseline FILE was recorded for sim-A10-torch2.13, not for sim-T4-torch2.13; move it to "
        "the folder of its environment"
    )


def test_a_driver_update_keeps_the_baselines(store: BaselineStore) -> None:
    store.write(replace(T4, driver="550.1"), MODULE, {"test_other": OTHER})
    assert store.load(replace(T4, driver="570.2"), MODULE) == {"test_other": OTHER}


def test_an_entry_that_breaks_the_schema_is_not_written(store: BaselineStore, path: Path) -> None:
    with pytest.raises(BaselineError, match=r"was not written: -1 is less than the minimum of 0"):
        store.write(T4, MODULE, {"test_other": replace(OTHER, peak_allocated=-1)})
    assert not path.exists()


def test_a_folder_in_the_place_of_the_file_is_refused(store: BaselineStore, path: Path) -> None:
    path.mkdir(parents=True)
    for act in (lambda: store.load(T4, MODULE), lambda: store.write(T4, MODULE, {"t": OTHER})):
        with pytest.raises(BaselineError, match=r"is not a file; move it away$"):
            act()
    assert path.is_dir()


def test_a_pipe_in_the_place_of_the_file_does_not_hang(store: BaselineStore, path: Path) -> None:
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    with pytest.raises(BaselineError, match=r"is not a file; move it away$"):
        store.load(T4, MODULE)


def test_a_file_in_the_place_of_the_folder_is_refused(store: BaselineStore) -> None:
    store.root.write_text("mine")
    for act in (lambda: store.load(T4, MODULE), lambda: store.write(T4, MODULE, {"t": OTHER})):
        with pytest.raises(BaselineError, match=r"cannot be read: Not a directory; check "):
            act()
    assert store.elsewhere(MODULE, "t", T4) == []
    assert store.root.read_text() == "mine"


def test_a_symbolic_link_is_read_but_not_written_through(
    store: BaselineStore, path: Path, tmp_path: Path
) -> None:
    target = put(tmp_path / "shared.json", WRITTEN)
    path.parent.mkdir(parents=True)
    path.symlink_to(target)
    assert store.entry(T4, MODULE, "test_other") == OTHER
    with pytest.raises(BaselineError, match=r"is a symbolic link and is not written through; put"):
        store.write(T4, MODULE, {"test_other": OTHER})
    assert path.is_symlink()
    assert target.read_text() == WRITTEN


def test_a_broken_symbolic_link_is_no_baseline_and_is_kept(
    store: BaselineStore, path: Path, tmp_path: Path
) -> None:
    path.parent.mkdir(parents=True)
    path.symlink_to(tmp_path / "nowhere")
    assert store.load(T4, MODULE) == {}
    with pytest.raises(BaselineError, match="symbolic link"):
        store.write(T4, MODULE, {"test_other": OTHER})
    path.unlink()
    path.symlink_to(path)
    with pytest.raises(BaselineError, match="cannot be read: Too many levels of symbolic links"):
        store.load(T4, MODULE)


def test_a_symbolic_link_to_a_folder_is_followed(store: BaselineStore, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    store.root.symlink_to(tmp_path / "elsewhere")
    store.write(T4, MODULE, {"test_other": OTHER})
    assert store.root.is_symlink()
    assert store.load(T4, MODULE) == {"test_other": OTHER}


@pytest.mark.parametrize(
    "error", [PermissionError(13, "Permission denied"), OSError(30, "Read-only file system")]
)
def test_a_write_that_fails_is_one_sentence_and_leaves_the_old_file_alone(
    store: BaselineStore, path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    put(path, WRITTEN)

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(BaselineError) as caught:
        store.write(T4, MODULE, {"test_other": OTHER})
    assert str(caught.value) == (
        f"baseline {path} cannot be written: {error.strerror}; check {path.parent}"
    )
    assert path.read_text() == WRITTEN
    assert names(path.parent) == [path.name]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_an_error(store: BaselineStore, path: Path) -> None:
    put(path, WRITTEN).parent.chmod(0o555)
    with pytest.raises(BaselineError, match="cannot be written: Permission denied; check "):
        store.write(T4, MODULE, {"test_other": OTHER})
    path.parent.chmod(0o755)


def test_a_new_file_has_the_permissions_that_the_umask_leaves(
    store: BaselineStore, path: Path
) -> None:
    before = os.umask(0o027)
    try:
        store.write(T4, MODULE, {"test_other": OTHER})
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.parametrize("module", ["/abs/test_a.py", "../test_a.py", "tests/../../x.py", ""])
def test_a_module_outside_the_rootdir_is_refused(store: BaselineStore, module: str) -> None:
    with pytest.raises(BaselineError, match="lies outside pytest's rootdir") as caught:
        store.write(T4, module, {"test_other": OTHER})
    name = repr(module) if module else "the test's file"
    assert str(caught.value).startswith(f"{name} lies outside")
    assert not store.root.exists()
    assert store.entry(T4, module, "test_other") is None


def test_readers_see_whole_files_while_two_write(store: BaselineStore, path: Path) -> None:
    first = {f"test_{i}": OTHER for i in range(200)}
    second = {f"test_{i}": STEP for i in range(200)}
    store.write(T4, MODULE, first)

    def rewrite(tests: dict[str, BaselineEntry]) -> None:
        writer = BaselineStore(store.root)
        for round_ in range(15):
            writer.write(T4, MODULE, {**tests, "test_0": replace(STEP, allocated_after=round_)})

    threads = [threading.Thread(target=rewrite, args=(tests,)) for tests in (first, second)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        tests = dict(BaselineStore(store.root).load(T4, MODULE))
        del tests["test_0"]
        assert len(tests) == 199
        assert all(entry == tests["test_1"] for entry in tests.values())
    for thread in threads:
        thread.join()
    assert names(path.parent) == ["test_model.py.json"]


def test_loading_caches_a_file_and_editing_reads_it_again(store: BaselineStore, path: Path) -> None:
    put(path, WRITTEN)
    assert len(store.load(T4, MODULE)) == 2
    BaselineStore(store.root).write(T4, MODULE, {"test_other": OTHER})
    assert len(store.load(T4, MODULE)) == 2
    store.edit(T4, MODULE, lambda entries: None)
    assert len(store.load(T4, MODULE)) == 1


def test_entries_of_other_environments_can_be_listed(store: BaselineStore) -> None:
    h100 = replace(T4, gpu="H100")
    store.write(h100, MODULE, {"test_other": STEP})
    store.write(A10, MODULE, {"test_other": OTHER})
    store.write(T4, MODULE, {"test_other": STEP})
    put(store.path(replace(T4, gpu="L4").key, MODULE), "damaged")
    put(store.root / "README.md", "notes")
    assert store.elsewhere(MODULE, "test_other", T4) == [(A10, OTHER), (h100, STEP)]
    assert store.elsewhere(MODULE, "test_unknown", T4) == []
    assert store.elsewhere("tests/test_b.py", "test_other", T4) == []


def test_the_modules_of_an_environment_are_listed(store: BaselineStore) -> None:
    for module in ("tests/b/test_a.py", "test_top.py"):
        store.write(T4, module, {"test_other": OTHER})
    store.write(A10, MODULE, {"test_other": OTHER})
    assert store.modules(T4) == ["test_top.py", "tests/b/test_a.py"]


def test_a_folder_is_read_from_its_root_or_from_one_environment(store: BaselineStore) -> None:
    store.write(T4, MODULE, {"test_other": OTHER})
    store.write(A10, "test_top.py", {"test_other": STEP})
    assert [(module, file.environment) for module, file in read_folder(store.root)] == [
        ("test_top.py", A10),
        (MODULE, T4),
    ]
    ((module, content),) = read_folder(store.root / "sim-T4-torch2.13")
    assert (module, dict(content.tests)) == (MODULE, {"test_other": OTHER})


def test_hidden_folders_are_read_in_an_environment_alone(store: BaselineStore) -> None:
    store.write(T4, ".ci/test_x.py", {"test_other": OTHER})
    put(store.root / ".pytest_cache" / "d" / "learned.json", "{}")
    for folder in (store.root, store.root / "sim-T4-torch2.13"):
        assert [module for module, _ in read_folder(folder)] == [".ci/test_x.py"]


def test_a_folder_without_baselines_or_with_misplaced_ones_is_refused(
    store: BaselineStore, path: Path, tmp_path: Path
) -> None:
    with pytest.raises(BaselineError, match="holds no baselines; record some with pytest --gpum"):
        read_folder(tmp_path)
    put(path, changed(environment=A10.to_dict()))
    with pytest.raises(BaselineError, match=r"for sim-A10-torch2.13, not for sim-T4-torch2.13;"):
        read_folder(store.root)
    with pytest.raises(BaselineError, match=r"for sim-A10-torch2.13, not for tests;"):
        read_folder(path.parent.parent)
    with pytest.raises(BaselineError, match=r"for sim-A10-torch2.13, not for tests;"):
        read_folder(path.parent)


@pytest.mark.parametrize(
    ("nodeid", "parts"),
    [
        ("tests/test_a.py::test_x", ("tests/test_a.py", "test_x")),
        ("tests/test_a.py::TestA::test_x[a::b]", ("tests/test_a.py", "TestA::test_x[a::b]")),
        ("tests/test_a.py::test_x@gpu", ("tests/test_a.py", "test_x")),
        ("tests/test_a.py::test_x[a@b]@gpu", ("tests/test_a.py", "test_x[a@b]")),
        ("tests/test_a.py::test_x[a@b]", ("tests/test_a.py", "test_x[a@b]")),
        ("tests/a@b/test_a.py::test_x", ("tests/a@b/test_a.py", "test_x")),
    ],
)
def test_a_node_id_is_a_module_and_an_id_without_xdists_group(
    nodeid: str, parts: tuple[str, str]
) -> None:
    assert split_nodeid(nodeid) == parts


def test_the_schema_has_every_field() -> None:
    schema = json.loads(files("pytest_gpumem.baseline").joinpath("schema.json").read_text())
    environment, test = schema["$defs"]["environment"], schema["$defs"]["test"]
    assert set(environment["properties"]) == {field.name for field in fields(Environment)}
    numbers = {field.name for field in fields(BaselineEntry)} - {"peak", "phase_peaks"}
    peak = {field.name for field in fields(StoredPeak)}
    assert set(test["properties"]) == numbers | peak
    site = schema["$defs"]["sites"]["items"]["properties"]
    assert set(site) == {field.name for field in fields(Site)} - {"held_by", "each"}
