"""The torch release whose numbers the guide shows."""

from __future__ import annotations

import torch

NAMED_RELEASE = "2.15"
"""The release that ``pip install torch`` gives; the GPU is a simulated A100-40GB by default."""


def is_named_release() -> bool:
    """Return whether the installed torch prints the numbers that are shown."""
    return torch.__version__.startswith(f"{NAMED_RELEASE}.")
