import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_gpumem.report.json_report import (
    read_report,
    read_usage,
    report_of,
    write_report,
)
from pytest_gpumem.report.record import TestRecord
from pytest_gpumem.values.environment import Environment
from tests.report.example_run import MIB, SIMULATED, failing, improved, measured, passing, unknown

T4 = Environment(True, "T4", "7.5", "2.13")


def explained() -> TestRecord:
    change = {
        "bytes": 16 * MIB,
        "change": "new",
        "category": "activations",
        "site": "model.py:71",
        "operator": "torch.softmax",
        "module": None,
        "count": 2,
        "shape": [2, 1024, 1024],
        "dtype": "float32",
    }
    limit, base = failing().verdicts
    return replace(failing(), verdicts=(limit, replace(base, explanation=(change,))))


def test_sharing_survives_a_round_trip_through_the_report(tmp_path: Path) -> None:
    span = {"nodeid": "test_a", "worker": "gw0", "begin": 0.0, "end": 1.5, "bytes": MIB}
    use = {"device": "cuda:0", "capacity": 16 * MIB, "spans": [span]}
    shared = write_report(tmp_path / "shared.json", [passing()], [use])
    alone = write_report(tmp_path / "alone.json", [passing()])
    assert read_usage(shared) == [use]
    assert read_usage(alone) == []
    assert "usage" not in json.loads(alone.read_text(encoding="utf-8"))
    with pytest.raises(ValueError, match="not of type 'integer'"):
        write_report(tmp_path / "no.json", [passing()], [{**use, "capacity": "much"}])


def test_the_report_has_the_documented_shape(tmp_path: Path) -> None:
    path = write_report(tmp_path / "report.json", [explained()])
    data = json.loads(path.read_text(encoding="utf-8"))
    assert data["schema_version"] == 1
    assert data["environment"]["gpu"] == "A100-40GB"
    (test,) = data["tests"]
    assert test["nodeid"] == "tests/test_model.py::test_step"
    assert test["outcome"] == "failed"
    assert test["prediction"] is None
    measurement = test["measurement"]
    assert measurement["peak_allocated"] == 83_886_080
    assert measurement["cublas_workspace"] == 8_519_680
    assert measurement["phases"]["forward"]["peak_allocated"] == 83_886_080
    assert measurement["phases"]["forward"]["parent"] == "call"
    verdict = test["verdicts"][1]
    assert verdict["phase"] == "forward"
    assert (verdict["limit"], verdict["reference"]) == (67_108_864, 67_108_864)
    assert verdict["explanation"][0]["bytes"] == verdict["actual"] - verdict["reference"]
    assert test["verdicts"][0]["reference"] is None


def test_a_report_survives_a_round_trip(tmp_path: Path) -> None:
    records = [
        replace(explained(), nvml={"absent": "the NVIDIA driver is not loaded"}),
        replace(improved(), other_devices=(measured(MIB, device="cuda:1"),), environment=T4),
        replace(unknown(), baseline={"peak_allocated": 5, "phases": {}}, expectation={"max": 9}),
        replace(passing(), measurement=None, judged=False),
    ]
    path = write_report(tmp_path / "report.json", records)
    assert read_report(path) == sorted(records, key=lambda record: record.nodeid)


def test_the_report_s_environment_is_that_of_most_tests() -> None:
    elsewhere = replace(passing("test_a"), environment=T4)
    report = report_of([elsewhere, passing("test_b"), passing("test_c")])
    assert report["environment"] == SIMULATED.to_dict()
    assert [test.get("environment") for test in report["tests"]] == [T4.to_dict(), None, None]


def test_a_run_without_tests_is_a_report_too(tmp_path: Path) -> None:
    path = write_report(tmp_path / "report.json", [])
    assert json.loads(path.read_bytes()) == {"schema_version": 1, "environment": None, "tests": []}
    assert read_report(path) == []


def test_folders_are_created_and_an_old_report_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "report.json"
    write_report(path, [failing()])
    write_report(path, [passing()])
    assert [record.nodeid for record in read_report(path)] == ["tests/test_model.py::test_small"]
    assert [file.name for file in path.parent.iterdir()] == ["report.json"]
    assert path.read_bytes().endswith(b"}\n")


def test_a_symbolic_link_is_kept_and_its_target_written(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    written = write_report(tmp_path / "link.json", [passing()])
    assert written == tmp_path / "real.json"
    assert (tmp_path / "link.json").is_symlink()


def test_a_named_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_report(pipe, [])
        assert json.loads(os.read(reader, 10_000))["tests"] == []
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def test_a_path_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    for path, reason in (
        (tmp_path / "file" / "report.json", "File exists|Not a directory"),
        (tmp_path, "Is a directory"),
        (Path("/"), "Is a directory"),
        (tmp_path / "a\0b", "embedded null byte|lstat: embedded null character in path"),
        (tmp_path / ("x" * 10_000), "File name too long"),
    ):
        with pytest.raises(ValueError, match=f"^report .* cannot be written: ({reason}); give"):
            write_report(path, [passing()])
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_a_record_that_breaks_the_schema_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"was not written: 'rerun' is not one of .* at \$\.tests"):
        write_report(tmp_path / "report.json", [replace(passing(), outcome="rerun")])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"{", r"not valid JSON .*; write it with --gpumem-report json:PATH$"),
        (b"[]", r"\[\] is not of type 'object' at \$;"),
        (b'{"schema_version": 1, "tests": []}', "'environment' is a required property"),
        (b'{"schema_version": 2}', "has schema_version 2 and this pytest-gpumem reads 1"),
        (b"\xff", "not valid JSON"),
    ],
)
def test_a_file_that_is_no_report_is_refused(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=sentence):
        read_report(path)


def test_a_missing_report_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read: No such file or directory; check"):
        read_report(tmp_path / "report.json")


def test_the_shipped_schema_is_a_valid_one() -> None:
    from importlib.resources import files

    from jsonschema import Draft202012Validator

    text = files("pytest_gpumem.report").joinpath("schema.json").read_text(encoding="utf-8")
    Draft202012Validator.check_schema(json.loads(text))
