"""The line in the header of a run."""

from __future__ import annotations

from pytest_gpumem.report.header import header_line


def test_the_header_names_the_device_and_the_baselines() -> None:
    environments = ["sim-A100-40GB-torch2.13", "sim-T4-torch2.6"]
    assert header_line("simulated T4", "2.13.0", "baselines", environments, []) == (
        "gpumem: simulated T4; torch 2.13.0; "
        "baselines in baselines: sim-A100-40GB-torch2.13, sim-T4-torch2.6"
    )
    gpus = ["NVIDIA A100 (MIG 3g.20gb)"]
    assert header_line("cuda", "2.13.0", "baselines", [], gpus) == (
        "gpumem: cuda; NVIDIA A100 (MIG 3g.20gb); torch 2.13.0"
    )
    assert header_line("simulated T4", None, "baselines", [], []) == (
        "gpumem: simulated T4; torch is not installed"
    )
