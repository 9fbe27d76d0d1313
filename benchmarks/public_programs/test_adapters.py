"""Adapters, quantized weights, optimizers of few bits, private gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from made import llama, tokens, train
from torch import nn
from torch.nn import functional


def adapters() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


@pytest.mark.needs("peft", "transformers")
def test_peft_lora() -> None:
    from peft import get_peft_model

    words = tokens(2, 64)
    train(get_peft_model(llama(), adapters()).cuda(), words, labels=words)


@pytest.mark.needs("peft", "transformers", "bitsandbytes", "accelerate")
def test_peft_qlora(tmp_path: Path) -> None:
    from peft import get_peft_model, prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    llama().save_pretrained(tmp_path)
    bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=bits, device_map={"": 0}
    )
    words = tokens(2, 64)
    model = get_peft_model(prepare_model_for_kbit_training(model), adapters())
    train(model, words, labels=words)


@pytest.mark.needs("bitsandbytes")
@pytest.mark.parametrize("name", ["Adam8bit", "Lion8bit", "PagedAdamW8bit"])
def test_bitsandbytes_optimizers(name: str) -> None:
    import bitsandbytes

    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).cuda()
    optimizer = getattr(bitsandbytes.optim, name)(model.parameters(), lr=1e-3)
    for _ in range(2):
        model(torch.randn(8, 256, device="cuda")).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.needs("torchao")
def test_torchao_quantize() -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512)).cuda().bfloat16()
    quantize_(model, Int8WeightOnlyConfig())
    with torch.no_grad():
        model(torch.randn(16, 512, device="cuda", dtype=torch.bfloat16))


@pytest.mark.needs("torchao")
@pytest.mark.gpumem(gpu="H100")
def test_torchao_float8() -> None:
    from torchao.float8 import convert_to_float8_training

    model = nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512)).cuda().bfloat16()
    convert_to_float8_training(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.randn(16, 512, device="cuda", dtype=torch.bfloat16)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.needs("opacus")
def test_opacus() -> None:
    from opacus import PrivacyEngine

    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10)).cuda()
    samples = torch.utils.data.TensorDataset(torch.randn(64, 1, 8, 8), torch.randint(0, 10, (64,)))
    model, optimizer, loader = PrivacyEngine().make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        data_loader=torch.utils.data.DataLoader(samples, batch_size=16),
        noise_multiplier=1.1,
        max_grad_norm=1.0,
    )
    for pictures, labels in loader:
        optimizer.zero_grad()
        functional.cross_entropy(model(pictures.cuda()), labels.cuda()).backward()
        optimizer.step()


@pytest.mark.needs("gpytorch")
def test_gpytorch() -> None:
    import gpytorch

    class Process(gpytorch.models.ExactGP):  # type: ignore[misc]
        def __init__(self, x: torch.Tensor, y: torch.Tensor, likelihood: Any) -> None:
            super().__init__(x, y, likelihood)
            self.mean = gpytorch.means.ConstantMean()
            self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x: torch.Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    x = torch.linspace(0, 1, 100).cuda()
    y = torch.sin(6 * x)
    likelihood = gpytorch.likelihoods.GaussianLikelihood().cuda()
    model = Process(x, y, likelihood).cuda()
    marginal = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        (-marginal(model(x), y)).backward()
        optimizer.step()
    model.eval()
    likelihood.eval()
    with torch.no_grad():
        likelihood(model(torch.linspace(0, 1, 51).cuda())).mean.cpu()
