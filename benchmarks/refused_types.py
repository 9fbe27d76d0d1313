"""Which types each operator takes on CUDA: PyTorch's own record against the simulation.

    python benchmarks/refused_types.py [OPERATOR ...]

PyTorch's tests record for each operator the types that its CUDA kernels take (``dtypesIfCUDA`` in
torch/testing/_internal/common_methods_invocations.py, checked there on GPUs). Needs ``expecttest``.
The record says less than the truth for some: ``embedding`` of integers, ``cumsum`` of booleans and
``clone`` of what a float sample was converted to all run on a GPU.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any
from unittest import mock

import torch

from pytest_gpumem import simulate
from pytest_gpumem.values.errors import SimulationError

TYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
)
MOST_SAMPLES = 3


def operators() -> list[Any]:
    """PyTorch's records of its operators, as they are on a GPU of compute capability 8.0."""
    with mock.patch("torch.cuda.get_device_capability", return_value=(8, 0)):
        import torch.testing._internal.common_cuda as capabilities

        for name in dir(capabilities):
            if found := re.fullmatch(r"SM(\d+)OrLater", name):
                setattr(capabilities, name, int(found[1]) <= 80)
        from torch.testing._internal.common_methods_invocations import op_db
    return list(op_db)


def samples(operator: Any, dtype: torch.dtype) -> list[Any]:
    """Arguments on the host; where PyTorch makes none of this type, others converted to it."""
    try:
        return list(islice(operator.sample_inputs("cpu", dtype), MOST_SAMPLES))
    except Exception:  # whatever an operator raises on such a type
        made = torch.float32
        if made not in operator.dtypesIfCUDA:
            made = min(operator.dtypesIfCUDA, key=str)

    def converted(value: Any) -> Any:
        is_made = isinstance(value, torch.Tensor) and value.dtype is made
        return value.to(dtype) if is_made else value

    given = islice(operator.sample_inputs("cpu", made), MOST_SAMPLES)
    return [sample.transform(converted) for sample in given]


def on_gpu(value: Any) -> Any:
    """``value`` as it would be made for a test on the GPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cuda")
    return torch.device("cuda") if isinstance(value, torch.device) else value


def outcome(operator: Any, sample: Any) -> str:
    """``runs``, ``raises``, or ``unknown`` where the simulation itself gives up."""
    with simulate("A100-40GB"):
        try:
            moved = sample.transform(on_gpu)
            operator.op(moved.input, *moved.args, **moved.kwargs)
        except SimulationError:
            return "unknown"
        except Exception:  # that is what is asked
            return "raises"
    return "runs"


def pairs(names: list[str]) -> Iterator[tuple[str, torch.dtype, bool, str]]:
    """Yield operator, type, whether PyTorch takes it on CUDA, and what the simulation does."""
    for operator in operators():
        if names and operator.name not in names:
            continue
        for dtype in TYPES:
            try:
                found = {outcome(operator, sample) for sample in samples(operator, dtype)}
            except Exception:  # no sample of any type can be made on the host
                continue
            for each in ("raises", "unknown", "runs"):
                if each in found:
                    yield operator.formatted_name, dtype, dtype in operator.dtypesIfCUDA, each
                    break


def main() -> None:
    """Print how many pairs agree, and every one that does not."""
    warnings.simplefilter("ignore")
    counted: Counter[tuple[bool, str]] = Counter()
    for name, dtype, is_taken, each in pairs(sys.argv[1:]):
        counted[is_taken, each] += 1
        if (is_taken, each) not in ((True, "runs"), (False, "raises")):
            print(f"{name:50} {dtype!s:16} {'taken' if is_taken else 'refused':8} {each}")
    for (is_taken, each), count in sorted(counted.items()):
        print(f"{'taken' if is_taken else 'refused'} by CUDA, {each} when simulated: {count}")


if __name__ == "__main__":
    main()
