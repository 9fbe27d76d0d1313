"""Readings of NVML, from a fake that answers and fails as the library does."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping

import pynvml  # type: ignore[import-untyped]  # nvidia-ml-py ships no types
import pytest

from pytest_gpumem.measurement.device_mode import NvmlMode
from pytest_gpumem.measurement.nvml import (
    NvmlAbsent,
    NvmlProcess,
    NvmlReading,
    RepeatedReading,
    read_device,
    read_visible,
    stay_open,
)
from pytest_gpumem.measurement.nvml_library import visible_devices
from tests.fake_nvml import GIB, MACHINES, ME, FakeNvml, Gpu, found, process, sample


def read(
    nvml: FakeNvml, device: int | str = 0, environ: Mapping[str, str] | None = None
) -> NvmlReading:
    with found(nvml, environ, ME):
        reading = read_device(device)
    assert isinstance(reading, NvmlReading), reading
    return reading


def absent(nvml: FakeNvml, device: int | str = 0, environ: Mapping[str, str] | None = None) -> str:
    with found(nvml, environ, ME):
        reading = read_device(device)
    assert isinstance(reading, NvmlAbsent)
    return reading.reason


def mig_gpu() -> Gpu:
    def instance(number: int, profile: str) -> Gpu:
        uuid = f"MIG-{number}0000000-dddd-eeee-ffff-000000000000"
        refused = {"utilization": pynvml.NVML_ERROR_NOT_SUPPORTED}
        return Gpu(uuid, f"NVIDIA A100-SXM4-40GB MIG {profile}", errors=refused)

    instances = [None, instance(5, "1g.5gb"), instance(6, "3g.20gb")]
    return Gpu(name="NVIDIA A100-SXM4-40GB", instances=instances)


def test_a_reading_has_every_value_of_a_device() -> None:
    gpu = Gpu(
        compute=[process(ME, 2 * GIB), process(77, 3 * GIB)],
        samples=[
            sample(ME, 2, 80),
            sample(ME, 1, 5),
            sample(77, 3, 99),
        ],
    )
    nvml = FakeNvml(gpu, names={77: "/usr/bin/python3.11 train.py"})
    assert read(nvml) == NvmlReading(
        uuid="GPU-11111111-aaaa-bbbb-cccc-000000000000",
        name="NVIDIA H200",
        driver="570.86.15",
        total=140 * GIB,
        used=6 * GIB,
        free=133 * GIB,
        process_used=2 * GIB,
        unattributed=None,
        others=(NvmlProcess(77, "python3.11", 3 * GIB, gpu_percent=99),),
        alone=False,
        mode=NvmlMode(),
        gpu_percent=37,
        memory_percent=12,
        process_gpu_percent=80,
    )


def test_a_reading_is_serialised_as_builtin_types() -> None:
    data = read(FakeNvml(Gpu(compute=[process(ME, GIB), process(7, None)]))).to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data["others"] == [{"pid": 7, "name": None, "used": None, "gpu_percent": None}]
    assert data["mode"]["mig_profile"] is None
    assert NvmlAbsent("why").to_dict() == {"absent": "why"}


def test_repeated_readings_query_utilisation_once_in_a_sample_period(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def shares() -> tuple[int | None, int | None, int]:
        with found(nvml):
            reading = repeated.read()
        assert isinstance(reading, NvmlReading)
        assert (reading.name, reading.driver) == ("NVIDIA H200", "570.86.15")
        (other,) = reading.others or ()
        return other.gpu_percent, other.used, reading.used

    gpu = Gpu(compute=[process(77, GIB)], samples=[sample(77, 1, 40)])
    times = iter([10.0, 10.1, 10.2])
    monkeypatch.setattr("pytest_gpumem.measurement.nvml.monotonic", lambda: next(times))
    nvml, repeated = FakeNvml(gpu), RepeatedReading(0)

    assert shares() == (40, GIB, 6 * GIB)
    gpu.samples, gpu.used = [sample(77, 2, 90)], 7 * GIB
    gpu.compute = [process(77, 2 * GIB)]
    assert shares() == (40, 2 * GIB, 7 * GIB)  # 0.1 s after the first
    assert shares() == (90, 2 * GIB, 7 * GIB)  # 0.2 s


@pytest.mark.parametrize("fails", ["nothing", "memory", "device", "all answers"])
def test_the_library_is_shut_down_after_success_and_failure(fails: str) -> None:
    nvml = FakeNvml(Gpu(errors={"memory": 4} if fails == "memory" else {}))
    with found(nvml, pid=ME):
        read_device(9 if fails == "device" else 0)
    assert nvml.open == 0


def test_a_reading_survives_a_shutdown_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: FakeNvml) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)

    monkeypatch.setattr(FakeNvml, "nvmlShutdown", fail)
    assert read(FakeNvml()).used == 6 * GIB


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "the NVIDIA driver is not loaded"),
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "shared library was not found"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "insufficient permissions"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "of different versions"),
        (pynvml.NVML_ERROR_TIMEOUT, "NVML says: Timeout"),
    ],
)
def test_a_missing_driver_library_or_permission_is_a_reason(code: int, reason: str) -> None:
    nvml = FakeNvml(init_error=code)
    assert reason in absent(nvml)
    assert nvml.open == 0


def test_a_device_that_may_not_be_read_or_is_lost_is_a_reason() -> None:
    assert "permissions" in absent(FakeNvml(Gpu(errors={"memory": 4})))
    assert "fallen off the bus" in absent(FakeNvml(Gpu(errors={"memory": 15})))


def test_a_missing_package_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert read_device() == NvmlAbsent("the package nvidia-ml-py is not installed")


def test_pynvml_itself_is_the_library_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    reading = read_device()
    assert isinstance(reading, NvmlReading)
    assert reading.process_used is None, "this test's own PID is not on the fake"


def test_used_memory_of_an_old_driver_includes_its_reserve() -> None:
    nvml = FakeNvml()
    nvml.old_driver = True
    reading = read(nvml)
    assert (reading.used, reading.free) == (7 * GIB, 133 * GIB)


def test_an_unsupported_value_is_none() -> None:
    refused = dict.fromkeys(("utilization", "virtualization", "compute_mode", "mig"), 3)
    nvml = FakeNvml(Gpu(errors=refused))
    nvml.driver_error = 3
    reading = read(nvml)
    assert reading.driver is None
    assert reading.gpu_percent is None
    assert reading.memory_percent is None
    assert reading.mode == NvmlMode()


def test_a_process_without_samples_has_no_utilisation() -> None:
    assert read(FakeNvml()).process_gpu_percent is None
    strangers = [sample(1, 1, 50)]
    assert read(FakeNvml(Gpu(samples=strangers))).process_gpu_percent is None


@pytest.mark.parametrize("used", [0, None])
def test_a_process_without_bytes_is_unattributed_but_recognised(used: int | None) -> None:
    reading = read(FakeNvml(Gpu(compute=[process(ME, used), process(7, used)])))
    assert reading.process_used is None
    assert reading.unattributed == f"NVML does not say how much this process (PID {ME}) uses"
    assert reading.others == (NvmlProcess(7, None, None),)
    assert reading.alone is False
    assert read(FakeNvml(Gpu(compute=[process(ME, used)]))).alone is True


@pytest.mark.parametrize(
    ("pids", "alone"),
    [([], None), ([90_001], None), ([90_001, 90_002], False)],
)
def test_a_container_that_shows_the_hosts_pids_is_unattributed(
    pids: list[int], alone: bool | None
) -> None:
    reading = read(FakeNvml(Gpu(compute=[process(pid, GIB) for pid in pids])))
    assert reading.process_used is None
    assert reading.unattributed is not None
    assert f"this process (PID {ME}) is not among those NVML lists" in reading.unattributed
    assert reading.alone is alone


def test_processes_are_unknown_where_listing_is_not_permitted() -> None:
    reading = read(FakeNvml(Gpu(errors={"processes": pynvml.NVML_ERROR_NO_PERMISSION})))
    assert reading.others is None
    assert reading.alone is None
    assert reading.unattributed == "NVML does not list the device's processes"


def test_a_process_with_compute_and_graphics_is_counted_once() -> None:
    both = Gpu(
        compute=[process(ME, GIB), process(7, None)],
        graphics=[process(7, 5 * GIB), process(8, GIB)],
    )
    assert read(FakeNvml(both)).others == (
        NvmlProcess(7, None, 5 * GIB),
        NvmlProcess(8, None, GIB),
    )


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("/opt/my env/bin/python", "my"),
        ("C:\\Python\\python.exe", "python.exe"),
        ("", None),
        ("\xff", None),
    ],
)
def test_a_process_name_is_that_of_its_program_or_none(name: str, shown: str | None) -> None:
    nvml = FakeNvml(Gpu(compute=[process(ME, GIB), process(7, GIB)]), names={7: name})
    assert read(nvml).others == (NvmlProcess(7, shown, GIB),)


def test_the_first_mig_instance_is_what_cuda_uses() -> None:
    reading = read(FakeNvml(mig_gpu()))
    assert reading.uuid.startswith("MIG-5")
    assert reading.mode.mig_profile == "1g.5gb"
    assert reading.mode.partition == "MIG-1g.5gb"
    assert reading.gpu_percent is None


@pytest.mark.parametrize(
    "visible",
    ["MIG-60000000-dddd-eeee-ffff-000000000000", "MIG-6", "MIG-6,MIG-5"],
)
def test_a_mig_instance_is_found_by_its_uuid(visible: str) -> None:
    reading = read(FakeNvml(mig_gpu()), environ={"CUDA_VISIBLE_DEVICES": visible})
    assert reading.mode.partition == "MIG-3g.20gb"


def test_the_uuid_of_a_divided_gpu_reads_its_visible_mig_instance() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "MIG-6"}
    whole = FakeNvml(mig_gpu())
    reading = read(whole, mig_gpu().uuid.removeprefix("GPU-"), environ)
    assert isinstance(reading, NvmlReading)
    assert reading.mode.partition == "MIG-3g.20gb"


def test_a_mig_instance_with_a_plain_name_is_recognised() -> None:
    gpu = mig_gpu()
    assert gpu.instances is not None
    assert gpu.instances[1] is not None
    gpu.instances[1].name = "NVIDIA A100-SXM4-40GB"
    assert read(FakeNvml(gpu)).mode.partition == "MIG"


def test_mps_vgpu_and_exclusive_mode_are_read() -> None:
    mode = read(FakeNvml(Gpu(mps=[process(ME, GIB)], virtualization=2, compute_mode=3))).mode
    assert mode == NvmlMode(vgpu=True, mps=True, exclusive_process=True)
    assert mode.partition == "vGPU-MPS"
    passthrough = read(FakeNvml(Gpu(virtualization=1, compute_mode=1))).mode
    assert passthrough == NvmlMode()
    assert passthrough.partition == ""


def test_mps_is_recognised_by_its_server_and_its_variable() -> None:
    server = Gpu(compute=[process(ME, GIB), process(9, 30)])
    assert read(FakeNvml(server, names={9: "nvidia-cuda-mps-server"})).mode.mps
    assert read(FakeNvml(), environ={"CUDA_MPS_PIPE_DIRECTORY": "/run/mps"}).mode.mps


def two_gpus(second_name: str = "NVIDIA H200") -> FakeNvml:
    return FakeNvml(
        Gpu(used=1), Gpu("GPU-22222222-aaaa-bbbb-cccc-000000000000", second_name, used=2)
    )


@pytest.mark.parametrize(
    ("device", "visible", "used"),
    [
        (1, None, 2),
        (0, "1", 2),
        (1, "1,0", 1),
        (0, " 1 , 0", 2),
        (0, "GPU-2", 2),
        (1, "GPU-22222222,GPU-1", 1),
        ("GPU-22222222-aaaa-bbbb-cccc-000000000000", "0", 2),
        ("22222222-aaaa-bbbb-cccc-000000000000", None, 2),
        ("2222", None, 2),
    ],
)
def test_a_device_is_cudas_index_or_a_uuid(
    device: int | str, visible: str | None, used: int
) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert read(two_gpus(), device, environ).used == used


@pytest.mark.parametrize(
    ("device", "visible", "reason"),
    [
        (2, None, "no CUDA device 2: NVML sees 2, CUDA_VISIBLE_DEVICES is unset"),
        (0, "", "no CUDA device 0: NVML sees 2, CUDA_VISIBLE_DEVICES is ''"),
        (1, "0", "no CUDA device 1: NVML sees 2, CUDA_VISIBLE_DEVICES is '0'"),
        (-1, None, "no CUDA device -1"),
        (0, "GPU-9", "NVML sees no device with the UUID 'GPU-9'"),
        ("GPU-", None, "more than one device matches the UUID 'GPU-'"),
    ],
)
def test_a_device_that_is_not_there_is_a_reason(
    device: int | str, visible: str | None, reason: str
) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert reason in absent(two_gpus(), device, environ)


def test_an_index_is_refused_where_cuda_may_order_gpus_differently() -> None:
    mixed = two_gpus("NVIDIA T400")
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in absent(mixed, 1)
    assert read(mixed, 1, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}).used == 2
    assert read(mixed, "GPU-2").used == 2


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, [0, 1, 2, 3]),
        ("2,1", [2, 1]),
        ("0,2,-1,1", [0, 2]),
        ("0,7,1", [0]),
        ("-1", []),
        ("", []),
        ("none", []),
        ("0,0", []),
        ("1x,2", [1, 2]),
        ("+3", [3]),
        ("GPU-8932f937,MIG-5", ["GPU-8932f937", "MIG-5"]),
    ],
)
def test_visible_devices_are_those_cuda_enumerates(
    value: str | None, expected: list[int | str]
) -> None:
    assert visible_devices(value, 4) == expected


def test_a_percentage_above_a_hundred_is_no_sample() -> None:
    gpu = Gpu(samples=[sample(ME, 2, 3_000_000), sample(ME, 1, 44)])
    assert read(FakeNvml(gpu)).process_gpu_percent == 44


@pytest.mark.parametrize(
    ("visible", "used"), [(None, [1, 2]), ("1,0", [2, 1]), ("GPU-2", [2]), ("", []), ("0,0", [])]
)
def test_visible_devices_are_listed_in_cuda_s_order(visible: str | None, used: list[int]) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    with found(two_gpus(), environ):
        readings = read_visible()
    assert isinstance(readings, list)
    assert [one.used for one in readings] == used


def test_every_instance_of_a_divided_gpu_is_visible() -> None:
    with found(MACHINES["mig"].nvml()):
        readings = read_visible()
    assert isinstance(readings, list)
    assert [one.mode.mig_profile for one in readings] == ["3g.20gb", "2g.10gb", "1g.5gb"]


def test_a_device_is_read_again_while_the_library_stays_open() -> None:
    nvml = FakeNvml(Gpu(compute=[process(ME, GIB), process(7, None)]))
    repeated = RepeatedReading(nvml.gpus[0].uuid)
    with found(nvml, pid=ME):
        stay_open()
        for used in (6 * GIB, 5 * GIB):
            nvml.gpus[0].used = used
            reading = repeated.read()
            assert isinstance(reading, NvmlReading)
            assert (reading.used, reading.process_used) == (used, GIB)
            assert [(one.pid, one.used) for one in reading.others or ()] == [(7, None)]
            assert nvml.open == 1


def test_memory_that_cannot_be_read_is_a_reason() -> None:
    for nvml, uuid, reason in (
        (FakeNvml(init_error=9), "GPU-1", "driver is not loaded"),
        (FakeNvml(), "GPU-9", "no device with the UUID 'GPU-9'"),
    ):
        with found(nvml):
            reading = RepeatedReading(uuid).read()
        assert isinstance(reading, NvmlAbsent)
        assert reason in reading.reason
