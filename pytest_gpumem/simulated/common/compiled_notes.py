"""The form of notes on compiled code, for their writers and their readers."""

from __future__ import annotations

OF_COMPILED_CODE = "torch.compile at"
"""The beginning of every note on compiled code."""

RUNS_EAGERLY = "runs eagerly"
"""A part of notes on compiled code that was not followed."""


def ran_eagerly(note: str) -> bool:
    """Return whether ``note`` is about eager code's number, where code was to be compiled."""
    return note.startswith(OF_COMPILED_CODE) and RUNS_EAGERLY in note


FOLLOWED_SINCE = "2.11"
"""Releases before have other hooks; ``torch.__version__`` compares itself by releases."""
