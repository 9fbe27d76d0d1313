"""What ``auto`` stands for: a GPU, else the dry device where there can be one, else sim."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from pytest_gpumem.device import host_gpus
from pytest_gpumem.device.select import DeviceSelector
from pytest_gpumem.option_values import DeviceChoice, device_choice


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without a GPU that has a CUDA build of torch and a compiler."""
    torch = tmp_path / "torch"
    (torch / "lib").mkdir(parents=True)
    (torch / "lib" / "libtorch_cuda.so").touch()
    version = "__version__ = '2.15.0+cu132'\ncuda: str | None = '13.2'\n"
    (torch / "version.py").write_text(version, encoding="utf-8")
    (torch / "__init__.py").touch()
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.delenv(host_gpus.REFUSED, raising=False)
    monkeypatch.setattr(host_gpus, "DRIVERS", (str(tmp_path / "nvidiactl"),))
    monkeypatch.setattr("pytest_gpumem.dry.build.missing_tool", lambda: None)
    monkeypatch.setattr("sys.platform", "linux")
    spec = type("Spec", (), {"origin": str(torch / "__init__.py")})
    monkeypatch.setattr(host_gpus, "find_spec", lambda name: spec)
    return tmp_path


def chosen(text: str = "auto", baselines: Path = Path("none")) -> DeviceChoice:
    return host_gpus.resolved(device_choice(text), baselines)


def test_it_is_the_dry_device_without_a_gpu(machine: Path) -> None:
    assert chosen().kind == "dry"
    assert chosen().models == device_choice("auto").models


@pytest.mark.parametrize(
    ("stored", "kind"),
    [
        (("sim-A100-40GB-torch2.15",), "auto"),
        (("sim-A100-40GB-torch2.15", "dry-A100-40GB-torch2.15"), "dry"),
        (("A100-40GB-torch2.15-cu132",), "dry"),
        (("sim-A100-40GB-torch2.13", "dry-A100-40GB-torch2.15"), "dry"),
        (("sim-H100-torch2.15-rank0of8", "dry-A100-40GB-torch2.13"), "auto"),
        (("sim-A100-40GB-torch2.1", "dry-A100-40GB-torch2.15"), "dry"),
    ],
)
def test_a_project_whose_baselines_are_simulated_stays_so(
    machine: Path, stored: tuple[str, ...], kind: str
) -> None:
    for name in stored:
        (machine / "baselines" / name).mkdir(parents=True)
    assert chosen(baselines=machine / "baselines").kind == kind


def test_a_process_that_has_torch_already_is_simulated(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pytest_gpumem.dry.load.is_loaded", lambda: False)
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    assert chosen().kind == "auto"


def test_a_runtime_that_cannot_be_loaded_is_not_tried_again(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(host_gpus.REFUSED, f"{host_gpus.TRIED}the dry runtime cannot be built")
    assert (chosen().kind, chosen().not_dry) == ("auto", "the dry runtime cannot be built")


def test_a_refusal_of_the_user_s_own_is_no_news(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(host_gpus.REFUSED, "numbers of the simulated device")
    assert (chosen().kind, chosen().not_dry) == ("auto", "")


def test_a_driver_means_a_gpu(machine: Path) -> None:
    (machine / "nvidiactl").touch()
    assert chosen().kind == "auto"


def test_a_cpu_build_is_simulated(machine: Path) -> None:
    (machine / "torch" / "version.py").write_text("cuda: str | None = None\n", encoding="utf-8")
    assert (chosen().kind, chosen().not_dry) == ("auto", "")


def test_without_a_compiler_it_is_simulated(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pytest_gpumem.dry.build.missing_tool", lambda: "C compiler")
    assert (chosen().kind, chosen().not_dry) == ("auto", "there is no C compiler")
    said = DeviceSelector(chosen()).description
    assert said.endswith("simulated A100-40GB (not dry: there is no C compiler)")


def test_other_systems_are_simulated(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    assert chosen().kind == "auto"


def test_what_is_named_stays(machine: Path) -> None:
    assert [chosen(text).kind for text in ("cuda", "sim:T4", "dry:H100", "off")] == [
        *("cuda", "sim", "dry", "off")
    ]
