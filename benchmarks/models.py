"""Models of real size, built from transformers' configurations, on one simulated GPU.

``python benchmarks/models.py [NAME ...]`` prints for each the bytes of its parameters, gradients
and optimizer state (AdamW), the peaks of a forward pass without gradients and of a training step,
and the seconds that simulating it took. Nothing is downloaded: weights are as initialised.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pytest_gpumem import simulate

os.environ.setdefault("HF_HUB_OFFLINE", "1")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers as transformers  # for who needs it without its warnings

MIB = 1024**2


def tokens(batch: int, length: int) -> torch.Tensor:
    """(batch, length) of one and the same token."""
    return torch.ones(batch, length, dtype=torch.long)


def text(batch: int, length: int) -> dict[str, torch.Tensor]:
    """A batch of sequences that are their own labels."""
    return {"input_ids": tokens(batch, length), "labels": tokens(batch, length)}


def classified_text(batch: int, length: int) -> dict[str, torch.Tensor]:
    """A batch of sequences with a label each."""
    return {"input_ids": tokens(batch, length), "labels": torch.zeros(batch, dtype=torch.long)}


def bert_base() -> Any:
    """BERT-base with a classifier; the configuration's defaults are its sizes."""
    return transformers.BertForSequenceClassification(transformers.BertConfig())


def gpt2_small() -> Any:
    """GPT-2 small; the configuration's defaults are its sizes."""
    return transformers.GPT2LMHeadModel(transformers.GPT2Config())


def llama_8b() -> Any:
    """Llama 3 8B in bfloat16."""
    config = transformers.LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
    )
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


def t5_base() -> Any:
    """T5-base."""
    config = transformers.T5Config(
        d_model=768, d_ff=3072, num_layers=12, num_heads=12, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def vit_base() -> Any:
    """ViT-B/16 at 224 x 224; the configuration's defaults are its sizes."""
    return transformers.ViTForImageClassification(transformers.ViTConfig(num_labels=1000))


def whisper_small() -> Any:
    """Whisper-small."""
    config = transformers.WhisperConfig(
        d_model=768,
        encoder_layers=12,
        decoder_layers=12,
        encoder_attention_heads=12,
        decoder_attention_heads=12,
        encoder_ffn_dim=3072,
        decoder_ffn_dim=3072,
    )
    return transformers.WhisperForConditionalGeneration(config)


@dataclass(frozen=True)
class Case:
    """A model, its inputs and the GPU that has room for them."""

    make: Callable[[], Any]
    inputs: Callable[[], dict[str, torch.Tensor]]
    gpu: str = "A100-40GB"


CASES = {
    "BERT-base 32x128": Case(bert_base, lambda: classified_text(32, 128)),
    "GPT-2-small 8x1024": Case(gpt2_small, lambda: text(8, 1024)),
    "Llama-3-8B 1x4096": Case(llama_8b, lambda: text(1, 4096), "B200"),
    "T5-base 16x512": Case(t5_base, lambda: text(16, 512)),
    "ViT-B/16 64x224": Case(
        vit_base,
        lambda: {
            "pixel_values": torch.ones(64, 3, 224, 224),
            "labels": torch.zeros(64, dtype=torch.long),
        },
    ),
    "Whisper-small 8x30s": Case(
        whisper_small,
        lambda: {"input_features": torch.ones(8, 80, 3000), "labels": tokens(8, 128)},
    ),
}


def in_blocks(tensors: Any) -> int:
    """Bytes of the blocks behind ``tensors``: each storage once, rounded up to 512."""
    sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(-(-nbytes // 512) * 512 for nbytes in sizes.values())


def measured(case: Case) -> tuple[list[int], float]:
    """Bytes of parameters, gradients and state, and both peaks; seconds."""
    start = time.perf_counter()
    with simulate(case.gpu, alloc_conf="") as gpu:
        with torch.device("cuda"):
            model: nn.Module = case.make().train()
        inputs = {name: tensor.cuda() for name, tensor in case.inputs().items()}
        with gpu.phase("forward"), torch.no_grad():
            model(**inputs)
        optimizer = torch.optim.AdamW(model.parameters())
        for repeat in range(2):
            with gpu.phase(f"step {repeat}"):
                model(**inputs).loss.backward()
                optimizer.step()
                gradients = in_blocks(p.grad for p in model.parameters() if p.grad is not None)
                optimizer.zero_grad()
        state = [t for s in optimizer.state.values() for t in s.values() if t.is_cuda]
        sizes = [
            in_blocks(model.parameters()),
            gradients,
            in_blocks(state),
            gpu.phases["forward"].peak_allocated,
            gpu.phases["step 1"].peak_allocated,
        ]
    return sizes, time.perf_counter() - start


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of names; all models without")
    wanted = [name.casefold() for name in parser.parse_args().names]
    print(f"MiB on a simulated GPU, torch {torch.__version__}, transformers", end=" ")
    print(transformers.__version__)
    header = ("model", "GPU", "parameters", "gradients", "state", "forward", "step", "seconds")
    print("{:20} {:10}".format(*header[:2]), *(f"{title:>10}" for title in header[2:]))
    for name, case in CASES.items():
        if wanted and not any(part in name.casefold() for part in wanted):
            continue
        sizes, seconds = measured(case)
        print(f"{name:20} {case.gpu:10}", *(f"{s / MIB:10.1f}" for s in sizes), f"{seconds:10.1f}")


if __name__ == "__main__":
    main()
