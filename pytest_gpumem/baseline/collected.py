"""The tests that a session collected, and the stored tests that it proves gone."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from pytest_gpumem.baseline.store import split_nodeid


@dataclass(frozen=True)
class Collected:
    """The tests that this session collected: the proof that a test no longer exists.

    ``ids`` holds the test ids of each module that was collected, deselected tests included. A
    module counts as collected completely unless ``incomplete`` gives a reason: a node id was given
    for it, its collection failed, or a plugin filtered it while it was collected (``--lf``).
    Reasons complete the sentence "2 stored tests not pruned: ...".
    """

    rootpath: Path
    """Pytest's rootdir, to which module paths are relative."""
    ids: Mapping[str, frozenset[str]]
    incomplete: Mapping[str, str] = field(default_factory=dict)
    """Reason by module why its ids may be incomplete."""
    partial: str = ""
    """Reason why modules may exist that were not collected: ``paths were given``; empty if none."""
    narrowed: str = ""
    """Reason why any module may have more tests than were collected; empty if none."""

    @classmethod
    def of(
        cls,
        rootpath: Path,
        nodeids: Iterable[str],
        incomplete: Mapping[str, str] | None = None,
        partial: str = "",
        narrowed: str = "",
    ) -> Collected:
        """Return the value for the node ids of all collected items, deselected ones included."""
        ids: dict[str, set[str]] = defaultdict(set)
        for nodeid in nodeids:
            module, test_id = split_nodeid(nodeid)
            ids[module].add(test_id)
        frozen = {module: frozenset(found) for module, found in ids.items()}
        return cls(rootpath, frozen, incomplete or {}, partial, narrowed)


@dataclass(frozen=True)
class GoneTests:
    """A filter of stored tests that no longer exist; ``ran`` are modules and ids that ran."""

    collected: Collected
    ran: frozenset[tuple[str, str]]

    def can_prove(self, module: str) -> bool:
        """Return whether a test of ``module`` can be proved gone, whichever are stored."""
        return not _doubt(module, self.collected)

    def among(self, module: str, stored: Iterable[str]) -> tuple[list[str], Mapping[str, int]]:
        """Return the gone ids of ``stored`` ones in ``module``, and how many are in doubt by
        reason.

        A test whose function is still in its module was hidden, by an option or a plugin. Of a
        function that was collected with other parameters, a parameter is gone.
        """
        ids = self.collected.ids.get(module, frozenset())
        unseen = [i for i in stored if i not in ids and (module, i) not in self.ran]
        if not unseen:
            return [], {}
        if doubt := _doubt(module, self.collected):
            return [], {doubt: len(unseen)}
        known = {function_of(test_id) for test_id in ids}
        gone, doubts = [], Counter[str]()
        for test_id in unseen:
            name = function_of(test_id)
            if name not in known and name in _functions_in(self.collected.rootpath / module):
                doubts[f"{module} still defines {name}, which was not collected"] += 1
            else:
                gone.append(test_id)
        return gone, doubts


def function_of(test_id: str) -> str:
    """Return the function of a test's id, without parameters: ``TestX::test_y``."""
    return test_id.partition("[")[0]


@cache
def _functions_in(path: Path) -> frozenset[str]:
    try:
        return frozenset(_functions(ast.parse(path.read_text(encoding="utf-8")), ""))
    except (OSError, SyntaxError, ValueError):
        return frozenset()


def _functions(node: ast.AST, owner: str) -> Iterable[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield owner + child.name
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{owner}{child.name}::")
        else:  # under a condition, for instance
            yield from _functions(child, owner)


def _doubt(module: str, collected: Collected) -> str:
    """Return why entries of ``module`` that were not collected may still have their tests."""
    if reason := collected.incomplete.get(module) or collected.narrowed:
        return reason
    if module in collected.ids or collected.partial:
        return "" if module in collected.ids else collected.partial
    if (collected.rootpath / module).exists():
        return f"{module} exists, but nothing was collected from it"
    return ""
