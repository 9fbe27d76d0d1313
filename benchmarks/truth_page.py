"""The tables of ``truth.py`` on the page of fidelity, which ``fidelity.py`` keeps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

BEGIN, END = "<!-- truth.py writes this -->", "<!-- truth.py has written this -->"

_TEXT = """
## Against torch's own code

`python benchmarks/truth.py --write docs/fidelity.md` runs the same code on the simulated device and
on the [dry device](dry.md), torch's own CUDA code over a runtime whose kernels compute nothing, and
compares every allocation and every free, by size and in order, then the highest bytes allocated and
reserved. Samples are those that PyTorch tests itself with (`op_db`, `module_db`, `optim_db`), in
float32, bfloat16, float16, int64 and under autocast. Frees with nothing between them count as the
same in any order: casts that autocast has kept are dropped in the order of a hash. Recorded GPUs,
below, are right where they say otherwise. *Simulated, GPU* and *dry, GPU* stand beside the
recording of a GPU: `python benchmarks/truth.py --recorded FILE --device dry`.

Counted at the end of a row, and not compared: passes whose values, zero on the dry device, decide
what is taken; workspaces that a library chooses; what a clock decides. *Refused* counts as other.

| torch | GPU | devices | what | passes | same events | same peaks | refused | values \
| libraries | clocks |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""


def section(page: str) -> str:
    """Return the part of ``page`` that ``truth.py`` writes, empty where there is none."""
    _, found, rest = page.partition(BEGIN)
    part, ended, _ = rest.partition(END)
    return f"{BEGIN}{part}{END}" if found and ended else ""


def write(file: Path, rows: Sequence[str]) -> None:
    """Put ``rows`` into the page in place of those of the same release, GPU, devices and corpus."""
    page = file.read_text(encoding="utf-8")
    before = section(page)
    columns = {tuple(row.split(" | ")[:4]) for row in rows}
    kept = [
        line
        for line in before.splitlines()
        if line[:3].startswith("| 2") and tuple(line.split(" | ")[:4]) not in columns
    ]
    made = "\n".join(sorted([*kept, *rows], key=lambda row: row.split(" | ")[:3]))
    new = f"{BEGIN}\n{_TEXT.strip()}\n{made}\n\n{END}"
    if before:
        page = page.replace(before, new)
    else:
        title, _, rest = page.partition("\n\n")
        introduction, _, rest = rest.partition("\n\n")
        page = f"{title}\n\n{introduction}\n\n{new}\n\n{rest}"
    file.write_text(page, encoding="utf-8")
