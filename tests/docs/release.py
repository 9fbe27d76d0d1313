"""The torch release whose numbers the guide shows."""

from __future__ import annotations

import torch

NAMED_RELEASE = "2.15"
"""What ``pip install torch`` gives; a simulated A100-40GB, where no other GPU is named."""


def is_named_release() -> bool:
    """Return whether the installed torch prints the numbers that are shown."""
    return torch.__version__.startswith(f"{NAMED_RELEASE}.")
