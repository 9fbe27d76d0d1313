"""Selection of the device that tests run on, by options, marker and machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal

import pynvml  # type: ignore[import-untyped]  # nvidia-ml-py ships no types
import pytest
import torch

from pytest_gpumem.device import DeviceError
from pytest_gpumem.device.cuda import CudaDevice, find_device
from pytest_gpumem.device.select import DeviceSelector
from pytest_gpumem.marker import Expectation
from pytest_gpumem.option_values import DeviceChoice
from pytest_gpumem.sharing.devices import CONTEXT
from tests.fake_nvml import MACHINES, FakeNvml, uuids


def selector(
    kind: Literal["auto", "cuda", "sim", "off"],
    *models: str,
    index: int | None = None,
) -> DeviceSelector:
    return DeviceSelector(DeviceChoice(kind, index=index, models=models))


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_gpu")
def test_auto_simulates_where_there_is_no_gpu() -> None:
    device = selector("auto", "T4").select(None)

    assert (device.environment.simulated, device.environment.gpu) == (True, "T4")
    assert device.index == 0
    assert device.total_memory < 16 * 1024**3
    assert device.nvml() is None


@pytest.mark.usefixtures("two_gpus")
def test_auto_takes_a_gpu_that_is_there() -> None:
    device = selector("auto", "T4").select("H100")

    assert isinstance(device, CudaDevice)
    assert device.index == 0


@pytest.mark.usefixtures("two_gpus")
def test_sim_simulates_also_where_there_is_a_gpu() -> None:
    assert selector("sim", "T4").select(None).environment.simulated


def test_one_model_is_one_device_for_all_tests() -> None:
    models = selector("sim", "T4")

    assert models.select("L4") is models.select("L4")
    assert models.select("L4") is not models.select(None)
    assert models.select("L4").environment.gpu == "L4"


def test_torch_is_asked_for_cuda_once(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([False])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: next(answers))
    auto = selector("auto", "T4")

    assert auto.measured_device() is None
    assert auto.measured_device() is None


@pytest.mark.usefixtures("two_gpus")
def test_a_device_is_selected_by_its_index() -> None:
    assert selector("cuda", index=1).select(None).index == 1


@pytest.mark.usefixtures("two_gpus")
def test_an_index_without_a_device_is_refused() -> None:
    message = r"--gpumem-device=cuda:2, but torch sees 2 CUDA devices; the last one is cuda:1"
    with pytest.raises(DeviceError, match=message):
        selector("cuda", index=2).select(None)


@pytest.mark.usefixtures("no_gpu")
def test_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(
        DeviceError, match=r"sees no CUDA device; write --gpumem-device=auto or sim"
    ):
        selector("cuda").select(None)


@pytest.mark.parametrize(
    ("device", "marked", "models"),
    [
        (selector("sim", "T4", "L4"), (), ("T4", "L4")),
        (selector("sim", "T4", "L4"), ("H100",), ("H100",)),
        (selector("auto", "T4"), (), ()),
        (selector("auto", "T4"), ("L4", "H100"), ("L4", "H100")),
        (selector("cuda"), ("L4", "H100"), ("L4", "H100")),
    ],
)
def test_the_marker_overrides_the_models_of_the_option(
    device: DeviceSelector, marked: tuple[str, ...], models: tuple[str, ...]
) -> None:
    assert device.models(Expectation(gpu=marked)) == models


@pytest.mark.parametrize(
    ("device", "description"),
    [
        (selector("auto", "T4"), "a CUDA device if torch sees one, else simulated T4"),
        (selector("sim", "T4", "L4"), "simulated T4, simulated L4"),
        (selector("cuda"), "cuda"),
        (selector("cuda", index=1), "cuda:1"),
        (selector("off"), "off, nothing is measured"),
    ],
)
def test_a_choice_is_described_without_torch(device: DeviceSelector, description: str) -> None:
    assert device.description == description


class Properties:
    name = "NVIDIA L4"
    major, minor = 8, 9
    total_memory = 24 * 1024**3
    uuid = None


@pytest.fixture
def l4(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    def properties(index: int) -> Any:
        return Properties

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    device = find_device(None, required=True)
    assert device is not None
    return device


def test_the_environment_of_a_gpu_is_read(l4: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")

    environment = l4.environment

    assert (environment.simulated, environment.gpu) == (False, "NVIDIA L4")
    assert environment.compute_capability == "8.9"
    assert environment.torch == ".".join(torch.__version__.split(".")[:2])
    assert environment.cuda == torch.version.cuda
    assert environment.alloc_conf == "expandable_segments:True"
    assert environment.cublas_workspace_config == ":0:0"
    assert l4.total_memory == 24 * 1024**3


def test_pytorch_alloc_conf_is_read_since_2_10(
    l4: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")

    read_since_2_10 = "expandable_segments:True" if torch.__version__ >= "2.10" else ""
    assert l4.environment.alloc_conf == read_since_2_10


def test_a_device_without_an_index_does_not_set_the_current_one(l4: CudaDevice) -> None:
    with l4.active():
        pass
    assert isinstance(find_device(1, required=True), CudaDevice)
    assert isinstance(CudaDevice(1).active(), torch.cuda.device)


def test_begin_test_does_not_initialise_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def initialise(_: int) -> None:
        raise AssertionError("CUDA is initialised")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", initialise)

    CudaDevice(None).begin_test("test_it", (), lambda *_: None)


def test_absent_nvml_readings_have_a_reason(
    l4: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    not_loaded = pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(init_error=not_loaded))

    assert l4.nvml() == {"absent": "the NVIDIA driver is not loaded"}


@pytest.mark.usefixtures("two_gpus")
def test_every_visible_gpu_is_shared_beginning_with_the_selected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", MACHINES["two"].nvml())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(reversed(uuids("two"))))
    first, second = uuids("two")
    plain, chosen = CudaDevice(None), CudaDevice(1)
    assert [one.name for one in plain.share(tmp_path)] == [second, first]
    assert [one.name for one in chosen.share(tmp_path)] == [first, second]
    # Before CUDA starts, a context is expected on the selected device alone.
    assert (plain.held(second), plain.held(first)) == ((CONTEXT, 0), (0, 0))
