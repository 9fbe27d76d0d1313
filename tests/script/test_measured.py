"""One run of a script on a device: its phases, the holders of its memory, and its end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver

from pytest_gpumem import run_script, simulate
from pytest_gpumem.device.cuda import CudaDevice
from pytest_gpumem.device.simulated import SimulatedDevice
from pytest_gpumem.script.entry import Script, kept_test, process_as_it_was
from pytest_gpumem.script.measured import ScriptRun, run_measured
from pytest_gpumem.script.process import Request
from pytest_gpumem.script.stopping import StopError

MIB = 1 << 20

Running = Callable[..., ScriptRun]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    with process_as_it_was():
        yield tmp_path


@pytest.fixture
def run(folder: Path) -> Running:
    """Return a function that runs a script on a simulated T4."""

    def running(text: str, *arguments: str, steps: int = 2, seconds: float = 60.0) -> ScriptRun:
        (folder / "script.py").write_text(dedent(text))
        request = Request(Script("script.py", arguments), "T4", steps, seconds, Path())
        with ExitStack() as resources:
            return run_measured(request, SimulatedDevice("T4"), resources)

    return running


ACCUMULATES = """
    import torch
    weight = torch.nn.Linear(1 << 18, 1, bias=False).cuda()
    optimizer = torch.optim.SGD(weight.parameters(), momentum=0.9)
    with torch.no_grad():
        weight(torch.ones(1, 1 << 18, device="cuda"))  # an evaluation
    while True:
        for part in range(3):
            weight(torch.ones(4, 1 << 18).to("cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_an_iteration_lasts_until_a_step_of_the_optimizer(run: Running) -> None:
    ran = run(ACCUMULATES)

    assert isinstance(ran.error, StopError)
    phases = ran.measurements[0].phases
    assert [(name, phase.parent, phase.entered) for name, phase in phases.items()] == [
        ("load", None, 1),
        ("iteration_1", None, 1),
        ("forward_1", "iteration_1", 4),
        ("backward_1", "iteration_1", 3),
        ("step_1", "iteration_1", 1),
        ("iteration_2", None, 1),
        ("forward_2", "iteration_2", 3),
        ("backward_2", "iteration_2", 3),
        ("step_2", "iteration_2", 1),
    ]
    # The weight and the evaluation's input; then the gradient is kept, and momentum is added.
    assert phases["load"].peak_allocated == 2 * MIB
    assert phases["step_1"].composition["optimizer state"] == MIB
    assert phases["step_1"].composition["gradients"] == MIB
    assert phases["step_1"].composition["parameters"] == MIB


def test_cleaning_up_at_the_end_of_a_script_is_no_iteration(run: Running) -> None:
    ran = run(
        """
        import torch
        net = torch.nn.Linear(256, 256).cuda()
        optimizer = torch.optim.SGD(net.parameters())
        x = torch.ones(1, 256, device="cuda")
        try:
            while True:
                net(x).sum().backward()
                optimizer.step()
        finally:
            net(x)
            large = torch.ones(8 << 20, device="cuda")
        """,
        steps=1,
    )
    phases = ran.measurements[0].phases
    assert list(phases) == ["load", "iteration_1", "forward_1", "backward_1", "step_1"]
    assert phases["forward_1"].entered == 1
    assert ran.measurements[0].peak_allocated > 32 * MIB > phases["step_1"].peak_allocated


def test_a_run_with_values_is_stopped_between_its_operators(folder: Path) -> None:
    # 400 products of 2 GFLOP take more than 10 s on one core, nearly all of them in operators.
    (folder / "script.py").write_text(
        dedent(
            """
            import torch
            weight = torch.randn(1024, 1024, device="cuda", requires_grad=True)
            y = weight
            for _ in range(400):
                y = y @ weight
            """
        )
    )
    request = Request(Script("script.py"), "T4", 2, 1.0, Path())
    with ExitStack() as resources:
        ran = run_measured(request, SimulatedDevice("T4", real_values=True), resources)
    assert isinstance(ran.error, StopError)
    assert ran.time_is_over
    assert ran.seconds < 6


def test_running_out_of_memory_is_recorded_with_the_holders(run: Running) -> None:
    ran = run(
        """
        import torch
        kept = torch.empty(8 << 30, dtype=torch.uint8, device="cuda")
        try:
            torch.empty(9 << 30, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError as error:
            raise RuntimeError("buy more") from error
        """
    )
    assert isinstance(ran.error, RuntimeError)
    assert ran.out_of_memory is not None
    assert ran.out_of_memory.requested == 9 << 30
    assert ran.out_of_memory.site == "script.py:5"
    assert [(site.bytes, site.site) for site in ran.out_of_memory.holders] == [
        (8 << 30, "script.py:3")
    ]


def test_an_out_of_memory_error_that_is_caught_is_not_recorded(run: Running) -> None:
    ran = run(
        """
        import torch
        try:
            torch.empty(20 << 30, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
        """
    )
    assert (ran.error, ran.out_of_memory, ran.measurements[0].peak_allocated) == (None, None, MIB)


def test_an_existing_checkpoint_is_not_overwritten(run: Running, folder: Path) -> None:
    torch.save({"weight": torch.ones(3)}, folder / "model.pt")
    ran = run(
        """
        import torch
        net = torch.nn.Linear(1000, 1000, device="cuda")
        for name in ("model.pt", "new.pt", "new.pt"):
            torch.save(net.state_dict(), name)
        torch.save({"epoch": 1}, "model.pt.epoch")
        torch.save({"epoch": 2}, "model.pt.epoch")
        """
    )
    assert ran.error is None
    assert torch.load(folder / "model.pt")["weight"].tolist() == [1, 1, 1]
    with pytest.raises(RuntimeError, match="saved on a simulated GPU"):
        torch.load(folder / "new.pt")
    assert torch.load(folder / "model.pt.epoch") == {"epoch": 2}
    assert (
        "torch.save at script.py:5 has left model.pt as it was: a simulated GPU has shapes to "
        "write, and no values"
    ) in ran.measurements[0].notes
    assert sorted(path.name for path in folder.iterdir()) == [
        *("model.pt", "model.pt.epoch", "new.pt", "script.py"),
    ]


def test_an_existing_checkpoint_of_safetensors_is_not_overwritten(
    run: Running, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = folder / "site-packages" / "safetensors"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "torch.py").write_text(SAFETENSORS)
    (folder / "model.safetensors").write_text("values")
    monkeypatch.syspath_prepend(package.parent)
    for name in ("safetensors", "safetensors.torch"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    ran = run(
        """
        import torch
        from safetensors.torch import save_file
        weight = torch.rand(3, device="cuda")
        for name in ("model.safetensors", "new.safetensors", "new.safetensors"):
            save_file(weight, name)
        save_file(torch.ones(1), "model.safetensors")
        """
    )
    assert ran.error is None
    assert (folder / "model.safetensors").read_bytes() == b"None" + bytes([0, 0, 0x80, 0x3F])
    new = (folder / "new.safetensors").read_bytes()
    assert new == b"{'pytest_gpumem': 'restore_unknown'}" + b"\xff" * 12
    assert (
        "safetensors at script.py:6 has left model.safetensors as it was: a simulated GPU has "
        "shapes to write, and no values"
    ) in ran.measurements[0].notes


SAFETENSORS = """
import ctypes

def serialize_file(tensors, filename, metadata=None):
    with open(filename, "wb") as file:
        file.write(str(metadata).encode() + tensors)

def save_file(tensor, filename):
    tensor = tensor.to("cpu")
    size = tensor.numel() * tensor.element_size()
    serialize_file(ctypes.string_at(tensor.data_ptr(), size), filename, metadata=None)
"""
"""What matters of safetensors/torch.py: it reads memory at an address and writes it."""


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
def test_an_existing_distributed_checkpoint_is_not_overwritten(run: Running, folder: Path) -> None:
    state_dict_saver.save({"weight": torch.ones(3)}, checkpoint_id=folder / "whole", no_dist=True)
    before = {path.name: path.read_bytes() for path in (folder / "whole").iterdir()}
    ran = run(
        """
        import torch
        import torch.distributed.checkpoint as dcp
        state = {"weight": torch.randn(3, device="cuda")}
        for name in ("whole", "new", "new"):
            dcp.save(state, checkpoint_id=name, no_dist=True)
        """
    )
    assert ran.error is None
    assert {path.name: path.read_bytes() for path in (folder / "whole").iterdir()} == before
    assert (folder / "new" / ".metadata").is_file()
    (note,) = [note for note in ran.measurements[0].notes if "distributed checkpoint" in note]
    assert note.startswith("a distributed checkpoint at script.py:6 has left whole as it was")


def test_a_real_device_is_measured_in_the_same_way(run: Running, folder: Path) -> None:
    simulated = run(ACCUMULATES)
    request = Request(Script("script.py"), "T4", 2, 60.0, Path())
    with simulate("T4"), ExitStack() as resources:  # it stands in for a real one
        real = run_measured(request, CudaDevice(None), resources)

    one, other = simulated.measurements[0], real.measurements[0]
    assert (one.simulated, other.simulated) == (True, False)
    assert other.peak_allocated == one.peak_allocated
    assert {name: phase.peak_allocated for name, phase in other.phases.items()} == {
        name: phase.peak_allocated for name, phase in one.phases.items()
    }
    assert sum(other.composition.values()) == other.peak_allocated


def test_a_script_in_a_test_is_stopped_and_leaves_no_state(folder: Path) -> None:
    (folder / "script.py").write_text(dedent(ACCUMULATES))
    with simulate("T4"):
        assert run_script("script.py", steps=3) == 3
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]).step()


def test_the_end_of_a_script_in_a_test_is_returned_or_raised(folder: Path) -> None:
    (folder / "exits.py").write_text("import sys\nsys.exit(int(sys.argv[1]))\n")
    (folder / "raises.py").write_text("raise KeyError('x')\n")
    assert run_script("exits.py", "0") == 0
    with pytest.raises(SystemExit, match="3"):
        run_script("exits.py", "3")
    with pytest.raises(KeyError, match="x"):
        run_script("raises", module=True)
    with pytest.raises(ValueError, match=r"there is no script 'absent\.py'"):
        run_script("absent.py")


def test_a_test_written_from_a_measurement_has_a_margin(run: Running) -> None:
    simulated = run("import torch\nx = torch.empty(1 << 20, device='cuda')\n").measurements[0]
    script = Script("my-tools.train", ("--name", 'a "b"\n'), is_module=True)
    assert kept_test(script, "T4", simulated, 3).splitlines() == [
        "# test_train.py",
        "import pytest",
        "",
        "from pytest_gpumem import run_script",
        "",
        "",
        '@pytest.mark.gpumem(max=4_194_304, gpu="T4")  # 4.0 MiB',
        "def test_train():",
        '    run_script("my-tools.train", "--name", "a \\"b\\"\\n", steps=3, module=True)',
    ]
    with simulate("T4"), ExitStack() as resources:
        request = Request(Script("script.py"), "T4", 2, 60.0, Path())
        real = run_measured(request, CudaDevice(None), resources).measurements[0]
    # 1 % and 1 MiB more.
    assert "(max=5_284_824)  # 5.0 MiB" in kept_test(Script("a b.py"), "T4", real, 2)
    assert "def test_a_b():" in kept_test(Script("a b.py"), "T4", real, 2)
