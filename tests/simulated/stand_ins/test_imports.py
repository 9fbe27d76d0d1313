"""Stand-ins of libraries that are not installed, importable during a simulation alone."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from pytest_gpumem import simulate
from pytest_gpumem.simulated.simulation import SimulatedGPU
from pytest_gpumem.values.errors import UnsupportedOperatorError

SENTENCE = "flash-attn is not installed: a stand-in allocated what flash-attn 2.8.3 does"


def is_there() -> bool:
    """Return whether flash-attn is found by import, spec and metadata alike."""
    answers = {importlib.util.find_spec("flash_attn") is not None}
    try:
        answers.add(importlib.metadata.version("flash_attn") == "2.8.3")
        answers.add(importlib.metadata.version("flash-attn") == "2.8.3")
    except importlib.metadata.PackageNotFoundError:
        answers.add(False)
    answers.add("flash_attn" in importlib.metadata.packages_distributions())
    try:
        answers.add(importlib.import_module("flash_attn").__version__ == "2.8.3")
    except ModuleNotFoundError:
        answers.add(False)
    (answer,) = answers
    return answer


def test_a_stand_in_is_importable_inside_a_simulation_alone() -> None:
    assert not is_there()
    with simulate():
        assert is_there()
        with simulate("T4"):
            assert is_there()
        assert is_there()
    assert not is_there()


def test_modules_of_a_stand_in_are_removed_afterwards() -> None:
    with simulate():
        importlib.import_module("flash_attn.bert_padding")

    assert not [name for name in sys.modules if name.startswith("flash_attn")]
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'flash_attn'$"):
        importlib.import_module("flash_attn.bert_padding")


def test_a_later_simulation_has_the_same_modules() -> None:
    with simulate():
        kept = importlib.import_module("flash_attn.bert_padding")
    with simulate():
        assert importlib.import_module("flash_attn.bert_padding") is kept


def test_stand_ins_may_be_turned_off() -> None:
    with SimulatedGPU.machine("T4", stand_ins=False)[0].active():
        assert not is_there()


def test_an_installed_library_has_no_stand_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("__version__ = 'the real one'\n")
    monkeypatch.syspath_prepend(tmp_path)
    with simulate():
        try:
            assert importlib.import_module("flash_attn").__version__ == "the real one"
            with pytest.raises(importlib.metadata.PackageNotFoundError):
                importlib.metadata.version("flash_attn")
        finally:
            sys.modules.pop("flash_attn", None)


def test_a_function_without_a_stand_in_is_named() -> None:
    with simulate():
        module = importlib.import_module("flash_attn")
        with pytest.raises(UnsupportedOperatorError, match=r"^flash_attn\.flash_attn_more at \S+"):
            module.flash_attn_more  # noqa: B018
        with pytest.raises(UnsupportedOperatorError, match=r"^flash_attn\.ops at \S+"):
            importlib.import_module("flash_attn.ops.rms_norm")


def test_a_missing_submodule_raises_module_not_found_error() -> None:
    """kornia imports flash-attn's modules only where they are installed."""
    with simulate() as gpu, pytest.raises(ModuleNotFoundError, match=r"^flash_attn\.modules at "):
        importlib.import_module("flash_attn.modules.mha")

    # With the library the code would allocate other sizes.
    assert list(gpu.notes) == [
        "flash_attn.modules has no stand-in: code that can do without flash-attn does"
    ]


def test_an_unknown_submodule_is_not_found() -> None:
    with simulate(), pytest.raises(ModuleNotFoundError):
        importlib.import_module("flash_attn.nothing")


def test_a_note_names_the_stand_in() -> None:
    with simulate() as gpu:
        attend = importlib.import_module("flash_attn").flash_attn_func
        q = torch.zeros(1, 8, 1, 64, device="cuda", dtype=torch.half)
        assert not gpu.notes
        attend(q, q, q)

    assert list(gpu.notes) == [SENTENCE]


def test_transformers_finds_the_stand_in_in_each_simulation() -> None:
    utils = pytest.importorskip("transformers.utils")
    for _ in range(2):
        assert not utils.is_flash_attn_2_available()
        with simulate():
            assert utils.is_flash_attn_2_available()
            assert utils.is_flash_attn_greater_or_equal("2.4.1")
        assert not utils.is_flash_attn_2_available()
