"""What tensors really are, below what the simulation makes them report."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch

device = cast(Callable[[torch.Tensor], torch.device], torch._C.TensorBase.device.__get__)
is_meta = cast(Callable[[torch.Tensor], bool], torch._C.TensorBase.is_meta.__get__)
