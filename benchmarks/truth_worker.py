"""One side of the comparison with torch's own code: runs cases on one device, a fork a group.

    python -m pytest_gpumem.dry benchmarks/truth_worker.py dry|simulated GPU REQUEST RESULT
    python benchmarks/truth_worker.py cuda GPU REQUEST RESULT

REQUEST is JSON: the corpora, the dtypes, samples of each, names, a size and a seed of a sample, and
which share of the groups it is. RESULT gets a line of JSON for each case. On a GPU the samples of
PyTorch's own run in this process: to list them initialises CUDA, which does not survive a fork.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import random
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from truth_corpora import Case, Group, groups

from pytest_gpumem import SimulatedRun, simulate
from pytest_gpumem.dry.blocks import passes_dropped, restart_numbering
from pytest_gpumem.dry.compiling import separate_pool, skip_tuning
from pytest_gpumem.dry.load import is_loaded
from pytest_gpumem.measurement.compiling import Compiling

PATIENCE = 300
"""Seconds for the cases of one group."""

SIGNS = {"alloc": "+", "free_requested": "-"}
OTHERS = ("segment_alloc", "segment_free", "segment_map", "segment_unmap", "oom")
"""Events that are compared besides: the allocator's requests to the driver."""

PROGRAMS = ("scenario", "program", "stranger", "random")
"""Corpora whose groups take longer: of a sample, one to ten others."""

WORKSPACES = ("cuDNN", "cuFFT", "cuSOLVER", "cuSPARSE", "MAGMA")
"""Libraries whose workspaces only they know."""

Json = dict[str, Any]


def main() -> None:
    """Run the requested cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("device", choices=("cuda", "dry", "simulated"))
    parser.add_argument("gpu")
    parser.add_argument("request")
    parser.add_argument("result", type=Path)
    options = parser.parse_args()
    request = json.loads(options.request)
    warnings.simplefilter("ignore")
    if options.device != "cuda":
        torch.cuda._is_in_bad_fork = lambda: False  # the dry runtime survives a fork
    with options.result.open("w", encoding="utf-8") as out:
        for corpora, run in _parts(request["corpora"], options.device):
            chosen, seed = _chosen({**request, "corpora": corpora})
            gc.collect()
            gc.freeze()
            for group in chosen:
                run(group, seed, options.device, options.gpu, request["stacks"], out)
    os._exit(0)  # without what libraries say of what they leave behind


def _parts(corpora: list[str], device: str) -> Iterator[tuple[list[str], Callable[..., None]]]:
    """Yield the corpora in parts, each with the function that runs a group of it."""
    if device != "cuda":
        yield corpora, _in_fork
        return
    yield [one for one in corpora if one in PROGRAMS], _in_fork
    yield [one for one in corpora if one not in PROGRAMS], _run


def _chosen(request: Json) -> tuple[list[Group], str | None]:
    """Return the groups to run, and the seed that chooses one case of each, ``None`` for all."""
    share, of = request["share"]
    named = (request[name] for name in ("corpora", "dtypes", "samples", "programs"))
    found = list(groups(*named))[share::of]
    if request["names"]:
        patterns = [re.compile(name) for name in request["names"]]
        found = [group for group in found if any(one.search(group.name) for one in patterns)]
    if request["sample"] is None:
        return found, None
    random.Random(request["seed"]).shuffle(found)
    programs = [
        group for group in found if group.name.startswith(tuple(f"{one}/" for one in PROGRAMS))
    ]
    samples = [group for group in found if group not in programs]
    chosen = samples[: request["sample"]] + programs[: request["sample"] // 10]
    return chosen, request["seed"]


def _in_fork(
    group: Group, seed: str | None, device: str, gpu: str, stacks: str | None, out: Any
) -> None:
    """Run ``group`` in a separate process."""
    out.flush()
    child = os.fork()
    if child == 0:
        signal.alarm(PATIENCE)
        sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123
        _run(group, seed, device, gpu, stacks, out)
        os._exit(0)  # without what the parent would do at its end
    _, status = os.waitpid(child, 0)
    if status:
        ending = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else "exit code"
        _tell(out, {"case": group.name, "error": f"the process ended: {ending}"})


def _run(
    group: Group, seed: str | None, device: str, gpu: str, stacks: str | None, out: Any
) -> None:
    """Run the cases of ``group``; with a ``seed`` one of them."""
    try:
        with _entered(group, device, gpu) as simulated:
            cases = group.cases()
            if seed is not None:
                found = list(cases)
                cases = iter(
                    random.Random(f"{seed} {group.name}").sample(found, min(1, len(found)))
                )
            for case in cases:
                _tell(out, _made(case, simulated, stacks))
    except BaseException as error:
        _tell(out, {"case": group.name, "error": _said(error)})


def _entered(
    group: Group, device: str, gpu: str
) -> contextlib.AbstractContextManager[SimulatedRun | None]:
    """Return the device that ``group`` runs on, as the rank that it is."""
    world = group.world
    if group.alloc_conf:
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
            os.environ[name] = group.alloc_conf
    if device == "cuda":
        return contextlib.nullcontext()
    if device == "dry":
        return _dry(group)
    if world is None:
        return simulate(gpu, real_values=group.has_values)
    model = gpu.partition("*")[0]
    return simulate(f"{model}*{world.local_size}", world_size=world.size, rank=world.rank)


class _Compilers:
    """What compilers take on the dry device, which counts in no test: it has segments of its own.

    In the place of the :class:`~pytest_gpumem.measurement.phases.PhaseTracker` of a test.
    """

    def __init__(self) -> None:
        self._windows: list[list[tuple[int, int]]] = []
        self._largest = [0, 0]

    def begin(self) -> None:
        """Begin a pass."""
        self._windows = [[] for _ in _gpus()]
        self._largest = [0, 0]

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Leave what is taken inside out of the pass."""
        self._largest, began = self.peaks(), list(map(len, _traces()))
        try:
            yield
        finally:
            _reset_peaks()
            for windows, *window in zip(self._windows, began, map(len, _traces()), strict=True):
                windows.append((window[0], window[1]))

    def peaks(self) -> list[int]:
        """Return the highest bytes allocated and reserved of the pass."""
        return list(map(max, self._largest, _peaks()))

    def without(self, traces: list[list[Json]]) -> list[list[Json]]:
        """Return the events of each GPU without what is taken and given back in a window."""
        return [
            _without(trace, windows) for trace, windows in zip(traces, self._windows, strict=True)
        ]


def _without(trace: list[Json], windows: list[tuple[int, int]]) -> list[Json]:
    left = set()
    for window in windows:
        taken: dict[tuple[str, int], int] = {}
        for at in range(*window):
            action, address = trace[at]["action"], trace[at]["addr"]
            if action in _BEGINS:
                taken[_BEGINS[action], address] = at
            elif (began := taken.pop((action, address), None)) is not None:
                left |= {began, at}
    return [event for at, event in enumerate(trace) if at not in left]


_BEGINS = {"alloc": "free_requested", "segment_alloc": "segment_free"}
"""What ends that which each of them begins."""

_compilers = _Compilers()
_tracker: Any = _compilers


def _gpus() -> range:
    return range(torch.cuda.device_count())


def _traces() -> list[list[Json]]:
    """Return the recorded events of each GPU."""
    traces: list[list[Json]] = torch.cuda.memory._snapshot()["device_traces"]
    return traces


def _peaks() -> list[int]:
    """Return the highest bytes allocated and reserved, as sums of all GPUs."""
    highest = torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved
    return [sum(map(read, _gpus())) for read in highest]


def _reset_peaks() -> None:
    for index in _gpus():
        torch.cuda.reset_peak_memory_stats(index)


@contextlib.contextmanager
def _dry(group: Group) -> Iterator[None]:
    """Be the rank of ``group``, and compute values where its programs go by them."""
    with contextlib.ExitStack() as inside:
        inside.enter_context(passes_dropped())  # as in a test, and so are compilers
        inside.enter_context(skip_tuning(contextlib.nullcontext))
        inside.enter_context(Compiling(_tracker, separate_pool).watched())
        if group.world is not None:
            from pytest_gpumem.dry.ranks import DryRankProcessGroups

            inside.enter_context(DryRankProcessGroups(group.world).taken())
        if group.has_values:
            from pytest_gpumem.dry.values.follower import Follower

            follower = Follower(follows=True, everything=True)
            inside.enter_context(follower.active())
            follower.begin()
        yield


def _made(case: Case, simulated: Any, stacks: str | None) -> Json:
    """Run one case on an empty device; return what its passes did."""
    _empty()
    passes: list[Json] = []

    def record(name: str, run: Callable[[], Any]) -> Any:
        torch.cuda.synchronize()
        began = _begin(simulated, stacks)
        result = run()
        torch.cuda.synchronize()
        passes.append({"name": name, **_ended(simulated, began, stacks)})
        return result

    told: Json = {"case": case.name, "given": case.given, "passes": passes}
    if simulated is None:
        _compilers.begin()  # a program may compile before its first pass
        if is_loaded():
            restart_numbering()  # as before a test
    gc.disable()
    try:
        case.run(record)
    except BaseException as error:
        told["error"] = _said(error)
        traceback.clear_frames(error.__traceback__)
    finally:
        gc.enable()
    return told


def _empty() -> None:
    """Leave nothing on the device."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def _begin(simulated: Any, stacks: str | None) -> list[int]:
    """Begin a pass; return how many events of each simulated device went before."""
    _reset_peaks()
    if simulated is not None:
        return [len(one.trace) for one in simulated.devices]
    _compilers.begin()
    torch.cuda.memory._record_memory_history(None)
    if stacks is None:
        torch.cuda.memory._record_memory_history("all", context=None)
    else:
        torch.cuda.memory._record_memory_history("all", context="alloc", stacks=stacks)
    return []


def _ended(simulated: Any, began: list[int], stacks: str | None) -> Json:
    """Return the events since, GPU by GPU, who made them where that is known, and the peaks."""
    peaks = dict(zip(("allocated", "reserved"), _peaks(), strict=True))
    if simulated is not None:
        traces = [one.trace[at:] for one, at in zip(simulated.devices, began, strict=True)]
        entries = [(one.action, one.size, one.context) for trace in traces for one in trace]
        who = [_operator(context) for action, _, context in entries if _sign(action)]
        where = [_place(context) for action, _, context in entries if _sign(action)]
        libraries = [
            position
            for position, context in enumerate(one[2] for one in entries if _sign(one[0]))
            if getattr(context, "library", None) in WORKSPACES
        ]
    else:
        peaks = dict(zip(peaks, _compilers.peaks(), strict=True))
        traces = _compilers.without(_traces())
        torch.cuda.memory._record_memory_history(None)
        entries = [
            (one["action"], one["size"], one.get("frames")) for trace in traces for one in trace
        ]
        who = [_frames(frames) for action, _, frames in entries if _sign(action)] if stacks else []
        where, libraries = [], []
    events = [f"{_sign(action)}{size}" for action, size, _ in entries if _sign(action)]
    return {"events": events, "who": who, "where": where, "libraries": libraries, **peaks}


def _sign(action: str) -> str:
    """Return how an event of this kind begins, nothing where it is not compared."""
    return SIGNS.get(action, f"{action} " if action in OTHERS else "")


def _operator(context: Any) -> str:
    """Return the operator behind an event of a simulated device."""
    if context is None:
        return ""
    return " ".join(one for one in (context.operator_name, context.node) if one)


def _place(context: Any) -> str:
    """Return the line behind an event of a simulated device."""
    place = context.source_line if context is not None else None
    return f"{Path(place[0]).name}:{place[1]}" if place else ""


def _frames(frames: Any) -> str:
    """Return the functions of ATen and the lines of Python behind an event."""
    names = [
        f"{Path(one['filename']).name}:{one['line']} {one['name']}"
        if one["filename"].endswith(".py")
        else one["name"]
        for one in frames or ()
    ]
    return "\n".join(names)


def _said(error: BaseException) -> str:
    """Return the first line of what ``error`` says."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def _tell(out: Any, told: Json) -> None:
    """Write one line at once: the process may die next."""
    out.write(json.dumps(told) + "\n")
    out.flush()


if __name__ == "__main__":
    main()
