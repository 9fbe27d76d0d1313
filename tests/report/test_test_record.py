import json
from dataclasses import replace

from pytest_gpumem.report.record import TestRecord
from tests.report.example_run import MIB, failing, improved, measured, passing, unknown


def test_a_record_survives_a_round_trip_through_json() -> None:
    full = replace(
        improved(),
        other_devices=(measured(MIB, device="cuda:1"),),
        expectation={"max": 5, "gpu": ["T4"]},
        baseline={"peak_allocated": 30 * MIB, "phases": {}},
        nvml={"absent": "the NVIDIA driver is not loaded"},
    )
    for one in (full, failing(), unknown(), replace(passing(), measurement=None)):
        travelled = json.loads(json.dumps(one.to_dict()))
        assert TestRecord.from_dict(travelled) == one


def test_a_record_survives_xdist_s_serializer() -> None:
    import execnet

    dumped = execnet.dumps(failing().to_dict())
    assert TestRecord.from_dict(execnet.loads(dumped)) == failing()


def test_a_memory_failure_is_a_failed_test_with_a_failed_verdict() -> None:
    assert failing().failed
    assert [one.phase for one in failing().broken] == ["forward"]
    assert not replace(failing(), outcome="xfailed").failed
    assert not replace(passing(), outcome="failed").failed


def test_measurements_start_with_the_judged_device() -> None:
    second = measured(MIB, device="cuda:1")
    two = replace(passing(), other_devices=(second,))
    assert [one.device for one in two.measurements] == ["cuda:0", "cuda:1"]
    assert replace(two, measurement=None).measurements == (second,)
