"""Frames of the simulation in a traceback, which would keep tensors that C++ has let go."""

from __future__ import annotations

import contextlib
from types import TracebackType

import torch._ops

from pytest_gpumem.simulated.common.callsite import is_own


def let_go(traceback: TracebackType | None) -> None:
    """Clear the frames of the simulation's code, and of operators it calls, that have ended.

    In a handler of an error C++ holds no tensor of the call any more.
    """
    while traceback is not None:
        frame = traceback.tb_frame
        if is_own(frame.f_code.co_filename) or frame.f_code.co_filename == torch._ops.__file__:
            with contextlib.suppress(RuntimeError):  # it is running
                frame.clear()
        traceback = traceback.tb_next
