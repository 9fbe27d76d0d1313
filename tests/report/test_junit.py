from dataclasses import replace

from pytest_gpumem.report.record import set_user_properties, user_properties
from tests.report.example_run import MIB, failing, measured, passing, phase, record


def test_the_numbers_are_flat_properties() -> None:
    assert user_properties(failing()) == [
        ("gpumem_environment", "sim-A100-40GB-torch2.13"),
        ("gpumem_simulated", "yes"),
        ("gpumem_peak_allocated", 83_886_080),
        ("gpumem_peak_reserved", 100_663_296),
        ("gpumem_allocated_after", 8_388_608),
        ("gpumem_leaked", 0),
        ("gpumem_cublas_workspace", 8_519_680),
        ("gpumem_phase_call_peak_allocated", 83_886_080),
        ("gpumem_phase_forward_peak_allocated", 83_886_080),
        ("gpumem_phase_step_peak_allocated", 41_943_040),
        ("gpumem_verdict", "failed"),
        ("gpumem_over", "forward +16.0 MiB over baseline"),
    ]


def test_an_unknown_number_has_no_property() -> None:
    broken = replace(record("t.py::test_x", measured(MIB, leaked=None)), judged=False)
    names = dict(user_properties(broken))
    assert "gpumem_leaked" not in names
    assert "gpumem_verdict" not in names
    assert [name for name, _ in user_properties(replace(broken, measurement=None))] == [
        "gpumem_environment",
        "gpumem_simulated",
    ]


def test_names_are_words_and_differ_for_a_further_device() -> None:
    two = replace(
        record("t.py::test_x", measured(MIB, phase("first half", MIB))),
        other_devices=(measured(2 * MIB, device="cuda:1"),),
    )
    names = dict(user_properties(two))
    assert names["gpumem_phase_first_half_peak_allocated"] == MIB
    assert names["gpumem_cuda1_peak_allocated"] == 2 * MIB
    assert names["gpumem_peak_allocated"] == MIB


def test_a_rerun_replaces_only_the_properties_of_the_plugin() -> None:
    properties: list[tuple[str, object]] = [("owner", "me")]
    set_user_properties(properties, failing())
    set_user_properties(properties, passing())
    assert properties == [("owner", "me"), *user_properties(passing())]
