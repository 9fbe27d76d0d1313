"""``gpumem predict``: what a function or a test needs on models of GPU."""

from __future__ import annotations

from textwrap import dedent

import pytest

from pytest_gpumem.simulated.gpu.catalogue import GPUS
from tests.cli.targets import GIB, KIB, Command, command

pytestmark = pytest.mark.usefixtures("plain_workspaces", "forked_python")

gpumem = command("predict")

PARAMETERS = 1024 * KIB + 4 * KIB + 512 * KIB + 512
WORKSPACE = 8_519_680
"""The workspace of cuBLAS on a T4."""


def test_peaks_are_shown_by_phase(gpumem: Command) -> None:
    (t4,) = gpumem.json("net.py:train", "--gpu", "T4")["gpus"]

    held = PARAMETERS + 64 * KIB + WORKSPACE
    # The first layer's output and ReLU's.
    assert t4["phases"]["forward"] == held + 2 * 256 * KIB
    # Backward has a workspace of its own, and with step() every gradient.
    assert t4["phases"]["step"] == held + WORKSPACE + PARAMETERS + 512
    assert t4["peak_allocated"] == max(t4["phases"].values())
    assert t4["total_memory"] == GPUS["T4"].total_memory
    assert t4["left"] == t4["total_memory"] - t4["peak_reserved"]
    assert t4["fits"]


def test_the_exit_code_is_1_where_a_model_is_too_small(gpumem: Command) -> None:
    code, lines = gpumem("net.py:reserve", "--gpu", "T4", "--gpu", "A100-40GB")

    assert code == 1
    # 2 · 10 GiB: the need is the same on the T4.
    assert lines[3].split() == [
        *("T4", "14.75", "GiB", "20.00", "GiB", "20.00", "GiB", "no,", "5.25", "GiB", "missing"),
    ]
    assert lines[4].split() == [
        *("A100-40GB", "39.39", "GiB", "20.00", "GiB", "20.00", "GiB"),
        *("yes,", "19.39", "GiB", "left"),
    ]
    assert gpumem("net.py:reserve", "--gpu", "A100-40GB")[0] == 0


def test_every_model_of_the_catalogue_is_shown_by_default(gpumem: Command) -> None:
    found = gpumem.json("net.py:train")["gpus"]
    assert [one["gpu"] for one in found] == list(GPUS)


def test_a_narrow_terminal_shows_fewer_phases(
    gpumem: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pytest_gpumem.cli.predict.terminal_width", lambda: 80)
    _, lines = gpumem("net.py:train", "--gpu", "T4")
    assert max(map(len, lines)) <= 80
    assert lines[2].split() == ["GPU", "memory", "peak", "reserved", "forward", "backward", "fits"]


TESTS = dedent(
    """
    import unittest

    import pytest
    import torch
    from net import train


    def test_unmarked():
        train()

    @pytest.mark.gpumem(max=1, gpu=["T4", "L4"])
    def test_limited():
        torch.empty(20 << 30, dtype=torch.uint8, device="cuda")

    class TestUnit(unittest.TestCase):
        def test_large(self):
            torch.empty(20 << 30, dtype=torch.uint8, device="cuda")

    def on_two():
        first = torch.empty(4 << 20, dtype=torch.uint8, device="cuda:0")
        second = torch.empty(16 << 20, dtype=torch.uint8, device="cuda:1")

    def test_on_two():
        on_two()

    def test_on_the_cpu():
        torch.ones(3)

    def test_fails():
        assert torch.ones(3, device="cuda").shape == (4,)

    @pytest.mark.skip(reason="not today")
    def test_skipped():
        pass
    """
)


@pytest.fixture
def tests(gpumem: Command) -> Command:
    (gpumem.folder / "test_net.py").write_text(TESTS)
    return gpumem


def test_a_test_needs_the_same_as_its_function(tests: Command) -> None:
    keys = ("peak_allocated", "peak_reserved", "phases", "fits")
    gpus = ("--gpu", "T4", "--gpu", "H100")
    function = tests.json("net.py:train", *gpus)["gpus"]
    test = tests.json("test_net.py::test_unmarked", *gpus)["gpus"]
    assert [{key: one[key] for key in keys} for one in test] == [
        {key: one[key] for key in keys} for one in function
    ]


def test_a_test_runs_on_a_machine_with_several_gpus(tests: Command) -> None:
    (found,) = tests.json("test_net.py::test_unmarked", "--gpu", "T4*2")["gpus"]
    assert found["gpu"] == "T4*2"
    assert found["total_memory"] == GPUS["T4"].total_memory


@pytest.mark.parametrize("target", ["test_net.py::test_on_two", "test_net.py:on_two"])
def test_numbers_of_a_machine_are_those_of_its_fullest_gpu(tests: Command, target: str) -> None:
    (found,) = tests.json(target, "--gpu", "T4*2")["gpus"]
    assert (found["gpu"], found["peak_allocated"]) == ("T4*2", 16 * 1024 * KIB)
    assert found["notes"] == ["T4*2: these are numbers of cuda:1; cuda:0 peaks at 4.0 MiB"]


def test_a_function_that_uses_no_gpu_is_noted(tests: Command) -> None:
    _, lines = tests("test_net.py:test_on_the_cpu", "--gpu", "T4")
    assert lines[-1].startswith("Nothing was allocated on the GPU")


@pytest.mark.parametrize("name", ["test_limited[T4]", "TestUnit::test_large"])
def test_neither_limits_nor_the_marker_s_model_matter(tests: Command, name: str) -> None:
    code = tests(f"test_net.py::{name}", "--gpu", "A100-40GB")[0]
    assert code == 0
    t4, _ = tests.json(f"test_net.py::{name}", "--gpu", "T4", "--gpu", "H100")["gpus"]
    assert (t4["fits"], t4["peak_allocated"]) == (False, 20 * GIB)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("test_limited", "names 2 tests; give one of them, like test_net.py::test_limited[L4]"),
        ("test_absent", "was not run: ERROR: not found:"),
        ("test_on_the_cpu", "cannot be predicted for T4: it allocates nothing on the device"),
        ("test_fails", "cannot be predicted for T4: assert torch.Size([3]) == (4,)"),
        ("test_skipped", "cannot be predicted for T4: not today"),
    ],
)
def test_an_unpredictable_test_is_refused(tests: Command, name: str, sentence: str) -> None:
    assert sentence in tests.refusal(f"test_net.py::{name}", "--gpu", "T4")


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("net.py:broken", "net.py:broken raised RuntimeError"),
        ("net.py:costly_value", "; and computing values on the CPU takes at least "),
        ("net.py:needs", "cannot be called without arguments"),
        ("absent.py:f", "there is no file absent.py"),
        ("net", "'net' is not a target; write module:function, path.py:function or path.py::test"),
    ],
)
def test_bad_input_is_one_sentence(gpumem: Command, target: str, sentence: str) -> None:
    assert sentence in gpumem.refusal(target, "--gpu", "T4")


def test_a_function_that_reads_a_value_runs_again_with_values(gpumem: Command) -> None:
    code, lines = gpumem("net.py:value", "--gpu", "T4")
    assert code == 0
    assert lines[3].split() == "T4 14.75 GiB 3.8 MiB 22.0 MiB yes, 14.73 GiB left".split()


def test_an_unknown_gpu_is_refused(gpumem: Command) -> None:
    assert "'T5' is not a GPU model" in gpumem.refusal("net.py:train", "--gpu", "T5")


def test_the_worst_rank_is_shown_for_each_number_of_ranks(gpumem: Command) -> None:
    arguments = ("net.py:share", "--gpu", "H100", "--gpu", "A100-80GB", "--ranks", "2,8")
    found = gpumem.json(*arguments)["gpus"]
    # Rank r of n allocates 64 MiB / n, and the last one 2 MiB more.
    assert [(one["gpu"], one["ranks"], one["peak_allocated"]) for one in found] == [
        ("H100", "rank 1 of 2", 34 * 1024 * KIB),
        ("H100", "rank 7 of 8", 10 * 1024 * KIB),
        ("A100-80GB", "rank 1 of 2", 34 * 1024 * KIB),
        ("A100-80GB", "rank 7 of 8", 10 * 1024 * KIB),
    ]
    code, lines = gpumem(*arguments[:3], *arguments[5:])
    assert code == 0
    assert lines[3].split()[:7] == ["H100", "rank", "1", "of", "2", "79.19", "GiB"]
    assert any(
        line.startswith("note: rank 7 has the highest peak of 8 ranks: 0, 3, 5, 6, 7")
        for line in lines
    )
    assert "ranks" not in gpumem.json("net.py:train", "--gpu", "T4")["gpus"][0]


@pytest.mark.parametrize("ranks", ["0", "eight", "8,8", ""])
def test_an_impossible_number_of_ranks_is_refused(gpumem: Command, ranks: str) -> None:
    sentence = gpumem.refusal("net.py:train", "--gpu", "T4", "--ranks", ranks)
    assert "is not a number of ranks, nor several different ones; write 8 or 8,64" in sentence


def test_the_ranks_option_is_refused_for_a_test(gpumem: Command) -> None:
    (gpumem.folder / "test_net.py").write_text(TESTS)
    sentence = gpumem.refusal("test_net.py::test_unmarked", "--gpu", "T4", "--ranks", "8")
    assert "says in its marker how many ranks there are" in sentence
