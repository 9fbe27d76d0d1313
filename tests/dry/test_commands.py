"""Commands that run code give on the dry device what they give on a simulated one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.dry.conftest import bare_environment, why_not

PROGRAM = """
import torch


def step():
    layers = torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 10)
    model = torch.nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.randn(64, 512, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def model():
    layers = torch.nn.Conv2d(3, 64, 3), torch.nn.ReLU(), torch.nn.Conv2d(64, 64, 3)
    return torch.nn.Sequential(*layers).cuda(), torch.randn(2, 3, 64, 64, device="cuda")


def large():
    torch.empty(20 * 2**30, dtype=torch.uint8, device="cuda")


def talk():
    print("{", torch.empty(2**20, dtype=torch.uint8, device="cuda").nbytes, end="")


def decide():
    total = torch.rand(4).cuda().exp().sum()
    torch.empty(2**20 if total > 4 else 2**21, dtype=torch.uint8, device="cuda")


if __name__ == "__main__":
    decide()
"""

TEST = """
import pytest
from train import large, step


@pytest.mark.gpumem
def test_step():
    step()


@pytest.mark.gpumem
def test_large():
    large()
"""

GIB = 1024**3


MODELS = ("--gpu", "T4", "--gpu", "H100")
FUNCTION = ("train.py:step", *MODELS)
IN_A_TEST = ("test_train.py::test_step", "--gpu", "H100")
LAYERS = ("train.py:model", "--by", "layer", "--gpu", "A10G")
LINES = ("train.py:step", "--by", "line")

EACH = """
import contextlib, io, json, sys
from pytest_gpumem.cli import main
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert main(["predict", *arguments, "--json"]) == 0
    print(json.dumps(json.loads(said.getvalue())))
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a module and its tests."""
    if reason := why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("project")
    (folder / "train.py").write_text(PROGRAM, encoding="utf-8")
    (folder / "test_train.py").write_text(TEST, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def simulated(project: Path) -> dict[tuple[str, ...], Any]:
    """What ``gpumem predict`` says of simulated GPUs, by its arguments.

    In a process with the dry runtime, because this torch may not import without it.
    """
    each = FUNCTION, IN_A_TEST, LAYERS, LINES
    command = [sys.executable, "-m", "pytest_gpumem.dry", "-c", EACH, json.dumps(each)]
    done = subprocess.run(
        command, cwd=project, env=bare_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(each, map(json.loads, done.stdout.splitlines()), strict=True))


def gpumem(folder: Path, command: str, *arguments: str) -> Any:
    """Return what ``gpumem`` answers as JSON."""
    program = [sys.executable, "-m", "pytest_gpumem.cli", command, "--json", *arguments]
    done = subprocess.run(
        program, cwd=folder, env=bare_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout)


def test_predict_of_a_function_is_the_same(project: Path, simulated: Any) -> None:
    dry = gpumem(project, "predict", *FUNCTION, "--device", "dry")

    assert [one["gpu"] for one in dry["gpus"]] == ["T4", "H100"]
    assert dry == simulated[FUNCTION]


def test_several_gpus_have_the_name_that_they_were_given(project: Path) -> None:
    (found,) = gpumem(project, "predict", FUNCTION[0], "--device", "dry:T4*2")["gpus"]
    assert found["gpu"] == "T4*2"


def test_what_a_function_prints_is_shown_above_the_answer(project: Path) -> None:
    program = [sys.executable, "-m", "pytest_gpumem.cli", "predict", "train.py:talk"]
    done = subprocess.run(
        [*program, "--device", "dry:T4"],
        cwd=project,
        env=bare_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("{ 1048576train.py:talk, torch ")


def test_predict_of_a_test_is_the_same(project: Path, simulated: Any) -> None:
    dry = gpumem(project, "predict", *IN_A_TEST, "--device", "dry")

    assert dry["gpus"][0]["peak_allocated"] > 0
    assert dry == simulated[IN_A_TEST]


def test_layers_are_the_same(project: Path, simulated: Any) -> None:
    dry = gpumem(project, "predict", *LAYERS[:3], "--device", "dry:A10G")

    assert [layer["kind"] for layer in dry] == ["Sequential", "Conv2d", "ReLU", "Conv2d"]
    assert dry == simulated[LAYERS]


def test_lines_take_the_same(project: Path, simulated: Any) -> None:
    """The history of a real allocator tells no shapes."""
    dry = gpumem(project, "predict", *LINES, "--device", "dry")

    def bytes_of(lines: Any) -> list[Any]:
        names = ("number", "source", "times", "before", "after", "peak")
        return [[line[name] for name in names] for line in lines]

    assert len(dry) == 7
    assert bytes_of(dry) == bytes_of(simulated[LINES])


def test_code_that_decides_by_a_value_runs_again_with_it(project: Path) -> None:
    """Four numbers from 0 to 1, whose exponentials are above 4 together.

    They are drawn by the CPU before there is a CUDA context.
    """
    function = gpumem(project, "predict", "train.py:decide", "--device", "dry:T4")["gpus"][0]
    script = gpumem(project, "run", "--device", "dry:T4", "train.py")["gpus"][0]
    lines = gpumem(project, "predict", "train.py:decide", "--by", "line", "--device", "dry:T4")

    for one in (function, script):
        assert one["peak_allocated"] == 2**20 + 512
    assert [line["peak"] for line in lines] == [2 * 512, 2**20 + 512]


def test_a_function_or_test_that_does_not_fit_says_what_it_would_take(project: Path) -> None:
    function, test = (
        gpumem(project, "predict", target, "--device", "dry:T4")["gpus"][0]
        for target in ("train.py:large", "test_train.py::test_large")
    )

    for one in (function, test):
        assert (one["gpu"], one["fits"]) == ("T4", False)
        assert one["peak_allocated"] == 20 * GIB
        assert 14 * GIB < one["total_memory"] < 15 * GIB


def test_plan_runs_tests_on_each_runner(project: Path) -> None:
    runners = ["--runner", "T4:0.35", "--runner", "H100:4"]
    plan = gpumem(project, "plan", *runners, "--device", "dry", "test_train.py")

    assert [(one["name"], one["fit"]) for one in plan["runners"]] == [("T4", 1), ("H100", 2)]
    assert plan["sources"][0].startswith("needs: dry on each runner")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["predict", "train.py:step", "--device", "tpu"], "'tpu' is not a device"),
        (["predict", "train.py:step", "--device", "dry:Z9"], "Z9"),
        (["predict", "train.py:step", "--device", "dry:T4", "--gpu", "L4"], "leave one out"),
        (["predict", "train.py:step", "--device", "dry:T4", "--ranks", "2"], "leave --device dry"),
        (["plan", "--runner", "T4:1", "--device", "cuda", "."], "write --device sim or dry"),
        (["predict", "train.py:missing", "--device", "dry:T4"], "train has no missing"),
    ],
)
def test_a_wrong_option_is_one_sentence(project: Path, arguments: list[str], sentence: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest_gpumem.cli", *arguments],
        cwd=project,
        env=bare_environment(),
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 2
    assert sentence in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
