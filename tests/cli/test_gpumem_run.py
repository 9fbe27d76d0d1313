"""``gpumem run``: a script, as it is, on a simulated GPU."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch

from pytest_gpumem.cli import main
from pytest_gpumem.cli.run import lines
from pytest_gpumem.script.entry import Script
from pytest_gpumem.script.process import ScriptResult
from pytest_gpumem.values.measurement import Measurement, PhaseRecord

pytest_plugins = ["pytester"]

pytestmark = pytest.mark.usefixtures("plain_workspaces", "forked_python")

TORCH = torch.__version__.partition("+")[0]

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

WORKSPACE = 8_519_680
"""The workspace of cuBLAS on a T4."""
PARAMETERS = 1024 * KIB + 4 * KIB + 512 * KIB + 512

NINE = ("load", *(f"iteration_{number}" for number in range(1, 10)))

TRAIN = dedent(
    """
    import atexit
    import sys

    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset


    def main():
        net = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 128)).cuda()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        data = TensorDataset(torch.randn(640, 256))
        loader = DataLoader(data, batch_size=int(sys.argv[1]), num_workers=1, pin_memory=True)
        for epoch in range(100):
            for (x,) in loader:
                try:
                    loss = net(x.to("cuda", non_blocking=True)).sum()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    print("loss", loss.item())
                except Exception:
                    print("caught")
        torch.save(net.state_dict(), "net.pt")


    if __name__ == "__main__":
        atexit.register(lambda: print("at exit", torch.cuda.memory_allocated() > 0))
        try:
            main()
        finally:
            print("finally")
    """
)


class Ran:
    """The exit code and output of one run of the command."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    @property
    def sentence(self) -> str:
        return self.err.splitlines()[-1]


class Gpumem:
    def __init__(self, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capfd = folder, capfd

    def __call__(self, *arguments: str) -> Ran:
        code = main(("run", *arguments))
        written = self._capfd.readouterr()
        return Ran(code, written.out, written.err)

    def script(self, text: str) -> str:
        (self.folder / "script.py").write_text(dedent(text))
        return "script.py"


@pytest.fixture
def gpumem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Gpumem:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAIN)
    return Gpumem(tmp_path, capfd)


def test_a_training_script_stops_after_two_steps(gpumem: Gpumem) -> None:
    ran = gpumem("--gpu", "T4", "train.py", "64")

    assert ran.code == 0
    # One print comes before the second step ends, and the script does not get to its end.
    assert ran.lines[:4] == [
        "loss 0.0",
        "finally",
        "at exit True",
        f"train.py on a simulated T4 (torch {TORCH}): stopped after 2 steps",
    ]
    assert not (gpumem.folder / "net.pt").exists()
    rows = {line.split()[0]: line.split()[1:3] for line in ran.lines[6:15]}
    assert list(rows) == [
        *("load", "iteration_1", "forward_1", "backward_1", "step_1"),
        *("iteration_2", "forward_2", "backward_2", "step_2"),
    ]
    assert rows["load"] == ["1.6", "MiB"]  # parameters, and the first input


def test_the_numbers_are_those_of_the_suggested_test(
    gpumem: Gpumem, pytester: pytest.Pytester
) -> None:
    (pytester.path / "train.py").write_text(TRAIN)
    ran = gpumem("--json", "--gpu", "T4", "train.py", "64")
    assert ran.err.splitlines()[0] == "loss 0.0"  # the script's output is not part of the JSON
    told: dict[str, Any] = json.loads(ran.out)
    (t4,) = told["gpus"]

    assert t4["phases"]["load"] == PARAMETERS + 64 * KIB
    # Parameters, gradients and the loss; backward has freed the input.
    assert t4["phases"]["step_1"] == 2 * PARAMETERS + 512 + 2 * WORKSPACE
    assert (t4["ending"], t4["steps"], t4["fits"]) == ("stopped", 2, True)
    (measured,) = t4["measurements"]
    assert sum(measured["composition"].values()) == t4["peak_allocated"]
    assert measured["composition"]["parameters"] == PARAMETERS
    assert measured["phases"]["forward_1"]["parent"] == "iteration_1"

    peak = t4["peak_allocated"]
    less = told["test"].replace(f"max={peak:_}", f"max={peak - 1:_}")
    pytester.makepyfile(test_train=told["test"], test_less=less)
    result = pytester.runpytest_subprocess("--gpumem-device=sim:T4", "-p", "no:randomly")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*FAILED test_less.py::test_train* over *"])


def test_a_script_that_does_not_fit_shows_holders_and_missing_bytes(gpumem: Gpumem) -> None:
    script = gpumem.script(
        """
        import torch
        kept = [torch.empty(10 << 30, dtype=torch.uint8, device="cuda") for _ in range(2)]
        """
    )
    ran = gpumem("--gpu", "T4", "--gpu", "A100-40GB", script)

    assert ran.code == 1
    assert (
        "gpumem: script.py ran out of memory on T4. Running again without a memory limit" in ran.err
    )
    assert "Traceback" not in ran.err
    assert ran.lines[0] == f"script.py on a simulated T4 (torch {TORCH}): ran to its end, 0 steps"
    assert ran.lines[2].startswith("out of memory: 10.00 GiB asked for by script.py:3 torch.empty")
    table = next(i for i, line in enumerate(ran.lines) if line.startswith("GPU "))
    assert [line.split()[0] for line in ran.lines[table + 1 : table + 3]] == ["T4", "A100-40GB"]
    assert ran.lines[table + 1].endswith("no, 5.25 GiB missing")
    assert ran.lines[table + 2].endswith("yes, 19.39 GiB left")
    # The suggested test is for the GPU on which the script fits.
    assert f'    @pytest.mark.gpumem(max={20 * GIB:_}, gpu="A100-40GB")  # 20.00 GiB' in ran.lines


def test_a_script_of_inference_runs_to_its_end(gpumem: Gpumem) -> None:
    (gpumem.folder / "tool").mkdir()
    (gpumem.folder / "tool" / "__init__.py").touch()
    (gpumem.folder / "tool" / "infer.py").write_text(
        "import sys, torch\n"
        "net = torch.nn.ReLU().cuda()\n"
        "x = torch.ones(1 << 20, device='cuda')\n"
        "for _ in range(3):\n    net(x)\n"
        "sys.exit(0)\n"
    )
    ran = gpumem("--json", "-m", "tool.infer")

    assert ran.code == 0
    (a100,) = json.loads(ran.out)["gpus"]
    assert (a100["ending"], a100["steps"], a100["gpu"]) == ("ended", 0, "A100-40GB")
    assert a100["phases"] == {"load": 4 * MIB, "forward": 8 * MIB}


def test_a_script_without_optimizer_steps_is_stopped_by_time(gpumem: Gpumem) -> None:
    script = gpumem.script(
        """
        import time, torch
        kept = torch.empty(1 << 20, device="cuda")
        while True:
            try:
                time.sleep(60)
            except Exception:
                pass
        """
    )
    ran = gpumem("--seconds", "0.2", script)

    assert ran.code == 0
    assert ran.lines[0].endswith(": stopped after 0 s, before its first step")
    assert "4.0 MiB" in ran.lines[3]
    assert ran.lines[-1] == (
        "note: its time was over, so its peak may be still to come: give more --seconds"
    )  # and no test is suggested: the number depends on the machine


def test_a_script_that_raises_shows_its_own_traceback(gpumem: Gpumem) -> None:
    script = gpumem.script(
        """
        import torch
        def wrong(x):
            return torch.nn.Linear(4, 4).cuda()(x)
        wrong(torch.ones(3, device="cuda"))
        """
    )
    ran = gpumem(script)

    assert (ran.code, ran.out) == (1, "")
    shown = ran.err.splitlines()
    assert shown[0] == "Traceback (most recent call last):"
    assert shown[1] == f'  File "{gpumem.folder / "script.py"}", line 5, in <module>'
    assert "pytest_gpumem" not in ran.err
    assert ran.sentence.startswith("gpumem: script.py raised RuntimeError: ")
    assert ran.sentence.endswith(" before its first step")


@pytest.mark.parametrize(
    ("ends", "code", "sentence"),
    [
        ("sys.exit('why')", 1, "gpumem: script.py ended with exit code 1 before its first step"),
        (
            "os._exit(0)",
            2,
            "gpumem: script.py ended its process with code 0, so nothing is known of its memory",
        ),
        (
            "torch.ones(3)",
            2,
            "gpumem: script.py allocated nothing on the A100-40GB in 0 s: it may choose another "
            "device by its own options, or need more --seconds to come to it",
        ),
    ],
)
def test_other_exits_have_a_sentence(gpumem: Gpumem, ends: str, code: int, sentence: str) -> None:
    script = gpumem.script(f"import os, sys, torch\n{ends}\n")
    ran = gpumem(script)
    assert (ran.code, ran.out, ran.sentence) == (code, "", sentence)
    assert ("why" in ran.err.splitlines()) == ("why" in ends)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_process_ends_as_without_the_command(gpumem: Gpumem) -> None:
    script = gpumem.script(
        """
        import atexit, os, sys, torch

        x = torch.ones(3, device="cuda")
        own = os.getpid()
        atexit.register(lambda: print("handler of", "parent" if os.getpid() == own else "child"))

        def fails():
            raise ValueError("why")

        for ends in (lambda: None, lambda: sys.exit(4), lambda: sys.exit("text"), fails):
            child = os.fork()
            if not child:
                ends()
                break
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        """
    )
    ran = gpumem(script)

    assert ran.code == 0
    assert ran.lines[:8] == [
        *("handler of child", "0", "handler of child", "4"),
        *("handler of child", "1", "handler of child", "1"),
    ]
    assert ran.lines[8] == "handler of parent"
    assert sum(line.startswith("script.py on") for line in ran.lines) == 1
    said = ran.err.splitlines()
    assert (said[0], said[-1]) == ("text", "ValueError: why")
    assert "pytest_gpumem" not in ran.err


def test_a_script_that_needs_values_runs_again_with_them(gpumem: Gpumem) -> None:
    script = gpumem.script(
        """
        import torch
        x = torch.full((1 << 20,), 2.0, device="cuda")
        drawn = torch.rand(1 << 20, device="cuda")
        if drawn.sum() > 0:
            y = torch.cat([x, x])
        """
    )
    ran = gpumem(script)

    assert ran.code == 0
    again = "bool() at script.py:5 depends on a value of a CUDA tensor"
    assert ran.sentence == f"gpumem: script.py runs again, with real values on the CPU: {again}"
    assert f"note: run again with real values on the CPU: {again}" in ran.lines
    assert f"    @pytest.mark.gpumem(max={16 * MIB:_}" in ran.out


DECIDES = """
    import torch
    x = torch.empty(1 << 15, 1 << 15, device="cuda")
    for _ in range(200):  # 1.4e16 operations
        y = x @ x
    kept = torch.empty(12 << 30, dtype=torch.uint8, device="cuda")
    if y.sum().item() > 0:
        torch.empty(20 << 30, dtype=torch.uint8, device="cuda")
"""


def test_a_script_whose_values_take_too_long_is_reported_up_to_them(gpumem: Gpumem) -> None:
    ran = gpumem("--gpu", "T4", "--gpu", "A100-40GB", "--seconds", "50", gpumem.script(DECIDES))

    assert ran.code == 1  # it has run out of memory on the T4
    assert ran.lines[0].endswith(": stopped at an unknown value, before its first step")
    assert ran.lines[2].startswith("out of memory: 12.00 GiB asked for by script.py:6 torch.empty")
    # x, y and what is kept, 4 + 4 + 12 GiB, exceed the device whatever the allocator does.
    assert "  no allocator setting would help: the peak is 20.01 GiB" in ran.lines
    t4, a100 = _rows(ran)
    assert "missing" in t4
    assert a100.endswith("unknown")
    read = "> of an item() at script.py:7 depends on a value of a CUDA tensor"
    assert f"note: the script was not run any further: {read}" in ran.lines
    assert ran.sentence.startswith(f"gpumem: script.py: {read}, which a simulated GPU does not")
    assert re.search(r"at least [\d,]+ s, more than --seconds 50: give --seconds \d+ or", ran.err)
    assert "a test that keeps the number" not in ran.out


def _rows(ran: Ran) -> list[str]:
    """Return the rows of the table of GPUs."""
    begin = next(i for i, line in enumerate(ran.lines) if line.startswith("GPU "))
    return ran.lines[begin + 1 : ran.lines.index("", begin)]


def test_it_is_unknown_whether_a_script_fits_after_an_unknown_value(gpumem: Gpumem) -> None:
    ran = gpumem("--json", "--seconds", "50", gpumem.script(DECIDES))

    assert ran.code == 2
    told = json.loads(ran.out)
    (a100,) = told["gpus"]
    assert (a100["ending"], a100["fits"], told["test"]) == ("unknown value", None, None)
    assert a100["peak_allocated"] // GIB == 20  # without the 20 GiB of the branch


@pytest.mark.parametrize(
    ("steps", "work", "seconds"),
    # Twice the work of both steps, in two digits.
    [(1, 138.2, 560), (0, 1000.0, 4000), (2, 90.1, 190), (0, 0.3, 2)],
)
def test_the_seconds_that_suffice_are_estimated(steps: int, work: float, seconds: int) -> None:
    assert ScriptResult("unknown value", steps=steps, work=work).enough_for(2) == seconds


@pytest.mark.parametrize(
    ("more", "remedy"),
    [
        (0, "  this request would have fitted with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:T"),
        # 600 × 9 MiB, and 24 GiB
        (20, "  no allocator setting would help: the peak is 29.27 GiB"),
    ],
)
def test_a_setting_is_advised_only_if_the_whole_peak_fits(
    gpumem: Gpumem, more: int, remedy: str
) -> None:
    script = gpumem.script(
        f"""
        import torch
        def allocate(size):
            return torch.empty(size, dtype=torch.uint8, device="cuda")
        pieces = [allocate(9 << 20) for _ in range(1200)]
        del pieces[::2]
        kept = allocate(4 << 30)
        more = allocate({more} << 30)
        """
    )
    ran = gpumem("--gpu", "T4", script)
    assert ran.code == 1
    assert ran.lines[5].startswith(remedy)


def test_an_out_of_memory_report_outlives_a_failure_without_a_limit(gpumem: Gpumem) -> None:
    script = gpumem.script(
        """
        import os, torch
        torch.empty(16 << 30, dtype=torch.uint8, device="cuda")
        os._exit(0)
        """
    )
    ran = gpumem("--gpu", "T4", script)
    assert ran.code == 1
    assert ran.lines[0].endswith(": ran out of memory before its first step")
    assert ran.lines[2].startswith("out of memory: 16.00 GiB asked for by script.py:3 torch.empty")
    assert _rows(ran)[0].endswith("no, it ran out of memory")
    assert ran.sentence.startswith("gpumem: script.py ended its process with code 0")


def test_only_the_informative_of_many_iterations_are_shown() -> None:
    peaks = {name: 4 * MIB if name == "iteration_6" else MIB for name in NINE}
    phases = {name: PhaseRecord(name, peak, peak, 0, 0) for name, peak in peaks.items()}
    measured = Measurement("cuda:0", True, 4 * MIB, 4 * MIB, 0, 0, None, 0, phases=phases)
    answer = ScriptResult("stopped", steps=9, gpu="T4", torch="2.13.0", measurements=(measured,))

    shown = list(lines(Script("train.py"), [answer], None, 1000))
    assert [line.split()[0] for line in shown[3:9]] == [
        *("load", "iteration_1", "iteration_2", "iteration_6", "iteration_9"),
        "5",
    ]
    assert shown[8] == "5 iterations between are left out: --json has them"
    assert shown[10] == "the peak, 4.0 MiB (4,194,304 B) in iteration_6:"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["absent.py"], "gpumem: there is no script 'absent.py'"),
        (["."], "gpumem: '.' is a folder without a __main__.py; give a script"),
        (["binary.py"], "gpumem: 'binary.py'"),
        (["wrong.py"], "gpumem: 'wrong.py', line 2: SyntaxError: "),
        ([], "gpumem: the following arguments are required: SCRIPT"),
        (["--gpu", "T5", "train.py"], "gpumem: 'T5' is not a GPU model"),
        (["--steps", "0", "train.py"], "gpumem: argument --steps: '0' is not a number of steps"),
        (["--steps", "x", "train.py"], "gpumem: argument --steps: 'x' is not a number of steps"),
        (
            ["--seconds", "nan", "train.py"],
            "gpumem: argument --seconds: 'nan' is not a number of s",
        ),
        (["--seconds", "-1", "train.py"], "gpumem: argument --seconds: "),
    ],
)
def test_bad_input_is_one_sentence(gpumem: Gpumem, arguments: list[str], sentence: str) -> None:
    (gpumem.folder / "binary.py").write_bytes(b"\x7fELF\0\0\0")
    (gpumem.folder / "wrong.py").write_text("x = 1\ndef f(:\n")
    ran = gpumem(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(sentence)
    assert len(ran.err.splitlines()) == 1


def test_an_absent_module_is_refused(gpumem: Gpumem) -> None:
    ran = gpumem("-m", "absent.train")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == "gpumem: absent.train: there is no module 'absent.train'\n"


def test_an_absent_device_is_refused(gpumem: Gpumem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    ran = gpumem("--gpu", "cuda", "train.py")
    assert (ran.code, ran.out) == (2, "")
    assert "torch sees no CUDA device; name a model to be simulated" in ran.err
