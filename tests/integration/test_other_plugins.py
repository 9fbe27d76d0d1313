"""Plugins that run tests in ways of their own: reruns, subtests, unittest, async, workers."""

from __future__ import annotations

from textwrap import dedent
from xml.etree import ElementTree

import pytest

from tests.pytest_project import Project

PEAK = "gpumem_peak_allocated"


def peak(test: dict) -> int:  # type: ignore[type-arg]  # JSON
    value: int = test["measurement"]["peak_allocated"]
    return value


FLAKY = """
    attempts = []

    @pytest.mark.gpumem(max="1KiB")
    def test_flaky():
        attempts.append(1)
        torch.empty(4096 if len(attempts) == 1 else 1, device="cuda")

    @pytest.mark.gpumem
    def test_stable():
        torch.empty(1, device="cuda")
"""


@pytest.fixture
def rerunfailures() -> str:
    pytest.importorskip("pytest_rerunfailures")
    return "rerunfailures"


def test_a_failed_verdict_is_rerun_and_the_last_attempt_reported(
    project: Project, rerunfailures: str
) -> None:
    project.write(test_flaky=FLAKY)

    tests = project.report("--reruns=1", use=(rerunfailures,))

    assert {id_: (test["outcome"], peak(test)) for id_, test in tests.items()} == {
        "test_flaky.py::test_flaky": ("passed", 512),
        "test_flaky.py::test_stable": ("passed", 512),
    }


def test_a_test_that_was_rerun_stores_no_baseline(project: Project, rerunfailures: str) -> None:
    project.write(test_flaky=FLAKY)

    result = project.run("--reruns=1", "--gpumem-update-baselines", use=(rerunfailures,))

    assert result.ret == 0
    result.stdout.fnmatch_lines(["*test_flaky not recorded: passed only when run again*"])
    ((_, stored),) = project.baselines().items()
    assert list(stored) == ["test_stable"]


def test_each_attempt_has_its_own_junit_properties(project: Project, rerunfailures: str) -> None:
    project.write(test_flaky=FLAKY)

    project.run("--reruns=1", "--junit-xml=junit.xml", use=(rerunfailures,))

    cases = ElementTree.parse(project.path / "junit.xml").iter("testcase")
    peaks = [
        [each.get("value") for each in case.iter("property") if each.get("name") == PEAK]
        for case in cases
        if case.get("name") == "test_flaky"
    ]
    assert peaks == [["16384"], ["512"]]


SUBTESTS = """
    @pytest.mark.gpumem(max="20KiB")
    def test_sub(subtests):
        for size in (1024, 2048):
            with subtests.test(size=size):
                torch.empty(size, device="cuda")
                assert size != FAILING

    @pytest.mark.gpumem
    def test_after():
        torch.empty(1, device="cuda")
"""


@pytest.fixture
def subtests_plugin() -> str:
    """The plugin, or pytest's own fixture since 9.0."""
    if pytest.version_tuple < (9, 0):
        pytest.importorskip("pytest_subtests")
    return "subtests"


@pytest.mark.parametrize("failing", [0, 2048])
def test_a_test_with_subtests_is_measured_as_one(
    project: Project, subtests_plugin: str, failing: int
) -> None:
    project.write(test_sub=f"FAILING = {failing}\n" + dedent(SUBTESTS))

    tests = project.report("--gpumem-update-baselines", use=(subtests_plugin,))

    measured = tests["test_sub.py::test_sub"]
    assert (peak(measured), measured["judged"]) == (8192, not failing)
    ((_, stored),) = project.baselines().items()
    assert list(stored) == (["test_after"] if failing else ["test_after", "test_sub"])


UNITTEST = """
    import unittest

    @pytest.mark.gpumem(max="20MiB", max_leak=0)
    class TestCase(unittest.TestCase):
        @classmethod
        def setUpClass(cls):
            cls.model = torch.nn.Linear(8, 8).cuda()  # 512 B of weight, 512 B of bias

        def setUp(self):
            self.batch = torch.empty(4, 8, device="cuda")

        def test_training(self):
            self.model(self.batch).sum().backward()
            assert self.model.weight.grad is not None

        def test_too_large(self):
            torch.empty(8 * 1024**2, device="cuda")

        def test_fails(self):
            assert False

        @unittest.skip("always")
        def test_skipped(self):
            raise SystemExit

        @unittest.expectedFailure
        def test_expected(self):
            assert False

        def test_sub(self):
            for size in (128, 256):
                with self.subTest(size=size):
                    torch.empty(size, device="cuda")
"""


def test_tests_of_unittest_classes_are_measured(project: Project) -> None:
    project.write(test_case=UNITTEST)

    tests = project.report()

    found = {id_.rpartition("::")[2]: test for id_, test in tests.items()}
    assert {name: test["outcome"] for name, test in found.items()} == {
        "test_training": "passed",
        "test_too_large": "failed",
        "test_fails": "failed",
        "test_expected": "xfailed",
        "test_sub": "passed",
    }
    assert found["test_fails"]["verdicts"] == []
    assert found["test_training"]["measurement"]["allocated_before"] == 1024
    # setUp runs within the call: the instance keeps its batch, and the model the gradients.
    assert found["test_training"]["measurement"]["allocated_after"] == 1024 + 512 + 1024
    assert found["test_training"]["measurement"]["leaked"] == 0


def test_an_exceeded_limit_is_a_failure_that_unittest_expects(project: Project) -> None:
    project.write(
        test_case="""
        import unittest

        class TestCase(unittest.TestCase):
            @unittest.expectedFailure
            @pytest.mark.gpumem("1MiB", warmup=1)
            def test_exceeds(self):
                torch.empty(2 * 1024**2, device="cuda", dtype=torch.uint8)

            @unittest.expectedFailure
            @pytest.mark.gpumem("2MiB")
            def test_keeps(self):
                torch.empty(2 * 1024**2, device="cuda", dtype=torch.uint8)
        """
    )

    tests = project.report()

    exceeds, keeps = (
        tests[f"test_case.py::TestCase::test_{name}"] for name in ("exceeds", "keeps")
    )
    assert exceeds["outcome"] == "xfailed"
    assert [verdict["passed"] for verdict in exceeds["verdicts"]] == [False]
    assert keeps["outcome"] == "failed"  # an unexpected success
    assert [verdict["passed"] for verdict in keeps["verdicts"]] == [True]


def test_a_unittest_test_runs_its_warm_up(project: Project) -> None:
    project.write(
        test_case="""
        import unittest

        class TestCase(unittest.TestCase):
            runs = []

            @pytest.mark.gpumem(warmup=1)
            def test_warm(self):
                self.runs.append(1)
                torch.empty(len(self.runs) * 128, device="cuda")
        """
    )

    tests = project.report()

    assert peak(tests["test_case.py::TestCase::test_warm"]) == 1024


ASYNC = """
    @pytest.fixture
    async def batch():
        return torch.empty(1024, device="cuda")

    @pytest.mark.gpumem(max_leak=0, warmup=1)
    @pytest.mark.{plugin}
    async def test_async(batch, gpumem):
        with gpumem.phase("work"):
            torch.empty(2048, device="cuda")
"""


@pytest.mark.parametrize("plugin", ["asyncio", "anyio"])
def test_async_tests_are_measured(project: Project, plugin: str) -> None:
    pytest.importorskip("pytest_asyncio" if plugin == "asyncio" else "anyio")
    source = ASYNC.format(plugin=plugin)
    args: tuple[str, ...] = ()
    if plugin == "asyncio":
        source = source.replace("@pytest.fixture", "@__import__('pytest_asyncio').fixture")
        args = ("-o", "asyncio_default_fixture_loop_scope=function")
    project.write(
        conftest="""
        @pytest.fixture
        def anyio_backend():
            return "asyncio"
        """,
        test_async=source,
    )

    tests = project.report(*args, use=(plugin,))

    measurement = tests["test_async.py::test_async"]["measurement"]
    assert measurement["allocated_before"] == 4096
    assert measurement["phases"]["work"]["peak_allocated"] == 4096 + 8192
    assert measurement["leaked"] == 0


def test_shuffled_tests_have_the_same_bytes(project: Project) -> None:
    pytest.importorskip("pytest_randomly")
    project.write(
        test_shuffled="""
        @pytest.fixture(scope="module")
        def shared():
            return torch.empty(1024, device="cuda")

        @pytest.mark.gpumem
        @pytest.mark.parametrize("size", [1, 1000, 2000])
        def test_shared(shared, size):
            torch.empty(size, device="cuda")

        @pytest.mark.gpumem
        def test_alone():
            torch.empty(1, device="cuda")
        """
    )

    runs = []
    for seed in ("1", "2", "3"):
        tests = project.report(f"--randomly-seed={seed}", use=("randomly",))
        runs.append({id_: peak(test) for id_, test in tests.items()})

    assert runs[0] == runs[1] == runs[2]
    assert sorted(runs[0].values()) == [512, 4608, 8192, 12288]


def test_groups_of_workers_are_removed_from_node_ids(project: Project) -> None:
    pytest.importorskip("xdist")
    project.write(
        test_groups="""
        @pytest.mark.gpumem
        @pytest.mark.xdist_group("one")
        @pytest.mark.parametrize("x", ["a@b"])
        def test_grouped(x):
            torch.empty(1, device="cuda")
        """
    )

    result = project.run_apart("-n1", "--dist=loadgroup", "--gpumem-update-baselines")

    assert result.ret == 0
    ((_, stored),) = project.baselines().items()
    assert list(stored) == ["test_grouped[a@b]"]
    again = project.run_apart("-n1", "--dist=loadgroup", "--gpumem-require-baselines")
    assert again.ret == 0
