"""Calls of other plugins' implementations of :mod:`pytest_gpumem.hookspecs`.

One implementation at a time: one that fails is named in a sentence, and the others still run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
from pluggy import HookCaller

from pytest_gpumem.attribution.history import CATEGORIES, Origin
from pytest_gpumem.device import DeviceError
from pytest_gpumem.device.device import Device
from pytest_gpumem.device.select import SELECTOR
from pytest_gpumem.quoting import printable, quoted
from pytest_gpumem.report.record import TestRecord

_FAILURES = (Exception, pytest.fail.Exception, pytest.skip.Exception)
"""Exceptions of an implementation that do not end the run, unlike ``pytest.exit`` or Ctrl-C."""

_NAME = re.compile(r"[a-z][a-z0-9_]*")


class Hooks:
    """The hook calls of one process."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self.broken: dict[tuple[str, str], str] = {}
        """The sentence on a plugin's first error, by hook and plugin."""

    def call_with(self, item: pytest.Item, record: TestRecord) -> None:
        """Call the hooks with ``item``'s numbers and verdicts, except while predicting."""
        if SELECTOR in self._config.stash:
            return
        hook, outcome = item.ihook, record.outcome
        for each in record.measurements:
            given: dict[str, Any] = {"item": item, "measurement": each, "outcome": outcome}
            list(self._answers(hook.pytest_gpumem_measured, **given))
        for verdict in record.verdicts:
            list(self._answers(hook.pytest_gpumem_verdict, item=item, verdict=verdict))

    def environment(self, device: Device) -> Mapping[str, str]:
        """Return the plugins' entries in the environment of ``device``.

        Raises ``DeviceError`` where that fails: without it, a test would be compared with the
        baselines of another environment.
        """
        hook, found = self._config.hook.pytest_gpumem_environment, dict[str, str]()
        if not hook.get_hookimpls():
            return found  # reading the device's environment would initialise CUDA
        answers = self._answers(
            hook,
            lambda answer: _problem_of_entries(answer, found),
            needed=True,
            config=self._config,
            environment=device.environment,
        )
        for entries in answers:
            found.update(entries)
        return found

    def classify_for(self, item: pytest.Item) -> Callable[[str, int, Origin], str] | None:
        """Return a function that names the category of ``item``'s blocks; ``None`` without a hook.

        Its arguments are the category, bytes and origin of the block known so far.
        """
        hook: HookCaller = item.ihook.pytest_gpumem_category
        if not hook.get_hookimpls():
            return None

        def problem_of(answer: object) -> str:
            if answer in CATEGORIES:
                return ""
            return f"returned {quoted(answer)}, which is none of {', '.join(CATEGORIES)}"

        def category(known: str, nbytes: int, origin: Origin) -> str:
            dtype = None if origin.dtype is None else str(origin.dtype).removeprefix("torch.")
            answers = self._answers(
                hook,
                problem_of,
                item=item,
                category=known,
                nbytes=nbytes,
                frames=_frames(origin),
                operator=origin.operator_name,
                shape=origin.shape,
                dtype=dtype,
            )
            return str(next(answers, known))

        return category

    def locate_for(
        self, item: pytest.Item
    ) -> Callable[[Origin], tuple[str, int, str] | None] | None:
        """Return a function that names the line of ``item``'s blocks; ``None`` without a hook."""
        hook: HookCaller = item.ihook.pytest_gpumem_site
        if not hook.get_hookimpls():
            return None
        known: dict[tuple[tuple[str, int], ...], int | None] = {}

        def site(origin: Origin) -> tuple[str, int, str] | None:
            frames = _frames(origin)

            def problem_of(answer: object) -> str:
                if isinstance(answer, int) and 0 <= answer < len(frames):
                    return ""
                return f"returned {quoted(answer)}, which is not an index of {len(frames)} frames"

            stack = tuple((frame["filename"], frame["line"]) for frame in frames)
            if frames and stack not in known:
                answers = self._answers(hook, problem_of, item=item, frames=frames)
                known[stack] = next(answers, None)
            if (index := known.get(stack)) is None:
                return origin.source_line
            frame = frames[index]
            return frame["filename"], frame["line"], frame["name"]

        return site

    def _answers(
        self,
        hook: HookCaller,
        problem_of: Callable[[object], str] = lambda _: "",
        *,
        needed: bool = False,
        **given: Any,
    ) -> Iterator[Any]:
        """Yield the valid answers in pluggy's order: the one registered last is called first.

        Records errors; raises ``DeviceError`` instead if an answer is ``needed``.
        """
        for implementation in reversed(hook.get_hookimpls()):
            try:
                if implementation.wrapper or implementation.hookwrapper:
                    raise TypeError("it is a wrapper, and this hook takes none")
                answer = implementation.function(*map(given.get, implementation.argnames))
                problem = "" if answer is None else problem_of(answer)
            except _FAILURES as error:
                problem = f"raised {type(error).__name__}: {error}"
            if problem:
                name = str(implementation.plugin_name)
                sentence = f"the plugin {name} is broken, its {hook.name} {problem}"
                if needed:
                    raise DeviceError(printable(sentence, 500))
                self.broken.setdefault((hook.name, name), printable(sentence, 500))
            elif answer is not None:
                yield answer


def _problem_of_entries(answer: object, found: Mapping[str, str]) -> str:
    if not isinstance(answer, Mapping):
        return f"returned {quoted(answer)}, not words by name"
    for name, word in answer.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            return f"returned the name {quoted(name)}; one is made of a-z, 0-9 and _"
        if not isinstance(word, str) or not word:
            return f"returned {quoted(word)} for {name}, not a word"
        if found.get(name, word) != word:
            return f"returned {quoted(word)} for {name}, which is {quoted(found[name])} by another"
    return ""


def _frames(origin: Origin) -> Sequence[Mapping[str, Any]]:
    return [frame for frame in origin.frames if frame["filename"].endswith(".py")]
