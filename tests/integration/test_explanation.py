"""Seeded regressions in a small transformer: the failure's first explained line is the cause."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import Any

import pytest

from tests.pytest_project import Project

pytestmark = pytest.mark.usefixtures("plain_workspaces")

MODEL = """
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x, mask):
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        scores = q @ k.transpose(-1, -2)
        scores = scores.masked_fill(mask, -1e9)
        probs = torch.softmax(scores, -1)
        return self.out((probs @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x, mask):
        x = x + self.attn(self.norm(x), mask)
        return x + self.down(F.gelu(self.up(x)))


class Transformer(nn.Module):
    def __init__(self, vocabulary=512, width=128, heads=4, layers=2):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        length = tokens.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = self.run(block, x, mask)
        return self.head(x)

    def run(self, block, x, mask):
        return block(x, mask)


class Checkpointed(Transformer):
    def run(self, block, x, mask):
        return checkpoint(block, x, mask, use_reentrant=False)
"""

TRAINING = """
import torch.nn.functional as F


def loss_of(model, tokens):
    logits = model(tokens)
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def train(model, optimizer, batches):
    losses = []
    for tokens in batches:
        optimizer.zero_grad()
        loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def evaluate(model, batches):
    with torch.no_grad():
        return [model(tokens).argmax(-1) for tokens in batches]
"""

TESTS = """
from model import Checkpointed, Transformer
from training import evaluate, train


def tokens(batch=4):
    return torch.randint(0, 512, (batch, 64), device="cuda")


@pytest.mark.gpumem(baseline=True)
@pytest.mark.parametrize("kind", [Transformer, Checkpointed])
def test_training(kind, gpumem):
    model = kind().cuda().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, [tokens(), tokens(), tokens()])


@pytest.mark.gpumem(baseline=True)
def test_evaluation(gpumem):
    model = Transformer().cuda().bfloat16()
    with gpumem.phase("first"):
        evaluate(model, [tokens()])
    with gpumem.phase("second"):
        evaluate(model, [tokens(8)])
"""

FILES = {"model": MODEL, "training": TRAINING, "test_project": TESTS}


@dataclass(frozen=True)
class Change:
    """An edit of the project, and the expected first line of the explanation."""

    file: str
    old: str
    new: str
    test: str = ""
    cause: str = ""
    """Text of the line that is to blame."""
    category: str = ""
    phase: str | None = None


TRAINING_TEST = "test_training[Transformer]"

REGRESSIONS = {
    "softmax in float32": Change(
        "model",
        "probs = torch.softmax(scores, -1)",
        "probs = torch.softmax(scores.float(), -1).to(scores.dtype)",
        TRAINING_TEST,
        "probs = torch.softmax",
        "activations",
        "forward",
    ),
    "forgotten no_grad": Change(
        "training",
        "with torch.no_grad():",
        "with torch.enable_grad():",
        "test_evaluation",
        "F.gelu(self.up(x))",
        "activations",
        "second",
    ),
    "a list that keeps losses": Change(
        "training",
        "losses.append(loss.item())",
        "losses.append(loss)",
        TRAINING_TEST,
        "return F.cross_entropy",
        "activations",
        "forward",
    ),
    "attention mask materialised": Change(
        "model",
        "scores = scores.masked_fill(mask, -1e9)",
        "mask = mask.expand_as(scores).contiguous()\n"
        "        scores = scores.masked_fill(mask, -1e9)",
        TRAINING_TEST,
        "mask = mask.expand_as",
        "activations",
        "forward",
    ),
    "an optimizer with more state": Change(
        "test_project",
        "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)",
        "torch.optim.AdamW(model.parameters())",
        TRAINING_TEST,
        "optimizer.step()",
        "optimizer state",
        "forward",
    ),
    "checkpointing removed": Change(
        "model",
        "return checkpoint(block, x, mask, use_reentrant=False)",
        "return block(x, mask)",
        "test_training[Checkpointed]",
        "F.gelu(self.up(x))",
        "activations",
        "forward",
    ),
    "an extra head": Change(
        "model",
        "return self.head(x)",
        "return self.head(x) + self.extra(x)",
        TRAINING_TEST,
        "self.extra(x)",
        "activations",
        "forward",
    ),
    "double batch in one phase": Change(
        "test_project",
        "evaluate(model, [tokens(8)])",
        "evaluate(model, [tokens(16)])",
        "test_evaluation",
        "self.qkv(x)",
        "temporaries",
        "second",
    ),
    "retain_graph": Change(
        "training",
        "loss.backward()",
        "loss.backward(retain_graph=True)",
        TRAINING_TEST,
        "F.gelu(self.up(x))",
        "activations",
        "step",
    ),
    "a gradient kept after the step": Change(
        "training",
        "optimizer.zero_grad()\n        loss = loss_of(model, tokens)",
        "loss = loss_of(model, tokens)\n        optimizer.zero_grad()",
        TRAINING_TEST,
        "return x + self.down",
        "gradients",
        "forward",
    ),
}

EXTRA_HEAD = (
    "        self.head = nn.Linear(width, vocabulary)\n",
    "        self.head = nn.Linear(width, vocabulary)\n"
    "        self.extra = nn.Linear(width, vocabulary)\n",
)


def edited(change: Change) -> dict[str, str]:
    assert FILES[change.file].count(change.old) == 1, change.old
    files = {**FILES, change.file: FILES[change.file].replace(change.old, change.new)}
    if "self.extra" in change.new:
        files["model"] = files["model"].replace(*EXTRA_HEAD)
    return files


@pytest.fixture(scope="module")
def baselines() -> dict[str, str]:
    """Hold the baselines of the project's first run, by path; the first test fills them."""
    return {}


def accept(project: Project, baselines: dict[str, str]) -> None:
    """Write the unchanged project with its baselines; run it first if there are none."""
    project.write(**FILES)
    if not baselines:
        assert project.run("--gpumem-update-baselines").ret == 0
        stored = (project.path / "baselines").rglob("*.json")
        baselines.update({str(path.relative_to(project.path)): path.read_text() for path in stored})
        assert baselines
    for name, text in baselines.items():
        path = project.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def broken(report: dict[str, Any], test: str, phase: str | None) -> dict[str, Any]:
    verdicts = report[f"test_project.py::{test}"]["verdicts"]
    (verdict,) = [v for v in verdicts if v["phase"] == phase and v["kind"] == "baseline"]
    return dict(verdict)


@pytest.mark.parametrize("name", REGRESSIONS)
def test_the_first_explained_line_is_the_cause(
    project: Project, baselines: dict[str, str], name: str
) -> None:
    change = REGRESSIONS[name]
    accept(project, baselines)
    # Python takes bytecode of a file with the same size and second for current.
    shutil.rmtree(project.path / "__pycache__", ignore_errors=True)
    project.write(**edited(change))

    report = project.report(f"test_project.py::{change.test}")

    verdict = broken(report, change.test, change.phase)
    assert not verdict["passed"]
    first, *others = verdict["explanation"]
    path, line = first["site"].rsplit(":", 1)
    assert change.cause in (project.path / path).read_text().splitlines()[int(line) - 1]
    assert first["category"] == change.category
    total = sum(entry["bytes"] for entry in (first, *others))
    assert total == verdict["actual"] - verdict["reference"]


UNRELATED = """

@pytest.mark.gpumem
def test_something_else():
    kept = torch.empty(1 << 22, device="cuda")
"""

HARMLESS = {
    "a renamed variable": ("model", (("probs", "weights"),)),
    "a renamed function": ("training", (("loss_of", "compute_loss"),)),
    "a renamed class": ("model", (("class Block", "class Layer"), ("Block(width", "Layer(width"))),
    "moved lines": ("model", (("class Attention", "# A comment.\n\n\nclass Attention"),)),
    "a docstring": ("training", (("    losses = []", '    """Train."""\n    losses = []'),)),
    "a longer expression in two lines": (
        "model",
        (
            (
                "            x = self.run(block, x, mask)",
                "            x = self.run(\n                block, x, mask\n            )",
            ),
        ),
    ),
    "a type hint": ("training", (("def train(model, ", "def train(model: object, "),)),
    "a reordered import": (
        "test_project",
        (
            ("from training import evaluate, train\n", ""),
            ("from model import", "from training import evaluate, train\nfrom model import"),
        ),
    ),
    "an unrelated test in front": (
        "test_project",
        (("\n\ndef tokens", UNRELATED + "\n\ndef tokens"),),
    ),
    "reordered tests": (
        "test_project",
        (("[Transformer, Checkpointed])", "[Checkpointed, Transformer])"),),
    ),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_a_harmless_change_fails_no_test(
    project: Project, baselines: dict[str, str], name: str
) -> None:
    file, replacements = HARMLESS[name]
    accept(project, baselines)
    source = FILES[file]
    for old, new in replacements:
        assert old in source
        source = source.replace(old, new)
    project.write(**{**FILES, file: source})

    report = project.report()

    judged = [test for test in report.values() if test["baseline"]]
    assert len(judged) == 3
    assert all(test["outcome"] == "passed" for test in judged)
    assert not any(v["explanation"] for test in judged for v in test["verdicts"])
