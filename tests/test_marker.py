from __future__ import annotations

import json
from typing import Any

import pytest

from pytest_gpumem.marker import Expectation, expectation_of, parse_keyword
from pytest_gpumem.options import MARKER
from pytest_gpumem.sizes import Tolerance

GIVEN: dict[str, Any] = {
    "phases": {"forward": 1},
    "gpu": "T4",
    "baseline": True,
    "exclusive": True,
    "elastic": True,
    "isolate": True,
    "qos": "opportunistic",
}
"""A valid value of each keyword that takes no number."""


def gpumem(*args: Any, **kwargs: Any) -> pytest.Mark:
    # Not pytest.mark.gpumem: these tests also pass where the plugin has not registered it.
    return pytest.Mark("gpumem", args, kwargs, _ispytest=True)


def refusal(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(ValueError) as error:
        expectation_of([gpumem(*args, **kwargs)])
    sentence = str(error.value)
    assert "\n" not in sentence
    return sentence


def test_a_bare_marker_has_the_default_expectation() -> None:
    assert expectation_of([gpumem()]) == Expectation()
    assert Expectation().warmup == 0
    assert Expectation().repeat == 1
    assert Expectation().baseline is None


def test_every_keyword_is_parsed() -> None:
    expectation = expectation_of(
        [
            gpumem(
                max="2GB",
                max_reserved="3GiB",
                max_leak=0,
                phases={"forward": "1GB", "my phase": 512},
                baseline=True,
                tolerance="2% + 1MiB",
                warmup=1,
                repeat=2,
                gpu=["a100-40gb", "T4"],
                min_memory="20GiB",
                quota="4GiB",
                exclusive=True,
                qos="opportunistic",
                priority=-2,
            )
        ]
    )
    assert expectation == Expectation(
        max=2_000_000_000,
        max_reserved=3_221_225_472,
        max_leak=0,
        phases={"forward": 1_000_000_000, "my phase": 512},
        baseline=True,
        tolerance=Tolerance(2.0, 1_048_576),
        warmup=1,
        repeat=2,
        gpu=("A100-40GB", "T4"),
        min_memory=21_474_836_480,
        quota=4_294_967_296,
        exclusive=True,
        qos="opportunistic",
        priority=-2,
    )


def test_the_one_positional_argument_is_max() -> None:
    assert expectation_of([gpumem("2GB", warmup=1)]) == Expectation(max=2_000_000_000, warmup=1)


def test_one_gpu_needs_no_list() -> None:
    assert expectation_of([gpumem(gpu="t4")]).gpu == ("T4",)
    assert expectation_of([gpumem(gpu=("T4", "L4"))]).gpu == ("T4", "L4")


def test_the_closest_marker_wins_keyword_by_keyword() -> None:
    function = gpumem(max="1GB", phases={"forward": 1})
    klass = gpumem(max="2GB", max_leak=0, phases={"backward": 2})
    module = gpumem(max="3GB", max_leak=512, repeat=3)
    assert expectation_of([function, klass, module]) == Expectation(
        max=1_000_000_000, max_leak=0, repeat=3, phases={"forward": 1}
    )


def test_a_positional_max_wins_over_a_farther_keyword() -> None:
    assert expectation_of([gpumem(1), gpumem(max=2)]).max == 1
    assert expectation_of([gpumem(max=2), gpumem(1)]).max == 2


@pytest.mark.parametrize("keyword", Expectation().to_dict())
def test_none_removes_an_inherited_value(keyword: str) -> None:
    inherited = gpumem(**{keyword: GIVEN.get(keyword, 2)})
    assert expectation_of([inherited]) != Expectation()
    assert expectation_of([gpumem(**{keyword: None}), inherited]) == Expectation()


def test_none_removes_a_default_of_the_project() -> None:
    default = {"max": 5, "tolerance": Tolerance(1.0, 0)}
    assert expectation_of([gpumem(max=None, tolerance=None)], default) == Expectation()


def test_limits_keep_their_written_form() -> None:
    expectation = expectation_of([gpumem("300KB", phases={"forward": " 1 GiB "}, max_leak=512)])
    assert getattr(expectation.max, "written", None) == "300KB"
    assert getattr(expectation.phases["forward"], "written", None) == "1 GiB"
    assert type(expectation.max_leak) is int
    assert {type(value) for value in (expectation.to_dict()["max"], 1)} == {int}


def test_defaults_are_weaker_than_any_marker() -> None:
    defaults = {"max": 5, "max_leak": 6, "baseline": True}
    assert expectation_of([gpumem(max=1), gpumem(baseline=False)], defaults) == Expectation(
        max=1, max_leak=6, baseline=False
    )
    assert defaults == {"max": 5, "max_leak": 6, "baseline": True}


def test_no_marker_leaves_the_defaults() -> None:
    assert expectation_of([], {"max": 5}) == Expectation(max=5)


def test_a_farther_marker_is_checked_though_overridden() -> None:
    with pytest.raises(ValueError, match="max='2 gigs' is not a size"):
        expectation_of([gpumem(max=1), gpumem(max="2 gigs")])


@pytest.mark.parametrize("keyword", ["max", "max_reserved", "max_leak", "min_memory"])
@pytest.mark.parametrize("value", ["2 gigs", -1, 1.5, True, ["1GB"], float("nan")])
def test_an_ill_typed_size_names_keyword_value_and_form(keyword: str, value: object) -> None:
    sentence = refusal(**{keyword: value})
    assert sentence.startswith(f"gpumem marker: {keyword}={value!r} is not a size; write bytes")


@pytest.mark.parametrize("keyword", ["tolerance", "predict"])
def test_an_ill_typed_tolerance_is_refused(keyword: str) -> None:
    assert refusal(**{keyword: 0.01}) == (
        f"gpumem marker: {keyword}=0.01 is not a tolerance; "
        'write "2% + 1MiB", "1%", "1MiB" or bytes as an int'
    )


def test_a_prediction_has_a_tolerance_of_its_own() -> None:
    expectation = expectation_of([pytest.mark.gpumem(predict="1%").mark])
    assert (expectation.predict, expectation.tolerance) == (Tolerance(1.0, 0), None)


@pytest.mark.parametrize("value", [1, 0, "yes"])
def test_an_ill_typed_flag_is_refused(value: object) -> None:
    assert refusal(baseline=value) == (
        f"gpumem marker: baseline={value!r} is neither True nor False"
    )


@pytest.mark.parametrize(("keyword", "least"), [("warmup", 0), ("repeat", 1)])
@pytest.mark.parametrize("value", [-1, True, "1", 1.0])
def test_an_ill_typed_count_is_refused(keyword: str, least: int, value: object) -> None:
    assert refusal(**{keyword: value}) == (
        f"gpumem marker: {keyword}={value!r} is not a number of runs; write an int from {least} up"
    )


def test_repeat_is_at_least_one_and_warmup_may_be_zero() -> None:
    assert expectation_of([gpumem(warmup=0)]).warmup == 0
    assert "repeat=0 is not a number of runs" in refusal(repeat=0)


def test_ill_typed_phases_are_refused() -> None:
    assert refusal(phases=["forward"]) == (
        "gpumem marker: phases=['forward'] is not a dict of sizes by phase, "
        'like {"forward": "1GB"}'
    )
    assert refusal(phases={"forward": "1 zillion"}).startswith(
        "gpumem marker: phases={'forward': '1 zillion'}: for 'forward', '1 zillion' is not a size; "
        "write bytes"
    )
    for name in (1, ""):
        assert refusal(phases={name: 1}) == (
            f"gpumem marker: phases={{{name!r}: 1}} names a phase {name!r}; "
            "a name is a text, not empty"
        )


@pytest.mark.parametrize("value", [1, [], (), ["T4", 1], {"T4": 1}])
def test_an_ill_typed_gpu_is_refused(value: object) -> None:
    assert refusal(gpu=value) == (
        f'gpumem marker: gpu={value!r} is not a GPU model; write one like "A100-40GB", or a list'
    )


def test_an_unknown_gpu_gets_a_suggestion() -> None:
    assert refusal(gpu=["T4", "A100"]).startswith(
        "gpumem marker: gpu='A100' is not a GPU model; did you mean A100-40GB or A100-80GB? "
    )


def test_a_gpu_that_is_named_twice_is_refused() -> None:
    assert refusal(gpu=["T4", "t4"]) == (
        "gpumem marker: gpu=['T4', 't4'] names T4 twice; name each GPU model once"
    )


def test_a_gpu_may_be_several_of_a_model() -> None:
    assert expectation_of([gpumem(gpu=["T4", "a100-80gb * 2"])]).gpu == ("T4", "A100-80GB*2")
    assert refusal(gpu="A100-80GB*0").startswith(
        "gpumem marker: gpu='A100-80GB*0' does not say how many GPUs; write a number from 1 to 120"
    )


def test_an_unknown_keyword_gets_a_suggestion() -> None:
    assert refusal(max_leaks=0) == (
        "gpumem marker: unknown keyword max_leaks=0; did you mean max_leak? accepted: max, "
        "max_reserved, max_leak, phases, baseline, predict, tolerance, warmup, repeat, gpu, "
        "min_memory, quota, elastic, exclusive, qos, priority, isolate, ranks, rank"
    )
    assert refusal(xyz=1).startswith("gpumem marker: unknown keyword xyz=1; accepted: max, ")


def test_ill_typed_keywords_of_sharing_are_refused() -> None:
    assert refusal(qos="best") == (
        "gpumem marker: qos='best' is neither 'guaranteed' nor 'opportunistic'"
    )
    assert refusal(priority="high") == (
        "gpumem marker: priority='high' is not a priority; write an int, 0 where none is given"
    )
    assert refusal(exclusive=1) == "gpumem marker: exclusive=1 is neither True nor False"


def test_max_given_twice_is_refused() -> None:
    assert refusal("1GB", max="2GB") == (
        "gpumem marker: '1GB' and max='2GB' are both the peak limit; give one of them"
    )


def test_a_second_positional_argument_is_refused() -> None:
    assert refusal("1GB", "2GB") == (
        "gpumem marker: 2 positional arguments ('1GB', '2GB'), "
        "but only max= may be given without its keyword"
    )


def test_the_json_form_has_builtin_types() -> None:
    expectation = Expectation(
        max=1, phases={"forward": 2}, tolerance=Tolerance(1.0, 1_048_576), gpu=("T4",)
    )
    data = expectation.to_dict()
    assert data == {
        "max": 1,
        "max_reserved": None,
        "max_leak": None,
        "phases": {"forward": 2},
        "baseline": None,
        "predict": None,
        "tolerance": "1% + 1MiB",
        "warmup": 0,
        "repeat": 1,
        "gpu": ["T4"],
        "min_memory": None,
        "quota": None,
        "exclusive": False,
        "qos": "guaranteed",
        "priority": 0,
        "isolate": False,
        "elastic": False,
    }
    assert json.loads(json.dumps(data)) == data
    assert Expectation(predict=Tolerance(1.0, 0)).to_dict()["predict"] == "1%"


def test_an_expectation_copies_the_mappings_it_is_given() -> None:
    limits = {"forward": 1}
    expectation = Expectation(phases=limits)
    limits["forward"] = 2
    assert expectation.phases == {"forward": 1}


def test_the_marker_line_names_the_marker_and_every_keyword() -> None:
    signature, _, text = MARKER.partition(": ")
    assert text
    assert signature.startswith("gpumem(")
    for keyword in Expectation().to_dict():
        assert keyword in signature


def test_a_keyword_alone_is_parsed_as_in_the_marker() -> None:
    assert parse_keyword("max", "1KiB") == 1_024
