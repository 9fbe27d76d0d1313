"""Language, speech and routing models of transformers and others."""

from __future__ import annotations

import pytest
import torch
from made import WORDS, llama, tokens, train

pytestmark = pytest.mark.needs("transformers")

SMALL = {
    "vocab_size": WORDS,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def test_llama_generates() -> None:
    model = llama().cuda().eval()
    with torch.no_grad():
        words = model.generate(tokens(2, 16), max_new_tokens=24, do_sample=True, use_cache=True)
    assert words.shape[0] == 2


def test_bert() -> None:
    from transformers import BertConfig, BertForMaskedLM

    words = tokens(4, 64)
    mask = torch.ones_like(words)
    mask[:, 48:] = 0
    train(BertForMaskedLM(BertConfig(**SMALL)).cuda(), words, attention_mask=mask, labels=words)


def test_t5() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=WORDS,
        d_model=128,
        d_ff=256,
        d_kv=32,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )
    train(T5ForConditionalGeneration(config).cuda(), tokens(4, 64), labels=tokens(4, 32))


def test_whisper() -> None:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=WORDS,
        d_model=128,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        max_source_positions=100,
        decoder_start_token_id=3,
        pad_token_id=2,
        bos_token_id=1,
        eos_token_id=1,
    )
    model = WhisperForConditionalGeneration(config).cuda()
    train(model, torch.randn(2, 80, 200, device="cuda"), labels=tokens(2, 24))


def test_wav2vec2() -> None:
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    model = Wav2Vec2ForCTC(Wav2Vec2Config(**SMALL)).cuda()
    train(model, torch.randn(2, 16000, device="cuda"), labels=tokens(2, 12))


def test_mixtral() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        **SMALL, num_key_value_heads=2, num_local_experts=4, output_router_logits=True
    )
    words = tokens(2, 64)
    train(MixtralForCausalLM(config).cuda(), words, labels=words)


def test_qwen_moe() -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **SMALL,
        num_key_value_heads=2,
        head_dim=32,
        moe_intermediate_size=64,
        num_experts=8,
        num_experts_per_tok=2,
    )
    words = tokens(2, 64)
    train(Qwen3MoeForCausalLM(config).cuda(), words, labels=words)


def test_mamba() -> None:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=WORDS, hidden_size=128, state_size=8, num_hidden_layers=2)
    words = tokens(2, 64)
    train(MambaForCausalLM(config).cuda(), words, labels=words)


def test_mamba2() -> None:
    from transformers import Mamba2Config, Mamba2ForCausalLM

    config = Mamba2Config(
        vocab_size=WORDS,
        hidden_size=128,
        state_size=16,
        num_hidden_layers=2,
        num_heads=8,
        head_dim=32,
        n_groups=2,
        chunk_size=32,
    )
    words = tokens(2, 64)
    train(Mamba2ForCausalLM(config).cuda(), words, labels=words)


@pytest.mark.needs("x_transformers")
def test_x_transformers() -> None:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    net = TransformerWrapper(
        num_tokens=WORDS,
        max_seq_len=128,
        attn_layers=Decoder(dim=128, depth=2, heads=4, rotary_pos_emb=True, attn_flash=True),
    )
    model = AutoregressiveWrapper(net).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(tokens(2, 65)).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval().generate(tokens(1, 8), 16)


@pytest.mark.needs("liger_kernel")
def test_liger() -> None:
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    model = llama()
    apply_liger_kernel_to_llama(model=model)
    words = tokens(2, 64)
    train(model.cuda().bfloat16(), words, labels=words)


@pytest.mark.needs("fla")
def test_flash_linear_attention() -> None:
    from fla.models import GLAConfig, GLAForCausalLM

    config = GLAConfig(vocab_size=WORDS, hidden_size=128, num_hidden_layers=2, num_heads=2)
    words = tokens(2, 64)
    train(GLAForCausalLM(config).cuda().bfloat16(), words, labels=words)
