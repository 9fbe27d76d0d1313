"""Captures of graphs that a call invalidates, by the CUDA Runtime API's manual.

cudaStreamBeginCapture, cudaStreamEndCapture, cudaStreamIsCapturing and
cudaThreadExchangeStreamCaptureMode, and "Prohibited and Unhandled Operations" of the CUDA C++
Programming Guide.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest

from tests.dry.conftest import Run

RELEASE = tuple(map(int, version("torch").split(".")[:2]))
"""torch's, which is not imported: NVIDIA's libraries may be missing in this process."""
GLOBAL, RELAXED = 0, 2
NONE, ACTIVE, INVALIDATED = 0, 1, 2
SUCCESS, UNSUPPORTED, OVER = 0, 900, 901

PROGRAM = """
import ctypes, threading
from ctypes import byref, c_int, c_void_p
torch.cuda.init()
runtime = ctypes.CDLL(None)
stream, other, event, memory, graph = (c_void_p() for _ in range(5))
runtime.cudaStreamCreateWithFlags(byref(stream), 1)
runtime.cudaStreamCreateWithFlags(byref(other), 1)
runtime.cudaEventCreate(byref(event))
runtime.cudaMalloc(byref(memory), ctypes.c_size_t(512))

def states():
    found = []
    for one in (stream, other):
        status = c_int(-1)
        runtime.cudaStreamIsCapturing(one, byref(status))
        found.append(status.value)
    return found

def clear():
    return runtime.cudaMemsetAsync(memory, 0, ctypes.c_size_t(512), stream)

def take():
    return runtime.cudaMalloc(byref(c_void_p()), ctypes.c_size_t(512))

def in_a_thread(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]

def end():
    return [runtime.cudaStreamEndCapture(stream, byref(graph)), graph.value is not None]

def exchange(mode):
    mode = c_int(mode)
    runtime.cudaThreadExchangeStreamCaptureMode(byref(mode))
    return mode.value

runtime.cudaStreamBeginCapture(stream, 0)
runtime.cudaEventRecord(event, stream)
runtime.cudaStreamWaitEvent(other, event, 0)
found["both"] = states()
found["waited for"] = runtime.cudaStreamSynchronize(other)
found["then"] = states()
found["further"] = [clear(), runtime.cudaEventRecord(event, stream)]
found["its end"] = end()
found["behind"] = states()
runtime.cudaStreamBeginCapture(stream, 0)
found["anew"] = [clear(), *end()]

for name, mode in [("global", 0), ("of a thread", 1), ("relaxed", 2)]:
    for who in (in_a_thread, lambda function: function()):
        runtime.cudaStreamBeginCapture(stream, mode)
        found.setdefault(name, []).append([who(take), *end()])

runtime.cudaStreamBeginCapture(stream, 0)
before = exchange(2)
found["exchanged"] = [before, take(), exchange(before)]
found["synchronized"] = [runtime.cudaDeviceSynchronize(), *end()]

runtime.cudaGetLastError()  # torch would raise it at its next launch
held = torch.ones(8, device="cuda")
torch.cuda.synchronize()
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        held += 1
        torch.cuda.synchronize()
except RuntimeError as error:
    found["torch"] = [str(one).splitlines()[0] for one in (error.__context__, error)]
found["capturing"] = torch.cuda.is_current_stream_capturing()
"""


@pytest.fixture(scope="module")
def found(dry_run: Run) -> Any:
    """What the runtime has answered."""
    return dry_run(PROGRAM)


def test_a_wait_invalidates_the_capture_on_all_of_its_streams(found: Any) -> None:
    assert found["both"] == [ACTIVE, ACTIVE]
    assert found["waited for"] == UNSUPPORTED
    assert found["then"] == [INVALIDATED, INVALIDATED]


def test_an_invalidated_capture_refuses_everything_and_ends_without_a_graph(found: Any) -> None:
    assert found["further"] == [OVER, OVER]
    assert found["its end"] == [OVER, False]
    assert found["behind"] == [NONE, NONE]
    assert found["anew"] == [SUCCESS, SUCCESS, True]


def test_an_unsafe_call_is_refused_by_the_modes_of_capture_and_thread(found: Any) -> None:
    invalidated, captured = [UNSUPPORTED, OVER, False], [SUCCESS, SUCCESS, True]

    # By another thread, and by the one that captures.
    assert found["global"] == [invalidated, invalidated]
    assert found["of a thread"] == [captured, invalidated]
    assert found["relaxed"] == [captured, captured]
    assert found["exchanged"] == [GLOBAL, SUCCESS, RELAXED]
    assert found["synchronized"] == [UNSUPPORTED, OVER, False]


def test_torch_raises_what_it_raises_on_a_gpu(found: Any) -> None:
    assert found["torch"] == [
        "CUDA error: operation not permitted when stream is capturing",
        "CUDA error: operation failed due to a previous error during capture",
    ]
    assert found["capturing"] is False


REUSING = """
torch.cuda.init()
first, second = torch.cuda.Stream(), torch.cuda.Stream()
graph = torch.cuda.CUDAGraph()
with torch.cuda.stream(first):
    graph.capture_begin()
    other, used = torch.empty(8, device="cuda"), torch.empty(8, device="cuda")
    address = used.data_ptr()
    second.wait_stream(first)
    with torch.cuda.stream(second):
        torch.add(used, 2.0, out=torch.empty_like(used))
        used.record_stream(second)
    del used
    apart = torch.empty(8, device="cuda")
    first.wait_stream(second)
    joined = torch.empty(8, device="cuda")
    graph.capture_end()
found = [one.data_ptr() == address for one in (apart, joined)]
"""


@pytest.mark.skipif(RELEASE < (2, 9), reason="the setting came with torch 2.9")
@pytest.mark.parametrize(("reuses", "expected"), [(True, [False, True]), (False, [False, False])])
def test_a_captured_join_frees_a_block_that_another_stream_used(
    dry_run: Run, reuses: bool, expected: list[bool]
) -> None:
    conf = f"graph_capture_record_stream_reuse:{reuses}"

    assert dry_run(REUSING, PYTORCH_CUDA_ALLOC_CONF=conf) == expected


CONDITIONAL = """
from torch._higher_order_ops.cudagraph_conditional_nodes import if_else_node
condition, x = torch.tensor(True, device="cuda"), torch.ones(1000, device="cuda")
before = torch.cuda.memory_allocated()
torch.cuda.reset_peak_memory_stats()
with torch.cuda.graph(torch.cuda.CUDAGraph()):
    result = if_else_node(condition, lambda x: x + 1, lambda x: x - 1, [x])
found = [one - before for one in (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated())]
"""


@pytest.mark.skipif(RELEASE < (2, 12), reason="conditional nodes came with torch 2.12")
def test_both_branches_of_a_conditional_node_are_captured(dry_run: Run) -> None:
    # The result; beside it the other branch's, the condition that is not, and up to 2.13 the seed
    # and the offset of the capture.
    seed_and_offset = 2 * 512 if RELEASE < (2, 14) else 0
    assert dry_run(CONDITIONAL) == [4096, 4096 + 4096 + 512 + seed_and_offset]
