"""Training loops of frameworks have the phases of a handwritten loop."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from tests.pytest_project import Project

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("plain_workspaces"),
]

PREPARE = """
    import sys, warnings
    warnings.simplefilter("ignore")
    from torch import nn

    def net():
        return nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 10))

    def tiny_gpt2():
        from transformers import GPT2Config, GPT2LMHeadModel
        return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=128))

    class Tokens(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            tokens = torch.arange(index, index + 64)
            return {"input_ids": tokens, "labels": tokens}
"""

BY_HAND = """
    def test_train():
        model = net().cuda()
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(3):
            loss = model(torch.randn(16, 1024).cuda()).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
"""

LIGHTNING = """
    from lightning import LightningModule, Trainer

    class Lit(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net()

        def training_step(self, batch, index):
            return self.net(batch[0]).mean()

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    def test_train(tmp_path):
        samples = torch.utils.data.TensorDataset(torch.randn(64, 1024))
        trainer = Trainer(
            max_steps=3, accelerator="gpu", devices=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=str(tmp_path),
        )
        trainer.fit(Lit(), torch.utils.data.DataLoader(samples, batch_size=16))
"""

TRANSFORMERS = """
    def test_train(tmp_path):
        from transformers import Trainer, TrainingArguments
        arguments = TrainingArguments(
            output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=2,
            save_strategy="no", report_to=[], disable_tqdm=True,
        )
        Trainer(model=tiny_gpt2(), args=arguments, train_dataset=Tokens()).train()
"""

ACCELERATE = """
    def test_train():
        from accelerate import Accelerator
        accelerator = Accelerator(gradient_accumulation_steps=2)
        model = tiny_gpt2()
        optimizer = torch.optim.AdamW(model.parameters())
        loader = torch.utils.data.DataLoader(Tokens(), batch_size=2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
"""

TRL = """
    def test_train(tmp_path):
        from datasets import Dataset
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast
        from trl import SFTConfig, SFTTrainer
        words = models.WordLevel({str(i): i for i in range(128)}, unk_token="0")
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(words), eos_token="1", pad_token="2"
        )
        tokens = [list(range(64))] * 8
        arguments = SFTConfig(
            output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=2, bf16=False,
            save_strategy="no", report_to=[], disable_tqdm=True,
        )
        SFTTrainer(
            model=tiny_gpt2(), args=arguments, processing_class=tokenizer,
            train_dataset=Dataset.from_dict({"input_ids": tokens, "labels": tokens}),
        ).train()
"""


def trained(project: Project, source: str) -> dict[str, Any]:
    """Return the phases of a loop that trains, in the order in which they are shown."""
    project.write(test_it=PREPARE + source)
    # A process of its own: accelerate keeps one device for the whole process.
    tests = project.report("--gpumem-all", "-Wignore", apart=True)
    phases: dict[str, Any] = tests["test_it.py::test_train"]["measurement"]["phases"]
    return {name: phase for name, phase in phases.items() if name not in ("setup", "call")}


@pytest.mark.skipif(find_spec("lightning") is None, reason="Lightning is not installed")
def test_lightning_runs_all_of_a_step_in_the_closure_of_the_optimizer(project: Project) -> None:
    by_hand = trained(project, BY_HAND)
    assert list(by_hand) == ["forward", "backward", "step"]
    phases = trained(project, LIGHTNING)
    assert {name: phase["entered"] for name, phase in phases.items()} == {
        "forward": 3, "backward": 3, "step": 3
    }  # fmt: skip
    assert [phase["parent"] for phase in phases.values()] == ["call"] * 3
    for name, phase in phases.items():
        own, other = phase["composition"], by_hand[name]["composition"]
        more = {each: own.get(each, 0) - other.get(each, 0) for each in own.keys() | other.keys()}
        # Its loader is up to three batches of 64 KiB ahead, and it keeps some losses to log.
        assert 0 <= more.pop("inputs", 0) <= 3 * 16 * 1024 * 4
        assert 0 <= more.pop("activations", 0) <= 8 * 512
        assert set(more.values()) == {0}, name


@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")
@pytest.mark.parametrize(
    ("needs", "source", "entered"),
    [
        ("transformers", TRANSFORMERS, {"forward": 3, "backward": 3, "step": 3}),
        ("transformers", ACCELERATE, {"forward": 4, "backward": 4, "step": 2}),
        ("trl", TRL, {"forward": 3, "backward": 3, "step": 3}),
    ],
    ids=["transformers", "accelerate", "trl"],
)
def test_trainers_have_the_phases_of_a_handwritten_loop(
    project: Project, needs: str, source: str, entered: dict[str, int]
) -> None:
    if find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
    phases = trained(project, source)
    assert {name: phase["entered"] for name, phase in phases.items()} == entered
    assert [phase["parent"] for phase in phases.values()] == ["call"] * 3
    weights = phases["step"]["composition"]["parameters"]
    assert phases["step"]["composition"]["optimizer state"] >= 2 * weights
