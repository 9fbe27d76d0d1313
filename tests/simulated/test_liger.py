"""Liger's Triton kernels, in the installed release, against Liger's own measurements.

The measurements lie outside this repository: $GPUMEM_GROUNDTRUTH names their folder. All releases
are run by ``benchmarks/triton_operators.py``, here in a process of its own: it imports Liger
without its models.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
GROUNDTRUTH = os.environ.get("GPUMEM_GROUNDTRUTH")


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(find_spec("liger_kernel") is None, reason="liger-kernel is not installed")
@pytest.mark.skipif(GROUNDTRUTH is None, reason="$GPUMEM_GROUNDTRUTH names no folder")
def test_peaks_are_the_measured_ones() -> None:
    run = subprocess.run(
        [sys.executable, str(REPOSITORY / "benchmarks" / "triton_operators.py")],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    *rows, total = run.stdout.splitlines()
    if not rows:
        pytest.skip(f"nothing was measured of {total.partition(':')[0]}")

    assert [row for row in rows if not row.endswith(" equal")] == []


STEP = """
import sys
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
from pytest_gpumem import simulate

def peak():
    config = LlamaConfig(
        hidden_size=256, intermediate_size=704, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=32000,
    )
    with simulate("A100-40GB") as gpu:
        model = LlamaForCausalLM(config).to(torch.bfloat16).cuda()
        adapters = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        model = get_peft_model(model, adapters)
        optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
        tokens = torch.randint(config.vocab_size, (2, 512)).cuda()
        for _ in range(2):
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return gpu.peak_allocated

before = peak()
from liger_kernel.transformers import apply_liger_kernel_to_llama
apply_liger_kernel_to_llama()
print(before, peak())
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(find_spec("liger_kernel") is None, reason="liger-kernel is not installed")
@pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
def test_a_llama_with_adapters_is_trained_with_ligers_kernels() -> None:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", STEP],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if "ImportError" in run.stderr and "transformers/models" in run.stderr:
        pytest.skip("this release of liger-kernel does not fit the installed transformers")
    assert run.returncode == 0, run.stderr

    plain, with_kernels = map(int, run.stdout.split())
    # Without the logits of 1,024 tokens in float32, and their gradient: 125 MiB each.
    assert plain - with_kernels > 2 * 1024 * 32000 * 4
