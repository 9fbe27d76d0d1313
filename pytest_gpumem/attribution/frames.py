"""Facts from the frames of a recorded allocation, without torch: line, operator and purpose."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from pytest_gpumem.attribution.history import (
    ACTIVATIONS,
    GRADIENTS,
    INPUTS,
    OPTIMIZER_STATE,
    OTHER,
    PARAMETERS,
    TEMPORARIES,
    WORKSPACE,
)

Frame = Mapping[str, Any]

MOST_LINES = 12
"""The number of innermost frames of a stack that are kept."""

OPERATOR = re.compile(r"\bat::_ops::(\w+?)::(?:call|redispatch)\b")
NODE = re.compile(r"\btorch::autograd::(?:generated::)?(\w+)::apply\b")
"""C++ function names of an operator and of an autograd node."""
_CUBLAS = re.compile(
    r"\bat::cuda::(getNewWorkspace|setWorkspaceForHandle|allocateCUDABlasWorkspace"
    r"|getCUDABlasLtWorkspace)\b"
)
"""Functions of aten/src/ATen/cuda/CublasHandlePool.cpp that allocate workspaces: of cuBLAS up to
torch 2.9, from 2.10 to 2.14, and since 2.15; and of cuBLASLt."""
_CUDNN = re.compile(
    r"\bat::native::"
    r"(run_\w*conv\w*|cudnn_convolution\w*|convolution_backward|_cudnn_init_dropout_state)\b"
)
"""Functions that allocate the workspace of a convolution's plan (native/cudnn/Conv_v8.cpp, torch
2.6 to 2.15; in 2.15 by an unnamed function), and the state of recurrent layers' dropout
(cudnn/RNN.cpp). All of them call ``empty``."""
_ALLOCATING = re.compile(r"^\?\?$|^torch::|^c10::|\bCUDACachingAllocator\b")
"""The most frames between a recorded allocation and the function that requests it."""
_MEMORY_ONLY = re.compile(r"_?(?:empty|new_empty|resize)(?:_|$)")
"""Operators that only allocate for the operator that calls them."""
_OVERLOAD = re.compile(
    r"_(?:[A-Z]\w*|out|dim|dims|int|self|default|start|start_out|start_step|names|like_out"
    r"|memory_format|dim_IntList|dim_max|dim_DimnameList)$"
)
"""The form in which ``at::_ops`` writes the overload in ``aten::sum.dim_IntList``."""

_MADE_BY = ("nn/modules/module.py", ("_apply", "convert"))
"""The functions by which ``model.to("cuda")`` makes parameters: torch/nn/modules/module.py."""


@dataclass(frozen=True)
class StackFacts:
    """The facts that one stack gives about the block allocated there."""

    site: str | None = None
    """``path:line`` of the innermost Python frame outside torch."""
    function: str | None = None
    operator: str | None = None
    during: str = ""
    """``forward``, ``backward``, ``step``, ``making`` of parameters, or empty."""
    library: bool = False
    """Whether it is a workspace of a library, cuBLAS or cuDNN."""
    stack: tuple[str, ...] = ()
    """``path:line function`` of the frames in Python, the innermost first."""


UNKNOWN = StackFacts()
EARLIER = StackFacts(operator="allocated before recording began")


def frames_in(event: Mapping[str, Any]) -> list[Frame]:
    """Return the valid frames of an event, because a file may contain any values."""
    frames = event.get("frames")
    return [
        frame
        for frame in (frames if isinstance(frames, list) else [])
        if isinstance(frame, Mapping)
        and isinstance(frame.get("filename"), str)
        and isinstance(frame.get("name"), str)
    ]


def stack_facts(frames: Sequence[Frame], paths: Mapping[str, str]) -> StackFacts:
    """Return the facts of ``frames``, the innermost first; ``paths`` are file names as shown."""
    python = [frame for frame in frames if _is_python(frame)]
    line = next((frame for frame in python if not is_torchs(frame["filename"])), None)
    symbols = [frame["name"] for frame in takewhile(lambda frame: not _is_python(frame), frames)]
    node = next((match[1] for name in symbols if (match := NODE.search(name))), None)
    shown = [f"{_place(frame, paths)} {frame['name']}" for frame in python[:MOST_LINES]]
    return StackFacts(
        site=None if line is None else _place(line, paths),
        function=None if line is None else line["name"],
        operator=node or _operator(symbols) or _called(python),
        during="backward" if node else _during(python),
        library=library_of(symbols) is not None,
        stack=tuple(shown),
    )


def library_of(symbols: Iterable[str]) -> str | None:
    """Return the library whose workspace is requested by C++ functions, the innermost first."""
    names = [name for name in symbols if not _ALLOCATING.search(name)]
    if any(map(_CUBLAS.search, names)):
        return "cuBLAS"
    return "cuDNN" if names and _CUDNN.search(names[0]) else None


def category(facts: StackFacts, *, kept: bool) -> str:
    """Return a block's category; ``kept``: it outlived the phase it was allocated in.

    Frames show less than the observation of a test: a copy from the host looks like any other
    tensor, and a parameter is recognised only by the function that moved it.
    """
    if facts.library:
        return WORKSPACE
    if facts.during == "making":
        return PARAMETERS
    if not facts.during:
        return INPUTS if facts.operator == "Tensor.to" else OTHER
    if not kept:
        return TEMPORARIES
    return {"forward": ACTIVATIONS, "backward": GRADIENTS, "step": OPTIMIZER_STATE}[facts.during]


def is_torchs(filename: str) -> bool:
    """Return whether a file belongs to torch; a recorded path may begin at torch's folder."""
    return filename.startswith(("torch/", "<")) or "/torch/" in filename


def _during(python: Sequence[Frame]) -> str:
    """Return the innermost phase that these frames are part of, empty for none."""
    for frame in python:
        name, file = frame["name"], frame["filename"]
        if not is_torchs(file):
            continue
        if "torch/optim/" in file and name != "zero_grad":
            return "step"
        if name in ("backward", "grad", "_engine_run_backward") and "autograd" in file:
            return "backward"
        if file.endswith(_MADE_BY[0]):
            if name in _MADE_BY[1]:
                return "making"
            if name.endswith("_call_impl"):
                return "forward"
    return ""


def _operator(symbols: Sequence[str]) -> str | None:
    """Return the innermost operator that does more than allocate for another one."""
    found = [match[1] for name in symbols if (match := OPERATOR.search(name))]
    if not found:
        return None
    computing = (name for name in found if not _MEMORY_ONLY.match(name))
    base = _OVERLOAD.sub("", next(computing, found[-1]))
    return "Tensor.to" if base.lstrip("_") == "to_copy" else f"aten::{base}"


def _called(python: Sequence[Frame]) -> str | None:
    """Return the function of torch that the user's code called."""
    inside = list(takewhile(lambda frame: is_torchs(frame["filename"]), python))
    if not inside:
        return None
    file = inside[-1]["filename"].rpartition("/")[2].removesuffix(".py")
    return f"{file}.{inside[-1]['name']}"


def _place(frame: Frame, paths: Mapping[str, str]) -> str:
    filename = frame["filename"]
    return f"{paths.get(filename, filename)}:{frame.get('line', 0)}"


def python_files(frames: Sequence[Frame]) -> Iterator[str]:
    """Yield the file of every frame in Python."""
    return (frame["filename"] for frame in frames if _is_python(frame))


def _is_python(frame: Frame) -> bool:
    return bool(frame["filename"].endswith(".py"))
