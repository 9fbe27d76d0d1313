"""Every command and Python block of the documentation runs, and prints its shown output."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from textwrap import dedent

import pytest

pytest.importorskip("markdown_it")

from pytest_gpumem import simulate
from pytest_gpumem.cli import main
from tests.docs.blocks import (
    PAGES,
    REPOSITORY,
    Shown,
    agrees,
    blocks,
    commands,
    printed_blocks,
    python_blocks,
)
from tests.docs.release import NAMED_RELEASE, is_named_release
from tests.forked import quick
from tests.pytest_project import Project

NOT_RUN = {
    "python -m pip install tox && python -m tox -e examples": "installs from an index",
    "python -m pip install tox && python -m tox": "installs from an index",
    "EXAMPLE_REGRESSION=1 python -m tox -e examples -- examples/transformer": "installs",
    "pip install 'pytest-gpumem[examples]'": "installs from an index",
    "pip install PATH/TO/pytest-gpumem": "installs a checkout",
    "pip install pytest-xdist": "installs from an index",
    'pip install "pytest-gpumem[plot]"': "installs from an index",
    "gpumem report report.json -o peaks.png": "needs matplotlib; has tests of its own",
    "gpumem report report.json --kind phases --test test_two_steps -o phases.svg": "the same",
    "gpumem report report.json --kind timeline --test test_two_steps -o timeline.svg": "the same",
    "gpumem report reports/ --kind history -o history.png": "the same",
    "gpumem history --git v1.0..HEAD": "needs commits; has tests of its own",
    "gpumem history --git HEAD --max-creep 3%": "the same",
    'gpumem bisect "tests/test_model.py::test_step" --good v1.0': "the same",
    'gpumem bisect "tests/test_model.py::test_step" --good v1.0 --bad HEAD --gpu A100-40GB': "the "
    "same",
    "tox -e gpu": "needs a GPU",
    "python benchmarks/plugin_overhead.py": "needs a GPU",
    "python benchmarks/twin.py": "needs a GPU",
    "pytest examples/cnn_memory": "is part of this suite",
    "pytest examples/memory_of_training": "is part of this suite",
    "pytest examples/transformer": "is part of this suite",
    "EXAMPLE_REGRESSION=1 pytest examples/transformer": "is part of this suite",
    "pytest examples/ranks": "is part of this suite",
    "EXAMPLE_REGRESSION=1 pytest examples/ranks": "is part of this suite",
    "pytest examples/transformer --gpumem-update-baselines": "writes to this repository",
    "python -m examples.memory_of_training.charts charts": "has tests of its own",
    "python examples/shared_gpu/demonstrate.py": "takes minutes",
    'gpumem baselines move "tests/test_a.py::test_old" "tests/test_b.py::test_new"': "has tests of "
    "its own",
    "gpumem run --gpu T4 --gpu A100-40GB -m mypackage.train config.yaml --lr 1e-4": "has tests of "
    "its own",
    "gpumem gpus --watch": "does not end by itself",
    "gpumem predict train.py:step --device dry --gpu T4 --gpu H100": "needs a CUDA build of torch; "
    "has tests of its own",
    "gpumem predict train.py:step --by line --device dry": "the same",
    "gpumem plan --runner T4:0.35 --runner L4:0.80 --runner H100:4.10 --minutes 10 "
    "--output shards.json": "has tests of its own: it needs durations of many tests",
    "gpumem plan --runner T4:0.35 --runner L4:0.80 --runner H100:4.10 --minutes 10 "
    "report.json": "shows a suite of a hundred tests",
    "pytest --gpumem-share --dist load --tx 2*ssh=gpu1//chdir=/ci//python=python3 "
    '--tx ssh=gpu2//chdir=/ci --rsyncdir . "$PWD"': "needs two hosts",
    "pytest --gpumem-shard 2/5 --gpumem-shard-by shards.json": "has tests of its own",
    "pytest --gpumem-shard 2/4": "has tests of its own: one test cannot be cut in four",
    "pytest -n 4 --gpumem-share": "has tests of its own, and takes four workers",
}
"""Commands that these tests do not run, and why."""
NOT_RUN_PAGES = {"docs/pytorch_tests.md": "runs the tests of other projects, which are not here"}

READ = {"before.json", "after.json", "report.json", "reports/"}
"""Reports, and a folder of them, that commands read: made before."""

NOT_COMPARED = {
    "docs/replay.md": "shows a recording of a GPU that is too large to be kept here",
}

OTHER_NUMBERS = {
    "docs/fidelity.md": "compares releases, and names each",
    "docs/plan.md": "shows a suite that is made up",
    "docs/replay.md": "shows a recording of a GPU",
}
"""Pages whose numbers are not those of the guide's release, and why."""

MODEL = """

def model():
    return Net().cuda(), torch.randn(64, 256, device="cuda")
"""
"""The functions of ``net.py`` that other pages use; one page shows the file."""

KERNEL = """\
import pytest
import torch

torch.library.define("mylib::fused", "(Tensor x, *, float eps=1e-6) -> Tensor")
@pytest.mark.gpumem
def test_fused():
    x = torch.ones(8, 128, 64, dtype=torch.bfloat16, device="cuda")
    torch.ops.mylib.fused(x, eps=1e-5)
"""

PREAMBLES = {
    "docs/predict.md: test_step": """
        import pytest
        from train import step
    """,
    "docs/replay.md: result": "import pytest_gpumem",
    "docs/simulation.md: simulate_operator": "import torch",
    "docs/replay.md: _record_memory_history": "import torch",
}
"""The code that a block presupposes, by its page and a word in it."""


FAILING = {
    "test_limit.py": ("test_first_number", "gpumem\n", 'gpumem(max="40MiB")\n'),
    "test_leak.py": ("test_that_a_cache", "gpumem\n", "gpumem(max_leak=0)\n"),
}
"""Tests that fail, to be shown: each a block with a word in it, and one piece of it replaced."""

RECORDING = """
import sys, torch
from pytest_gpumem import simulate

with simulate("T4"):
    torch.cuda.memory._record_memory_history()
    kept = [torch.empty(1 << 20, device="cuda") for _ in range(4)]
    torch.cuda.memory._dump_snapshot(sys.argv[1])
"""


pytestmark = pytest.mark.usefixtures("forgotten_imports", "forked_python")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a user's project, with the files that the documentation mentions."""
    folder = tmp_path_factory.mktemp("project")
    net = _block("# net.py").source + MODEL
    (folder / "net.py").write_text(net)
    (folder / "train.py").write_text(net)
    (folder / "finetune.py").write_text(_block("# finetune.py").source)
    (folder / "test_model.py").write_text(_block("test_training_step").source)
    (folder / "test_first.py").write_text(_block("test_first_number").source)
    (folder / "attention.py").write_text(_block("class Attention").source)
    for name, (word, old, new) in FAILING.items():
        failing = _block(word).source.replace(old, new)
        assert new in failing
        (folder / name).write_text(failing)
    # Only for blocks that need them.
    (folder / "conftest.py").write_text(f"collect_ignore = {[*FAILING, 'test_kernel.py']}")
    # Without their tests, which a plain pytest would run.
    for name in ("__init__.py", "cnn_memory/__init__.py", "cnn_memory/models.py"):
        (folder / "examples" / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / "examples" / name, folder / "examples" / name)
    subprocess.run([quick(), "-c", RECORDING, folder / "recorded.pickle"], check=True)
    (folder / "mylib").mkdir()
    (folder / "mylib" / "__init__.py").touch()
    (folder / "test_kernel.py").write_text(KERNEL)
    kernels = "def launch_norm(x, weight): ...\ndef norm_kernel(): ...\n"
    (folder / "mylib" / "kernels.py").write_text(kernels)
    return folder


def _block(word: str) -> Shown:
    return next(block for block in python_blocks() if word in block.source)


COMMANDS = [
    command
    for command in commands()
    if command.source not in NOT_RUN and command.page not in NOT_RUN_PAGES
]


def test_exceptions_exist_and_enough_blocks_are_found() -> None:
    found = {command.source for command in commands()}
    assert NOT_RUN.keys() <= found
    assert len(COMMANDS) >= 15
    assert len(python_blocks()) >= 8


Ran = tuple[int, list[str]]
Run = Callable[[str], Ran]


@pytest.fixture(scope="module")
def known() -> dict[str, Ran]:
    """Hold the results of commands that several pages show."""
    return {}


@pytest.fixture
def run(
    place: Path, known: dict[str, Ran], project: Project, monkeypatch: pytest.MonkeyPatch
) -> Run:
    """Return a function that runs a command: its exit code and printed lines."""
    shutil.copy(place / "recorded.pickle", place / "step.pickle")  # blocks record their own
    monkeypatch.setenv("GPUMEM_SHARE_DIR", str(place / "shared"))
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(place)

    def call(command: str) -> Ran:
        if command not in known:
            program, *words = shlex.split(command)
            assert program in ("gpumem", "pytest"), command
            known[command] = _gpumem(words) if program == "gpumem" else _pytest(project, words)
        return known[command]

    return call


def _gpumem(words: list[str]) -> Ran:
    printed = StringIO()
    with redirect_stdout(printed):
        code = main(words)
    return code, printed.getvalue().splitlines()


def _pytest(project: Project, words: list[str]) -> Ran:
    ran = project.run(*words, device="", use=("cacheprovider",))
    return int(ran.ret), ran.outlines


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_a_command_prints_the_shown_lines(command: Shown, run: Run, place: Path) -> None:
    for file in sorted(READ & set(command.source.split())):
        needed = place / (f"{file}1.json" if file.endswith("/") else file)
        if not needed.exists():
            run(f"pytest test_model.py --gpumem-report=json:{needed.relative_to(place)}")
    code, printed = run(command.source)
    assert code == 0, printed
    shown = command.output
    if shown is None or command.page in NOT_COMPARED or not is_named_release():
        return
    assert agrees(shown, [_without_build(line) for line in printed]), "\n".join(printed)


@pytest.mark.parametrize("block", printed_blocks(), ids=lambda block: block.name)
def test_parts_of_output_are_shown(block: Shown, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, printed = run(f"{block.source} --gpumem-baselines=elsewhere")  # others have recorded some
    # On every release: the limit in a failure that the guide shows has to be below the peak.
    assert code == int(block.source.split()[1] in FAILING), "\n".join(printed)
    if block.output is not None and is_named_release():
        lines = [_without_build(line) for line in printed]
        assert agrees(block.output, lines, part=True), "\n".join(printed)


def _shows_sizes(page: str) -> bool:
    texts = [block.text for block in blocks(page) if block.language in ("", "text", "console")]
    # Also bare bytes, which Python prints.
    return any(re.search(r"\d (?:[KMGT]i)?B\b|^\d{6,}\b", text, re.MULTILINE) for text in texts)


@pytest.mark.parametrize("page", [*filter(_shows_sizes, PAGES)])
def test_a_page_names_the_release_of_its_numbers(page: str) -> None:
    if page in OTHER_NUMBERS or page.startswith("examples/"):
        return
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    # At the top, so that it holds for all that follows; in the README anywhere.
    top = text.split("\n\n")[1] if page.startswith("docs/") else text
    said = re.findall(
        r"^Numbers shown: torch (\S+) \(\[others differ\]\((?:docs/)?versions\.md\)\), a simulated "
        r"A100-40GB where no GPU is named\.$",
        top,
        re.MULTILINE,
    )
    assert said == [NAMED_RELEASE]


@pytest.mark.parametrize("block", python_blocks(), ids=lambda block: block.name)
def test_a_python_block_prints_the_shown_lines(block: Shown, run: Run, place: Path) -> None:
    known = (text for key, text in PREAMBLES.items() if _is_meant(key, block))
    source = "\n".join((*map(dedent, known), block.source))
    if "def test_" in source:
        path = place / f"test_{Path(block.page).stem}_{block.line}.py"
        path.write_text(source)
        code, printed = run(f"pytest {path.name}")
        path.unlink()  # a plain pytest of another block would run it
        assert code == 0, printed
        return
    if "simulate_operator" in source:  # it applies to the whole process
        subprocess.run([quick(), "-c", source], cwd=place, check=True)
        return
    printed = _executed(source)
    if block.output is not None and is_named_release():
        assert agrees(block.output, printed), "\n".join(printed)


def _executed(source: str) -> list[str]:
    printed = StringIO()
    with redirect_stdout(printed):
        if "simulate(" in source or "fit_batch" in source or "replay(" in source:
            exec(compile(source, "block", "exec"), {})
        else:
            with simulate("T4"):
                exec(compile(source, "block", "exec"), {})
    return printed.getvalue().splitlines()


def _is_meant(key: str, block: Shown) -> bool:
    page, _, word = key.partition(": ")
    return page == block.page and word in block.source


def _without_build(line: str) -> str:
    """Return the line as a torch without a local version (``+cpu``) prints it."""
    return re.sub(r"(torch \d+\.\d+\.\d+)\+\w+", r"\1", line)
