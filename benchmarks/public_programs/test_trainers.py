"""Loops that a library runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from made import Sentences, llama, sentences, tokenizer
from torch import nn


@pytest.mark.needs("transformers", "accelerate")
def test_transformers_trainer(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        bf16=True,
        logging_steps=1,
        report_to=[],
    )
    Trainer(model=llama(), args=arguments, train_dataset=Sentences()).train()


@pytest.mark.needs("trl", "datasets")
def test_trl_sft(tmp_path: Path) -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(
        output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=2, report_to=[]
    )
    SFTTrainer(
        model=llama(),
        args=arguments,
        processing_class=tokenizer(),
        train_dataset=Dataset.from_dict({"text": sentences(8, 48)}),
    ).train()


@pytest.mark.needs("trl", "datasets")
def test_trl_grpo(tmp_path: Path) -> None:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    # The model that the trained one is held near is read from a folder, too.
    llama().save_pretrained(tmp_path / "model")
    arguments = GRPOConfig(
        output_dir=str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=16,
        beta=0.04,
        report_to=[],
    )
    GRPOTrainer(
        model=str(tmp_path / "model"),
        args=arguments,
        processing_class=tokenizer(),
        reward_funcs=lambda completions, **_: [float(len(each)) for each in completions],
        train_dataset=Dataset.from_dict({"prompt": sentences(8, 12)}),
    ).train()


@pytest.mark.needs("accelerate", "transformers")
def test_accelerate() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="bf16")
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters())
    loader = torch.utils.data.DataLoader(Sentences(), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.needs("lightning")
def test_lightning(tmp_path: Path) -> None:
    import lightning

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))

        def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: list[torch.Tensor]) -> None:
            self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    samples = torch.utils.data.TensorDataset(torch.randn(64, 256), torch.randint(0, 10, (64,)))
    loader = torch.utils.data.DataLoader(samples, batch_size=16)
    lightning.Trainer(
        max_epochs=2,
        accelerator="gpu",
        devices=1,
        precision="16-mixed",
        logger=False,
        default_root_dir=tmp_path,
    ).fit(Classifier(), loader, loader)


@pytest.mark.needs("pytorch_forecasting", "lightning")
def test_pytorch_forecasting() -> None:
    import lightning
    import numpy
    import pandas
    from pytorch_forecasting import QuantileLoss, TemporalFusionTransformer, TimeSeriesDataSet

    table = pandas.DataFrame(
        {
            "time": numpy.tile(numpy.arange(60), 4),
            "series": numpy.repeat(["a", "b", "c", "d"], 60),
            "value": numpy.sin(numpy.arange(240) / 5) + 2,
        }
    )
    samples = TimeSeriesDataSet(
        table,
        time_idx="time",
        target="value",
        group_ids=["series"],
        max_encoder_length=24,
        max_prediction_length=6,
        static_categoricals=["series"],
        time_varying_known_reals=["time"],
        time_varying_unknown_reals=["value"],
    )
    model = TemporalFusionTransformer.from_dataset(
        samples, hidden_size=16, attention_head_size=2, loss=QuantileLoss()
    )
    lightning.Trainer(
        max_steps=3, accelerator="gpu", devices=1, logger=False, enable_checkpointing=False
    ).fit(model, samples.to_dataloader(train=True, batch_size=16, num_workers=0))
