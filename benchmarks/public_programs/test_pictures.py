"""Pictures: classes, boxes, masks, and their generation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from made import WORDS, tokens, train
from torch import nn
from torch.nn import functional


def classify(model: nn.Module, size: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            scores = model(torch.randn(4, 3, size, size, device="cuda"))
            loss = functional.cross_entropy(scores, torch.randint(0, 10, (4,), device="cuda"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.needs("timm")
def test_timm() -> None:
    import timm

    classify(timm.create_model("resnet18", num_classes=10).cuda(), 64)


@pytest.mark.needs("timm")
def test_timm_compiled() -> None:
    import timm

    model = timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=10, depth=2).cuda()
    classify(torch.compile(model), 64)  # type: ignore[arg-type]


@pytest.mark.needs("torchvision")
def test_faster_rcnn() -> None:
    from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn

    model = fasterrcnn_mobilenet_v3_large_320_fpn(
        weights=None, weights_backbone=None, num_classes=5, min_size=96, max_size=96
    ).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    boxes = torch.tensor([[8.0, 8.0, 48.0, 48.0], [20.0, 30.0, 80.0, 90.0]], device="cuda")
    targets = [{"boxes": boxes, "labels": torch.tensor([1, 2], device="cuda")}] * 2
    for _ in range(2):
        losses = model([torch.rand(3, 96, 96, device="cuda")] * 2, targets)
        optimizer.zero_grad()
        sum(losses.values()).backward()
        optimizer.step()
    model.eval()([torch.rand(3, 96, 96, device="cuda")])


@pytest.mark.needs("ultralytics")
def test_ultralytics(tmp_path: Path) -> None:
    from PIL import Image
    from ultralytics import YOLO

    for part in ("train", "val"):
        (tmp_path / "images" / part).mkdir(parents=True)
        (tmp_path / "labels" / part).mkdir(parents=True)
        for i in range(4):
            Image.new("RGB", (64, 64), (40 * i, 90, 120)).save(
                tmp_path / "images" / part / f"{i}.png"
            )
            (tmp_path / "labels" / part / f"{i}.txt").write_text("0 0.5 0.5 0.4 0.4\n", "utf-8")
    (tmp_path / "data.yaml").write_text(
        f"path: {tmp_path}\ntrain: images/train\nval: images/val\nnames:\n  0: thing\n", "utf-8"
    )
    YOLO("yolo11n.yaml").train(
        data=str(tmp_path / "data.yaml"),
        epochs=1,
        imgsz=64,
        batch=2,
        workers=0,
        device=0,
        amp=False,
        plots=False,
        project=str(tmp_path),
    )


@pytest.mark.needs("torchvision")
def test_deeplab() -> None:
    from torchvision.models.segmentation import deeplabv3_mobilenet_v3_large

    model = deeplabv3_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=5).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        masks = torch.randint(0, 5, (2, 96, 96), device="cuda")
        found = model(torch.randn(2, 3, 96, 96, device="cuda"))["out"]
        optimizer.zero_grad()
        functional.cross_entropy(found, masks).backward()
        optimizer.step()


@pytest.mark.needs("segmentation_models_pytorch")
def test_segmentation_models() -> None:
    import segmentation_models_pytorch

    model = segmentation_models_pytorch.Unet("resnet18", encoder_weights=None, classes=1).cuda()
    lost = segmentation_models_pytorch.losses.DiceLoss("binary")
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        found = model(torch.randn(2, 3, 64, 64, device="cuda"))
        optimizer.zero_grad()
        lost(found, torch.ones(2, 1, 64, 64, device="cuda")).backward()
        optimizer.step()


@pytest.mark.needs("transformers")
def test_vit() -> None:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=64,
        num_labels=10,
    )
    labels = torch.randint(0, 10, (4,), device="cuda")
    model = ViTForImageClassification(config).cuda()
    train(model, torch.randn(4, 3, 64, 64, device="cuda"), labels=labels)


@pytest.mark.needs("transformers")
def test_clip() -> None:
    from transformers import CLIPConfig, CLIPModel

    shape = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = CLIPConfig(
        text_config={**shape, "vocab_size": WORDS, "eos_token_id": 1},
        vision_config={**shape, "image_size": 64, "patch_size": 16},
        projection_dim=64,
    )
    pictures = torch.randn(4, 3, 64, 64, device="cuda")
    train(CLIPModel(config).cuda(), tokens(4, 16), pictures, return_loss=True)


@pytest.mark.needs("diffusers")
def test_diffusers_sd3() -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel

    model = SD3Transformer2DModel(
        sample_size=16,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=64,
        caption_projection_dim=64,
        pooled_projection_dim=64,
    ).cuda()
    scheduler = FlowMatchEulerDiscreteScheduler()
    optimizer = torch.optim.AdamW(model.parameters())
    latents = torch.randn(2, 16, 16, 16, device="cuda")
    text, pooled = torch.randn(2, 20, 64, device="cuda"), torch.randn(2, 64, device="cuda")
    for _ in range(2):
        found = model(latents, text, pooled, torch.tensor([10, 500], device="cuda")).sample
        optimizer.zero_grad()
        functional.mse_loss(found, torch.randn_like(latents)).backward()
        optimizer.step()
    scheduler.set_timesteps(3, device="cuda")
    with torch.no_grad():
        for time in scheduler.timesteps:
            found = model(latents, text, pooled, time.expand(2)).sample
            latents = scheduler.step(found, time, latents).prev_sample


@pytest.mark.needs("diffusers")
def test_diffusers_unet() -> None:
    from diffusers import DDPMScheduler, UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=16, block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=64, attention_head_dim=8,
    ).cuda()  # fmt: skip
    model.enable_gradient_checkpointing()
    scheduler = DDPMScheduler(num_train_timesteps=100)
    optimizer = torch.optim.AdamW(model.parameters())
    latents, text = torch.randn(2, 4, 16, 16).cuda(), torch.randn(2, 20, 64).cuda()
    for _ in range(2):
        noise = torch.randn_like(latents)
        times = torch.randint(0, 100, (2,), device="cuda")
        found = model(scheduler.add_noise(latents, noise, times), times, text).sample
        optimizer.zero_grad()
        functional.mse_loss(found, noise).backward()
        optimizer.step()


@pytest.mark.needs("diffusers")
def test_diffusers_vae() -> None:
    from diffusers import AutoencoderKL

    model = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(32, 64),
        norm_num_groups=8,
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    pictures = torch.randn(2, 3, 64, 64, device="cuda")
    for _ in range(2):
        latents = model.encode(pictures).latent_dist
        found = model.decode(latents.sample()).sample
        loss = functional.mse_loss(found, pictures) + 1e-6 * latents.kl().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.needs("kornia")
def test_kornia_augmentation() -> None:
    from kornia import augmentation

    change = augmentation.AugmentationSequential(
        augmentation.RandomHorizontalFlip(p=0.5),
        augmentation.RandomAffine(degrees=20.0, p=0.7),
        augmentation.ColorJitter(0.1, 0.1, 0.1, 0.1, p=1.0),
        augmentation.RandomGaussianBlur((3, 3), (0.1, 2.0), p=0.5),
        data_keys=["input", "mask"],
    ).cuda()
    pictures, masks = change(torch.rand(4, 3, 64, 64).cuda(), torch.ones(4, 1, 64, 64).cuda())
    assert pictures.shape == (4, 3, 64, 64)
    assert masks.shape == (4, 1, 64, 64)


@pytest.mark.needs("kornia")
def test_kornia_ms_ssim() -> None:
    from kornia.losses import MS_SSIMLoss

    net = nn.Conv2d(3, 3, 3, padding=1).cuda()
    pictures = torch.rand(2, 3, 64, 64, device="cuda")
    MS_SSIMLoss().cuda()(net(pictures).sigmoid(), pictures).backward()
    assert net.weight.grad is not None
