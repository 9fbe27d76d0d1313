"""What compiling costs: GPT-2 small and its first training step, compiled anew and from the cache.

Each run is a process of its own, the first with an empty cache of Inductor's; what is measured is
the first forward and backward pass and the step of a model that is on the GPU already. Beside it
stands what Dynamo alone takes to trace the same model (``backend="eager"``, on ``meta``): no cache
saves that, on a GPU neither. Seconds are of CPU, which other processes disturb least, and on the
wall. Exits with 1 where the model of ``training_step.py`` takes more than ``ANEW`` or ``CACHED``
seconds of CPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

ANEW, CACHED = 60, 5
BATCH, CONTEXT = 8, 512

_OWN = "from training_step import Gpt2; model = Gpt2(12)"

_OF_TRANSFORMERS = """
from transformers import GPT2Config, GPT2LMHeadModel
class Logits(GPT2LMHeadModel):
    def forward(self, tokens):
        return super().forward(tokens).logits
model = Logits(GPT2Config(use_cache=False))
"""

_BEGIN = f"""
import time, torch, torch.nn.functional as F
import torch._inductor.compile_fx
from pytest_gpumem import simulate
SHAPE = {BATCH}, {CONTEXT}
"""

_STEP = """
with simulate("A100-80GB", compile="always") as gpu:
    optimizer = torch.optim.AdamW(model.cuda().parameters())
    tokens = torch.zeros(SHAPE, dtype=torch.long, device="cuda")
    before = time.perf_counter(), time.process_time()
    logits = torch.compile(model)(tokens)
    F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()
    print(time.process_time() - before[1], time.perf_counter() - before[0], gpu.peak_allocated)
"""

_TRACE = """
tokens = torch.zeros(SHAPE, dtype=torch.long, device="meta")
model.to("meta")
before = time.perf_counter(), time.process_time()
torch.compile(model, backend="eager")(tokens)
print(time.process_time() - before[1], time.perf_counter() - before[0], 0)
"""


def run(code: str, cache: str) -> tuple[float, float, int]:
    """Run it in a process; return seconds of CPU and on the wall, and the peak in bytes."""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _BEGIN + code],
        cwd=Path(__file__).parent,
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    cpu, wall, peak = ran.stdout.split()
    return float(cpu), float(wall), int(peak)


def main() -> None:
    """Print a line for each model."""
    models = {"training_step.py": _OWN}
    if find_spec("transformers"):
        models["transformers"] = _OF_TRANSFORMERS
    print(f"GPT-2 small, {BATCH} x {CONTEXT} tokens, float32: seconds of CPU (on the wall)\n")
    print(f"{'model':18}{'anew':>18}{'from the cache':>18}{'Dynamo alone':>18}   peak MiB")
    met = True
    for name, model in models.items():
        with tempfile.TemporaryDirectory() as cache:
            anew, cached = (run(f"{model}\n{_STEP}", cache) for _ in range(2))
            traced = run(f"{model}\n{_TRACE}", cache)
        figures = [f"{cpu:.1f} ({wall:.1f})" for cpu, wall, _ in (anew, cached, traced)]
        peaks = dict.fromkeys(f"{peak / 2**20:,.1f}" for _, _, peak in (anew, cached))
        print(f"{name:18}{''.join(f'{each:>18}' for each in figures)}   {' and '.join(peaks)}")
        if name == "training_step.py":
            met = anew[0] <= ANEW and cached[0] <= CACHED
    sys.exit(not met)


if __name__ == "__main__":
    main()
