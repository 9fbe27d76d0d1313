"""generate() of transformers: runs to its maximum length where tokens are unknown."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pytest_gpumem import simulate
from pytest_gpumem.simulated.machine.values.assumptions import GENERATION

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")


def gpt2() -> Any:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=1, n_head=2, n_embd=32, vocab_size=5000, n_positions=64,
            bos_token_id=1, eos_token_id=2, pad_token_id=0,
        )
    )  # fmt: skip


def llama() -> Any:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, hidden_size=32,
            intermediate_size=64, vocab_size=5000, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        )
    )  # fmt: skip


@pytest.mark.parametrize("make", [gpt2, llama])
@pytest.mark.parametrize(
    "options",
    [{}, {"do_sample": True, "top_k": 50, "top_p": 0.9}, {"cache_implementation": "static"}],
    ids=["greedy", "sampling", "static-cache"],
)
@pytest.mark.parametrize("prompt", ["cpu", "cuda"])
def test_generation_runs_to_its_maximum_length(
    make: Any, options: dict[str, Any], prompt: str
) -> None:
    with simulate("A100-40GB") as gpu:
        model = make().cuda().eval()
        tokens = torch.randint(3, 5000, (2, 7), device=prompt).cuda()
        out = model.generate(tokens, max_new_tokens=5, **options)
        assert out.is_cuda
        assert out.shape == (2, 12)
        assert GENERATION in gpu.notes


def test_real_tokens_end_the_generation() -> None:
    peaks = []
    for real_values in (False, True):
        with simulate("A100-40GB", real_values=real_values) as gpu:
            model = gpt2().cuda().eval()
            tokens = torch.full((1, 4), 5, device="cuda")
            out = model.generate(tokens, max_new_tokens=6)
            peaks.append(gpu.peak_allocated)
            if real_values:
                assert GENERATION not in gpu.notes
                # The first token of greedy decoding becomes the end: the second run has one.
                model.generation_config.eos_token_id = int(out[0, 4])
                assert model.generate(tokens, max_new_tokens=6).shape == (1, 5)
    assert out.shape[1] <= 10
    assert peaks[0] == peaks[1] or out.shape[1] < 10
