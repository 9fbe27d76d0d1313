from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from pytest_gpumem import simulate
from pytest_gpumem.dry.load import description
from pytest_gpumem.simulated.gpu.catalogue import (
    GPUS,
    LIMITS,
    GpuError,
    GpuModel,
    find_gpu,
    find_machine,
)

CAPACITIES = {
    "T4": "14.75",
    "V100": "15.77",
    "V100-32GB": "31.73",
    "A10": "22.07",
    "A10G": "22.06",
    "A100-40GB": "39.39",
    "A100-80GB": "79.15",
    "L4": "21.99",
    "L40S": "44.31",
    "RTX-3060": "11.76",
    "RTX-3090": "23.70",
    "RTX-4060": "7.75",
    "RTX-4090": "23.64",
    "H100": "79.19",
    "H200": "139.80",
    "B200": "178.35",
}
"""As torch prints it on the card: "GPU 0 has a total capacity of 39.39 GiB"."""


@pytest.mark.parametrize("name", GPUS)
def test_a_model_has_the_capacity_that_torch_prints(name: str) -> None:
    assert f"{GPUS[name].total_memory / 1024**3:.2f}" == CAPACITIES[name]


@pytest.mark.parametrize("model", GPUS.values(), ids=lambda model: model.name)
def test_simulated_and_dry_devices_have_the_properties_of_the_catalogue(model: GpuModel) -> None:
    with simulate(model):
        found = torch.cuda.get_device_properties(0)
    assert (found.name, found.total_memory) == (model.full_name, model.total_memory)
    assert (found.major, found.minor) == model.compute_capability
    assert found.L2_cache_size == model.l2_cache_bytes
    assert found.max_threads_per_multi_processor in (1024, 1536, 2048)
    described = dict(part.split("=") for part in description([model]).split(","))
    assert described["name"] == model.full_name
    assert int(described["bus"]) % 64 == 0 < int(described["bus"])


def test_every_generation_has_its_limits() -> None:
    assert {gpu.compute_capability[0] for gpu in GPUS.values()} <= {major for major, _ in LIMITS}


@pytest.mark.parametrize(
    ("capability", "known"), [((10, 3), (10, 0)), ((8, 8), (8, 7)), ((6, 1), (7, 0))]
)
def test_a_custom_model_has_the_limits_of_the_nearest_capability(
    capability: tuple[int, int], known: tuple[int, int]
) -> None:
    model = replace(GPUS["B200"], name="mine", compute_capability=capability)
    with simulate(model):
        properties = torch.cuda.get_device_properties(0)
    assert (properties.major, properties.minor) == capability
    assert properties.shared_memory_per_multiprocessor == LIMITS[known].shared_memory


def test_the_catalogue_is_read_only() -> None:
    with pytest.raises(TypeError):
        GPUS["T4"] = GPUS["A10"]  # type: ignore[index]  # what must not work


def test_names_are_case_insensitive() -> None:
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
        f"{name!r} is not a GPU model; did you mean {suggestion}? known: {', '.join(GPUS)}"
    )


def test_an_unknown_name_unlike_any_other_gets_the_list_alone() -> None:
    with pytest.raises(GpuError, match=r"^'Instinct' is not a GPU model; known: T4, V100, "):
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
def test_an_invalid_number_of_gpus_is_refused(name: str) -> None:
    with pytest.raises(GpuError) as error:
        find_machine(name)
    assert str(error.value) == (
        f"{name!r} does not say how many GPUs; write a number from 1 to 120 after the star, as "
        'in "T4*2"'
    )


@pytest.mark.parametrize("name", [None, 4, ["T4"]])
def test_a_value_that_is_no_name_is_refused(name: Any) -> None:
    with pytest.raises(GpuError) as error:
        find_machine(name)
    assert str(error.value) == f'{name!r} is not a GPU model; write a name like "A100-40GB"'


def test_the_model_of_a_machine_must_be_known() -> None:
    with pytest.raises(GpuError, match=r"^'A100' is not a GPU model; did you mean A100-40GB"):
        find_machine("A100*2")


def test_the_catalogue_imports_without_torch() -> None:
    code = "import sys, pytest_gpumem.simulated.gpu.catalogue; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
