"""The checks of collected tests: their markers, their devices, and conditions on a device."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence, Set
from pathlib import Path

import pytest

from pytest_gpumem.device import DeviceError
from pytest_gpumem.report.pytest_reports import FAILED_WITHOUT_GPU, SKIPPED_AT_IMPORT
from pytest_gpumem.session.context import REFUSAL, Parts
from pytest_gpumem.session.expected import MARKER_NAME

_DEVICE = r"(?i)cuda|gpu|accelerator|is_available|device"
"""Words in conditions on a device, and in their reasons."""

_NO_GPU = r"Torch not compiled with CUDA enabled|Found no NVIDIA driver|No CUDA GPUs are available"
"""torch's errors where there is no GPU: of a build for CPUs, and of CUDA builds."""


def check(parts: Parts, report: pytest.CollectReport) -> None:
    """Turn an error in a test's marker into an error of its collection."""
    items = [node for node in report.result or () if isinstance(node, pytest.Item)]
    markers: list[str] = parts.config.getini("markers") if items else []
    registered = {re.split("[:(]", line, maxsplit=1)[0].strip() for line in markers}
    problems = (
        (item.nodeid, parts.expectations.problem(item) or _misspelt(item, registered))
        for item in items
    )
    errors = [f"{nodeid}: {problem}" for nodeid, problem in problems if problem]
    if errors:
        report.outcome = "failed"
        report.longrepr = "\n".join(errors)
        report.result = []
    # This check imports torch, so it runs only where its result matters.
    elif items and (why := parts.why_not):
        found = (parts.shares(item) for item in items)
        if any(one and one[1] is parts.selector.measured_device() for one in found):
            if not parts.is_worker:
                raise pytest.UsageError(why)
            # In a worker of pytest-xdist this is an error only; the controller ends the run.
            report.outcome = "failed"
            report.longrepr = why
            report.result = []
            setattr(report, REFUSAL, True)


def note_module(parts: Parts, collector: pytest.Collector, report: pytest.CollectReport) -> None:
    """Record a module that skipped itself by a condition on the device, or failed without one."""
    if report.passed or not (isinstance(collector, pytest.Module) and _imports_without_gpu(parts)):
        return
    if report.failed and re.search(_NO_GPU, str(report.longrepr)):
        parts.results.failed_modules.add(report.nodeid)
    if report.skipped and _skipped_for_its_device(
        collector.path, report.longrepr, everything=parts.settings.all
    ):
        parts.results.skipped_modules.add(report.nodeid)


def note_test(parts: Parts, item: pytest.Item, report: pytest.TestReport) -> None:
    """Record a marked test skipped by a condition at import, or one that failed without a GPU."""
    if not _imports_without_gpu(parts):
        return
    wanted = parts.settings.all or item.get_closest_marker(MARKER_NAME)
    if report.skipped and report.when != "teardown" and wanted and _is_skipped_at_import(item):
        setattr(report, SKIPPED_AT_IMPORT, True)
    has_failed = report.failed and not parts.expectations.is_measured(item)
    if has_failed and re.search(_NO_GPU, report.longreprtext):
        setattr(report, FAILED_WITHOUT_GPU, True)


def _imports_without_gpu(parts: Parts) -> bool:
    """Return whether modules are imported before the GPU of their tests is simulated."""
    settings = parts.settings
    is_later = settings.sim_scope == "test" and settings.device.kind != "cuda"
    return is_later and not parts.selector.off


def selected(parts: Parts, items: Sequence[pytest.Item]) -> None:
    """Prepare for the tests left after deselection; send their memory needs to the controller.

    Raises ``pytest.UsageError`` where no GPU is present, in a run that requests ``cuda``.
    """
    if (
        parts.settings.device.kind == "cuda"
        # A worker of pytest-xdist cannot end a run: in it the first test fails instead.
        and not (parts.is_worker or parts.config.option.collectonly or parts.selector.world)
        and any(item.get_closest_marker(MARKER_NAME) for item in items)
    ):
        try:
            parts.selector.measured_device()
        except DeviceError as error:
            raise pytest.UsageError(str(error)) from None
    if not (parts.selector.off or parts.is_one_of_several):
        expectations = map(parts.expectations.of, items)
        if any(expectation and expectation.isolate for expectation in expectations):
            from pytest_gpumem.session.isolated import prepare

            prepare()
    if parts.launched is not None:
        parts.launched.join_ranks(items, parts.expectations)
    if parts.sharing is not None and parts.is_worker:
        shared = ((item, parts.shares(item)) for item in items)
        parts.sharing.plan((item, *found) for item, found in shared if found)


def _misspelt(item: pytest.Item, registered: Set[str]) -> str:
    """Return the error in a marker that is nearly this plugin's, which would check nothing.

    A marker that the project has ``registered`` is its own.
    """
    names = {mark.name for mark in item.iter_markers()} - registered
    if not names:
        return ""
    from difflib import get_close_matches

    unknown = {name.lower(): name for name in names}
    for close in get_close_matches(MARKER_NAME, unknown, n=1, cutoff=0.75):
        return f"@pytest.mark.{unknown[close]}: did you mean @pytest.mark.{MARKER_NAME}?"
    return ""


def _skipped_for_its_device(path: Path, longrepr: object, *, everything: bool) -> bool:
    """Return whether ``pytest.skip()`` skipped the module at ``path`` because CUDA is missing.

    ``longrepr`` is from the module's report. A module whose source does not contain "gpumem" would
    be measured only if ``everything`` is.
    """
    if not isinstance(longrepr, tuple):
        return False
    _, line, reason = longrepr
    try:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (OSError, SyntaxError, UnicodeDecodeError):
        return False
    if not everything and "gpumem" not in source:
        return False
    conditions = (
        ast.unparse(node.test)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and node.lineno <= int(line) <= (node.end_lineno or 0)
    )
    return any(re.search(_DEVICE, text) for text in (str(reason), *conditions))


def _is_skipped_at_import(item: pytest.Item) -> bool:
    """Return whether a condition evaluated when the module was imported skips ``item``."""
    if any(mark.args[:1] == (True,) for mark in item.iter_markers("skipif")):
        return True
    # unittest's decorators, as ``skipUnless(torch_device == "cuda", ...)``.
    cls = getattr(item, "cls", None)
    holders = cls, getattr(cls, getattr(item, "originalname", None) or item.name, None)
    return any(getattr(holder, "__unittest_skip__", False) for holder in holders)
