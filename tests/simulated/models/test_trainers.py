"""Trainers of libraries, at real size and with their defaults, which read unknown values."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_gpumem import simulate

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")
    state = pytest.importorskip("accelerate.state")

pytestmark = pytest.mark.filterwarnings("ignore")

SEARCH = "looks for infinities or NaN in numbers that are not computed"
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _no_state_between_tests() -> Iterator[None]:
    # accelerate keeps one device for the whole process.
    yield
    state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def arguments(tmp_path: Path) -> dict[str, Any]:
    return {
        "output_dir": str(tmp_path),
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
    }


def llama(**sizes: int) -> Any:
    config = transformers.LlamaConfig(
        num_attention_heads=32, num_key_value_heads=4, bos_token_id=2, eos_token_id=2,
        pad_token_id=1, **sizes,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """A dataset of tokens, which are the labels too."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.arange(index, index + 512)
        return {"input_ids": tokens, "labels": tokens}


def test_a_model_of_a_billion_parameters_trains(arguments: dict[str, Any]) -> None:
    with simulate("A100-80GB") as gpu:
        with torch.device("cuda"):  # its weights need not be drawn on the CPU
            model = llama(
                hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, vocab_size=32000
            )
        count = sum(parameter.numel() for parameter in model.parameters())
        trainer = transformers.Trainer(
            model=model, args=transformers.TrainingArguments(**arguments), train_dataset=Tokens()
        )
        trainer.train()
        assert count == 1_100_048_384
        assert any(SEARCH in note for note in gpu.notes)
        # Weights and two moments in float32; in the step gradients besides.
        assert 12 * count <= gpu.allocated < 12 * count + 64 * MIB
        assert 16 * count <= gpu.peak_allocated


def tokenizer() -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    words = ["<unk>", "<pad>", "</s>", "hello", "world", "yes", "no"]
    vocabulary = {word: number for number, word in enumerate(words)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", pad_token="<pad>", eos_token="</s>"
    )


@pytest.mark.parametrize("method", ["SFT", "DPO"])
def test_fine_tuning_with_trl_runs_without_values(method: str, arguments: dict[str, Any]) -> None:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    texts = {"SFT": {"text": ["hello world yes"] * 16}}
    texts["DPO"] = {"prompt": ["hello"] * 16, "chosen": ["yes"] * 16, "rejected": ["no"] * 16}
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 32}
    with simulate("A100-80GB") as gpu:
        reference = {"ref_model": llama(**sizes)} if method == "DPO" else {}
        trainer = getattr(trl, f"{method}Trainer")(
            model=llama(**sizes),
            **reference,
            args=getattr(trl, f"{method}Config")(**arguments),
            train_dataset=datasets.Dataset.from_dict(texts[method]),
            processing_class=tokenizer(),
        )
        trainer.train()
        assert trainer.state.global_step == 3
        assert any(SEARCH in note for note in gpu.notes)
