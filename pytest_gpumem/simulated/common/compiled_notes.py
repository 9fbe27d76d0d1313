"""How notes on compiled code read, for those who write them and those who judge by them."""

from __future__ import annotations

OF_COMPILED_CODE = "torch.compile at"
"""With which every note on compiled code begins."""

RUNS_EAGERLY = "runs eagerly"
"""What notes say of compiled code that was not followed."""


def ran_eagerly(note: str) -> bool:
    """Whether ``note`` says that the number is eager code's, where code was to be compiled."""
    return note.startswith(OF_COMPILED_CODE) and RUNS_EAGERLY in note


FOLLOWED_SINCE = "2.11"
"""Releases before have other hooks; ``torch.__version__`` compares itself by releases."""
