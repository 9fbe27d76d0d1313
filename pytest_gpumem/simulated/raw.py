"""What tensors really are, below what the simulation makes them report."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch

_getters = vars(torch._C.TensorBase)

device = cast(Callable[[torch.Tensor], torch.device], _getters["device"].__get__)
is_meta = cast(Callable[[torch.Tensor], bool], _getters["is_meta"].__get__)
data = _getters["data"]
"""The getset descriptor of ``Tensor.data``."""
