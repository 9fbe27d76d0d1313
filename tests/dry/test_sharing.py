"""Several processes on the same dry GPUs: what NVML says, and what one leaves for the others."""

from __future__ import annotations

from pathlib import Path

from tests.dry.conftest import Run

GIB = 1024**3

NEIGHBOUR = """
import os, subprocess, sys
from pytest_gpumem.measurement.nvml import read_all, read_device
code = (
    "import torch, time; block = torch.empty(3 * 2**30, dtype=torch.uint8, device='cuda'); "
    "print('ready', flush=True); time.sleep(60)"
)

def neighbour():
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    process.stdout.readline()
    return process

own = torch.empty(2**30, dtype=torch.uint8, device="cuda")
uuid = str(torch.cuda.get_device_properties(0).uuid)
other = neighbour()
reading = read_device(uuid)
found["used"], found["own"], found["alone"] = reading.used, reading.process_used, reading.alone
found["others"] = [[one.pid == other.pid, one.used] for one in reading.others]
found["free"] = torch.cuda.mem_get_info()[0]
try:
    torch.empty(37 * 2**30, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    found["out_of_memory"] = str(error).replace(str(other.pid), "PID")
other.kill()
other.wait()
found["after"] = read_device(uuid).used
found["gpus"] = [one.name for one in read_all()]
"""


def test_processes_that_meet_share_a_gpu(dry_run: Run, tmp_path: Path) -> None:
    found = dry_run(NEIGHBOUR, PYTEST_GPUMEM_DRY_SHARED=str(tmp_path))

    assert (found["used"], found["own"], found["alone"]) == (4 * GIB, GIB, False)
    assert found["others"] == [[True, 3 * GIB]]
    total = 42_298_834_944  # of the catalogue's A100-40GB
    assert found["free"] == total - 4 * GIB
    assert "Process PID has 3.00 GiB memory in use." in found["out_of_memory"]
    assert "of which 35.39 GiB is free" in found["out_of_memory"]
    # What a killed process held is free.
    assert found["after"] == GIB


def test_a_process_has_its_gpu_for_itself_otherwise(dry_run: Run) -> None:
    found = dry_run(NEIGHBOUR)

    assert (found["used"], found["own"], found["alone"]) == (GIB, GIB, True)
    assert found["others"] == []
    assert "out_of_memory" not in found


def test_nvml_knows_all_gpus_whatever_cuda_is_shown(dry_run: Run) -> None:
    found = dry_run(
        """
from pytest_gpumem.measurement.nvml import read_all, read_device
block = torch.empty(2**30, dtype=torch.uint8, device="cuda")
found["used"] = [[one.name, one.used] for one in read_all()]
found["first"] = read_device(str(torch.cuda.get_device_properties(0).uuid)).name
""",
        gpu="A100-40GB,H100",
        CUDA_VISIBLE_DEVICES="1",
    )

    assert found["used"] == [["NVIDIA A100-SXM4-40GB", 0], ["NVIDIA H100 80GB HBM3", GIB]]
    assert found["first"] == "NVIDIA H100 80GB HBM3"


def test_a_tensor_travels_to_another_process(dry_run: Run) -> None:
    """By CUDA IPC: the receiver takes no memory of its own."""
    found = dry_run(
        """
import torch.multiprocessing as mp
from tests.dry.receiver import receive
if __name__ == "__main__":
    context = mp.get_context("spawn")
    there, back = context.Queue(), context.Queue()
    process = context.Process(target=receive, args=(there, back))
    process.start()
    sent = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    there.put(sent)
    found["received"] = back.get()
    process.join()
"""
    )

    assert found["received"] == [2**28, 0]
