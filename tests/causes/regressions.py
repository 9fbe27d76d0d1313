"""Twenty-seven regressions of the project, each with the sentence that a maintainer would write."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Edit:
    """A replacement in a file, where ``old`` occurs once."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Regression:
    """The planted change, the test that fails by it, and a pattern of its cause."""

    test: str
    edits: tuple[Edit, ...]
    sentence: str
    options: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


def edit(file: str, old: str, new: str) -> tuple[Edit, ...]:
    return (Edit(file, old, new),)


NEXT = "\n\n\n@pytest.mark.gpumem(baseline=True)\ndef test_momentum"
"""Follows the training test, which alone is to change."""

REGRESSIONS = {
    "no_grad lost": Regression(
        "test_evaluation",
        edit("training", "    with torch.no_grad():", "    with torch.enable_grad():"),
        r"autograd is on .* where it was off.* kept for backward",
    ),
    "float32 for bfloat16": Regression(
        "test_training",
        edit("test_gpt", "return GPT(**options).cuda().bfloat16()", "return GPT(**options).cuda()"),
        r"bfloat16 before.* float32 now",
    ),
    "checkpointing lost": Regression(
        "test_checkpointed",
        edit("model", "if self.checkpointed:", "if False:"),
        r"activations of blocks\.\* are kept .* computed again",
    ),
    "losses kept, the graphs of which backward has freed": Regression(
        "test_training",
        edit("training", "losses.append(loss.item())", "losses.append(loss)"),
        r"each step leaves 512 B in the list losses of train\(\)",
    ),
    "formula for fused attention": Regression(
        "test_training",
        edit(
            "model",
            "mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal)",
            "mixed = torch.softmax(q @ k.transpose(-1, -2), -1) @ v",
        ),
        r"attention is no longer called: the formula at model\.py:\d+ \(torch\.softmax\) takes",
    ),
    "no fused attention on a T4": Regression(
        "test_long",
        edit("test_gpt", "GPT(layers=1).cuda().half()", "GPT(layers=1).cuda().bfloat16()"),
        r"asked for .* free .* too much: scaled_dot_product_attention ran unfused.* bfloat16 ",
    ),
    "a leaked variable": Regression(
        "test_leaks",
        edit(
            "training",
            "        losses.append(loss.item())\n    return losses",
            "        losses.append(loss.item())\n        KEPT[0] = loss\n"
            "    return losses\n\n\nKEPT = {}",
        ),
        r"training\.KEPT\[0\] keeps",
    ),
    "a second optimizer state": Regression(
        "test_momentum",
        edit(
            "test_gpt",
            "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)",
            "torch.optim.Adam(model.parameters(), fused=True)",
        ),
        r"the optimizer keeps exp_avg, exp_avg_sq \(Adam\), where it kept momentum_buffer",
    ),
    "retain_graph": Regression(
        "test_training",
        edit(
            "training",
            "loss.backward()\n        optimizer.step()",
            "loss.backward(retain_graph=True)\n        optimizer.step()",
        ),
        r"backward\(retain_graph=True\) keeps the graph",
    ),
    "a hook that keeps": Regression(
        "test_evaluation",
        (
            Edit("test_gpt", "evaluate(gpt(), batches())", "evaluate(watched(gpt()), batches())"),
            Edit(
                "test_gpt",
                "def gpt(**options):",
                "SEEN = []\n\n\n"
                "def watched(model):\n"
                "    for block in model.blocks:\n"
                "        block.register_forward_hook(lambda module, given, out: SEEN.append(out))\n"
                "    return model\n\n\n"
                "def gpt(**options):",
            ),
        ),
        r"each step leaves .* in the list SEEN of test_gpt",
    ),
    ".float() on logits": Regression(
        "test_training",
        edit("training", "logits = model(tokens)", "logits = model(tokens).float()"),
        r"training\.py:\d+ .*bfloat16 before, float32 now",
    ),
    "a compiled block runs eagerly": Regression(
        "test_compiled",
        edit("model", "        x = x.cos() + x.exp()", "        x = added(x)")
        + edit(
            "model",
            "class Mixer",
            "@torch._dynamo.disable\ndef added(x):\n    return x.cos() + x.exp()\n\n\nclass Mixer",
        ),
        r"model\.py:\d+ .* ran eagerly .* compiled code",
    ),
    "a wrong wrapping policy": Regression(
        "test_sharded",
        edit("test_gpt", "    for block in model.blocks:\n        fully_shard(block)\n", ""),
        r"unsharded parameters of .* at once.* blocks",
    ),
    "a cache that grows": Regression(
        "test_generation",
        (
            Edit(
                "generation",
                "            tokens = model(tokens[:, -1:], caches).argmax(-1)",
                "            logits = model(tokens[:, -1:], caches)\n"
                "            PAST[len(PAST)] = logits.expand(-1, 64, -1).float()\n"
                "            tokens = logits.argmax(-1)",
            ),
            Edit("generation", "def generate(", "PAST = {}\n\n\ndef generate("),
        ),
        r"each step leaves .* in the dict PAST of generation",
    ),
    "gradients filled with zeros": Regression(
        "test_training",
        edit(
            "training",
            "optimizer.zero_grad()\n        losses",
            "optimizer.zero_grad(set_to_none=False)\n        losses",
        ),
        r"zero_grad\(set_to_none=False\) .* gradients",
    ),
    "a loader that copies twice": Regression(
        "test_evaluation",
        edit(
            "data",
            '        yield batch.to("cuda", non_blocking=True)',
            '        pinned = batch.to("cuda", non_blocking=True)\n        yield pinned.clone()',
        ),
        r"the inputs hold 16\.0 KiB, 8\.0 KiB before: data\.py:\d+",
    ),
    "foreach for fused": Regression(
        "test_training",
        edit(
            "test_gpt",
            "    model = gpt()\n    optimizer = torch.optim.AdamW(model.parameters(), fused=True)\n"
            f"    train(model, optimizer, batches()){NEXT}",
            "    model = gpt()\n"
            "    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)\n"
            f"    train(model, optimizer, batches()){NEXT}",
        ),
        r"AdamW steps as foreach, fused before",
    ),
    "channels_last lost": Regression(
        "test_eyes",
        edit("test_gpt", ".half().to(memory_format=torch.channels_last)", ".half()")
        + edit("test_gpt", "    images = images.to(memory_format=torch.channels_last)\n", ""),
        r"channels_last",
    ),
    "a dtype promotion": Regression(
        "test_training",
        edit(
            "training",
            "logits = model(tokens)",
            "logits = model(tokens) * torch.ones(1, device=tokens.device)",
        ),
        r"training\.py:\d+ .*bfloat16 before, float32 now",
    ),
    "a mask made contiguous": Regression(
        "test_training",
        edit(
            "model",
            "        mixed = F.scaled_dot_product_attention(q, k,",
            "        mask = torch.ones_like(q[..., :1]).expand_as(q).contiguous()\n"
            "        mixed = F.scaled_dot_product_attention(q * mask, k,",
        ),
        r"model\.py:\d+ \(torch\.clone\) takes 2\.0 MiB of activations",
    ),
    "accumulation that keeps every graph": Regression(
        "test_accumulation",
        edit(
            "training",
            "        loss.backward()\n    optimizer.step()",
            "        total = total + loss\n    total.backward()\n    optimizer.step()",
        )
        + edit(
            "training",
            "def accumulate(model, optimizer, batches):\n",
            "def accumulate(model, optimizer, batches):\n    total = 0\n",
        ),
        r"graphs? of 3 forwards .* backward",
    ),
    "an EMA copy": Regression(
        "test_training",
        edit(
            "test_gpt",
            "    model = gpt()\n    optimizer = torch.optim.AdamW(model.parameters(), fused=True)\n"
            f"    train(model, optimizer, batches()){NEXT}",
            "    model = gpt()\n    average = torch.optim.swa_utils.AveragedModel(model)\n"
            "    optimizer = torch.optim.AdamW(model.parameters(), fused=True)\n"
            f"    train(model, optimizer, batches()){NEXT}",
        ),
        r"the parameters are there a second time",
    ),
    "a larger vocabulary": Regression(
        "test_training",
        edit("model", "vocabulary=2048", "vocabulary=4096"),
        r"embedding.*\(2048, 256\) before, \(4096, 256\) now",
    ),
    "a padded batch": Regression(
        "test_training",
        edit("data", "length=256", "length=320"),
        r"the inputs are larger: \(4, 256\) before, \(4, 320\) now",
    ),
    "a KV cache in float32": Regression(
        "test_generation",
        edit("generation", "dtype=torch.bfloat16", "dtype=torch.float32"),
        r"generation\.py:\d+.* bfloat16 before.* float32 now",
    ),
    "an allocator setting": Regression(
        "test_training",
        (),
        r"roundup_power2_divisions:4",
        environment=(("PYTORCH_CUDA_ALLOC_CONF", "roundup_power2_divisions:4"),),
    ),
    "a library upgrade": Regression(
        "test_normalized",
        edit(
            "normalize",
            "return x / x.norm(dim=-1, keepdim=True)",
            "wide = x.double()\n    return x / wide.norm(dim=-1, keepdim=True)",
        ),
        r"normalize is 2\.0 now, 1\.0 before.* normalize\.py:\d+",
    ),
}
"""The first seven are those that users complained of."""
