"""Workspaces that only a library knows: the dry device asks for what the simulated one would."""

from __future__ import annotations

import pytest

from tests.dry.conftest import Run


@pytest.mark.parametrize("gpu", ["A100-40GB", "H100", "T4"])
def test_libraries_ask_for_what_the_rules_of_the_simulated_device_say(
    dry_run: Run, gpu: str
) -> None:
    found = dry_run(f"from tests.dry.library_calls import peaks; found = peaks({gpu!r})", gpu=gpu)

    differing = {name: both for name, both in found.items() if both[0] != both[1]}
    assert len(found) > 50
    assert differing == {}


ESTIMATED = """
import pytest_gpumem
from pytest_gpumem.dry import workspaces
layer = torch.nn.Conv2d(128, 128, 3, padding=1).cuda()
images = torch.randn(8, 128, 56, 56, device="cuda")
torch.cuda.reset_peak_memory_stats()
before = torch.cuda.memory_allocated()
with torch.no_grad():
    output = layer(images)
found["workspace"] = torch.cuda.max_memory_allocated() - before - output.untyped_storage().nbytes()
found["notes"] = workspaces.notes(0)
workspaces.forget()
found["forgotten"] = workspaces.notes(0)
with torch.no_grad():
    layer(images)
found["again"] = workspaces.notes(0)
with workspaces.unmeasured():
    workspaces.forget()
    layer(torch.randn(16, 128, 56, 56, device="cuda")).sum().backward()
found["unmeasured"] = workspaces.notes(0)
"""


def test_the_notes_say_how_much_of_a_peak_is_an_estimate(dry_run: Run) -> None:
    found = dry_run(ESTIMATED)

    # Images and weights are copied for tensor cores: 8 x 128 x 56 x 56 and 128 x 128 x 3 x 3
    # numbers of 4 bytes, and 16 bytes beyond them, in blocks of 512 bytes.
    workspace = 12_845_056 + 589_824 + 512
    assert found["workspace"] == workspace
    (note,) = found["notes"]
    assert note.startswith("12.8 MiB of the peak are an estimate: cuDNN's workspace for conv2d")
    assert note.endswith("(forward) at program.py:11")
    assert found["forgotten"] == []
    assert found["again"] == [note.replace(":11", ":17")]
    assert found["unmeasured"] == []


def test_a_convolution_runs_without_a_workspace_where_there_is_no_room(dry_run: Run) -> None:
    found = dry_run(
        """
layer = torch.nn.Conv2d(64, 64, 3, padding=1).cuda().half()
images = torch.randn(64, 64, 1024, 1024, device="cuda", dtype=torch.half)
with torch.no_grad():
    torch.cuda.set_per_process_memory_fraction(0.45)
    found["shape"] = list(layer(images).shape)
found["peak"] = torch.cuda.max_memory_allocated()
"""
    )

    assert found["shape"] == [64, 64, 1024, 1024]
    assert found["peak"] < 17 * 2**30  # images and output, of 8 GiB each


def test_calls_whose_workspace_is_left_out_are_named(dry_run: Run) -> None:
    found = dry_run(
        """
from pytest_gpumem.dry import workspaces
square = torch.randn(16, 16, device="cuda")
torch.linalg.qr(square)
torch.fft.fft(square)
found["notes"] = workspaces.notes(0)
workspaces.forget()
torch.fft.fft(square)
found["of_a_plan_that_is_kept"] = workspaces.notes(0)
"""
    )

    assert [note.split(" is ")[0] for note in found["notes"]] == [
        "cuSOLVER's workspace for cusolverDnXgeqrf",
        "cuSOLVER's workspace for cusolverDnSorgqr",
        "cuFFT's workspace for cufftXtExec",
    ]
    assert found["of_a_plan_that_is_kept"] == found["notes"][2:]


def test_solvers_ask_for_what_was_recorded(dry_run: Run) -> None:
    found = dry_run(
        """
from pytest_gpumem.dry import workspaces
square = torch.randn(64, 64, device="cuda")
torch.cuda.memory._record_memory_history()
results = [
    torch.linalg.qr(square), torch.linalg.cholesky_ex(square), torch.linalg.lu_factor(square),
    torch.linalg.ldl_factor(square), torch.linalg.svd(square[:, :32], full_matrices=False),
    torch.linalg.svdvals(square[:8, :8]),
]
events = torch.cuda.memory._snapshot()["device_traces"][0]
found["sizes"] = [event["size"] for event in events if event["action"] == "alloc"]
found["notes"] = workspaces.notes(0)
found["cuda"] = torch.version.cuda
""",
        gpu="H100",
    )

    recorded = [3_145_856, 148_480, 160, 1280, 98_432, 3_145_984, 3968]
    taken = [size for size in found["sizes"] if size in recorded]
    assert taken == (recorded if found["cuda"].startswith("13.") else [])
    assert bool(found["notes"]) == (taken == [])


def test_asking_keeps_nothing_alive(dry_run: Run) -> None:
    found = dry_run(
        """
import gc
layer = torch.nn.Conv2d(64, 64, 3, padding=1).cuda()
gc.collect()
gc.disable()
before = torch.cuda.memory_allocated()
with torch.no_grad():
    layer(torch.randn(8, 64, 56, 56, device="cuda"))
found["kept"] = torch.cuda.memory_allocated() - before
"""
    )

    assert found["kept"] == 0


def test_a_matrix_with_two_of_four_values_takes_what_it_compresses_to(dry_run: Run) -> None:
    """Nine of sixteen bytes; ten, where a value has one (cuSPARSELtOps.cpp)."""
    found = dry_run(
        "for dtype in (torch.float16, torch.float32, torch.int8):\n"
        "    packed = torch._cslt_compress(torch.zeros(128, 256, device='cuda', dtype=dtype))\n"
        "    found[str(dtype)] = packed.untyped_storage().nbytes()"
    )

    assert found == {
        "torch.float16": 128 * 256 * 2 * 9 // 16,
        "torch.float32": 128 * 256 * 4 * 9 // 16,
        "torch.int8": 128 * 256 * 10 // 16,
    }
