"""``gpumem env``: the environment of a number, without names of host, user or folder."""

from __future__ import annotations

import getpass
import json
import os
import platform
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_gpumem import simulate
from pytest_gpumem.cli import env, main
from tests.cli.test_without_torch import ABSENT
from tests.fake_nvml import FakeNvml, Gpu

T4 = FakeNvml(Gpu(name="Tesla T4"))


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*env.VARIABLES, "CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", T4)


def shown(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    assert main(["env"]) == 0
    rows = (line.split("  ", 1) for line in capsys.readouterr().out.splitlines() if line[0] != " ")
    return {name: value.strip() for name, value in rows}


def data(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["env", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_gpu_is_shown_with_all_that_its_numbers_depend_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with simulate("T4", cublas_workspace_config=":16:8"):
        uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
        monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(Gpu(uuid=uuid)))
        built = torch.version.cuda
        assert main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    release = ".".join(torch.__version__.split(".")[:2])
    # The numbers are those that deviceQuery shows for a T4.
    assert [line.rstrip() for line in lines[-9:]] == [
        "CUBLAS_WORKSPACE_CONFIG  :16:8",
        "cuda:0                   Tesla T4",
        "  compute capability     7.5",
        "  memory                 15,835,660,288 B",
        "  multiprocessors        40, of 1,024 threads",
        "  L2 cache               4,194,304 B",
        "  driver                 570.86.15",
        "  divided                no",
        f"  baselines              cuda-Tesla-T4-torch{release}-cu{built}-cublas=16=8",
    ]


def test_every_gpu_of_several_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with simulate("T4*2"):
        devices = data(capsys)["devices"]
    assert [device["full_name"] for device in devices] == ["Tesla T4", "Tesla T4"]


def test_releases_of_packages_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    found = shown(capsys)
    assert found["Python"] == platform.python_version()
    assert found["torch"] == version("torch")
    assert found["pytest"] == version("pytest")
    assert found["system"].split() == [platform.system(), platform.release(), platform.machine()]


def test_a_missing_package_is_shown_as_absent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(env, "PACKAGES", ("no-such-package",))
    assert shown(capsys)["no-such-package"] == "not installed"
    assert data(capsys)["packages"] == {"no-such-package": None}


@pytest.mark.parametrize(
    ("built_for", "nvml", "why"),
    [
        (None, T4, "this torch is built without CUDA"),
        (
            "12.8",
            FakeNvml(init_error=12),
            "torch sees no CUDA device: NVML's shared library was not found, so no NVIDIA driver "
            "is installed",
        ),
        ("12.8", T4, "torch sees no CUDA device, though the driver shows Tesla T4"),
    ],
)
def test_the_reason_for_no_gpu_is_shown(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    built_for: str | None,
    nvml: FakeNvml,
    why: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert shown(capsys)["GPU"] == f"none: {why}"


def test_missing_torch_is_reported(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(ABSENT)
    search = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    ran = subprocess.run(
        [sys.executable, "-m", "pytest_gpumem.cli", "env", "--json"],
        env={**os.environ, "PYTHONPATH": search},
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(ran.stdout)
    assert (found["devices"], found["no_device"]) == ([], "torch is not installed")


def test_the_output_names_no_host_user_or_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    private = (socket.gethostname(), getpass.getuser(), str(Path.home()), str(Path.cwd()))
    assert [name for name in private if len(name) > 4 and name in text] == []
