"""Models of the transformers library, small ones built from configurations."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.simulated.models.accounting import (
    Inputs,
    account_for_training,
    assert_holds,
    blocks,
    on_gpu,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")

WORDS, WIDTH, HEADS, LAYERS = 1000, 64, 4, 2


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH,
    )
    return _module(transformers.BertForSequenceClassification(config))


GROUPED_HEADS = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
}
"""A decoder with two heads of queries for each of keys."""


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=WORDS,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        n_positions=128,
        bos_token_id=0,
        eos_token_id=0,
    )
    return _module(transformers.GPT2LMHeadModel(config))


def llama() -> nn.Module:
    config = transformers.LlamaConfig(**GROUPED_HEADS)
    return _module(transformers.LlamaForCausalLM(config).to(torch.bfloat16))


def qwen() -> nn.Module:
    """In float32: flash cannot run."""
    config = transformers.Qwen2Config(**GROUPED_HEADS)
    return _module(transformers.Qwen2ForCausalLM(config))


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=WORDS,
        d_model=WIDTH,
        d_kv=WIDTH // HEADS,
        d_ff=2 * WIDTH,
        num_layers=LAYERS,
        num_heads=HEADS,
        decoder_start_token_id=0,
    )
    return _module(transformers.T5ForConditionalGeneration(config))


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH,
        image_size=32,
        patch_size=8,
    )
    return _module(transformers.ViTForImageClassification(config))


def whisper() -> nn.Module:
    config = transformers.WhisperConfig(
        vocab_size=WORDS,
        d_model=WIDTH,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=4 * WIDTH,
        decoder_ffn_dim=4 * WIDTH,
        max_source_positions=50,
        max_target_positions=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return _module(transformers.WhisperForConditionalGeneration(config))


def _module(model: Any) -> nn.Module:
    assert isinstance(model, nn.Module)
    return model


def tokens(*shape: int) -> torch.Tensor:
    return torch.ones(shape or (2, 16), dtype=torch.long)


def text() -> Inputs:
    return {"input_ids": tokens(), "labels": tokens()}


def labelled_text() -> Inputs:
    return {"input_ids": tokens(), "attention_mask": tokens(), "labels": tokens(2)}


def labelled_images() -> Inputs:
    return {"pixel_values": torch.ones(2, 3, 32, 32), "labels": tokens(2)}


def sound() -> Inputs:
    return {"input_features": torch.ones(2, 80, 100), "labels": tokens(2, 8)}


Case = tuple[Callable[[], nn.Module], Callable[[], Inputs]]
CASES: dict[str, Case] = {
    "BERT": (bert, labelled_text),
    "GPT-2": (gpt2, text),
    "Llama": (llama, text),
    "Qwen": (qwen, text),
    "T5": (t5, text),
    "ViT": (vit, labelled_images),
    "Whisper": (whisper, sound),
}
WRITERS: dict[str, Callable[[], nn.Module]] = {"GPT-2": gpt2, "Llama": llama, "T5": t5}


def loss(model: nn.Module, inputs: Inputs) -> torch.Tensor:
    result: torch.Tensor = model(**inputs).loss
    return result


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize(("make", "inputs"), CASES.values(), ids=CASES)
def test_training(
    make: Callable[[], nn.Module], inputs: Callable[[], Inputs], autocast: bool
) -> None:
    account_for_training(make, inputs, loss, autocast=autocast)


@pytest.mark.parametrize(("make", "inputs"), CASES.values(), ids=CASES)
def test_gradient_checkpointing(
    make: Callable[[], nn.Module], inputs: Callable[[], Inputs]
) -> None:
    def recomputing() -> nn.Module:
        model: Any = make()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return _module(model.train())

    def many() -> Inputs:
        return {
            name: tensor.repeat(16, *[1] * (tensor.dim() - 1)) for name, tensor in inputs().items()
        }

    kept, _ = account_for_training(make, many, loss)
    recomputed, _ = account_for_training(recomputing, many, loss)
    assert recomputed < kept


@pytest.mark.parametrize("make", WRITERS.values(), ids=WRITERS)
def test_generation_with_a_cache(make: Callable[[], nn.Module]) -> None:
    with on_gpu() as gpu:
        with torch.device("cuda"):
            model: Any = make().eval()
        prompt = tokens().cuda()
        held = blocks([*model.parameters(), *model.buffers(), prompt])
        with torch.no_grad():
            written = model.generate(prompt, max_new_tokens=8, do_sample=False)
        begins_with = 1 if model.config.is_encoder_decoder else prompt.shape[1]
        assert written.shape == (2, begins_with + 8)
        del written
        assert_holds(gpu, held)


def test_cache_grows_by_a_token_of_every_layer() -> None:
    with on_gpu(), torch.no_grad():
        with torch.device("cuda"):
            model: Any = gpt2().eval()
        cache = model(tokens().cuda(), use_cache=True).past_key_values
        kept = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
        assert [tuple(t.shape) for t in kept] == [(2, HEADS, 16, WIDTH // HEADS)] * 2 * LAYERS


def test_low_rank_adapters_of_peft() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = pytest.importorskip("peft")

    def adapted() -> nn.Module:
        config = peft.LoraConfig(r=8, target_modules=["c_attn"], fan_in_fan_out=True)
        return _module(peft.get_peft_model(gpt2(), config))

    account_for_training(adapted, text, loss)
