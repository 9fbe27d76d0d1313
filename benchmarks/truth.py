"""One truth: the simulated device against torch's own CUDA code, event by event. Needs no GPU.

    python benchmarks/truth.py                        PyTorch's samples, scenarios, programs
    python benchmarks/truth.py NAME...                groups whose name matches one of these
    python benchmarks/truth.py --corpus op --dtype f32,bf16 --gpu H100
    python benchmarks/truth.py --sample 200 --seed 7  one case each of so many groups, 20 programs
    python benchmarks/truth.py --programs FOLDER      random programs that truth_random.py wrote
    python benchmarks/truth.py --stacks all -v NAME   who made the first event that differs
    python benchmarks/truth.py --write docs/fidelity.md    the tables of this release
    python benchmarks/truth.py --read FOLDER --known  what is there, too, into truth_known.txt
    python benchmarks/truth.py --record FILE          record this machine's GPU: nothing is compared
    python benchmarks/truth.py --recorded FILE --device dry    a recorded GPU and the dry device

Needs a CUDA build of torch and a C compiler (docs/dry.md), and expecttest for PyTorch's own
samples. Every case runs on both devices, a fork for each group of cases. A recorded GPU stands in
the place of torch's own code on the dry device where FILE is given. Compared are the allocator's
events by action, size and order, then the highest bytes allocated and reserved.
Returns 1 where a pass differs that neither an exception of ``truth_exceptions.py`` names nor a line
of ``truth_known.txt``: what differs of an operator, in which pass and after which kernel, that is
known and not mended yet, under its reason.
"""

from __future__ import annotations

import argparse
import datetime
import json
import lzma
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from truth_exceptions import CLOCK, LIBRARY, VALUES, exception_of
from truth_page import write

ROOT = Path(__file__).resolve().parent.parent
KNOWN = Path(__file__).with_name("truth_known.txt")
CORPORA = {
    "op": "samples of operators, forward and backward",
    "layout": "operators, with tensors that are transposed or have their channels last",
    "out": "operators, with tensors for their results, empty and of the right size",
    "inplace": "operators that write to their first argument",
    "module": "modules, in training and inference",
    "optim": "steps of optimizers",
    "scenario": "programs of the twin run",
    "program": "small programs",
    "stranger": "programs of strangers",
    "random": "random programs",
}
"""The name of each on the page."""
DTYPES = "f32,bf16,f16,i64,amp"
FOUND = "Found, and not looked into."
"""The reason of what ``--known`` adds."""

Json = dict[str, Any]

EQUAL = "same events"
ADJACENT = "frees beside each other"
"""In another order: nothing is between them, so the allocator is left the same."""
REORDERED = "other order, same peaks"
PEAK = "other peak"
REFUSED = "refused by the simulation"
DRY_FAILS = "fails on the dry device alone"
BOTH_FAIL = "fails on both"
_ALIKE = (EQUAL, ADJACENT, REORDERED)
OUTCOMES = (EQUAL, ADJACENT, REORDERED, PEAK, REFUSED, DRY_FAILS, BOTH_FAIL)


@dataclass(frozen=True)
class Pass:
    """The events of one pass on both devices."""

    case: str
    name: str
    given: str
    outcome: str
    dry: Json
    simulated: Json
    exception: str | None
    """Why it is not comparable."""

    @property
    def group(self) -> str:
        """The name of the case: ``op/add``."""
        return "/".join(self.case.split("/")[:2])

    @property
    def first(self) -> int:
        """The position of the first event that differs."""
        pairs = zip(self.dry["events"], self.simulated["events"], strict=False)
        for position, (one, other) in enumerate(pairs):
            if one != other:
                return position
        return min(len(self.dry["events"]), len(self.simulated["events"]))

    @property
    def family(self) -> str:
        """The key that passes with the same cause share."""
        what = self.group
        if self.outcome in (REFUSED, DRY_FAILS):
            error = (self.simulated if self.outcome == REFUSED else self.dry)["error"]
            return f"{what}: {re.sub(r'[0-9]+', 'N', error)[:110]}"
        one, other = (_event(side, self.first) for side in (self.dry, self.simulated))
        kinds = f"{_kind(one)} where simulated {_kind(other)}"
        who = _at(self.simulated["who"], self.first)
        return f"{what} {self.name}: {kinds}{who and f', {who}'}"

    @property
    def shift(self) -> int:
        """The bytes by which the simulated peak is higher."""
        return int(self.simulated["allocated"]) - int(self.dry["allocated"])


def main() -> int:
    """Run the requested groups, and print or write the result."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--corpus", default=",".join(one for one in CORPORA if one != "random"))
    parser.add_argument("--programs", type=Path, metavar="FOLDER", help="of truth_random.py")
    parser.add_argument("--dtype", default=DTYPES)
    parser.add_argument("--gpu", default="A100-40GB")
    parser.add_argument("--samples", type=int, default=6, help="of each operator and dtype")
    parser.add_argument("--sample", type=int, help="how many groups, one case each")
    parser.add_argument("--seed", default=str(datetime.date.today()))
    parser.add_argument("--stacks", choices=("python", "all"))
    parser.add_argument("--keep", type=Path, help="a folder for both sides' results")
    parser.add_argument("--read", type=Path, help="such a folder, instead of running")
    parser.add_argument("--record", type=Path, metavar="FILE", help="what this GPU does")
    parser.add_argument("--jobs", type=int, default=1, help="processes that record")
    parser.add_argument("--recorded", type=Path, metavar="FILE", help="what a GPU did")
    parser.add_argument("--device", choices=("simulated", "dry"), default="simulated")
    parser.add_argument("--write", type=Path, metavar="PAGE")
    parser.add_argument("--known", action="store_true")
    parser.add_argument("-v", "--verbose", action="store_true")
    options = parser.parse_args()
    request = {
        "corpora": ["random"] if options.programs else options.corpus.split(","),
        "programs": str(options.programs and options.programs.resolve()),
        "dtypes": options.dtype.split(","),
        **{name: getattr(options, name) for name in ("names", "samples", "sample", "stacks")},
        "seed": options.seed,
        "share": (0, 1),
    }
    began = time.time()
    if options.record:
        record(request, options.jobs, options.record)
        return 0
    devices = ("cuda" if options.recorded else "dry", options.device)
    with tempfile.TemporaryDirectory() as made:
        folder = options.read or options.keep or Path(made)
        if options.read is None:
            folder.mkdir(parents=True, exist_ok=True)
            if options.recorded:
                unpack(options.recorded, folder)
            run(request, options.gpu, folder, devices)
        passes = list(compared(folder, devices))
        of_release = release(folder)
    print(f"{options.gpu}, seed {options.seed}, {time.time() - began:.0f} s")
    print_table(passes)
    print_families(passes, options.verbose)
    differing = {
        one.family
        for one in passes
        if one.outcome in (REORDERED, PEAK, REFUSED) and one.exception is None
    }
    known = known_families()
    if options.known and differing - known:
        with KNOWN.open("a", encoding="utf-8") as out:
            out.write("\n".join(["", f"# {FOUND}", *sorted(differing - known), ""]))
    if options.write:
        write(options.write, rows(passes, of_release, options.gpu, devices))
    for family in sorted(differing - known):
        print(f"not known: {family}")
    return 1 if differing - known else 0


def known_families() -> set[str]:
    """Return the families of ``truth_known.txt``, which stand under their reasons.

    A family of the corpus ``op`` is also known in the other corpora of operators.
    """
    lines = KNOWN.read_text(encoding="utf-8").splitlines()
    known = {line for line in lines if line and not line.startswith("#")}
    return known | {
        re.sub("^op/", f"{corpus}/", one)
        for one in known
        for corpus in ("layout", "out", "inplace")
    }


def run(request: Json, gpu: str, folder: Path, devices: tuple[str, str]) -> None:
    """Run those of ``devices`` beside each other that are no GPU."""
    _run_workers(
        [
            sys.executable,
            "-m",
            "pytest_gpumem.dry",
            "--gpu",
            gpu,
            *_worker(device, gpu, request),
            file,
        ]
        for device in devices
        if device != "cuda"
        for file in [str(folder / f"{device}.jsonl")]
    )
    (folder / "torch").write_text(_torch_release(), encoding="utf-8")


def record(request: Json, jobs: int, file: Path) -> None:
    """Record what this machine's GPU does, in so many processes, as a packed ``file``."""
    with tempfile.TemporaryDirectory() as folder:
        parts = [Path(folder, f"{share}.jsonl") for share in range(jobs)]
        _run_workers(
            [sys.executable, *_worker("cuda", "", {**request, "share": (share, jobs)}), str(part)]
            for share, part in enumerate(parts)
        )
        lines = [line for part in parts for line in part.read_text(encoding="utf-8").splitlines()]
    text = "".join(f"{line}\n" for line in sorted(map(_plain, lines)))
    file.write_bytes(lzma.compress(text.encode(), preset=9))


def _plain(line: str) -> str:
    """Return a case's result without what no recording has."""
    told = json.loads(line)
    for one in told.get("passes", ()):
        for empty in ("who", "where", "libraries"):
            del one[empty]
    return json.dumps(told, separators=(",", ":"))


def unpack(file: Path, folder: Path) -> None:
    """Write a recorded ``file`` as one side's results."""
    nothing: Json = {"who": [], "where": [], "libraries": []}
    with (folder / "cuda.jsonl").open("w", encoding="utf-8") as out:
        for line in lzma.decompress(file.read_bytes()).decode().splitlines():
            told = json.loads(line)
            told["passes"] = [one | nothing for one in told.get("passes", ())]
            out.write(json.dumps(told) + "\n")


def _worker(device: str, gpu: str, request: Json) -> list[str]:
    script = str(Path(__file__).with_name("truth_worker.py"))
    return [script, device, gpu, json.dumps(request)]


def _run_workers(commands: Iterable[Sequence[str]]) -> None:
    """Run ``commands`` beside each other; raises ``CalledProcessError`` where one dies."""
    path = [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
    children = [(subprocess.Popen(one, env=variables, cwd=ROOT), one) for one in commands]
    for child, command in children:
        if child.wait():
            raise subprocess.CalledProcessError(child.returncode, command[:5])


def _torch_release() -> str:
    question = "import importlib.metadata as m; print(m.version('torch'))"
    version = subprocess.check_output([sys.executable, "-c", question], text=True)
    return version.partition("+")[0].strip()


def compared(folder: Path, devices: tuple[str, str]) -> Iterator[Pass]:
    """Yield every pass of both sides' results."""
    first, second = (_read(folder / f"{device}.jsonl") for device in devices)
    for case, one in first.items():
        if case in second or devices[0] == "dry":
            yield from _passes(case, one, second.get(case, {"error": "it did not run"}))


def _read(file: Path) -> dict[str, Json]:
    """Return the results of one side by case."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return {told["case"]: told for told in map(json.loads, lines)}


def _passes(case: str, dry: Json, simulated: Json) -> Iterator[Pass]:
    """Yield the passes of one case."""
    sides = [{one["name"]: one for one in side.get("passes", ())} for side in (dry, simulated)]
    nothing: Json = {"events": [], "who": [], "where": [], "libraries": []}
    nothing |= {"allocated": 0, "reserved": 0}
    names = list(sides[0] | sides[1])
    given = dry.get("given", "")
    if "error" in dry or "error" in simulated:
        names.append("the rest")
    for name in names:
        one = {**nothing, **sides[0].get(name, {"error": dry.get("error")})}
        other = {**nothing, **sides[1].get(name, {"error": simulated.get("error")})}
        outcome = _outcome(one, other)
        exception = exception_of(case, name, given)
        if outcome in (REORDERED, PEAK) and _is_but_for_libraries(one, other):
            exception = LIBRARY
        yield Pass(case, name, given, outcome, one, other, exception)


def _outcome(one: Json, other: Json) -> str:
    """Return how a pass on torch's own code and the simulated one differ."""
    if "error" in one and "error" in other:
        if one["error"] and other["error"]:
            return BOTH_FAIL
        return DRY_FAILS if one["error"] else REFUSED
    if "error" in one or "error" in other:
        return DRY_FAILS if "error" in one else REFUSED
    if one["events"] == other["events"]:
        return EQUAL
    if _in_any_order(one["events"]) == _in_any_order(other["events"]):
        return ADJACENT
    if all(one[peak] == other[peak] for peak in ("allocated", "reserved")):
        return REORDERED
    return PEAK


def _in_any_order(events: Sequence[str]) -> list[str]:
    """Return events with those frees sorted that nothing is between.

    Casts that autocast has kept are dropped in the order of a hash of their addresses
    (aten/src/ATen/autocast_mode.cpp, ``clear_cache``), which no two processes share.
    """
    made: list[str] = []
    for is_freed, beside in groupby(events, lambda event: event[0] == "-"):
        run = list(beside)
        made += sorted(run) if is_freed else run
    return made


def _is_but_for_libraries(dry: Json, simulated: Json) -> bool:
    """Return whether the simulation adds nothing but workspaces, and segments for them."""
    theirs = set(simulated["libraries"])
    without = [one for at, one in enumerate(simulated["events"]) if at not in theirs]
    return bool(theirs) and _blocks(without) == _blocks(dry["events"])


def _blocks(events: Sequence[str]) -> list[str]:
    """Return what is taken and freed, without segments."""
    return [one for one in events if one[0] in "+-"]


def print_table(passes: Sequence[Pass]) -> None:
    """Print how many passes of each corpus have which outcome."""
    corpora = sorted({one.case.split("/")[0] for one in passes}, key=list(CORPORA).index)
    print(f"{'':10}" + "".join(f"{name:>34}" for name in corpora))
    for outcome in OUTCOMES:
        counts = [
            Counter(
                one.exception is None
                for one in passes
                if one.outcome == outcome and one.case.startswith(f"{corpus}/")
            )
            for corpus in corpora
        ]
        told = "".join(f"{count[True]:>18} ({count[False]:>5} excepted)" for count in counts)
        print(f"{outcome:32}{told}")
    for corpus in corpora:
        print(
            f"{corpus:10} {_shares([one for one in passes if one.case.startswith(f'{corpus}/')])}"
        )


def release(folder: Path) -> str:
    """Return the torch that both sides' results are of."""
    return (folder / "torch").read_text(encoding="utf-8")


def rows(passes: Sequence[Pass], version: str, gpu: str, devices: tuple[str, str]) -> list[str]:
    """Return a row of the page's table for each corpus."""
    made = []
    truth, other = devices
    pair = f"{other}, {'GPU' if truth == 'cuda' else truth}"
    for corpus, title in CORPORA.items():
        among = [one for one in passes if one.case.startswith(f"{corpus}/")]
        counts = Counter(one.outcome for one in among if one.exception is None)
        compared = sum(counts[one] for one in (*_ALIKE, PEAK, REFUSED))
        if not compared:
            continue
        equal, same = counts[EQUAL] + counts[ADJACENT], sum(counts[one] for one in _ALIKE)
        reasons = Counter(one.exception for one in among if one.exception is not None)
        cells = [version, gpu, pair, title, f"{compared:,}"]
        cells += [f"{number:,} ({number / compared:.2%})" for number in (equal, same)]
        cells += [f"{counts[REFUSED]:,}", f"{reasons[VALUES]:,}", f"{reasons[LIBRARY]:,}"]
        cells += [f"{reasons[CLOCK]:,}"]
        made.append(f"| {' | '.join(cells)} |")
    return made


def _shares(passes: Sequence[Pass]) -> str:
    """Return which part of what can be compared is equal."""
    counts = Counter(one.outcome for one in passes if one.exception is None)
    total = sum(counts[one] for one in (*_ALIKE, PEAK, REFUSED))
    if not total:
        return "nothing to compare"
    equal, same = counts[EQUAL] + counts[ADJACENT], sum(counts[one] for one in _ALIKE)
    far = sum(
        abs(one.shift) > one.dry["allocated"] / 1000
        for one in passes
        if one.outcome == PEAK and one.exception is None
    )
    return (
        f"same events {equal} of {total} ({equal / total:.2%}), "
        f"same peaks {same} ({same / total:.2%}), {far} off by more than 0.1 %"
    )


def print_families(passes: Sequence[Pass], verbose: bool) -> None:
    """Print what differs, folded by cause, the most frequent first."""
    found: dict[str, list[Pass]] = defaultdict(list)
    for one in passes:
        if one.outcome in (REORDERED, PEAK, REFUSED) and one.exception is None:
            found[one.family].append(one)
    for family, members in sorted(found.items(), key=lambda item: -len(item[1])):
        example = members[0]
        outcomes = Counter(one.outcome for one in members)
        told = ", ".join(f"{outcome} {count}" for outcome, count in outcomes.items())
        print(f"\n{len(members):4} {family}")
        print(f"     {told}; {example.case} {example.given}")
        if example.outcome == REFUSED:
            continue
        first = example.first
        print(
            f"     peak {example.dry['allocated']:,}, simulated {example.shift:+,}; event {first}"
        )
        for side, label in ((example.dry, "torch"), (example.simulated, "sim  ")):
            shown = side["events"] if verbose else side["events"][max(0, first - 3) : first + 5]
            print(f"     {label} {' '.join(shown)}")
        if verbose:
            print(f"     {_at(example.dry['who'], first)}\n  simulated")
            print(f"     {_at(example.simulated['who'], first)}")
            print(f"     {_at(example.simulated['where'], first)}")


def _event(side: Json, position: int) -> str:
    """Return the event at ``position``."""
    return str(_at(side["events"], position) or "nothing")


def _kind(event: str) -> str:
    """Return what is done, without its size."""
    return {"+": "takes", "-": "frees"}.get(event[0], event.partition(" ")[0])


def _at(listed: Sequence[Any], position: int) -> Any:
    """Return what is at ``position``, nothing behind the end."""
    return listed[position] if position < len(listed) else ""


if __name__ == "__main__":
    sys.exit(main())
