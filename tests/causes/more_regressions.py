"""Regressions of other programs, and changes that offer a wrong explanation (decoys).

``said`` is the whole sentence of a maintainer; ``sentence`` is the part that must be found: the
mechanism, and the variable, module or line.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.causes.corpus import Program
from tests.causes.programs import language, vision
from tests.causes.regressions import Edit, Regression, edit

PROGRAMS = {
    "cnn": Program({"cnn": vision.CNN, "test_cnn": vision.CNN_TESTS}),
    "vit": Program({"vit": vision.VIT, "test_vit": vision.VIT_TESTS}),
    "unet": Program(
        {"unet": vision.UNET, "diffusion": vision.DIFFUSION, "test_unet": vision.UNET_TESTS}
    ),
    "lstm": Program({"recurrent": language.LSTM, "test_lstm": language.LSTM_TESTS}),
    "trainer": Program({"trainer": language.TRAINER, "test_trainer": language.TRAINER_TESTS}),
    "lora": Program({"lora": language.LORA, "test_lora": language.LORA_TESTS}),
    "loader": Program({"loader": language.LOADER, "test_loader": language.LOADER_TESTS}),
}


@dataclass(frozen=True)
class Elsewhere:
    """A regression of one of :data:`PROGRAMS`."""

    program: str
    said: str
    planted: Regression


def planted(
    program: str, said: str, test: str, edits: tuple[Edit, ...], sentence: str
) -> Elsewhere:
    return Elsewhere(program, said, Regression(test, edits, sentence))


ELSEWHERE = {
    "a running loss that is a tensor": planted(
        "cnn",
        "running of epoch() still holds a tensor of an earlier step: backward has freed its graph",
        "test_epoch",
        edit("cnn", "running += loss.item()", "running += loss"),
        r"running of epoch\(\) still holds 512 B of earlier steps",
    ),
    "losses that no backward frees": planted(
        "cnn",
        "each step leaves its graph (so many MiB a step), held by found of difficulty()",
        "test_difficulty",
        edit(
            "cnn", "model(normalize(images)), labels).item())", "model(normalize(images)), labels))"
        ),
        r"each step leaves its graph \(20\.8 MiB a step\), held by the list found of difficulty",
    ),
    "autocast lost": planted(
        "cnn",
        "the same activations of stages.*: bfloat16 before, float32 now",
        "test_epoch",
        edit(
            "cnn",
            'with torch.autocast("cuda", dtype=torch.bfloat16):',
            'with torch.autocast("cuda", dtype=torch.bfloat16, enabled=False):',
        ),
        r"bfloat16 before, float32 now",
    ),
    "float64 in the loss": planted(
        "trainer",
        "the logits are copied to float64 at trainer.py:42: float32 before, float64 now",
        "test_train",
        edit(
            "trainer",
            "cross_entropy(logits.flatten(0, 1),",
            "cross_entropy(logits.flatten(0, 1).double(),",
        ),
        r"trainer\.py:\d+ .*float32 before, float64 now",
    ),
    "a hidden state that is not detached": planted(
        "lstm",
        "hidden of train() keeps the graphs of all chunks before, so many MiB a step",
        "test_text",
        edit(
            "recurrent",
            "        loss.backward()\n        hidden = tuple(part.detach() for part in hidden)\n",
            "        loss.backward(retain_graph=True)\n",
        ),
        r"(each step leaves .* MiB.* hidden of train\(\).*graph|retain_graph=True.* graph)",
    ),
    "amsgrad": planted(
        "lstm",
        "the optimizer keeps max_exp_avg_sq too (amsgrad)",
        "test_text",
        edit("test_lstm", "foreach=False", "foreach=False, amsgrad=True"),
        r"the optimizer keeps exp_avg, exp_avg_sq, max_exp_avg_sq \(Adam\)",
    ),
    "attention weights that are asked for": planted(
        "vit",
        "layers.*.attention no longer runs fused attention: vit.py:18 keeps the attention weights",
        "test_fit",
        edit("vit", "need_weights=False", "need_weights=True"),
        r"attention is no longer called: the formula at vit\.py:\d+",
    ),
    "larger images": planted(
        "vit",
        "the inputs are larger: (8, 3, 64, 64) before, (8, 3, 96, 96) now",
        "test_fit",
        edit("vit", "steps=2, side=64", "steps=2, side=96"),
        r"the inputs are larger: \(8, 3, 64, 64\) before, \(8, 3, 96, 96\) now",
    ),
    "a trainer's flag for checkpointing": planted(
        "trainer",
        "activations of layers.* are kept for backward; before they were computed again",
        "test_train",
        edit(
            "trainer",
            "gradient_checkpointing = True\n    batch",
            "gradient_checkpointing = False\n    batch",
        ),
        r"activations of layers\.\* are kept .* computed again",
    ),
    "predictions kept on the GPU": planted(
        "trainer",
        "each step leaves its logits (8 MiB a step) in the list predictions of the trainer",
        "test_evaluate",
        edit("trainer", "logits.argmax(-1).cpu()", "logits"),
        r"each step leaves 8\.0 MiB in the list self\.predictions of evaluate\(\)",
    ),
    "a base that is not frozen": planted(
        "lora",
        "the parameters of the base are trained now: 6,300,000 of them have gradients and states",
        "test_tune",
        edit("lora", "    model.requires_grad_(False)\n", ""),
        r"(trained|requires? grad|frozen)",
    ),
    "a base in float32": planted(
        "lora",
        "the same parameters: bfloat16 before, float32 now",
        "test_tune",
        edit("lora", ".to(torch.bfloat16)", ""),
        r"parameters.*bfloat16 before, float32 now",
    ),
    "averages by hand": planted(
        "unet",
        "the parameters are there a second time: so many MiB more, made at diffusion.py:10",
        "test_train",
        edit(
            "diffusion",
            "self.kept = {}",
            "self.kept = {name: one.detach().clone() for name, one in model.named_parameters()}",
        ),
        r"the parameters are there a second time: .* diffusion\.py:\d+",
    ),
    "frames kept on the GPU": planted(
        "unet",
        "each step leaves 192 KiB in the list frames of sample()",
        "test_sample",
        edit("diffusion", "frames.append(x.cpu())", "frames.append(x)"),
        r"each step leaves 192\.0 KiB in the list frames of sample\(\)",
    ),
    "a loader that is four batches ahead": planted(
        "loader",
        "the inputs hold 5 batches, 2 before: loader.py:21",
        "test_features",
        edit("loader", "ahead=1", "ahead=4"),
        r"the inputs hold 20\.3 MiB, 10\.1 MiB before: loader\.py:\d+",
    ),
}
"""Fourteen; the families are those of the first corpus."""


SIGNATURES = {
    "autograd": r"autograd is on",
    "checkpointing": r"computed again",
    "retained": r"retain_graph",
    "waiting": r"wait for one backward",
    "zeros": r"zero_grad",
    "carried": r"each step leaves|of earlier steps",
    "sharding": r"units of their own",
    "copy": r"a second time",
    "model": r"has more parameters",
    "state": r"the optimizer keeps",
    "kind": r"steps as",
    "unfused": r"ran unfused",
    "formula": r"no longer called",
    "layout": r"channels_last",
    "library": r"is \S+ now, \S+ before, and takes",
    "inputs": r"the inputs are larger",
    "held inputs": r"the inputs hold",
    "dtype": r"\w+\d+ before, \w+\d+ now",
    "compiled": r"ran eagerly",
    "trained": r"trained now",
}
"""The causes by which a sentence is known; one without any states the largest change."""


@dataclass(frozen=True)
class Harmless:
    """A change with a decoy: ``allowed`` are the causes that are true, :data:`SIGNATURES`' keys."""

    program: str
    test: str
    edits: tuple[Edit, ...]
    allowed: tuple[str, ...]
    place: str = ""
    """The source line that a sentence without a cause has to name."""

    @property
    def planted(self) -> Regression:
        return Regression(self.test, self.edits, self.place)


WIDER = edit("cnn", "count, size=16", "count, size=32")

HARMLESS = {
    "a small list of losses beside a larger batch": Harmless(
        "cnn",
        "test_epoch",
        WIDER
        + edit("cnn", "running = 0.0", "running, losses = 0.0, []")
        + edit("cnn", "running += loss.item()", "losses.append(loss.detach())"),
        ("inputs",),
    ),
    "one forward with gradients among those without, and a larger temporary": Harmless(
        "cnn",
        "test_normalized",
        edit(
            "cnn",
            "    right = 0\n",
            "    right = 0\n    model(torch.zeros(1, 3, 8, 8, device='cuda'))\n",
        )
        + edit("cnn", "in loader:\n            right", "in list(loader)[:2]:\n            right")
        + edit("cnn", "return images - torch", "return images.repeat(4, 1, 1, 1)[:16] - torch"),
        ("held inputs",),
    ),
    "float16 for bfloat16 beside a larger batch": Harmless(
        "cnn",
        "test_epoch",
        WIDER
        + edit(
            "cnn", 'autocast("cuda", dtype=torch.bfloat16)', 'autocast("cuda", dtype=torch.float16)'
        ),
        ("inputs",),
    ),
    "a few more parameters beside longer texts": Harmless(
        "trainer",
        "test_train",
        edit("trainer", "length = 128", "length = 512")
        + edit("trainer", "vocabulary=4096", "vocabulary=4224"),
        ("inputs",),
    ),
    "checkpoints on other layers beside a second copy of the logits": Harmless(
        "trainer",
        "test_train",
        edit(
            "trainer",
            "if self.gradient_checkpointing and self.training:",
            "if self.gradient_checkpointing and layer is not self.layers[0]:",
        )
        + edit(
            "trainer", "logits = self.head(x)\n", "logits = self.head(x).tanh().tanh().tanh()\n"
        ),
        (),
        r"trainer\.py:\d+",
    ),
    "retain_graph once, and a temporary in evaluation": Harmless(
        "vit",
        "test_fit",
        edit(
            "vit",
            "        loss.backward()\n        optimizer.step()\n",
            "        loss.backward(retain_graph=True)\n        del loss\n        optimizer.step()\n"
            "        with torch.no_grad():\n"
            "            model(torch.zeros(64, 3, side, side, device='cuda'))\n",
        ),
        ("inputs",),
        r"vit\.py:\d+",
    ),
    "foreach for fused where forward is the peak": Harmless(
        "unet",
        "test_train",
        edit(
            "diffusion",
            "AdamW(model.parameters(), fused=True)",
            "AdamW(model.parameters(), foreach=True)",
        )
        + edit("diffusion", "size=4, side=32", "size=32, side=64"),
        ("inputs",),
    ),
    "another optimizer's state beside more chunks in one": Harmless(
        "lstm",
        "test_text",
        edit("recurrent", "text, length=32", "text, length=128")
        + edit(
            "test_lstm",
            "Adam(model.parameters(), foreach=False)",
            "SGD(model.parameters(), lr=0.1, foreach=False)",
        ),
        ("inputs",),
    ),
    "files and functions with new names, and one buffer more": Harmless(
        "loader",
        "test_features",
        edit(
            "loader",
            "    net = nn.Sequential",
            "    scratch = torch.zeros(1 << 20, device='cuda')\n    net = nn.Sequential",
        ),
        (),
        r"loader\.py:\d+",
    ),
    "two halves: wider layers and a copy in float32": Harmless(
        "lora",
        "test_tune",
        edit("lora", "model(x).square()", "model(x).float().square()")
        + edit("lora", "steps=2, size=64", "steps=2, size=256"),
        ("inputs", "dtype"),
    ),
}
"""Changes with a decoy; a sentence may name no cause but a true one."""
