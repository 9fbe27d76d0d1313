from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from pytest_gpumem import simulate
from pytest_gpumem.dry.load import description
from pytest_gpumem.simulated.gpu.catalogue import GPUS, LIMITS, GpuError, find_gpu, find_machine


@pytest.mark.parametrize(
    ("name", "full_name", "capacity", "capability", "sm_count", "max_threads_per_sm", "l2_cache"),
    [
        ("T4", "Tesla T4", "14.75", (7, 5), 40, 1024, 4_194_304),
        ("V100", "Tesla V100-SXM2-16GB", "15.77", (7, 0), 80, 2048, 6_291_456),
        ("V100-32GB", "Tesla V100-SXM2-32GB", "31.73", (7, 0), 80, 2048, 6_291_456),
        ("A10", "NVIDIA A10", "22.07", (8, 6), 72, 1536, 6_291_456),
        ("A10G", "NVIDIA A10G", "22.06", (8, 6), 80, 1536, 6_291_456),
        ("A100-40GB", "NVIDIA A100-SXM4-40GB", "39.39", (8, 0), 108, 2048, 41_943_040),
        ("A100-80GB", "NVIDIA A100-SXM4-80GB", "79.15", (8, 0), 108, 2048, 41_943_040),
        ("L4", "NVIDIA L4", "21.99", (8, 9), 58, 1536, 50_331_648),
        ("L40S", "NVIDIA L40S", "44.31", (8, 9), 142, 1536, 100_663_296),
        ("RTX-3060", "NVIDIA GeForce RTX 3060", "11.76", (8, 6), 28, 1536, 2_359_296),
        ("RTX-3090", "NVIDIA GeForce RTX 3090", "23.70", (8, 6), 82, 1536, 6_291_456),
        ("RTX-4060", "NVIDIA GeForce RTX 4060", "7.75", (8, 9), 24, 1536, 25_165_824),
        ("RTX-4090", "NVIDIA GeForce RTX 4090", "23.64", (8, 9), 128, 1536, 75_497_472),
        ("H100", "NVIDIA H100 80GB HBM3", "79.19", (9, 0), 132, 2048, 52_428_800),
        ("H200", "NVIDIA H200", "139.80", (9, 0), 132, 2048, 62_914_560),
        ("B200", "NVIDIA B200", "178.35", (10, 0), 148, 2048, 132_644_864),
    ],
)
def test_a_model_reads_as_on_the_real_card(
    name: str,
    full_name: str,
    capacity: str,
    capability: tuple[int, int],
    sm_count: int,
    max_threads_per_sm: int,
    l2_cache: int,
) -> None:
    gpu = GPUS[name]
    assert gpu.name == name
    assert gpu.full_name == full_name
    # As torch prints it: "GPU 0 has a total capacity of 39.39 GiB".
    assert f"{gpu.total_memory / 1024**3:.2f}" == capacity
    assert gpu.compute_capability == capability
    assert gpu.sm_count == sm_count
    assert gpu.max_threads_per_sm == max_threads_per_sm
    assert gpu.l2_cache_bytes == l2_cache


def test_each_capability_has_its_limits() -> None:
    assert {gpu.compute_capability for gpu in GPUS.values()} <= set(LIMITS)


@pytest.mark.parametrize(
    ("capability", "known"), [((10, 3), (10, 0)), ((8, 7), (8, 6)), ((6, 1), (7, 0))]
)
def test_a_model_of_ones_own_has_the_limits_of_the_nearest_capability(
    capability: tuple[int, int], known: tuple[int, int]
) -> None:
    model = replace(GPUS["B200"], name="mine", compute_capability=capability)
    with simulate(model):
        properties = torch.cuda.get_device_properties(0)
    assert (properties.major, properties.minor) == capability
    assert properties.shared_memory_per_multiprocessor == LIMITS[known].shared_memory


def test_the_catalogue_is_complete_and_read_only() -> None:
    assert len(GPUS) == 16
    assert GPUS["A100-40GB"].total_memory == 42_298_834_944
    assert GPUS["B200"].total_memory == 191_503_007_744
    with pytest.raises(TypeError):
        GPUS["T4"] = GPUS["A10"]  # type: ignore[index]  # what must not work


@pytest.mark.parametrize("name", list(GPUS))
def test_the_dry_device_knows_every_model(name: str) -> None:
    assert GPUS[name].full_name in description([GPUS[name]])


def test_names_are_found_without_regard_to_case() -> None:
    assert find_gpu("a100-40gb") is GPUS["A100-40GB"]
    assert find_gpu(" Rtx-4090 ") is GPUS["RTX-4090"]


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("A100", "A100-40GB or A100-80GB"),
        ("a100-80", "A100-80GB"),
        ("4090", "RTX-4090"),
        ("H100-80GB", "H100"),
        ("RTX4060", "RTX-4060 or RTX-4090"),
    ],
)
def test_an_unknown_name_gets_the_closest_ones_and_the_list(name: str, suggestion: str) -> None:
    with pytest.raises(GpuError) as error:
        find_gpu(name)
    assert str(error.value) == (
        f"{name!r} is not a simulated GPU; did you mean {suggestion}? "
        "known: T4, V100, V100-32GB, A10, A10G, A100-40GB, A100-80GB, L4, L40S, RTX-3060, "
        "RTX-3090, RTX-4060, RTX-4090, H100, H200, B200"
    )


def test_a_name_like_no_other_gets_the_list_alone() -> None:
    with pytest.raises(GpuError, match=r"^'Instinct' is not a simulated GPU; known: T4, V100, "):
        find_gpu("Instinct")


@pytest.mark.parametrize(
    ("written", "name", "count"),
    [
        ("t4", "T4", 1),
        ("a100-80gb*2", "A100-80GB*2", 2),
        (" H100 * 8 ", "H100*8", 8),
        ("T4*1", "T4", 1),
    ],
)
def test_a_machine_has_one_or_more_equal_gpus(written: str, name: str, count: int) -> None:
    machine = find_machine(written)
    assert (machine.name, machine.count) == (name, count)
    assert machine.model is GPUS[name.partition("*")[0]]


@pytest.mark.parametrize("name", ["T4*", "T4*0", "T4*121", "T4*x", "T4*-1", "T4*2*2", "T4*²"])
def test_a_number_of_gpus_that_there_is_not(name: str) -> None:
    with pytest.raises(GpuError) as error:
        find_machine(name)
    assert str(error.value) == (
        f"{name!r} does not say how many GPUs; write a number from 1 to 120 behind the star, as "
        'in "T4*2"'
    )


@pytest.mark.parametrize("name", [None, 4, ["T4"]])
def test_what_is_no_name_at_all(name: Any) -> None:
    with pytest.raises(GpuError) as error:
        find_machine(name)
    assert str(error.value) == f'{name!r} is not a simulated GPU; write a name like "A100-40GB"'


def test_the_model_of_a_machine_must_be_known() -> None:
    with pytest.raises(GpuError, match=r"^'A100' is not a simulated GPU; did you mean A100-40GB"):
        find_machine("A100*2")


def test_the_catalogue_imports_without_torch() -> None:
    code = "import sys, pytest_gpumem.simulated.gpu.catalogue; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
