"""Memory that a test leaves, or its traceback keeps, changes no other test's numbers."""

from __future__ import annotations

from typing import Any

from tests.pytest_project import Project

TESTS = """
    KEPT = []

    @pytest.fixture(scope="module")
    def shared():
        torch.empty(3_000_000, device="cuda")
        return [torch.empty(size, device="cuda") for size in (400_000, 100_000, 1_000)]

    @pytest.mark.gpumem
    def test_fails():
        blocks = [torch.empty(300_000, device="cuda") for _ in range(9)]
        del blocks[::2]
        raise AssertionError

    @pytest.mark.gpumem
    def test_leaks(shared):
        KEPT.extend(torch.empty(size, device="cuda") for size in (300_000, 128, 600_000, 128))
        del KEPT[::2]

    @pytest.mark.gpumem
    def test_alone():
        torch.empty(300_000, device="cuda")

    @pytest.mark.gpumem
    def test_with_shared(shared):
        torch.empty(350_000, device="cuda")

    @pytest.mark.gpumem
    def test_changes_shared(shared):
        shared.append(torch.empty(500_000, device="cuda"))

    @pytest.mark.gpumem
    def test_with_shared_again(shared):
        torch.empty(350_000, device="cuda")
"""
COUNTED = ("test_alone", "test_with_shared", "test_with_shared_again")


def numbers(project: Project, *names: str) -> dict[str, Any]:
    measured = {}
    for nodeid, test in project.report(*(f"test_it.py::{name}" for name in names)).items():
        strangers = ("stray", "leaked")
        measured[nodeid.partition("::")[2]] = {
            key: value for key, value in test["measurement"].items() if key not in strangers
        }
    return measured


def test_numbers_equal_those_of_the_test_run_alone(project: Project) -> None:
    project.write(test_it=TESTS)

    together = numbers(project)

    for name in COUNTED:
        assert numbers(project, name)[name] == together[name]


def test_numbers_do_not_depend_on_the_order(project: Project) -> None:
    project.write(test_it=TESTS)

    forwards = numbers(project)
    backwards = numbers(project, *COUNTED[::-1], "test_changes_shared", "test_leaks", "test_fails")

    assert {name: backwards[name] for name in COUNTED} == {name: forwards[name] for name in COUNTED}
    assert forwards["test_alone"]["peak_reserved"] == 20 * 1024 * 1024


THREADS = """
    import threading, time

    stop, go_on, worked = threading.Event(), threading.Event(), threading.Event()

    def work():
        kept = [torch.empty(1000, 1000, device="cuda")]
        while not stop.is_set():
            if go_on.wait(0.05):
                go_on.clear()
                kept.append(torch.empty(1000, 1000, device="cuda") @ kept[0])
                worked.set()

    def let_it_work():
        worked.clear()
        go_on.set()
        assert worked.wait(60)

    @pytest.mark.gpumem
    def test_starts_a_thread():
        threading.Thread(target=work, name="prefetcher").start()
        let_it_work()

    @pytest.mark.gpumem
    def test_another():
        kept = torch.empty(1024, device="cuda")
        let_it_work()
        assert torch.cuda.memory_allocated() == 4096

    def test_stops_it():
        stop.set()

    @pytest.mark.gpumem
    def test_afterwards():
        time.sleep(0.2)
        torch.empty(1024, device="cuda")
"""


def test_a_thread_that_outlives_its_test_is_charged_to_no_other_test(project: Project) -> None:
    project.write(test_it=THREADS)

    tests = project.report()
    first, another, afterwards = (
        tests[f"test_it.py::{name}"]["measurement"]
        for name in ("test_starts_a_thread", "test_another", "test_afterwards")
    )

    assert first["peak_allocated"] > 2 * 4_000_000
    assert (another["peak_allocated"], another["cublas_workspace"]) == (4096, 0)
    assert (
        "test_it.py::test_starts_a_thread left 'prefetcher' running in a thread: what it allocates "
        "is not charged"
    ) in another["notes"]
    assert afterwards["peak_allocated"] == 4096


def test_a_thread_of_a_shared_fixture_is_charged_to_tests_with_it(project: Project) -> None:
    project.write(
        test_it=THREADS.partition("@pytest.mark")[0]
        + """
    @pytest.fixture(scope="module")
    def worker():
        thread = threading.Thread(target=work, name="prefetcher")
        thread.start()
        yield
        stop.set()
        thread.join()

    @pytest.mark.gpumem
    @pytest.mark.parametrize("time", [1, 2])
    def test_uses_it(worker, time):
        before = torch.cuda.memory_allocated()
        let_it_work()
        assert torch.cuda.memory_allocated() > before
"""
    )

    for test in project.report().values():
        assert (test["outcome"], test["measurement"]["notes"]) == ("passed", [])


def test_tasks_left_to_an_executor_are_charged_to_no_other_test(project: Project) -> None:
    project.write(
        test_it=THREADS.partition("@pytest.mark")[0]
        + """
    from concurrent.futures import ThreadPoolExecutor

    executor = ThreadPoolExecutor(2)

    @pytest.mark.gpumem
    def test_submits():
        executor.submit(work)
        let_it_work()

    @pytest.mark.gpumem
    def test_another():
        own = executor.submit(torch.empty, 1024, device="cuda").result()
        let_it_work()
        assert torch.cuda.memory_allocated() == 4096
        stop.set()
        executor.shutdown()
"""
    )

    another = project.report()["test_it.py::test_another"]["measurement"]

    assert another["peak_allocated"] == 4096
    assert another["notes"] == [
        "test_it.py::test_submits left 'work' running in a thread: what it allocates is not charged"
    ]


def test_unmeasured_tests_keep_nothing_but_recorded_properties(project: Project) -> None:
    project.write(
        test_it="""
        from pytest_gpumem.simulated.simulation import active_simulation

        KEPT = []

        def events():
            return len(active_simulation().current.allocator.trace)

        def test_allocates():
            KEPT.append(torch.empty(1_000, device="cuda"))
            assert events() > 0

        def test_forgets_events_and_not_memory():
            assert events() == 0
            assert torch.cuda.memory_allocated() == 4096
            torch.cuda.memory._record_memory_history(stacks="python")
            KEPT.append(torch.empty(128, device="cuda"))

        def test_remembers_what_is_recorded():
            (event,) = torch.cuda.memory._snapshot()["device_traces"][0]
            assert event["action"] == "alloc"
            torch.cuda.memory._record_memory_history(None)
        """
    )

    project.run("--gpumem-sim-scope=session").assert_outcomes(passed=3)


def test_what_is_logged_stays_as_text(project: Project) -> None:
    project.write(
        test_it="""
    import logging

    log = logging.getLogger(__name__)

    def doubled(x):
        y = x * 2
        try:
            raise KeyError("no such backend")
        except KeyError as error:
            log.warning("fell back: %s", error)
            log.exception("failed")
        log.error("it calls %s", lambda: x)
        return y[:1].clone()

    @pytest.fixture
    def halves():
        half = torch.ones(2**20, device="cuda")
        doubled(half)
        return half.half()

    @pytest.mark.gpumem(max_leak=0)
    def test_logs(halves):
        doubled(halves)
        torch.ones(2**20, device="cuda")

    @pytest.mark.gpumem
    def test_reads(caplog):
        doubled(torch.ones(1, device="cuda"))
        assert isinstance(caplog.records[0].args[0], KeyError)
        assert caplog.records[1].exc_info[0] is KeyError

    @pytest.mark.gpumem
    def test_reads_later(request):
        doubled(torch.ones(1, device="cuda"))
        caplog = request.getfixturevalue("caplog")
        assert caplog.messages[0] == "fell back: 'no such backend'"
        assert "KeyError" in caplog.text
    """
    )

    report = project.report(use=("logging",))

    logs = report["test_it.py::test_logs"]["measurement"]
    phases = logs["phases"]
    # In float32: x, y and a clone of one number; then halves, and y of these.
    assert phases["setup"]["peak_allocated"] == 2 * 4 * 2**20 + 512
    assert phases["setup"]["allocated_after"] == 2 * 2**20
    assert (phases["call"]["peak_allocated"], logs["leaked"]) == (6 * 2**20, 0)
    assert [report[f"test_it.py::test_{name}"]["outcome"] for name in ("reads", "reads_later")] == [
        "passed",
        "passed",
    ]
