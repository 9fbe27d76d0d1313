"""Workspaces of NVIDIA's libraries, estimated by the rules of the simulated device.

When torch queries the size of a library's workspace, the runtime (``source/libraries.c``) calls
this module, which returns the simulated device's estimate. The runtime counts the estimated bytes
of each peak, and records calls without an estimate; the sentences are the simulated device's, too.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

from pytest_gpumem.dry.load import function
from pytest_gpumem.simulated.operators import cudnn, cudnn_rnn, cusolver

_CONVOLUTION, _RECURRENT, _PLACE, _ATTENTION, _SOLVER = 1, 2, 3, 4, 5
"""``enum question`` of ``source/libraries.h``."""

_DIRECTIONS = (cudnn.FORWARD, cudnn.INPUT, cudnn.WEIGHT)
_ELEMENT_BYTES = {0: 4, 1: 8, 2: 2, 9: 2}
"""Data types by cudnnDataType_t."""
_FLOAT, _DOUBLE, _BFLOAT16 = 0, 1, 9
_CELLS = ("rnn_relu", "rnn_tanh", "lstm", "gru")
"""Kinds of networks by cudnnRNNMode_t."""

if TYPE_CHECKING:
    _Pointer = ctypes._Pointer[ctypes.c_int64]

_Numbers = ctypes.POINTER(ctypes.c_int64)
_Answer = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, _Numbers, ctypes.c_int, _Numbers)

_LIBRARIES = {"cudnn": "cuDNN", "cufft": "cuFFT", "cusolverDn": "cuSOLVER", "cusparse": "cuSPARSE"}
"""Libraries by the prefixes of their functions' names."""
_ENDINGS = ("_bufferSizeExt", "_bufferSize", "_workEstimation", "_compute", "_v8")


_SENTENCES = [""]
"""Sentences, which the runtime refers to by their positions."""


@cache
def _number(sentence: str) -> int:
    """Return the position of ``sentence``; add it if it is new."""
    _SENTENCES.append(sentence)
    return len(_SENTENCES) - 1


_kept: list[object] = []


def begin_answering() -> None:
    """Answer the runtime's queries in this process from now on."""
    answer = _Answer(_answer)
    _kept.append(answer)
    function("answer_with")(answer)


def forget() -> None:
    """Clear the peaks, source lines and calls of earlier tests."""
    function("forget_estimates")()
    function("forget_left_out")()


def renew_dropout_states() -> None:
    """Make torch allocate the states of cuDNN's dropout again, as in a new process.

    torch keeps a state for each GPU, and replaces it when a recurrent layer runs after seeding
    (``get_dropout_state`` of aten/src/ATen/native/cudnn/RNN.cpp, torch 2.6 to 2.15). So this seeds
    and runs a layer whose state has no bytes.
    """
    import torch

    for device, generator in enumerate(torch.cuda.default_generators):
        if not function("has_dropout_state")(device):
            continue
        state = generator.get_state()
        generator.set_state(state)  # counts as seeding
        function("empty_dropout_states")(1)
        try:
            with torch.no_grad(), torch.cuda.device(device):
                _run_layer()
        finally:
            function("empty_dropout_states")(0)
            generator.set_state(state)
            torch.cuda.empty_cache()


def _run_layer() -> None:
    """Run a recurrent layer with dropout, and keep none of its tensors."""
    import torch

    layer = torch.nn.LSTM(1, 1, 2, dropout=0.5, device="cuda")
    layer(torch.zeros(1, 1, 1, device="cuda"))


@contextmanager
def unmeasured() -> Iterator[None]:
    """Exclude allocations inside from peaks."""
    function("pause_estimates")(1)
    try:
        yield
    finally:
        function("pause_estimates")(0)


def events_hash(device: int) -> int:
    """Return a hash of the allocator's events on GPU ``device`` in the present test."""
    return int(function("events", gives=ctypes.c_uint64)(device))


def notes(device: int) -> tuple[str, ...]:
    """Return the remarks on the libraries of GPU ``device`` for readers of its numbers."""
    numbers = (ctypes.c_int64 * 4)()
    function("estimates")(device, numbers)
    largest, in_peak, at_largest, at_peak = numbers
    calls = list(_left_out())
    if not (calls or largest):  # the rules of operators are slow to import
        return ()
    from pytest_gpumem.simulated.gpu.estimates import estimate_note
    from pytest_gpumem.simulated.operators.libraries import left_out_note

    sentences = [left_out_note(*call) for call in calls]
    if largest:
        sentences.append(
            estimate_note(largest, _SENTENCES[at_largest], in_peak, _SENTENCES[at_peak])
        )
    return tuple(dict.fromkeys(sentences))


def _left_out() -> Iterator[tuple[str, str]]:
    """Yield the library and the function of each call whose workspace is not estimated."""
    name_at = function("left_out", gives=ctypes.c_char_p)
    index = 0
    while (name := name_at(index)) is not None:
        called = name.decode()
        prefix = next(prefix for prefix in _LIBRARIES if called.startswith(prefix))
        for ending in _ENDINGS:
            called = called.removesuffix(ending)
        yield _LIBRARIES[prefix], called
        index += 1


def _answer(question: int, numbers: _Pointer, count: int, answers: _Pointer) -> int:
    rules: dict[int, Callable[[Sequence[int]], Sequence[int]]] = {
        _CONVOLUTION: _convolution,
        _RECURRENT: _recurrent,
        _PLACE: _place,
        _ATTENTION: lambda numbers: (cudnn.ATTENTION_BYTES,),
        _SOLVER: _solver,
    }
    for at, number in enumerate(rules[question](numbers[:count])):
        answers[at] = number
    return 0


def _convolution(numbers: Sequence[int]) -> Sequence[int]:
    """Return the bytes of a convolution's workspace, and the number of its sentence."""
    major, minor, direction, dtype, dims, *rest = numbers
    shapes = [tuple(rest[at * dims : (at + 1) * dims]) for at in range(6)]
    input, weight, output = shapes[:3]
    spatial = rest[6 * dims :]
    size = _ELEMENT_BYTES.get(dtype, 1)
    call = cudnn.Convolution(
        _DIRECTIONS[direction],
        input,
        output[1],
        weight[2:],
        tuple(spatial[: dims - 2]),
        tuple(spatial[dims - 2 :]),
        input[1] // max(weight[1], 1),
        math.prod(input) * size,
        math.prod(weight) * size,
        math.prod(output) * size,
        size,
        dtype != _DOUBLE and _reads_channels_last(direction, shapes),
        cudnn.on_tensor_cores(dtype == _FLOAT, size, (major, minor)),
        (major, minor),
    )
    shown = 1 if weight[2] == 1 < weight[3] else dims - 2
    what = f"conv{shown}d ({call.direction})"
    return cudnn.convolution_bytes(call), _number(f"cuDNN's workspace for {what}")


def _reads_channels_last(direction: int, shapes: Sequence[tuple[int, ...]]) -> bool:
    """Return whether cudnn_conv_suggest_memory_format gives channels last for the two inputs."""
    from pytest_gpumem.simulated.operators.layout import is_channels_last

    written = {cudnn.FORWARD: 2, cudnn.INPUT: 0, cudnn.WEIGHT: 1}[_DIRECTIONS[direction]]
    return any(is_channels_last(shapes[at], shapes[at + 3]) for at in range(3) if at != written)


def _recurrent(numbers: Sequence[int]) -> Sequence[int]:
    """Return a recurrent layer's bytes of workspace and reserve, and their sentences' numbers."""
    cell, dtype, input, hidden, projected, layers, directions, batch, steps, rows, *flags = numbers
    is_packed, has_dropout, is_training = map(bool, flags)
    call = cudnn_rnn.Recurrent(
        _CELLS[cell],
        input,
        hidden,
        projected,
        layers,
        directions,
        batch,
        steps,
        rows,
        _ELEMENT_BYTES.get(dtype, 1),
        is_bfloat16=dtype == _BFLOAT16,
        is_packed=is_packed,
        has_dropout=has_dropout,
        is_training=is_training,
    )
    workspace = _number(f"cuDNN's workspace for {call.name}")
    reserve = _number(f"cuDNN's reserve for {call.name}")
    nbytes = cudnn_rnn.workspace_bytes(call), cudnn_rnn.reserve_bytes(call)
    return *nbytes, workspace, reserve


def _solver(numbers: Sequence[int]) -> Sequence[int]:
    """Return the bytes of a cuSOLVER routine's workspace, a negative number if unknown."""
    routine, major, minor, *matrix = numbers
    nbytes = cusolver.workspace_bytes(cusolver.ROUTINES[routine], (major, minor), *matrix)
    return (-1 if nbytes is None else nbytes,)


def _place(numbers: Sequence[int]) -> Sequence[int]:
    """Return the number of the sentence extended by the current line of the user's code."""
    from pytest_gpumem.simulated.common.callsite import user_line

    return (_number(f"{_SENTENCES[numbers[0]]} at {user_line()}"),)
