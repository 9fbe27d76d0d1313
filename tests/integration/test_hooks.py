"""Hooks by which other plugins and conftests observe measurements and supply names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.pytest_project import Project

MIB = 2**20
TESTS = """
    @pytest.mark.gpumem(max="2MiB")
    def test_small():
        kept = torch.ones(2**18, device="cuda")

    @pytest.mark.gpumem(max="2MiB", max_leak=0)
    def test_large():
        kept = torch.ones(2**20, device="cuda")

    @pytest.mark.gpumem
    def test_broken():
        torch.ones(2**20, device="cuda")
        raise RuntimeError

    def test_plain():
        pass
"""


def plugin(name: str, **hooks: Callable[..., Any]) -> ModuleType:
    """Return a plugin with these hooks, named without ``pytest_gpumem_``."""
    module = ModuleType(name)
    for hook, function in hooks.items():
        setattr(module, f"pytest_gpumem_{hook}", function)
    return module


class Listener:
    """A plugin that records the calls of its hooks."""

    def __init__(self) -> None:
        self.measured: list[tuple[str, str, int, str]] = []
        self.verdicts: list[tuple[str, str, int | None, int, bool]] = []

    def pytest_gpumem_measured(self, item: pytest.Item, measurement, outcome):  # type: ignore[no-untyped-def]  # as users write it
        peak = measurement.peak_allocated
        self.measured.append((item.name, measurement.device, peak, outcome))

    def pytest_gpumem_verdict(self, item: pytest.Item, verdict):  # type: ignore[no-untyped-def]  # as users write it
        self.verdicts.append(
            (item.name, verdict.kind, verdict.limit, verdict.actual, verdict.passed)
        )


def test_hooks_are_called_for_every_measurement_and_verdict(project: Project) -> None:
    project.write(test_it=TESTS)
    heard = Listener()
    project.run(plugins=[heard])
    assert heard.measured == [
        ("test_small", "cuda:0", MIB, "passed"),
        ("test_large", "cuda:0", 4 * MIB, "failed"),
        ("test_broken", "cuda:0", 4 * MIB, "failed"),
    ]
    assert heard.verdicts == [
        ("test_small", "limit", 2 * MIB, MIB, True),
        ("test_large", "limit", 2 * MIB, 4 * MIB, False),
        ("test_large", "leak", 0, 0, True),
    ]


def test_hooks_are_called_for_each_device_of_a_test(project: Project) -> None:
    project.write(
        test_it="""
            @pytest.mark.gpumem
            def test_both():
                kept = [torch.ones(2**18, device=f"cuda:{i}") for i in range(2)]
        """
    )
    heard = Listener()
    project.run(device="--gpumem-device=sim:T4*2", plugins=[heard])
    assert [device for _, device, _, _ in heard.measured] == ["cuda:0", "cuda:1"]


def test_hooks_are_called_only_for_the_last_run_of_a_test(project: Project) -> None:
    project.write(
        test_it="""
            @pytest.mark.gpumem
            def test_it():
                assert torch.ones(2, device="cuda").sum() == 2
        """
    )
    heard = Listener()
    project.run(plugins=[heard])
    assert [name for name, *_ in heard.measured] == ["test_it"]


def test_workers_and_processes_of_single_tests_call_the_hooks_of_conftests(
    project: Project,
) -> None:
    project.write(
        conftest="""
            import os, pathlib

            def pytest_gpumem_measured(item, measurement):
                with pathlib.Path("heard").open("a") as file:
                    file.write(f"{item.name} {measurement.peak_allocated}\\n")
                raise ValueError("but then")
        """,
        test_it="""
            @pytest.mark.gpumem
            @pytest.mark.parametrize("x", [1, 2])
            def test_a(x):
                kept = torch.ones(x * 2**18, device="cuda")

            @pytest.mark.gpumem(isolate=True)
            def test_b():
                kept = torch.ones(2**20, device="cuda")
        """,
    )
    result = project.run_apart("-n2")
    result.assert_outcomes(passed=3)
    said = [line for line in result.outlines if "is broken" in line]
    assert len(said) == 1
    assert said[0].endswith(
        "conftest.py is broken, its pytest_gpumem_measured raised ValueError: but then"
    )
    heard = sorted((project.path / "heard").read_text().splitlines())
    assert heard == [f"test_a[1] {MIB}", f"test_a[2] {2 * MIB}", f"test_b {4 * MIB}"]


def test_environment_values_of_plugins_are_part_of_the_baseline_key(project: Project) -> None:
    project.write(
        conftest="""
            def pytest_gpumem_environment(config, environment):
                return {"kernels": "2.1"} if environment.gpu == "T4" else None
        """,
        test_it="""
            @pytest.mark.gpumem(baseline=True, gpu=["T4", "L4"])
            def test_it():
                kept = torch.ones(2**18, device="cuda")
        """,
    )
    another = plugin("another", environment=lambda: {"tuning": "fast & loose"})
    tests = project.report("--gpumem-update-baselines", plugins=[another])
    # sha256("fast & loose") begins so: the folder's name takes no such characters.
    folders = sorted(path.name for path in (project.path / "baselines").glob("[!.]*"))
    hashed = "tuning=f850e622"
    assert [name.split("-", 2)[1] for name in folders] == ["L4", "T4"]
    assert folders[0].endswith(f"-{hashed}")
    assert folders[1].endswith(f"-kernels=2.1-{hashed}")
    extras = {test["environment"]["gpu"]: test["environment"]["extra"] for test in tests.values()}
    assert extras == {
        "T4": {"kernels": "2.1", "tuning": "fast & loose"},
        "L4": {"tuning": "fast & loose"},
    }
    again = project.run(plugins=[another])
    again.assert_outcomes(passed=2)
    again.stdout.fnmatch_lines(["*T4 (torch *, kernels=2.1, tuning=fast & loose)*"])
    without = project.run("--noconftest", plugins=[another])
    without.assert_outcomes(passed=1, failed=1)  # L4's key is the same


def test_a_library_names_categories_and_the_lines_that_call_it(project: Project) -> None:
    project.write(
        cache="""
            def allocate():
                return torch.empty(2**18, device="cuda")
        """,
        conftest="""
            def pytest_gpumem_category(category, nbytes, frames, operator, shape, dtype):
                if frames and frames[0]["name"] == "allocate":
                    assert (category, nbytes, operator) == ("other", 2**20, "torch.empty")
                    assert (list(shape), dtype) == ([2**18], "float32")
                    return "activations"

            def pytest_gpumem_site(frames):
                if frames[0]["filename"].endswith("cache.py"):
                    return 1
        """,
        test_it="""
            import cache

            @pytest.mark.gpumem
            def test_it():
                kept = cache.allocate()
                more = torch.empty(2**19, device="cuda")
        """,
    )
    measured = project.report()["test_it.py::test_it"]["measurement"]
    assert measured["composition"] == {"activations": MIB, "other": 2 * MIB}
    assert [(site["site"], site["category"]) for site in measured["sites"]] == [
        ("test_it.py:9", "other"),
        ("test_it.py:8", "activations"),
    ]


def test_a_broken_plugin_is_named_once_and_no_result_is_lost(project: Project) -> None:
    heard: list[str] = []

    def raises(item: pytest.Item) -> None:
        raise ValueError("no\x1b[31mne")

    bad = plugin(
        "bad",
        measured=raises,
        verdict=lambda verdict: pytest.fail("I say so"),
        category=lambda category: "kv cache",
        site=lambda frames: -1,
    )
    good = plugin(
        "good",
        verdict=lambda item, verdict: heard.append(item.name),
        category=lambda category: "inputs",
    )
    project.write(test_it=TESTS)
    result = project.run(plugins=[good, bad])
    result.assert_outcomes(passed=2, failed=2)
    said = [line for line in result.outlines if "is broken" in line]
    start = "note: the plugin bad is broken, its pytest_gpumem_"
    assert [line.removeprefix(start).partition(", which is")[0] for line in sorted(said)] == [
        "category returned 'kv cache'",
        "measured raised ValueError: no\\x1b[31mne",
        "site returned -1",
        "verdict raised Failed: I say so",
    ]
    assert heard == ["test_small", "test_large", "test_large"]
    result.stdout.fnmatch_lines(["*inputs*test_it.py:10*"])


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ({"a": 1}, "returned 1 for a, not a word"),
        ({"a": ""}, "returned '' for a, not a word"),
        ({"A b": "c"}, "returned the name 'A b'; one is made of a-z, 0-9 and _"),
        (["a"], "returned ['a'], not words by name"),
        ({"other": "b"}, "returned 'b' for other, which is 'a' by another"),
    ],
)
def test_an_environment_hook_that_fails_fails_tests_in_a_sentence(
    project: Project, answer: object, problem: str
) -> None:
    # Otherwise measurements would be compared with baselines of another environment.
    bad = plugin("bad", environment=lambda: answer)
    good = plugin("good", environment=lambda: {"other": "a"})
    project.write(test_it=TESTS)
    result = project.run(plugins=[bad, good])
    result.assert_outcomes(passed=1, errors=3)
    said = [line for line in result.outlines if line.startswith("the plugin bad is broken")]
    assert said == [f"the plugin bad is broken, its pytest_gpumem_environment {problem}"]
    result.stdout.no_fnmatch_line("*Traceback*")


def test_a_hook_wrapper_is_refused(project: Project) -> None:
    project.write(
        conftest="""
            @pytest.hookimpl(wrapper=True)
            def pytest_gpumem_verdict(verdict):
                return (yield)
        """,
        test_it=TESTS,
    )
    project.run().stdout.fnmatch_lines(["*its pytest_gpumem_verdict *takes none*"])


def test_an_unknown_hook_is_reported_by_pytest(project: Project) -> None:
    project.write(conftest="def pytest_gpumem_verdikt(verdict): ...", test_it=TESTS)
    result = project.run_apart()
    assert result.ret != 0
    assert "unknown hook 'pytest_gpumem_verdikt'" in result.stdout.str() + result.stderr.str()


def test_the_conftest_of_the_documentation_works(project: Project) -> None:
    page = Path(__file__).parents[2] / "docs" / "hooks.md"
    source = page.read_text().partition("```python\n")[2].partition("```")[0]
    (project.path / "conftest.py").write_text(source)
    project.write_in(
        "mylib",
        "pool",
        """
        def take():
            return torch.empty(2**18, device="cuda")
    """,
    )
    project.write(
        test_it="""
            from mylib import pool

            @pytest.mark.gpumem(max=0)
            def test_it():
                kept = pool.take()
        """
    )
    tests = project.report("-s")
    (site,) = tests["test_it.py::test_it"]["measurement"]["sites"]
    assert (site["category"], site["site"]) == ("temporaries", "test_it.py:8")
    assert (project.path / "peaks.jsonl").read_text() == f'["test_it.py::test_it", {MIB}]\n'
