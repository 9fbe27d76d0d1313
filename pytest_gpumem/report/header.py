"""The line in the header of a run, visible in every project with the plugin installed."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_gpumem.quoting import printable


def header_line(
    device: str, torch: str | None, folder: str, environments: Sequence[str], gpus: Sequence[str]
) -> str:
    """Return the line for ``pytest_report_header``: the device, and the baselines used.

    ``device`` is the tests' device, ``torch`` the installed release; ``folder`` has baselines of
    the ``environments``; ``gpus`` are remarks on unusual states of this host's GPUs.
    """
    facts = [device, *gpus, f"torch {torch}" if torch else "torch is not installed"]
    if environments:
        facts.append(f"baselines in {folder}: {', '.join(environments)}")
    return printable(f"gpumem: {'; '.join(facts)}")


def installed_release(package: str) -> str | None:
    """Return the installed release of ``package`` without importing it."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None
