"""``simulate()``: the numbers, phases and notes of one run."""

from __future__ import annotations

import torch
from torch import nn

import pytest_gpumem
from pytest_gpumem import simulate

WORKSPACE = 8_519_680
MIB = 1024 * 1024
MODEL = 257_024
INPUT = OUTPUT = 1_024


def test_a_linear_layer_phase_by_phase() -> None:
    """The experiment of "GPU memory allocation for ML engineers", recorded on a T4."""
    with simulate("T4", torch_version="2.6") as gpu:
        model = nn.Linear(256, 250).cuda()
        x = torch.randn(1, 256, device="cuda")
        with gpu.phase("forward"):
            y = model(x)
        with gpu.phase("backward"):
            y.sum().backward()

    forward, backward = gpu.phases["forward"], gpu.phases["backward"]
    assert forward.allocated_before == MODEL + INPUT == 258_048
    assert forward.allocated_after == MODEL + INPUT + OUTPUT + WORKSPACE == 8_778_752
    # cuBLASLt's temporary MiB is in the peak only.
    assert forward.peak_allocated == 8_778_752 + MIB
    assert forward.cublas_workspace == WORKSPACE
    assert backward.allocated_after == 2 * MODEL + INPUT + OUTPUT + 2 * WORKSPACE == 17_555_456
    assert backward.cublas_workspace == 2 * WORKSPACE
    assert list(gpu.phases) == ["forward", "backward"]
    assert gpu.peak_allocated == backward.peak_allocated
    assert gpu.allocated == 17_555_456
    # One segment of 2 MiB for the small blocks, one of 20 MiB for both workspaces.
    assert gpu.reserved == gpu.peak_reserved == 22 * MIB
    assert gpu.model.name == "T4"


def test_peaks_of_the_run_are_independent_of_resets_by_the_code() -> None:
    with simulate("T4") as gpu:
        x = torch.empty(4 * MIB, dtype=torch.uint8, device="cuda")
        del x
        with gpu.phase("later"):
            torch.empty(1024, dtype=torch.uint8, device="cuda")
        # The run's own phases are not visible to the code ...
        assert torch.cuda.max_memory_allocated() == 4 * MIB
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_allocated() == 0
        # ... nor are the code's resets visible to the run.
        assert gpu.peak_allocated == 4 * MIB
        assert gpu.peak_reserved == 22 * MIB
    assert gpu.phases["later"].peak_allocated == 1024
    assert gpu.peak_allocated == 4 * MIB


def test_nested_phases_and_phases_entered_twice() -> None:
    with simulate("T4") as gpu:
        with gpu.phase("outer"), gpu.phase("inner"):
            torch.empty(2048, dtype=torch.uint8, device="cuda")
        with gpu.phase("outer"):
            torch.empty(1024, dtype=torch.uint8, device="cuda")
    assert gpu.phases["inner"].parent == "outer"
    assert gpu.phases["outer"].entered == 2
    assert gpu.phases["outer"].peak_allocated == gpu.phases["inner"].peak_allocated == 2048


def test_the_trace_is_in_order_and_the_snapshot_has_its_events() -> None:
    with simulate("T4", torch_version="2.6") as gpu:
        x = torch.ones(256, device="cuda")
        del x
        torch.cuda.empty_cache()
    assert [(event.action, event.size) for event in gpu.trace] == [
        ("segment_alloc", 2 * MIB),
        ("alloc", 1024),
        ("free_requested", 1024),
        ("free_completed", 1024),
        ("segment_free", 2 * MIB),
    ]
    (trace,) = gpu.snapshot()["device_traces"]
    assert [event["action"] for event in trace] == [event.action for event in gpu.trace]


def test_allocator_and_workspace_settings() -> None:
    with simulate(
        "T4",
        torch_version="2.6",
        alloc_conf="expandable_segments:True",
        cublas_workspace_config=":16:8",
    ) as gpu:
        x = torch.ones(8, 8, device="cuda")
        x @ x
        assert gpu.allocated == 512 + 16 * 1024 * 8
    assert {event.action for event in gpu.trace} >= {"segment_map"}


def test_two_runs_are_the_same_to_the_last_address() -> None:
    def run() -> list[object]:
        with simulate("A100-40GB", torch_version="2.11") as gpu:
            model = nn.Sequential(nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 10)).cuda()
            optimizer = torch.optim.AdamW(model.parameters())
            for _ in range(2):
                model(torch.randn(7, 300, device="cuda")).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return [event[:4] for event in gpu.trace]

    assert run() == run()


def test_a_runs_snapshot_replays_to_the_last_address() -> None:
    with simulate("A100-40GB", torch_version="2.6") as gpu:
        model = nn.Linear(2000, 2000).cuda()
        model(torch.randn(64, 2000, device="cuda")).sum().backward()
    result = pytest_gpumem.replay(gpu.snapshot())
    assert (result.exact, result.first_mismatch) == (True, None)
    assert result.total == sum(event.action == "alloc" for event in gpu.trace)
    assert (result.peak_allocated, result.peak_reserved) == (gpu.peak_allocated, gpu.peak_reserved)


def test_all_names_of_the_package_exist() -> None:
    assert set(pytest_gpumem.__all__) >= {"simulate"}
    for name in pytest_gpumem.__all__:
        assert getattr(pytest_gpumem, name) is not None


def test_a_nested_simulation_patches_torch_itself() -> None:
    with simulate("T4"):
        with simulate("T4", real_values=True):
            state = torch.cuda.get_rng_state()
            first = torch.rand(4, device="cuda").tolist()
            torch.cuda.set_rng_state(state)

            assert state.numel() == 16
            assert torch.rand(4, device="cuda").tolist() == first
        torch.cuda.set_rng_state(state)
