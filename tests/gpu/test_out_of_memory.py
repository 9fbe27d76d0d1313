"""The post-mortem of a body that ran out of memory."""

from __future__ import annotations

from tests.gpu.conftest import CudaProject

SOURCE = """
    @pytest.fixture
    def one_gib_more():
        # Leave room for one GiB, so that nobody else on the device is disturbed.
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        wanted = torch.cuda.memory_reserved() + (1 << 30)
        torch.cuda.set_per_process_memory_fraction(wanted / total)
        yield
        torch.cuda.set_per_process_memory_fraction(1.0)

    def allocate(mib):
        return torch.empty(mib << 20, dtype=torch.uint8, device="cuda")

    @pytest.mark.gpumem
    def test_too_much(one_gib_more):
        kept = allocate(600)
        allocate(500)

    @pytest.mark.gpumem
    def test_expected(one_gib_more):
        with pytest.raises(torch.OutOfMemoryError):
            allocate(2048)
        allocate(1)

    @pytest.mark.gpumem(max="1MiB")
    def test_after():
        allocate(1)
"""


def test_the_record_names_the_request_and_the_holders(cuda: CudaProject) -> None:
    cuda.write(test_oom=SOURCE)

    records = cuda.records()

    assert {name: record["outcome"] for name, record in records.items()} == {
        "test_too_much": "failed",
        "test_expected": "passed",
        "test_after": "passed",
    }
    found = records["test_too_much"]["out_of_memory"]
    source = (cuda.path / "test_oom.py").read_text().splitlines()
    line = 1 + next(i for i, text in enumerate(source) if "dtype=torch.uint8" in text)
    assert found["requested"] == 500 << 20
    assert found["site"] == f"test_oom.py:{line}"
    assert found["allocated"] >= 600 << 20
    holders = [site for site in found["holders"] if site["site"] == f"test_oom.py:{line}"]
    assert sum(site["bytes"] for site in holders) == 600 << 20
    # The device has room; the limit of the process refuses it under any allocator settings.
    assert found["free"] > 500 << 20
    assert found["avoided_by"] == []


def test_the_post_mortem_is_printed_below_the_failure(cuda: CudaProject) -> None:
    cuda.write(test_oom=SOURCE)

    result = cuda.run("-k", "too_much")

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "E *torch.OutOfMemoryError: CUDA out of memory*",
            "out of memory: 500.0 MiB asked for by test_oom.py:*",
            "  600.0 MiB  *test_oom.py:*",
        ]
    )
