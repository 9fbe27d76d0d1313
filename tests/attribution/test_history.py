"""Lifetimes of blocks, peaks and their composition, computed by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_gpumem.attribution.composition import Composition, compositions, with_rest_as_other
from pytest_gpumem.attribution.history import Event, History, Observation, Span


@dataclass(frozen=True, eq=False)
class Made:
    """An origin with explicit values."""

    operator_name: str | None = "torch.mm"
    source_line: tuple[str, int, str] | None = ("/home/me/project/model.py", 7, "forward")
    kind: str = "computed"
    library: str | None = None
    node: str | None = None
    sequence: int = -1
    has_node: bool = True
    shape: Sequence[int] | None = (2, 2)
    dtype: object = "torch.float32"
    frames: Sequence[Mapping[str, Any]] = ()


def alloc(address: int, nbytes: int, origin: Made | None = None) -> Event:
    return Event(True, address, nbytes, origin or Made())


def free(address: int) -> Event:
    return Event(False, address, 0, None)


CALL = Span("call", 0, 100)


def history(
    *events: Event,
    held: Sequence[tuple[int, int, Made | None]] = (),
    phases: Sequence[Span] = (),
    automatic: Sequence[Span] = (),
    modules: Sequence[tuple[int, str]] = (),
    observations: Sequence[Observation] = (),
    excluded_windows: Sequence[tuple[int, int]] = (),
) -> History:
    return History(
        held,
        events,
        phases or (Span("call", 0, len(events)),),
        automatic,
        modules,
        observations,
        excluded_windows,
        root="/home/me/project",
    )


def composition(trace: History) -> Composition:
    return compositions(trace)["call"]


def test_the_peak_is_the_first_moment_with_the_most_bytes() -> None:
    trace = history(alloc(1, 512), alloc(2, 1024), free(1), alloc(3, 512), free(2), free(3))
    assert trace.peaks() == {"call": 1}
    assert [life.address for life in trace.live_at(1)] == [1, 2]


def test_blocks_held_before_the_history_count() -> None:
    trace = history(alloc(1, 512), free(9), alloc(2, 1024), held=[(9, 4096, None)])
    assert composition(trace).total == 4096 + 512


def test_a_phase_that_only_frees_has_its_peak_before_its_first_event() -> None:
    trace = history(alloc(1, 512), free(1), phases=[Span("call", 0, 2), Span("late", 1, 2)])
    assert compositions(trace)["late"].total == 512


def test_a_phase_entered_twice_has_the_higher_peak() -> None:
    trace = history(
        alloc(1, 512),
        free(1),
        alloc(2, 2048),
        free(2),
        phases=[Span("step", 0, 2), Span("step", 2, 4)],
    )
    assert compositions(trace)["step"].total == 2048


def operators(trace: History) -> list[str | None]:
    return [site.operator for site in composition(trace).sites]


def test_a_buffer_of_sharding_overlaps_the_module_that_computes() -> None:
    gathered = Made("all-gather of layers.1", kind="buffer")
    trace = history(
        alloc(1, 2048, gathered), alloc(2, 512), modules=[(0, "layers.0"), (1, "layers.0.mlp")]
    )
    assert operators(trace) == ["all-gather of layers.1 overlaps layers.0", "torch.mm"]
    # Its own module, one inside or around it, and the root, which contains all, do not count.
    for path in ("layers.1", "layers.1.mlp", "layers", ""):
        trace = history(alloc(1, 2048, gathered), modules=[(0, path)])
        assert operators(trace) == ["all-gather of layers.1"]
    whole = Made("all-gather of the root", kind="buffer")
    assert operators(history(alloc(1, 2048, whole), modules=[(0, "layers.0")])) == [
        "all-gather of the root"
    ]


def test_a_buffer_overlaps_in_backward_the_module_of_the_running_node() -> None:
    trace = history(
        alloc(1, 512, Made(sequence=5)),
        alloc(2, 512, Made("MmBackward0", node="MmBackward0", sequence=4)),
        alloc(3, 2048, Made("reduce-scatter of layers.3", kind="buffer", node="Hook")),
        modules=[(0, "layers.2"), (1, "")],
    )
    assert "reduce-scatter of layers.3 overlaps layers.2" in operators(trace)


def test_an_observation_counts_for_the_block_that_was_live() -> None:
    trace = history(
        alloc(1, 512),
        free(1),
        alloc(1, 1024),
        observations=[
            Observation(1, 1, "inputs", "", ""),
            Observation(3, 1, "parameters", "head", "weight"),
        ],
    )
    assert composition(trace).categories == {"parameters": 1024}


def test_a_parameter_passed_to_a_module_remains_a_parameter() -> None:
    seen = [Observation(1, 1, "parameters", "emb", "weight"), Observation(1, 1, "inputs", "", "")]
    trace = history(alloc(1, 512), observations=seen)
    assert composition(trace).categories == {"parameters": 512}


def test_a_block_that_outlives_forward_is_an_activation() -> None:
    trace = history(
        alloc(1, 512),
        alloc(2, 1024),
        free(1),
        free(2),
        automatic=[Span("forward", 0, 3), Span("backward", 3, 4)],
    )
    assert composition(trace).categories == {"activations": 1024, "temporaries": 512}


def test_blocks_that_backward_leaves_are_gradients() -> None:
    backward = Made(node="MmBackward0")
    trace = history(
        alloc(1, 512, backward),
        alloc(2, 1024, backward),
        free(1),
        automatic=[Span("backward", 0, 3)],
    )
    assert composition(trace).categories == {"gradients": 1024, "temporaries": 512}


def test_a_module_that_runs_again_within_backward_makes_activations() -> None:
    trace = history(
        alloc(1, 512),
        free(1),
        automatic=[Span("backward", 0, 2)],
        modules=[(0, "block"), (1, "")],
    )
    assert composition(trace).categories == {"activations": 512}


def test_a_workspace_has_a_library_and_no_line() -> None:
    trace = history(alloc(1, 512, Made(library="cuBLAS")), automatic=[Span("forward", 0, 1)])
    (site,) = composition(trace).sites
    assert (site.category, site.operator, site.site) == ("workspace", "cuBLAS", None)


def test_a_tensor_outside_modules_has_the_category_of_its_origin() -> None:
    trace = history(
        alloc(1, 512, Made(kind="copy")),
        alloc(2, 1024, Made(kind="factory")),
        alloc(3, 2048),
        alloc(4, 4096),
        free(4),
        automatic=[Span("backward", 5, 5)],
    )
    assert composition(trace).categories == {
        "inputs": 512,
        "activations": 2048,
        "temporaries": 4096,
        "other": 1024,
    }


def test_blocks_of_one_line_and_layer_are_one_site() -> None:
    trace = history(
        alloc(1, 512),
        alloc(2, 1024),
        automatic=[Span("forward", 0, 2)],
        modules=[(0, "blocks.0.attn"), (1, "blocks.11.attn")],
    )
    (site,) = composition(trace).sites
    assert (site.bytes, site.count, site.site) == (1536, 2, "model.py:7")
    assert (site.module, site.operator, site.dtype) == ("blocks.*.attn", "torch.mm", "float32")


def test_backward_is_traced_to_the_forward_line_by_autograd_s_number() -> None:
    forward = Made(sequence=8, source_line=("/home/me/project/model.py", 3, "forward"))
    backward = Made(
        node="MmBackward0", sequence=7, source_line=("/home/me/project/t.py", 1, "test")
    )
    trace = history(
        alloc(1, 512, forward),
        free(1),
        alloc(2, 1024, backward),
        automatic=[Span("backward", 1, 3)],
        modules=[(0, "blocks.0"), (1, "")],
    )
    (site,) = composition(trace).sites
    assert (site.site, site.module, site.operator) == ("model.py:3", "blocks.*", "MmBackward0")


def test_a_fixture_that_the_body_asked_for_counts_as_held_before() -> None:
    trace = history(
        alloc(1, 512),
        free(1),
        alloc(2, 4096),
        alloc(3, 1024),
        free(2),
        excluded_windows=[(2, 5)],
        phases=[Span("call", 0, 5)],
    )
    # What only the fixture's set-up needed, 4,096 bytes, belongs to no phase.
    assert composition(trace).total == 1024 + 512


def test_paths_are_never_those_of_the_machine() -> None:
    library = Made(source_line=("/opt/venv/lib/python3.11/site-packages/lib/nn.py", 5, "f"))
    elsewhere = Made(source_line=("/tmp/other/thing.py", 6, "g"))
    sites = composition(history(alloc(1, 512, library), alloc(2, 1024, elsewhere))).sites
    assert [site.site for site in sites] == ["thing.py:6", "lib/nn.py:5"]


def test_bytes_that_the_allocator_adds_are_other() -> None:
    whole = with_rest_as_other(composition(history(alloc(1, 512, Made(kind="copy")))), 1024)
    assert whole.categories == {"inputs": 512, "other": 512}
    assert whole.total == sum(site.bytes for site in whole.sites) == 1024
