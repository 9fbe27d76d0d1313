"""Models of transformers, from configurations of two layers, trained for two steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from strangers import MIXED, Program

WORDS = 256
_SHAPE = {
    "vocab_size": WORDS,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_GROUPED = {**_SHAPE, "num_key_value_heads": 2, "pad_token_id": 0}
_LOOKS = {name: value for name, value in _SHAPE.items() if name != "vocab_size"}

_DECODERS: dict[str, dict[str, Any]] = {
    "Llama": _GROUPED,
    "Mistral": {**_GROUPED, "sliding_window": 32},
    "Qwen2": _GROUPED,
    "Qwen3": {**_GROUPED, "head_dim": 32},
    "Gemma": {**_GROUPED, "head_dim": 32},
    "Gemma2": {**_GROUPED, "head_dim": 32, "sliding_window": 32},
    "Phi3": _GROUPED,
    "Olmo2": _GROUPED,
    "StableLm": _GROUPED,
    "Granite": _GROUPED,
    "Cohere": _GROUPED,
    "Falcon": {**_SHAPE, "num_kv_heads": 2},
    "GPT2": {"vocab_size": WORDS, "n_embd": 128, "n_layer": 2, "n_head": 4},
    "GPTNeoX": {**_SHAPE, "pad_token_id": 0},
    "Bloom": {"vocab_size": WORDS, "hidden_size": 128, "n_layer": 2, "n_head": 4},
    "OPT": {
        "vocab_size": WORDS,
        "hidden_size": 128,
        "ffn_dim": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 128,
    },
    "Mixtral": {**_GROUPED, "num_local_experts": 4},
    "Mamba": {"vocab_size": WORDS, "hidden_size": 64, "state_size": 8, "num_hidden_layers": 2},
}
_MASKED: dict[str, dict[str, Any]] = {
    "Bert": _SHAPE,
    "Roberta": _SHAPE,
    "Electra": {**_SHAPE, "embedding_size": 128},
    "Albert": {**_SHAPE, "embedding_size": 64},
    "DistilBert": {"vocab_size": WORDS, "dim": 128, "hidden_dim": 256, "n_layers": 2, "n_heads": 4},
    "ModernBert": {**_SHAPE, "pad_token_id": 0},
    "DebertaV2": {**_SHAPE, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
}
_PAIRS: dict[str, dict[str, Any]] = {
    "T5": {"vocab_size": WORDS, "d_model": 128, "d_ff": 256, "d_kv": 32, "num_layers": 2,
           "num_heads": 4, "decoder_start_token_id": 0},
    "Bart": {"vocab_size": WORDS, "d_model": 128, "encoder_layers": 2, "decoder_layers": 2,
             "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 256,
             "decoder_ffn_dim": 256, "pad_token_id": 0, "decoder_start_token_id": 2},
}  # fmt: skip
_LOOKING: dict[str, dict[str, Any]] = {
    "ViT": {**_LOOKS, "image_size": 64, "num_labels": 10},
    "DeiT": {**_LOOKS, "image_size": 64, "num_labels": 10},
    "Dinov2": {
        **{name: _LOOKS[name] for name in _LOOKS if name != "intermediate_size"},
        "image_size": 56,
        "num_labels": 10,
    },
    "ConvNext": {"hidden_sizes": [32, 64], "depths": [1, 1], "num_stages": 2, "num_labels": 10},
    "Swin": {"image_size": 64, "embed_dim": 32, "depths": [1, 1], "num_heads": [2, 4],
             "window_size": 4, "num_labels": 10},
    "ResNet": {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [1, 1],
               "layer_type": "basic", "num_labels": 10},
}  # fmt: skip

_DECIDING = frozenset(
    {
        *("Mixtral", "Bart", "checkpointed_Llama"),
        *("greedy_generation", "sampled_generation", "generation_by_beams"),
    }
)
"""Those that send words to experts, look in positions for sentences that were packed, or stop where
all sentences have ended."""
_HEADS = {"GPT2ForCausalLM": "GPT2LMHeadModel"}
"""Classes that are named otherwise."""


def _made(kind: str, head: str, settings: dict[str, Any]) -> Any:
    import transformers

    config = getattr(transformers, f"{kind}Config")(**settings)
    name = f"{kind}For{head}"
    return (
        getattr(transformers, _HEADS.get(name, name))(config).to(torch.get_default_dtype()).cuda()
    )


def _words(batch: int, length: int) -> torch.Tensor:
    return torch.randint(3, WORDS, (batch, length)).cuda()


def _trained(model: Any, **given: Any) -> None:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        loss = model(**given).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def _decoder(kind: str, settings: dict[str, Any]) -> None:
    words = _words(2, 64)
    _trained(_made(kind, "CausalLM", settings), input_ids=words, labels=words)


def _masked(kind: str, settings: dict[str, Any]) -> None:
    words = _words(4, 64)
    mask = torch.ones_like(words)
    mask[:, 48:] = 0
    model = _made(kind, "MaskedLM", settings)
    _trained(model, input_ids=words, attention_mask=mask, labels=words)


def _pair(kind: str, settings: dict[str, Any]) -> None:
    model = _made(kind, "ConditionalGeneration", settings)
    _trained(model, input_ids=_words(4, 64), labels=_words(4, 32))


def _looking(kind: str, settings: dict[str, Any]) -> None:
    size = settings.get("image_size", 64)
    labels = torch.randint(0, 10, (4,)).cuda()
    pictures = torch.randn(4, 3, size, size, device="cuda")
    _trained(_made(kind, "ImageClassification", settings), pixel_values=pictures, labels=labels)


def _generated(kind: str, **how: Any) -> None:
    model = _made(kind, "CausalLM", _DECODERS[kind]).eval()
    with torch.no_grad():
        model.generate(_words(2, 16), max_new_tokens=12, pad_token_id=0, min_new_tokens=12, **how)


def _checkpointed(kind: str) -> None:
    words = _words(2, 64)
    model = _made(kind, "CausalLM", _DECODERS[kind])
    model.gradient_checkpointing_enable({"use_reentrant": False})
    _trained(model, input_ids=words, labels=words)


def _padded_inference(kind: str) -> None:
    words = _words(4, 64)
    mask = torch.ones_like(words)
    mask[:2, :20] = 0
    with torch.inference_mode():
        _made(kind, "CausalLM", _DECODERS[kind]).eval()(words, attention_mask=mask)


def _eagerly_attending(kind: str) -> None:
    words = _words(2, 64)
    settings = {**_DECODERS[kind], "attn_implementation": "eager"}
    _trained(_made(kind, "CausalLM", settings), input_ids=words, labels=words)


def _adapted(**settings: Any) -> None:
    from peft import LoraConfig, get_peft_model

    chosen = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **settings)
    words = _words(2, 64)
    model = get_peft_model(_made("Llama", "CausalLM", _GROUPED), chosen).cuda()
    _trained(model, input_ids=words, labels=words)


def programs() -> Iterator[Program]:
    """Yield the programs of this file."""
    if find_spec("transformers") is None:
        return
    for table, run in (
        (_DECODERS, _decoder),
        (_MASKED, _masked),
        (_PAIRS, _pair),
        (_LOOKING, _looking),
    ):
        for kind, settings in table.items():
            yield Program(kind, partial(run, kind, settings), has_values=kind in _DECIDING)
    others: dict[str, Callable[[], None]] = {
        "greedy_generation": partial(_generated, "Llama", do_sample=False),
        "sampled_generation": partial(_generated, "Qwen3", do_sample=True, top_p=0.9),
        "generation_by_beams": partial(_generated, "GPT2", num_beams=3, do_sample=False),
        "checkpointed_Llama": partial(_checkpointed, "Llama"),
        "padded_inference": partial(_padded_inference, "Qwen2"),
        "eager_attention": partial(_eagerly_attending, "Llama"),
    }
    for name, call in others.items():
        yield Program(name, call, has_values=name in _DECIDING)
    if find_spec("peft") is not None:
        yield Program("lora", partial(_adapted))
        yield Program("dora", partial(_adapted, use_dora=True), MIXED)
        yield Program("rank_stabilized_lora", partial(_adapted, use_rslora=True), MIXED)
