"""A plugin: NVML of the machine that GPUMEM_TEST_MACHINE names, and torch that sees its GPUs.

Loaded with ``-p`` into a pytest run and its workers; nothing can run on these GPUs.
"""

from __future__ import annotations

import os
import sys

import torch

from pytest_gpumem.device import host_gpus
from tests.fake_machine_name import VARIABLE
from tests.fake_nvml import MACHINES

_nvml = MACHINES[os.environ[VARIABLE]].nvml()
sys.modules["pynvml"] = _nvml  # type: ignore[assignment]  # it answers as the module
host_gpus.DRIVERS = (__file__,)
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: len(_nvml.gpus)
torch.cuda.get_allocator_backend = lambda: "native"
