"""A test is charged for its own fixtures and its body: the same alone, in any order, under -n."""

from __future__ import annotations

from typing import Any

from tests.pytest_project import Project

SHARED_FIXTURES = """
    @pytest.fixture(scope="session")
    def table():
        return torch.empty(1024, device="cuda")  # 4096 B

    @pytest.fixture(scope="module")
    def model(table):
        model = torch.nn.Linear(256, 250, bias=False, device="cuda")  # 256,000 B
        model(torch.empty(1, 256, device="cuda"))  # leaves a cuBLAS workspace behind
        return model

    @pytest.fixture(scope="module")
    def stranger():
        return torch.empty(1_000_000, dtype=torch.uint8, device="cuda")  # 1,000,448 B

    @pytest.fixture
    def batch():
        return torch.empty(7, 256, device="cuda")  # 7,168 B

    @pytest.mark.gpumem
    def test_model(model, batch):
        model(batch)

    @pytest.mark.gpumem
    def test_stranger(stranger):
        torch.empty(512, dtype=torch.uint8, device="cuda")

    @pytest.mark.gpumem
    def test_table(table):
        torch.empty(512, dtype=torch.uint8, device="cuda")

    @pytest.mark.gpumem
    def test_alone():
        torch.empty(512, dtype=torch.uint8, device="cuda")
"""

NAMES = ("test_model", "test_stranger", "test_table", "test_alone")
IDS = [f"test_shared.py::{name}" for name in NAMES]


def charged(test: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of a test's measurement that other tests must not change.

    Stray bytes belong to other tests, and reserved bytes depend on free room in their segments.
    """
    measurement = test["measurement"]
    phases = measurement["phases"]
    numbers = {key: measurement[key] for key in measurement.keys() - {"stray", "peak_reserved"}}
    numbers["phases"] = {
        name: {key: phase[key] for key in phase.keys() - {"peak_reserved"}}
        for name, phase in phases.items()
    }
    return numbers


def test_a_test_is_charged_what_its_fixtures_hold(project: Project) -> None:
    project.write(test_shared=SHARED_FIXTURES)

    tests = project.report()

    before = {
        name: tests[id_]["measurement"]["allocated_before"]
        for name, id_ in zip(NAMES, IDS, strict=True)
    }
    assert before == {
        "test_model": 4_096 + 256_000 + 7_168,
        "test_stranger": 1_000_448,
        "test_table": 4_096,
        "test_alone": 0,
    }
    peaks = {
        name: tests[id_]["measurement"]["peak_allocated"]
        for name, id_ in zip(NAMES, IDS, strict=True)
    }
    assert peaks == {
        "test_model": 4_096 + 256_000 + 7_168 + 7_168 + 8_519_680,
        "test_stranger": 1_000_448 + 512,
        "test_table": 4_096 + 512,
        "test_alone": 512,
    }
    assert tests[IDS[3]]["measurement"]["stray"] == 4_096 + 256_000 + 1_000_448


def test_the_setup_phase_is_the_sequence_of_the_fixtures_setups(project: Project) -> None:
    project.write(test_shared=SHARED_FIXTURES)

    setup = project.report()[IDS[0]]["measurement"]["phases"]["setup"]

    # The peak is within the set-up of model: its input and output, and the workspace.
    assert setup["peak_allocated"] == 4_096 + 256_000 + 2 * 1_024 + 8_519_680
    assert setup["allocated_after"] == 4_096 + 256_000 + 7_168


def test_charged_bytes_are_the_same_in_any_order(project: Project) -> None:
    project.write(test_shared=SHARED_FIXTURES)
    alone = {id_: charged(project.report(id_)[id_]) for id_ in IDS}

    for order in ((0, 1, 2, 3), (3, 2, 1, 0), (1, 2, 0, 3), (2, 0, 3, 1)):
        together = project.report(*(IDS[index] for index in order))
        assert {id_: charged(test) for id_, test in together.items()} == alone


def test_charged_bytes_are_the_same_on_workers(project: Project) -> None:
    project.write(test_shared=SHARED_FIXTURES)
    alone = {id_: charged(test) for id_, test in project.report().items()}

    spread = project.report("-n2", apart=True)

    assert {id_: charged(test) for id_, test in spread.items()} == alone


def test_fixtures_requested_dynamically_are_charged_to_the_test(project: Project) -> None:
    project.write(
        test_dynamic="""
        @pytest.fixture(scope="module")
        def inner():
            return torch.empty(1024, device="cuda")

        @pytest.fixture(scope="module")
        def outer(request):
            scratch = torch.empty(4096, device="cuda")
            return request.getfixturevalue("inner")

        @pytest.mark.gpumem
        def test_first(inner):
            torch.empty(512, dtype=torch.uint8, device="cuda")

        @pytest.mark.gpumem
        def test_by_fixture(outer):
            torch.empty(512, dtype=torch.uint8, device="cuda")

        @pytest.mark.gpumem
        def test_by_fixture_again(outer):
            torch.empty(512, dtype=torch.uint8, device="cuda")

        @pytest.mark.gpumem
        def test_in_body(request):
            torch.empty(512, dtype=torch.uint8, device="cuda")
            request.getfixturevalue("inner")
        """
    )
    names = ("test_first", "test_by_fixture", "test_by_fixture_again", "test_in_body")
    ids = [f"test_dynamic.py::{name}" for name in names]

    alone = {id_: project.report(id_)[id_]["measurement"] for id_ in ids}
    together = {id_: test["measurement"] for id_, test in project.report(*ids).items()}

    assert {id_: test["peak_allocated"] for id_, test in alone.items()} == dict.fromkeys(ids, 4_608)
    for id_ in ids:
        assert together[id_]["peak_allocated"] == alone[id_]["peak_allocated"]
        assert together[id_]["allocated_before"] == alone[id_]["allocated_before"] == 4_096
        assert together[id_]["allocated_after"] == alone[id_]["allocated_after"] == 4_096
        assert together[id_]["leaked"] == alone[id_]["leaked"] == 0


def test_a_fixture_that_overrides_and_requests_another_is_charged_with_it(project: Project) -> None:
    project.write(
        conftest="""
        @pytest.fixture(scope="session")
        def weights():
            return [torch.empty(1024, device="cuda")]
        """,
        test_extends="""
        @pytest.fixture(scope="module")
        def weights(weights):
            return weights + [torch.empty(2048, device="cuda")]

        @pytest.mark.gpumem
        def test_extended(weights):
            torch.empty(512, dtype=torch.uint8, device="cuda")
        """,
        test_plain="""
        @pytest.mark.gpumem
        def test_plain(weights):
            torch.empty(512, dtype=torch.uint8, device="cuda")
        """,
    )

    tests = project.report("test_plain.py", "test_extends.py")

    assert tests["test_plain.py::test_plain"]["measurement"]["peak_allocated"] == 4_608
    extended = tests["test_extends.py::test_extended"]["measurement"]
    assert (extended["peak_allocated"], extended["stray"]) == (4_096 + 8_192 + 512, 0)


def test_each_parameter_of_a_fixture_is_charged_separately(project: Project) -> None:
    project.write(
        test_params="""
        @pytest.fixture(scope="module", params=[1024, 4096])
        def buffer(request):
            yield torch.empty(request.param, dtype=torch.uint8, device="cuda")

        @pytest.mark.gpumem
        def test_buffer(buffer):
            torch.empty(512, dtype=torch.uint8, device="cuda")
        """
    )

    tests = project.report()

    assert {id_: test["measurement"]["peak_allocated"] for id_, test in tests.items()} == {
        "test_params.py::test_buffer[1024]": 1_536,
        "test_params.py::test_buffer[4096]": 4_608,
    }


def test_memory_of_xunit_setup_is_charged_to_the_test(project: Project) -> None:
    project.write(
        test_xunit="""
        class TestX:
            @classmethod
            def setup_class(cls):
                cls.weight = torch.empty(1024, device="cuda")

            def setup_method(self):
                self.batch = torch.empty(2048, device="cuda")

            @pytest.mark.gpumem(max_leak=0)
            def test_x(self):
                self.output = torch.empty(512, dtype=torch.uint8, device="cuda")
        """
    )

    measurement = project.report()["test_xunit.py::TestX::test_x"]["measurement"]

    assert measurement["allocated_before"] == 4_096 + 8_192
    assert (measurement["allocated_after"], measurement["leaked"]) == (4_096 + 8_192 + 512, 0)


def test_a_shared_fixture_of_an_unmarked_test_is_set_up_again_on_the_gpu(project: Project) -> None:
    project.write(
        test_mixed="""
        @pytest.fixture(scope="module")
        def device():
            return "cuda" if torch.cuda.is_available() else "cpu"

        @pytest.fixture(scope="module")
        def weight(device):
            return torch.empty(1024, device=device)

        @pytest.fixture(scope="module")
        def has_gpu():
            return torch.cuda.is_available()

        @pytest.fixture(scope="module")
        def tried():
            try:
                yield torch.zeros(1).cuda()
                torch.empty(1, device="cuda")
            except (AssertionError, RuntimeError):
                yield torch.zeros(1)

        @pytest.fixture(scope="module")
        def server():
            print("server starts")
            return {"port": 80}

        def test_plain(weight, has_gpu, tried, server):
            assert weight.sum().device.type == tried.device.type == "cpu"
            assert not has_gpu

        @pytest.mark.gpumem
        def test_marked(weight, has_gpu, tried, server):
            assert weight.is_cuda and tried.is_cuda and has_gpu
            torch.empty(512, dtype=torch.uint8, device="cuda")
        """
    )
    plain, marked = "test_mixed.py::test_plain", "test_mixed.py::test_marked"

    for order in ((plain, marked, plain), (marked, plain, marked)):
        result = project.run("-s", "--keep-duplicates", *order)
        assert result.ret == 0
        assert result.stdout.str().count("server starts") == 1

    assert project.report(plain, marked)[marked]["measurement"]["peak_allocated"] == 5_120


def test_a_shared_fixture_is_charged_after_an_unmarked_test_has_set_it_up(
    project: Project,
) -> None:
    project.write(
        test_mixed="""
        @pytest.fixture(scope="session")
        def weight():
            return torch.empty(1024, device="cuda")

        def test_plain(weight):
            assert weight.is_cuda

        @pytest.mark.gpumem
        def test_marked(weight):
            torch.empty(512, dtype=torch.uint8, device="cuda")
        """
    )
    plain, marked = "test_mixed.py::test_plain", "test_mixed.py::test_marked"
    for order in ([marked], [plain, marked]):
        tests = project.report("--gpumem-sim-scope=session", *order)
        assert tests[marked]["measurement"]["peak_allocated"] == 4_096 + 512


def test_a_shared_fixture_is_set_up_again_on_each_gpu_model(project: Project) -> None:
    project.write(
        test_models="""
        @pytest.fixture(scope="module")
        def weight():
            return torch.empty(1024, device="cuda")

        @pytest.mark.gpumem(gpu=["T4", "H100"])
        def test_weight(weight):
            weight @ torch.empty(1024, 1024, device="cuda")
        """
    )

    tests = project.report()

    t4, h100 = (tests[f"test_models.py::test_weight[{name}]"] for name in ("T4", "H100"))
    # cuBLAS takes 8,519,680 B on a T4 and 33,554,432 B on an H100.
    assert h100["measurement"]["peak_allocated"] - t4["measurement"]["peak_allocated"] == 25_034_752
    assert {test["measurement"]["allocated_before"] for test in tests.values()} == {4_096}


def test_a_fixture_of_another_parameter_reserves_as_much(project: Project) -> None:
    project.write(
        test_parameters="""
        @pytest.fixture(scope="module", params=[1, 2])
        def shared(request):
            return torch.empty(1 << 20, device="cuda")

        @pytest.mark.gpumem
        def test_it(shared):
            pass
        """
    )

    tests = project.report()

    reserved = [test["measurement"]["peak_reserved"] for test in tests.values()]
    assert reserved == [20 << 20] * 2


def test_a_fixture_that_the_body_requests_leaves_the_bodys_cached_segments(
    project: Project,
) -> None:
    project.write(
        test_requested="""
        @pytest.fixture
        def inner():
            return torch.empty(1 << 10, device="cuda")

        @pytest.mark.gpumem
        def test_it(request):
            torch.empty(5 << 20, device="cuda")
            before = torch.cuda.memory_reserved()
            request.getfixturevalue("inner")
            assert torch.cuda.memory_reserved() >= before == 20 << 20
        """
    )

    project.run().assert_outcomes(passed=1)
