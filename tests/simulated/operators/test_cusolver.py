"""cuSOLVER's workspaces, as recorded on an H100 with torch 2.11.0+cu130."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pytest_gpumem import simulate
from pytest_gpumem.simulated.operators.cusolver import workspace_bytes

H100 = (9, 0)

RECORDED = [
    ("potrf", 31, 31, 8, 160),
    ("potrf", 64, 64, 4, 160),
    ("potrf", 128, 128, 4, 192),
    ("potrf", 500, 500, 8, 1152),
    ("getrf", 5, 5, 4, 768),
    ("getrf", 64, 64, 4, 1280),
    ("getrf", 100, 100, 4, 2304),
    ("getrf", 500, 500, 8, 8448),
    ("geqrf", 5, 5, 4, 3_145_856),
    ("geqrf", 500, 500, 8, 8_290_432),
    ("geqrf", 1024, 512, 4, 4_194_432),
    ("orgqr", 6, 5, 4, 132_224),
    ("orgqr", 33, 33, 8, 273_152),
    ("orgqr", 64, 32, 8, 280_576),
    ("orgqr", 64, 64, 4, 148_480),
    ("orgqr", 500, 500, 8, 1_669_120),
    ("orgqr", 1024, 512, 4, 1_115_136),
    ("sytrf", 128, 128, 4, 98_432),
    ("sytrf", 500, 500, 4, 128_256),
    ("sytrf", 512, 512, 8, 262_656),
    ("gesvdj", 33, 16, 4, 3_145_984),
    ("gesvdj", 256, 128, 8, 6_292_736),
    ("gesvdj", 32, 64, 8, 6_308_352),
    ("gesvdj", 256, 512, 4, 3_671_168),
    ("gesvdjBatched", 31, 31, 8, 7936),
    ("gesvdjBatched", 2, 5, 4, 3968),
]


@pytest.mark.parametrize(("routine", "rows", "columns", "size", "nbytes"), RECORDED)
def test_workspaces(routine: str, rows: int, columns: int, size: int, nbytes: int) -> None:
    assert workspace_bytes(routine, H100, rows, columns, size) == nbytes
    assert workspace_bytes(routine, (8, 0), rows, columns, size) is None


@pytest.mark.parametrize(
    ("routine", "rows", "columns", "size"),
    [
        ("potrf", 513, 513, 4),
        ("getrf", 64, 32, 4),
        ("geqrf", 513, 513, 4),
        ("orgqr", 100, 100, 4),
        ("sytrf", 33, 33, 8),
        ("gesvdj", 100, 100, 4),
    ],
)
def test_unrecorded_sizes_are_unknown(routine: str, rows: int, columns: int, size: int) -> None:
    assert workspace_bytes(routine, H100, rows, columns, size) is None


def test_operators_allocate_the_workspaces(on: Any) -> None:
    """The events of the twin run on the H100."""
    gpu = on("H100", "2.11")
    matrix = torch.zeros(64, 64, device="cuda")
    held: list[Any] = []
    assert gpu.of(lambda: held.append(torch.linalg.qr(matrix))) == [
        16_384, 16_384, 256,
        4, 3_145_856, -3_145_856, -4,
        4, 148_480, -148_480, -4,
        -256,
    ]  # fmt: skip
    assert gpu.of(lambda: held.append(torch.linalg.cholesky(matrix)))[:4] == [16_384, 4, 160, -160]
    events = gpu.of(lambda: held.append(torch.linalg.det(matrix)))
    assert events[:6] == [4, 16_384, 256, 4, 1280, -1280]
    events = gpu.of(lambda: held.append(torch.linalg.ldl_factor(matrix)))
    assert events[2:5] == [4, 98_432, -98_432]
    of_singular = [8192, 4096, 128, 4, 8192, 3_145_984, -3_145_984, -8192]
    rows = matrix[:, :32]
    assert (
        gpu.of(lambda: held.append(torch.linalg.svd(rows, full_matrices=False)))[:8] == of_singular
    )


def test_notes_name_routines_of_unknown_size() -> None:
    with simulate("H100", torch_version="2.11") as gpu:
        torch.linalg.qr(torch.zeros(64, 64, device="cuda"))
        assert not gpu.notes
        torch.linalg.svd(torch.zeros(100, 100, device="cuda"))
    assert [note.split(" is unknown")[0] for note in gpu.notes] == [
        "cuSOLVER's workspace for linalg_svd"
    ]
