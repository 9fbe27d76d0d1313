"""A recorded history, read as on a real device; a simulated device stands in for it."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from pytest_gpumem import simulate
from pytest_gpumem.attribution.composition import compositions
from pytest_gpumem.attribution.history import History, Span
from pytest_gpumem.measurement.recorded import RecordedHistory, RecordedOrigin

FRAMES = [
    {"filename": "??", "line": 0, "name": "at::_ops::_softmax::redispatch(c10::DispatchKeySet)"},
    {"filename": "??", "line": 0, "name": "torch::autograd::generated::SoftmaxBackward0::apply()"},
    {"filename": "??", "line": 0, "name": "THPVariable_softmax"},
    {"filename": f"{torch.__path__[0]}/nn/functional.py", "line": 9, "name": "softmax"},
    {"filename": "/home/me/model.py", "line": 71, "name": "forward"},
    {"filename": "/home/me/train.py", "line": 3, "name": "main"},
]


def test_the_innermost_frame_outside_torch_is_the_source_line() -> None:
    assert RecordedOrigin(FRAMES).source_line == ("/home/me/model.py", 71, "forward")


def test_cpp_frames_name_operator_and_node() -> None:
    origin = RecordedOrigin(FRAMES)
    assert (origin.operator_name, origin.node) == ("torch.softmax", "SoftmaxBackward0")


def test_without_cpp_frames_torch_s_own_python_names_the_operator() -> None:
    origin = RecordedOrigin(FRAMES[3:])
    assert (origin.operator_name, origin.node) == ("functional.softmax", None)


def test_a_workspace_is_attributed_to_its_library() -> None:
    name = "at::cuda::allocateCUDABlasWorkspace(unsigned long)"
    frame = {"filename": "??", "line": 0, "name": name}
    assert RecordedOrigin([frame, *FRAMES]).library == "cuBLAS"


@pytest.mark.parametrize(
    ("symbols", "name", "kind"),
    [
        # As recorded on real GPUs, innermost function first.
        ("empty_strided clone", "torch.clone", "computed"),
        ("empty_memory_format empty_like clone reshape einsum", "torch.clone", "computed"),
        ("empty_memory_format zeros slice_backward", "aten::slice_backward", "computed"),
        ("resize_ arange_start_out arange", "torch.arange", "factory"),
        ("empty_memory_format randn", "torch.randn", "factory"),
        ("empty_memory_format", "torch.empty", "factory"),
        ("empty_strided _to_copy to_dtype_layout", "Tensor.to", "copy"),
        ("empty_strided _to_copy to_device", "Tensor.to", "copy"),
        ("empty_strided _to_copy to_dtype einsum", "Tensor.to", "computed"),
        ("sum_dim_IntList", "torch.sum", "computed"),
        ("_softmax softmax_int", "torch.softmax", "computed"),
    ],
)
def test_the_operator_that_requested_memory_is_named(symbols: str, name: str, kind: str) -> None:
    frames = [
        {"filename": "??", "line": 0, "name": f"at::_ops::{symbol}::call(at::Tensor const&)"}
        for symbol in symbols.split()
    ]
    python = {"filename": "/home/me/model.py", "line": 71, "name": "forward"}
    outside = {"filename": "??", "line": 0, "name": "at::_ops::mul_Tensor::call()"}

    origin = RecordedOrigin([*frames, python, outside])

    assert (origin.operator_name, origin.kind) == (name, kind)


def test_events_add_up_to_the_peak_that_torch_reports() -> None:
    with simulate("T4"):
        history = RecordedHistory()
        with history.during("all"):
            layer = nn.Linear(256, 256).cuda()
            torch.cuda.reset_peak_memory_stats()
            begin = history.positions()[0]
            held = history.held(0)
            line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
            layer(torch.ones(8, 256, device="cuda")).sum().backward()
            end = history.positions()[0]
            trace = History(held, list(history.events(0, begin)), [Span("call", 0, end - begin)])
        peak = torch.cuda.max_memory_allocated()
    found = compositions(trace)["call"]
    assert found.total == peak
    assert f"test_recorded.py:{line}" in {site.site for site in found.sites}


def test_reserved_bytes_are_known_after_every_allocation_and_free() -> None:
    with simulate("T4"):
        history = RecordedHistory()
        with history.during("all"):
            small = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
            begin = history.positions()[0]
            large = torch.empty(2 << 20, dtype=torch.uint8, device="cuda")
            del large
            torch.cuda.empty_cache()
            again = torch.empty(30 << 20, dtype=torch.uint8, device="cuda")
            # 2 MiB for small blocks and 20 MiB for the large one, both freed, then 30 MiB
            assert list(history.reserved(0, begin)) == [size << 20 for size in (2, 22, 22, 32)]
            assert list(history.reserved(0, history.positions()[0])) == [32 << 20]
    del small, again


def test_memory_mapped_by_expandable_segments_is_reserved_until_unmapped() -> None:
    with simulate("T4", alloc_conf="expandable_segments:True"):
        history = RecordedHistory()
        with history.during("all"):
            first = torch.empty(20 << 20, dtype=torch.uint8, device="cuda")
            begin = history.positions()[0]
            second = torch.empty(40 << 20, dtype=torch.uint8, device="cuda")
            del second
            torch.cuda.empty_cache()  # unmaps the pages of the second one
            third = torch.empty(20 << 20, dtype=torch.uint8, device="cuda")
            assert list(history.reserved(0, begin)) == [size << 20 for size in (20, 60, 60, 40)]
    del first, third


def test_the_last_failure_has_a_source_line() -> None:
    with simulate("T4"):
        history = RecordedHistory()
        with history.during("all"):
            kept = torch.ones(512, device="cuda")
            with pytest.raises(torch.OutOfMemoryError):
                torch.ones(1 << 40, device="cuda")
            failure = history.last_failure(0)
    assert failure is not None
    position, origin = failure
    assert position == 1
    assert origin is not None
    assert origin.source_line is not None
    assert origin.source_line[0] == __file__
    del kept
