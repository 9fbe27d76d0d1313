"""Models, tokenizers and data that the programs share, made from nothing."""

from __future__ import annotations

from typing import Any

import torch

WORDS = 256


def llama() -> Any:
    """Return a Llama of two layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=1,
        eos_token_id=1,
        pad_token_id=2,
    )
    return LlamaForCausalLM(config)


def tokenizer() -> Any:
    """Return a tokenizer whose words are numbers."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({str(i): i for i in range(WORDS)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="0", eos_token="1", pad_token="2", padding_side="left"
    )


def sentences(count: int, words: int) -> list[str]:
    """Return sentences of as many words."""
    return [" ".join(str(3 + (i + j) % 200) for j in range(words)) for i in range(count)]


def tokens(batch: int, length: int) -> torch.Tensor:
    """Return numbers of words on the GPU."""
    return torch.randint(3, WORDS, (batch, length), device="cuda")


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Eight samples of 64 words."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = torch.arange(index, index + 64)
        return {"input_ids": words, "labels": words}


def train(model: Any, *inputs: Any, steps: int = 2, **named: Any) -> None:
    """Train a model that returns its loss as transformers' models do."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        loss = model(*inputs, **named).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
