"""The form of notes on compiled code, for their writers and their readers."""

from __future__ import annotations

OF_COMPILED_CODE = "torch.compile at"
"""The beginning of every note on compiled code."""

RUNS_EAGERLY = "runs eagerly"
"""A part of the notes on code that was to be compiled and runs as eager code."""


def ran_eagerly(note: str) -> bool:
    """Return whether ``note`` says that code to be compiled was run as eager code."""
    return note.startswith(OF_COMPILED_CODE) and RUNS_EAGERLY in note


FOLLOWED_SINCE = "2.11"
"""Earlier releases have other hooks; ``torch.__version__`` compares itself by releases."""
