"""Captures of graphs that a call invalidates, by the CUDA Runtime API's manual.

cudaStreamBeginCapture, cudaStreamEndCapture, cudaStreamIsCapturing and
cudaThreadExchangeStreamCaptureMode, and "Prohibited and Unhandled Operations" of the CUDA C++
Programming Guide.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.dry.conftest import Run

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
    answers = []
    thread = threading.Thread(target=lambda: answers.append(function()))
    thread.start()
    thread.join()
    return answers[0]

def end():
    return [runtime.cudaStreamEndCapture(stream, byref(graph)), graph.value is not None]

def exchange(mode):
    mode = c_int(mode)
    runtime.cudaThreadExchangeStreamCaptureMode(byref(mode))
    return mode.value

runtime.cudaStreamBeginCapture(stream, 0)
runtime.cudaEventRecord(event, stream)
runtime.cudaStreamWaitEvent(other, event, 0)
told["both"] = states()
told["waited for"] = runtime.cudaStreamSynchronize(other)
told["then"] = states()
told["further"] = [clear(), runtime.cudaEventRecord(event, stream)]
told["its end"] = end()
told["behind"] = states()
runtime.cudaStreamBeginCapture(stream, 0)
told["anew"] = [clear(), *end()]

for name, mode in [("global", 0), ("of a thread", 1), ("relaxed", 2)]:
    for who in (in_a_thread, lambda function: function()):
        runtime.cudaStreamBeginCapture(stream, mode)
        told.setdefault(name, []).append([who(take), *end()])

runtime.cudaStreamBeginCapture(stream, 0)
before = exchange(2)
told["exchanged"] = [before, take(), exchange(before)]
told["synchronized"] = [runtime.cudaDeviceSynchronize(), *end()]

runtime.cudaGetLastError()  # torch would raise it at its next launch
held = torch.ones(8, device="cuda")
torch.cuda.synchronize()
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        held += 1
        torch.cuda.synchronize()
except RuntimeError as error:
    told["torch"] = [str(one).splitlines()[0] for one in (error.__context__, error)]
told["capturing"] = torch.cuda.is_current_stream_capturing()
"""


@pytest.fixture(scope="module")
def told(dry_run: Run) -> Any:
    """What the runtime has answered."""
    return dry_run(PROGRAM)


def test_a_wait_invalidates_the_capture_on_all_of_its_streams(told: Any) -> None:
    assert told["both"] == [ACTIVE, ACTIVE]
    assert told["waited for"] == UNSUPPORTED
    assert told["then"] == [INVALIDATED, INVALIDATED]


def test_an_invalidated_capture_refuses_everything_and_ends_without_a_graph(told: Any) -> None:
    assert told["further"] == [OVER, OVER]
    assert told["its end"] == [OVER, False]
    assert told["behind"] == [NONE, NONE]
    assert told["anew"] == [SUCCESS, SUCCESS, True]


def test_an_unsafe_call_is_refused_by_the_modes_of_capture_and_thread(told: Any) -> None:
    invalidated, captured = [UNSUPPORTED, OVER, False], [SUCCESS, SUCCESS, True]

    # By another thread, and by the one that captures.
    assert told["global"] == [invalidated, invalidated]
    assert told["of a thread"] == [captured, invalidated]
    assert told["relaxed"] == [captured, captured]
    assert told["exchanged"] == [GLOBAL, SUCCESS, RELAXED]
    assert told["synchronized"] == [UNSUPPORTED, OVER, False]


def test_torch_raises_what_it_raises_on_a_gpu(told: Any) -> None:
    assert told["torch"] == [
        "CUDA error: operation not permitted when stream is capturing",
        "CUDA error: operation failed due to a previous error during capture",
    ]
    assert told["capturing"] is False
