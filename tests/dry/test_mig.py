"""GPUs that MIG divides: what CUDA and NVML say of instances, and workers that get one each.

Sizes are of "NVIDIA Multi-Instance GPU User Guide", "Getting Started with MIG": 20,096, 9,984 and
4,864 MiB, with 42, 28 and 14 multiprocessors.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_gpumem.dry.load import models_of
from pytest_gpumem.simulated.gpu.catalogue import GpuError, find_machine
from tests.dry.conftest import Run, bare_environment

MIB, GIB = 1024**2, 1024**3

DIVIDED = "A100-40GB/3g.20gb,A100-40GB/2g.10gb,A100-40GB/1g.5gb"

READING = """
from pytest_gpumem.measurement.nvml import read_all, read_device
properties = torch.cuda.get_device_properties(0)
found["devices"] = torch.cuda.device_count()
found["cuda"] = properties.name, properties.total_memory, properties.multi_processor_count
kept = torch.empty(2**30, dtype=torch.uint8, device="cuda")
found["nvml"] = [[one.name, one.total, one.used, one.mode.partition] for one in read_all()]
found["own"] = read_device(0).name, read_device(str(properties.uuid)).name
found["uuids"] = [one.uuid for one in read_all()]
try:
    torch.empty(30 * 2**30, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    found["out_of_memory"] = str(error)
"""


def test_cuda_shows_the_first_instance_and_nvml_all(dry_run: Run) -> None:
    found = dry_run(READING, gpu=DIVIDED)

    assert found["devices"] == 1
    assert found["cuda"] == ["NVIDIA A100-SXM4-40GB MIG 3g.20gb", 20_096 * MIB, 42]
    assert found["nvml"] == [
        ["NVIDIA A100-SXM4-40GB MIG 3g.20gb", 20_096 * MIB, GIB, "MIG-3g.20gb"],
        ["NVIDIA A100-SXM4-40GB MIG 2g.10gb", 9_984 * MIB, 0, "MIG-2g.10gb"],
        ["NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4_864 * MIB, 0, "MIG-1g.5gb"],
    ]
    assert found["own"] == ["NVIDIA A100-SXM4-40GB MIG 3g.20gb"] * 2
    assert "GPU 0 has a total capacity of 19.62 GiB" in found["out_of_memory"]


def test_cuda_shows_the_instance_that_is_named(dry_run: Run) -> None:
    last = dry_run(READING, gpu=DIVIDED)["uuids"][-1]

    found = dry_run(READING, gpu=DIVIDED, CUDA_VISIBLE_DEVICES=last)

    assert last.startswith("MIG-")
    assert found["devices"] == 1
    assert found["cuda"] == ["NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4_864 * MIB, 14]
    assert [used for _, _, used, _ in found["nvml"]] == [0, 0, GIB]
    assert found["own"] == ["NVIDIA A100-SXM4-40GB MIG 1g.5gb"] * 2


def test_beside_an_instance_cuda_shows_no_whole_gpu(dry_run: Run) -> None:
    found = dry_run(
        """
from pytest_gpumem.measurement.nvml import read_all
found["cuda"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
found["nvml"] = [one.name for one in read_all()]
""",
        gpu="T4,H100/3g.40gb",
    )

    assert found["cuda"] == ["NVIDIA H100 80GB HBM3 MIG 3g.40gb"]
    assert found["nvml"] == ["Tesla T4", "NVIDIA H100 80GB HBM3 MIG 3g.40gb"]


def test_a_gpu_is_named_by_the_beginning_of_its_uuid(dry_run: Run) -> None:
    code = """
found["names"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
found["second"] = f"GPU-{torch.cuda.get_device_properties(torch.cuda.device_count() - 1).uuid}"
"""
    second = dry_run(code, gpu="T4,H100")["second"]

    assert dry_run(code, gpu="T4,H100", CUDA_VISIBLE_DEVICES=second[:12]) == {
        "names": ["NVIDIA H100 80GB HBM3"],
        "second": second,
    }


def test_a_divided_gpu_holds_what_its_instances_hold(dry_run: Run, tmp_path: Path) -> None:
    found = dry_run(
        """
import os, pynvml, subprocess, sys
pynvml.nvmlInit()
whole = pynvml.nvmlDeviceGetHandleByIndex(0)
second = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(whole, 1)
found["gpus"] = pynvml.nvmlDeviceGetCount()
found["modes"] = pynvml.nvmlDeviceGetMigMode(whole)
owner = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(second)
found["are_one"] = pynvml.nvmlDeviceGetUUID(owner) == pynvml.nvmlDeviceGetUUID(whole)
code = (
    "import torch; kept = torch.empty(3 * 2**30, dtype=torch.uint8, device='cuda'); "
    "print('ready', flush=True); input()"
)
environment = {**os.environ, "CUDA_VISIBLE_DEVICES": pynvml.nvmlDeviceGetUUID(second)}
other = subprocess.Popen(
    [sys.executable, "-c", code], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
)
other.stdout.readline()
kept = torch.empty(2**30, dtype=torch.uint8, device="cuda")
found["free"] = torch.cuda.mem_get_info()[0]
found["used"] = [pynvml.nvmlDeviceGetMemoryInfo(one).used for one in (whole, second)]
found["processes"] = [
    [one.pid == other.pid for one in pynvml.nvmlDeviceGetComputeRunningProcesses(device)]
    for device in (whole, second)
]
other.kill()
other.wait()
""",
        gpu=DIVIDED,
        PYTEST_GPUMEM_DRY_SHARED=str(tmp_path),
    )

    assert (found["gpus"], found["modes"], found["are_one"]) == (1, [1, 1], True)
    assert found["free"] == 20_096 * MIB - GIB
    assert found["used"] == [4 * GIB, 3 * GIB]
    assert sorted(found["processes"][0]) == [False, True]
    assert found["processes"][1] == [True]


TESTS = """
import pytest, torch

@pytest.mark.gpumem
@pytest.mark.parametrize("number", range(6))
def test_part(number):
    torch.empty(100 + 2 * number, 1024, 1024, dtype=torch.uint8, device="cuda")
"""


def test_an_instance_is_an_environment_of_its_own(dry_run: Run, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    command = "-p no:cacheprovider --gpumem-report=json:it.json --gpumem-update-baselines".split()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *command, "--gpumem-device=dry:a100-40gb/1G.5GB"],
        cwd=tmp_path,
        env=bare_environment(),
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "it.json").read_text())
    assert found["environment"]["gpu"] == "A100-40GB/1g.5gb"
    assert [test["measurement"]["peak_allocated"] for test in found["tests"]] == [
        (100 + 2 * number) * MIB for number in range(6)
    ]
    (folder,) = (tmp_path / "baselines").glob("[!.]*")
    assert folder.name.startswith("dry-A100-40GB-1g.5gb-torch")


WORKERS = """
import os, pytest, torch

@pytest.mark.gpumem
def test_each(tmp_path_factory):
    torch.empty(2**20, device="cuda")
    folder = tmp_path_factory.getbasetemp().parent
    (folder / os.environ["PYTEST_XDIST_WORKER"]).write_text(torch.cuda.get_device_name())
"""


WITH_A_DRIVER = """
from pytest_gpumem.device import host_gpus

host_gpus.DRIVERS = (__file__,)
"""
"""A plugin that says that NVIDIA's driver is installed, without whose files NVML is not asked."""


def test_each_worker_has_an_instance(dry_run: Run, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(WORKERS)
    (tmp_path / "with_a_driver.py").write_text(WITH_A_DRIVER)
    runs = tmp_path / "runs"
    runs.mkdir()
    bare = bare_environment()
    options = ["-n3", "--dist=each", "--gpumem-share", f"--basetemp={runs}/base"]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest_gpumem.dry", "--gpu", DIVIDED, "-m", "pytest"),
            *("-p", "no:cacheprovider", "-p", "with_a_driver", "--gpumem-device=cuda", *options),
        ],
        cwd=tmp_path,
        env={
            **bare,
            "PYTHONPATH": f"{bare['PYTHONPATH']}:{tmp_path}",
            "PYTEST_GPUMEM_DRY_SHARED": str(tmp_path),
            "GPUMEM_SHARE_DIR": str(tmp_path),
        },
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.read_text() for path in runs.rglob("gw?")) == [
        f"NVIDIA A100-SXM4-40GB MIG {profile}" for profile in ("1g.5gb", "2g.10gb", "3g.20gb")
    ]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("T4/1g.5gb", "'T4/1g.5gb' is not an instance of MIG that can be simulated"),
        ("A100-40GB/1g.10gb", "known: A100-40GB/1g.5gb, A100-40GB/2g.10gb"),
        ("A100-40GB/1g.5gb*7", "of which CUDA shows a process only one; write A100-40GB/1g.5gb"),
        (",".join(["A100-40GB/4g.20gb"] * 2), "more instances of MIG than fit on one A100-40GB"),
    ],
)
def test_what_cannot_be_is_said(names: str, message: str) -> None:
    with pytest.raises(GpuError, match="MIG") as raised:
        models_of(names)
    assert message in str(raised.value)


def test_a_simulated_device_is_an_instance_too() -> None:
    model = find_machine("A100-40GB/2g.10gb").model
    assert (model.total_memory, model.sm_count, model.l2_cache_bytes) == (9_984 * MIB, 28, 10 * MIB)
    assert (model.parent_name, model.profile, model.compute_capability) == (
        "A100-40GB",
        "2g.10gb",
        (8, 0),
    )
