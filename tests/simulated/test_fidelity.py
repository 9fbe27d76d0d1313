"""Regression tests against recorded traces of programs and measured numbers.

The recordings are outside this repository: $GPUMEM_GROUNDTRUTH names their folder. The whole
comparison is ``benchmarks/fidelity.py``; here is the part of it that takes seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
MIB = 2**20


@pytest.fixture(scope="module")
def recordings() -> Iterator[ModuleType]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import recordings

        if not (recordings.GROUND_TRUTH / "snapshots").is_dir():
            pytest.skip(f"recorded traces are not in {recordings.GROUND_TRUTH}")
        yield recordings
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def tables(recordings: ModuleType) -> ModuleType:
    import measured_tables

    return measured_tables


@pytest.mark.parametrize(
    "program",
    [
        "einsum-forward-100",
        "einsum-training-100",
        "naive-attention",
        "large-linear",
        "lm-small-forward",
        "lm-medium-training",
        "tiny-steps",
        "automaton-slide",
        "automaton-fused-slide",
        "automaton-video",
        "layer-by-layer",
    ],
)
def test_every_event_and_both_peaks_equal_the_recording(
    recordings: ModuleType, program: str
) -> None:
    found = recordings.compare(recordings.TRACES[program])

    assert recordings.differences(found.recorded, found.simulated)[:3] == []
    assert found.simulated_peaks == found.recorded_peaks


def test_autocast_differs_from_the_recording_in_order_alone(
    recordings: ModuleType,
) -> None:
    found = recordings.compare(recordings.TRACES["einsum-forward-200-bf16"])

    assert found.reordered
    assert found.simulated_peaks == found.recorded_peaks


@pytest.mark.parametrize("index", [0, 15, 25])
def test_an_operators_peak_is_the_measured_one(tables: ModuleType, index: int) -> None:
    row = tables.rows("liger_operators.csv")[index]

    assert f"{tables.operator_peak(row):.4f}" == f"{float(row['peak_mib']):.4f}"


@pytest.mark.parametrize(
    ("width", "activation"),
    [(1658, "mish"), (1258, "swish"), (358, "prelu")],
)
def test_reserved_memory_of_a_training_run_is_what_nvidia_smi_showed(
    tables: ModuleType, width: int, activation: str
) -> None:
    context = 1429  # MiB of CUDA context on that machine
    row = next(
        row
        for row in tables.rows("gpumemnet_mlp.csv")
        if row["activation"] == activation
        and int(row["input"]) >= width
        and int(row["batch"]) > 300
        and tables.usable(row)
    )

    assert tables.mlp_reserved(row) / MIB + context == int(row["measured_mib"])


def test_resnet50_takes_the_bytes_that_a_profiler_recorded(recordings: ModuleType) -> None:
    import single_numbers

    highest, last = islice(single_numbers.resnet_timelines(), 2)

    assert highest.simulated == highest.measured == 283_144_680
    assert last.simulated == last.measured == 111_570_920


@pytest.mark.parametrize(("model", "optimizer"), [("resnet101", "SGD"), ("convnext_tiny", "AdamW")])
def test_large_batches_of_images_reserve_what_nvml_showed(
    recordings: ModuleType, model: str, optimizer: str
) -> None:
    import single_numbers

    runs = [run for run in single_numbers.XMEM if (run.model, run.optimizer) == (model, optimizer)]
    (number,) = single_numbers.image_runs(runs)

    assert number.simulated == pytest.approx(number.measured, rel=0.02)


def test_convolutions_of_halves_reserve_what_was_printed() -> None:
    import convolutions

    rows = [*convolutions.images(), *convolutions.half_volumes(), *convolutions.three_channels()]

    assert [row.what for row in rows if row.off] == []


@pytest.mark.parametrize(
    ("shape", "reserved", "allocated"),
    # invoke-ai/InvokeAI#9305: latents of 832 x 1248 pixels, and an image of 768 x 768.
    [((16, 1, 104, 156), 5.211, 4.331), ((3, 1, 768, 768), 1.594, 1.724)],
)
def test_an_autoencoder_of_halves_takes_what_was_printed(
    shape: tuple[int, ...], reserved: float, allocated: float
) -> None:
    import convolutions

    grown, peak = convolutions.autoencoder("2.7", torch.half, *shape)

    assert grown == pytest.approx(reserved, abs=0.002)  # a segment
    assert round(peak, 3) == allocated
