"""``gpumem baselines``: entries are listed, shown, and pruned where their test is gone."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_gpumem.baseline.store import BaselineEntry
from pytest_gpumem.cli import main
from tests.report.example_run import SIMULATED
from tests.stores import BaselineStore

MIB = 1 << 20

Gpumem = Callable[..., list[str]]


@pytest.fixture
def gpumem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Gpumem:
    """Return a function that runs ``gpumem baselines`` in a folder with two files of baselines."""
    monkeypatch.chdir(tmp_path)
    store = BaselineStore(tmp_path / "baselines")
    for module, names in (("tests/test_a.py", ["test_x", "test_p[1]"]), ("test_b.py", ["test_y"])):
        entries = {name: _entry((at + 1) * MIB) for at, name in enumerate(names)}
        store.write(SIMULATED, module, entries)

    def run(*arguments: str) -> list[str]:
        assert main(["baselines", *arguments]) == 0
        return capsys.readouterr().out.splitlines()

    return run


def _entry(peak: int) -> BaselineEntry:
    return BaselineEntry(peak, 2 * MIB, 0, 0, {"forward": MIB // 2}, tolerance="1%")


def test_list_shows_every_module_with_its_environment(gpumem: Gpumem) -> None:
    assert gpumem("list") == [
        "environment              module           tests  largest peak",
        "sim-A100-40GB-torch2.13  test_b.py            1       1.0 MiB",
        "sim-A100-40GB-torch2.13  tests/test_a.py      2       2.0 MiB",
    ]
    (_, second) = json.loads("\n".join(gpumem("list", "--json")))
    assert second["tests"] == {"test_p[1]": 2 * MIB, "test_x": MIB}


@pytest.mark.parametrize("test", ["tests/test_a.py::test_p", "tests/test_a.py::test_p[1]"])
def test_show_prints_the_entry_of_a_test(gpumem: Gpumem, test: str) -> None:
    assert gpumem("show", test) == [
        "tests/test_a.py::test_p[1] [sim-A100-40GB-torch2.13]",
        "  peak 2.0 MiB (2,097,152 B), reserved 2.0 MiB, tolerance 1%",
        "  forward peak 512.0 KiB (524,288 B)",
    ]
    (shown,) = json.loads("\n".join(gpumem("show", test, "--json")))
    assert shown["peak_allocated"] == 2 * MIB


def test_show_prints_every_entry_of_a_module(gpumem: Gpumem) -> None:
    assert len(gpumem("show", "tests/test_a.py")) == 6


def test_show_refuses_an_unknown_test(gpumem: Gpumem, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["baselines", "show", "tests/test_a.py::test_z"]) == 2
    assert capsys.readouterr().err == (
        "gpumem: baselines holds nothing of 'tests/test_a.py::test_z'\n"
    )


def test_prune_deletes_modules_and_functions_that_are_gone(gpumem: Gpumem, tmp_path: Path) -> None:
    """``test_b.py`` and ``test_x`` are gone; ``test_p`` has other parameters now."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_a.py").write_text(
        "import pytest\n@pytest.mark.parametrize('n', [7])\ndef test_p(n): ...\n"
    )
    said = [
        "sim-A100-40GB-torch2.13: test_b.py::test_y",
        "sim-A100-40GB-torch2.13: tests/test_a.py::test_x",
    ]
    assert gpumem("prune", "--dry-run") == [*said, "2 stored tests would be dropped"]
    assert gpumem("prune") == [*said, "2 stored tests dropped"]
    assert gpumem("prune") == ["0 stored tests dropped"]
    assert len(gpumem("list")) == 2


def test_prune_deletes_nothing_where_collection_fails(
    gpumem: Gpumem, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_b.py").write_text("import nothing_of_this_name")
    assert main(["baselines", "prune"]) == 2
    assert capsys.readouterr().err == (
        "gpumem: pytest cannot collect test_b.py, so nothing was dropped: "
        "ModuleNotFoundError: No module named 'nothing_of_this_name'\n"
    )
    assert len(gpumem("list")) == 3


def test_prune_imports_modules_of_the_current_folder(
    gpumem: Gpumem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``python -m pytest`` does, where ``rootdir/tests`` has no ``__init__.py``."""
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    (tmp_path / "tests").mkdir()
    (tmp_path / "package_beside.py").write_text("")
    (tmp_path / "tests/test_a.py").write_text("import package_beside\ndef test_x(): ...\n")
    assert gpumem("prune", "--dry-run")[-1] == "2 stored tests would be dropped"
