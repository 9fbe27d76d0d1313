"""Tests that need values run a second time, on a simulated device that computes them."""

from __future__ import annotations

import sys

import pytest

from tests.pytest_project import Project

TESTS = """
    import unittest

    runs = []

    @pytest.fixture(scope="module")
    def weight():
        runs.append("weight")
        return torch.rand(64, 64, device="cuda")

    @pytest.fixture(scope="module")
    def name():
        runs.append("name")
        return "x"

    @pytest.fixture
    def x():
        yield torch.rand(64, device="cuda")
        runs.append("end of x")

    @pytest.fixture
    def chosen(x):
        return x[x < 2]

    @pytest.mark.gpumem
    def test_shapes(weight, x):
        weight @ x

    @pytest.mark.gpumem(max="9MiB")
    def test_condition(weight, x, name, gpumem):
        with gpumem.phase("product"):
            y = weight @ x
        if (y > 0).all():
            runs.append("condition")
        assert "product" in gpumem.phases

    @pytest.mark.gpumem
    def test_true(weight, x):
        torch.testing.assert_close(weight @ x, torch.mv(weight, x))

    @pytest.mark.gpumem
    def test_false(weight, x):
        torch.testing.assert_close(weight @ x, x)

    @pytest.mark.gpumem
    def test_loss(x):
        assert 0 < x.mean().item() < 1

    @pytest.mark.gpumem
    def test_loss_as_float(x):
        assert float(x.mean()) > 0

    @pytest.mark.gpumem
    def test_fixture(chosen):
        assert chosen.shape == (64,)

    @pytest.mark.xfail(strict=True)
    @pytest.mark.gpumem
    def test_expected(x):
        assert x.sum() < 0

    @pytest.mark.gpumem
    class TestClass(unittest.TestCase):
        def setUp(self):
            self.x = torch.rand(64, device="cuda")

        def test_true(self):
            self.assertTrue((self.x < 2).all())

        def test_false(self):
            self.assertTrue((self.x > 2).all())

    @pytest.mark.gpumem
    def test_shapes_again(weight, x):
        weight @ x

    def test_runs():
        assert runs[:9] == [
            "weight", "end of x",
            "name", "end of x", "weight", "condition", "end of x",
            "weight", "end of x",
        ]
"""


def test_conditions_shapes_and_assertions_use_real_values(project: Project) -> None:
    project.write(test_values=TESTS)

    result = project.run("-rA")

    result.assert_outcomes(passed=9, failed=2, xfailed=1)
    result.stdout.fnmatch_lines_random(
        [
            "FAILED test_values.py::test_false - AssertionError: Tensor-likes are not close!",
            "FAILED test_values.py::TestClass::test_false*",
            "run again with real values on the CPU: bool() in torch.testing._comparison at test_v*",
        ]
    )
    result.stdout.no_fnmatch_line("*During handling of the above exception*")


def test_a_failure_after_an_assumed_value_runs_again_with_values(project: Project) -> None:
    body = """
        @pytest.mark.gpumem
        def test_an_overflow_halves_the_scale():
            weight = torch.rand(4, device="cuda", requires_grad=True)
            optimizer = torch.optim.SGD([weight])
            scaler = torch.amp.GradScaler("cuda", init_scale=2.0**16)
            scaler.scale((weight * (torch.rand(4, device="cuda") + 1) * 1e38).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == 2.0**15
    """
    project.write(test_overflow=body)

    project.run().assert_outcomes(passed=1)


def test_a_second_run_has_the_same_numbers_as_one_without_values(project: Project) -> None:
    body = """
        @pytest.fixture
        def x():
            return torch.rand(1000, device="cuda")

        @pytest.mark.gpumem
        def test_shapes(x):
            (x > 0).all()

        @pytest.mark.gpumem
        def test_values(x):
            assert (x > 0).all()
    """
    project.write(test_numbers=body)

    tests = project.report()

    shapes = tests["test_numbers.py::test_shapes"]["measurement"]
    values = tests["test_numbers.py::test_values"]["measurement"]
    assert values["peak_allocated"] == shapes["peak_allocated"] == 4096 + 1024 + 512
    for number in ("peak_reserved", "allocated_before", "allocated_after", "leaked"):
        assert values[number] == shapes[number]
    assert shapes["notes"] == []
    assert values["notes"] == [
        "run again with real values on the CPU: bool() at test_numbers.py:14 depends on a value of "
        "a CUDA tensor"
    ]


@pytest.mark.parametrize(("setting", "runs"), [("always", 1), ("auto", 2)])
def test_values_may_be_computed_in_the_first_run(project: Project, setting: str, runs: int) -> None:
    body = """
        runs = []

        @pytest.mark.gpumem
        def test_values():
            runs.append(1)
            assert torch.rand(3, device="cuda").sum() > 0

        def test_count():
            assert len(runs) == RUNS
    """
    project.write(test_setting=body.replace("RUNS", str(runs)))
    project.write_ini(f"gpumem_sim_values = {setting}")

    project.run().assert_outcomes(passed=2)


def test_a_test_whose_values_exceed_host_memory_is_skipped(project: Project) -> None:
    body = """
        @pytest.mark.gpumem
        def test_values():
            x = torch.rand(1000, 1000, device="cuda")
            assert x.sum() > 0
    """
    project.write(test_large=body, conftest=LITTLE_MEMORY)

    result = project.run("-rs")

    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(
        ["SKIPPED*bool() at test_large.py:*; and real values take more than 1,000,000 bytes*"]
    )


LITTLE_MEMORY = """
    from pytest_gpumem.simulated.machine.values import reading as values

    @pytest.fixture(autouse=True, scope="session")
    def little_memory():
        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(values, "available_memory", lambda: 2_000_000)
            yield
"""


def test_a_shared_fixture_that_cannot_be_simulated_skips_its_tests_only(project: Project) -> None:
    body = """
        @pytest.fixture(scope="module")
        def chosen():
            x = torch.rand(10, device="cuda")
            return x[x < 2]

        @pytest.mark.gpumem
        def test_one(chosen):
            assert chosen.shape == (10,)

        @pytest.mark.gpumem
        def test_two(chosen):
            assert chosen.shape == (10,)
    """
    project.write(test_shared=body)

    project.run("--gpumem-sim-values=never").assert_outcomes(skipped=2)
    project.run().assert_outcomes(passed=2)


@pytest.mark.parametrize("scope", ["test", "session"])
def test_a_shared_fixture_of_unmarked_tests_stays_on_its_device(
    project: Project, scope: str
) -> None:
    body = """
        @pytest.fixture(scope="session")
        def pair():
            return torch.zeros(3, device="cuda"), torch.ones(3, device="cuda")

        @pytest.mark.parametrize("_", range(2))
        def test_decides(pair, _):
            assert pair[0].device.type == "cuda"
            assert torch.rand(4, device="cuda").sum() < 5
    """
    project.write(test_pair=body)

    project.run("--gpumem-all", f"--gpumem-sim-scope={scope}").assert_outcomes(passed=2)


def test_a_shared_process_group_exists_in_the_second_run(project: Project) -> None:
    body = """
        from torch import distributed

        @pytest.fixture(scope="module")
        def group():
            store = distributed.HashStore()
            distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
            yield
            distributed.destroy_process_group()

        @pytest.mark.gpumem
        @pytest.mark.parametrize("_", range(2))
        def test_decides(group, _):
            assert distributed.is_initialized()
            assert torch.rand(4, device="cuda").sum() < 5
    """
    project.write(test_group=body)

    project.run().assert_outcomes(passed=2)


def test_a_number_may_be_recorded_without_a_second_run(project: Project) -> None:
    body = """
        @pytest.mark.gpumem
        def test_loss(record_property):
            record_property("loss", torch.rand(3, device="cuda").mean().item())
    """
    project.write(test_recorded=body)

    project.run_apart("-n1").assert_outcomes(passed=1)


def test_integers_are_counted_and_printed_in_one_run(project: Project) -> None:
    body = """
        @pytest.mark.gpumem
        def test_counts():
            hits = 0
            for _ in range(2):
                found = torch.rand(64, 10, device="cuda").argmax(1)
                hits += (found == torch.arange(64, device="cuda")).sum().item()
            print(f"{100 * hits / 128:.1f} %", found)

        @pytest.mark.gpumem
        @pytest.mark.parametrize("use", ["size", "index", "comparison", "conversion"])
        def test_decides(use):
            place = torch.rand(64, device="cuda").argmax().item()
            match use:
                case "size":
                    torch.empty(1024 * (1 + place), device="cuda")
                case "index":
                    assert len(range(64)[place:]) == 64 - place
                case "comparison":
                    assert 0 <= place < 64
                case "conversion":
                    assert str(float(place)).endswith(".0")
    """
    project.write(test_integers=body)

    notes = {name: test["measurement"]["notes"] for name, test in project.report().items()}

    again = {name.partition("::")[2] for name, found in notes.items() if "again" in str(found)}
    uses = ("size", "index", "comparison", "conversion")
    assert again == {f"test_decides[{use}]" for use in uses}
    (note,) = notes["test_integers.py::test_counts"]
    assert note.startswith("item() at test_integers.py:")
    assert note.endswith("read a value that is not computed: it got 0")


def test_second_runs_happen_in_workers_too(project: Project) -> None:
    project.write(test_values=TESTS.replace("def test_runs", "def not_a_test"))

    result = project.run_apart("-n1")

    result.assert_outcomes(passed=8, failed=2, xfailed=1)


SLOW_HOST = """
    from pytest_gpumem.simulated.machine.values import work

    @pytest.fixture(autouse=True, scope="session")
    def slow_host():
        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(work, "speed", lambda dtype: 1e9)
            yield
"""
"""A machine that multiplies and adds 10⁹ numbers in a second."""


def test_a_second_run_estimated_as_too_long_is_not_started(project: Project) -> None:
    body = """
        @pytest.mark.gpumem
        def test_values():
            x = torch.rand(1000, 1000, device="cuda")
            for _ in range(20):
                x = x @ x
            assert x.sum() > 0

        @pytest.mark.gpumem
        def test_one_product():
            x = torch.rand(1000, 1000, device="cuda")
            assert (x @ x).sum() > 0
    """
    project.write(test_long=body, conftest=SLOW_HOST)

    result = project.run("-rs")

    # 20 products of 2 · 1000³ operations each.
    result.assert_outcomes(skipped=1, passed=1)
    result.stdout.fnmatch_lines(
        [
            "SKIPPED*bool() at test_long.py:9 depends on *; and computing values on the CPU takes "
            "at least 40 s, more than the 30 s that --gpumem-sim-values-limit allows"
        ]
    )
    project.run("--gpumem-sim-values-limit=41").assert_outcomes(passed=2)


@pytest.mark.parametrize(
    "work",
    [
        "x = x.sin() if device else x",  # without a formula
        "x = x @ x if x.sum() > 0 else x",  # the value is needed before the first run reaches it
    ],
)
def test_a_second_run_that_exceeds_its_time_limit_is_stopped(project: Project, work: str) -> None:
    body = """
        @pytest.fixture
        def device():
            yield "cuda"
            torch.rand(3, device="cuda").add_(1)

        @pytest.mark.gpumem
        def test_values(device):
            x = torch.rand(1000, 1000, device=device)
            assert x.sum() > 0
            for _ in range(100_000):
                WORK

        @pytest.mark.gpumem
        def test_next(device):
            assert torch.rand(3, device=device).sum() > 0
    """
    project.write(test_long=body.replace("WORK", work))

    result = project.run("-rs", "--gpumem-sim-values-limit=0.5")

    result.assert_outcomes(skipped=1, passed=1)
    result.stdout.fnmatch_lines(
        ["SKIPPED*bool() at test_long.py:12 *; and computing values on the CPU takes longer than "
         "the 0.5 s that --gpumem-sim-values-limit allows"]
    )  # fmt: skip


@pytest.mark.skipif(sys.platform == "win32", reason="has no pseudo-terminals")
@pytest.mark.parametrize(
    ("options", "is_shown"), [((), True), (("-s",), False), (("-o", "log_cli=true"), False)]
)
def test_a_terminal_shows_the_progress_of_a_second_run(
    project: Project, options: tuple[str, ...], is_shown: bool
) -> None:
    body = """
        from pytest_gpumem.simulated.machine.values import work

        work.SHOWN_EVERY = 0

        @pytest.mark.gpumem
        def test_values():
            print("captured")
            assert torch.rand(3, device="cuda").sum() > 0
    """
    project.write(test_shown=body)

    written = project.run_on_terminal(*options)

    line = (
        "test_shown.py::test_values: run again with real values, because bool() at "
        "test_shown.py:11 depends on a value of a CUDA tensor"
    )
    assert (line in written) is is_shown
    assert (f"{line}: 0 s of at most 30 s" in written) is is_shown
    # The line is erased, and the outcome follows the name of the module.
    assert ("\x1b[2K\x1b[A\x1b[15G" in written) is is_shown
    assert "1 passed" in written


def test_an_interrupt_of_the_second_run_loses_no_report(project: Project) -> None:
    project.write(
        test_it="""
        @pytest.mark.gpumem
        def test_first():
            torch.empty(512, dtype=torch.uint8, device="cuda")

        @pytest.mark.gpumem
        def test_interrupted(tmp_path):
            if torch.rand(10, device="cuda").sum() > 0:
                raise KeyboardInterrupt
        """
    )

    result = project.run_apart("--gpumem-report=json:report.json")

    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert list(project.written_report()) == ["test_it.py::test_first"]


def test_tmp_path_is_usable_after_a_fixture_that_needs_values(project: Project) -> None:
    project.write(
        test_it="""
        @pytest.fixture
        def model(tmp_path):
            (tmp_path / "file").write_text("once")
            assert len(list(tmp_path.iterdir())) == 1
            return torch.ones(3, device="cuda") if torch.rand(1, device="cuda") >= 0 else None

        @pytest.mark.gpumem
        def test_it(model, tmp_path):
            assert model.sum().item() == 3
        """
    )

    project.run_apart().assert_outcomes(passed=1)
