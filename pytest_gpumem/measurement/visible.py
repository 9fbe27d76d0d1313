"""The devices that CUDA shows a process, and their order."""

from __future__ import annotations

import re


def visible_devices(value: str | None, count: int) -> list[int | str]:
    """Return CUDA's devices in its order: indices of ``count`` devices, or UUID beginnings.

    ``value`` is ``CUDA_VISIBLE_DEVICES``: enumeration stops at the first entry that is no device,
    and a repeated entry makes all of them invisible (CUDA C++ Programming Guide, "CUDA
    Environment Variables"; ``torch.cuda._parse_visible_devices``).
    """
    if value is None:
        return list(range(count))
    entries: list[int | str] = []
    for text in (part.strip() for part in value.split(",")):
        entry = _visible_entry(text, count)
        if entry is None:
            break
        if entry in entries:
            return []
        entries.append(entry)
    return entries


def _visible_entry(text: str, count: int) -> int | str | None:
    if text.startswith(("GPU-", "MIG-")):
        return text
    digits = re.match(r"\+?\d+", text)
    return int(digits[0]) if digits and int(digits[0]) < count else None
