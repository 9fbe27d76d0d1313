"""The comparison of a test's expected numbers with its measured ones: verdicts only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Literal

from pytest_gpumem.attribution.causes import absolute_cause, cause_of, leak_cause
from pytest_gpumem.attribution.composition import Site
from pytest_gpumem.attribution.explain import Change, Growth, Side, explain, holdings
from pytest_gpumem.baseline.store import BaselineEntry
from pytest_gpumem.baseline.verdict import Improvement, Verdict
from pytest_gpumem.marker import Expectation
from pytest_gpumem.simulated.common.compiled_notes import ran_eagerly
from pytest_gpumem.sizes import MIB, Tolerance, format_size
from pytest_gpumem.values.environment import Environment
from pytest_gpumem.values.measurement import Measurement
from pytest_gpumem.values.prediction import PredictedTest

UpdateMode = Literal["all", "new"]

NOTHING_STORED = (
    "the baseline has no source lines, so what grew cannot be shown: check out the old code and "
    "record it again without --gpumem-explain=never"
)

PREDICTED_TOO_MUCH = "the prediction is too high, which is as wrong as one that is too low"

NO_LIMITS: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True)
class Judgement:
    """All verdicts on one test on one device."""

    verdicts: tuple[Verdict, ...] = ()
    improvements: tuple[Improvement, ...] = ()
    missing_baseline: bool = False
    """Whether a baseline was wanted and none is stored for this environment."""


def default_tolerance_for(exact: bool) -> Tolerance:
    """Return the default tolerance.

    ``exact`` numbers, simulated or dry ones, repeat byte for byte.
    """
    return Tolerance(0.0, 0) if exact else Tolerance(1.0, MIB)


def missing_text(
    environment: Environment, elsewhere: Sequence[tuple[Environment, BaselineEntry]]
) -> str:
    """Return a note that a test has no baseline, with its peaks in other environments."""
    text = f"none is stored for {environment.key}"
    known = [f"{other.key} {format_size(entry.peak_allocated)}" for other, entry in elsewhere]
    return f"{text}; stored elsewhere: {', '.join(known)}" if known else text


def missing_cause(
    environment: Environment, elsewhere: Sequence[tuple[Environment, BaselineEntry]]
) -> str:
    """Return the difference from an environment with a baseline, if there is only one.

    Empty unless a stored environment differs only in the torch release, in the settings of the
    allocator or in those of cuBLAS.
    """
    names = {
        "torch": "torch",
        "alloc_conf": "PYTORCH_CUDA_ALLOC_CONF",
        "cublas_workspace_config": "CUBLAS_WORKSPACE_CONFIG",
    }
    for other, _ in elsewhere:
        for name, written in names.items():
            if replace(other, **{name: getattr(environment, name)}) == environment:
                now, before = (getattr(one, name) or "not set" for one in (environment, other))
                return (
                    f"{written} is {now}, and the stored baseline is of a run where it was {before}"
                )
    return ""


def judge(
    expectation: Expectation,
    measurement: Measurement,
    *,
    baseline: BaselineEntry | None,
    environment: Environment,
    require_baseline: bool = False,
    update: UpdateMode | None = None,
    elsewhere: Sequence[tuple[Environment, BaselineEntry]] = (),
    used_elsewhere: bool = False,
    default_phases: Mapping[str, int] = NO_LIMITS,
) -> Judgement:
    """Return the judgement of a marked test whose body passed, on one device.

    ``baseline`` is the test's entry for ``environment``; ``elsewhere`` has entries of other
    environments, which are shown and never compared. ``used_elsewhere``: the test allocated on
    another device, so that an empty peak on this one is no failure. Baselines belong to one device:
    for further devices, pass an expectation with ``baseline=False``. A limit on a phase that did
    not run fails, because nothing was checked, except for the project's ``default_phases``.

    If the marker does not contain ``baseline``, a test without a baseline passes and is listed, so
    that a project with limits only, or a machine with a new environment, has no failures. With
    ``require_baseline``, for ``--gpumem-require-baselines`` given by the user, it fails. (If only
    the variable CI turned the option on, it applies to tests with ``baseline=True``, which fail in
    any case.) While baselines are updated no baseline is missing, and with ``all`` none is
    compared: the update reports the changes.
    """
    judged = _Judged(measurement, environment.gpu)
    if measurement.peak_allocated <= 0 and not used_elsewhere:
        return Judgement((judged.unfit("nothing_measured"),))
    verdicts = [*judged.limits(expectation, default_phases), *judged.leak(expectation)]
    if expectation.baseline is False:
        return Judgement(tuple(verdicts))
    if baseline is None:
        if update is None and (expectation.baseline or require_baseline):
            cause = missing_cause(environment, elsewhere)
            note = missing_text(environment, elsewhere)
            verdicts.append(judged.unfit("baseline", note, cause))
        return Judgement(tuple(verdicts), missing_baseline=True)
    if update == "all":
        return Judgement(tuple(verdicts))
    eager = [note for note in measurement.notes if ran_eagerly(note)]
    if eager and not baseline.ran_eagerly:
        verdicts.append(judged.unfit("ran_eagerly", eager[0]))
    exact = measurement.simulated or measurement.dry
    tolerance = expectation.tolerance or default_tolerance_for(exact)
    return Judgement(
        (*verdicts, *judged.against(baseline, tolerance)),
        tuple(judged.improvements(baseline, tolerance)),
    )


def judge_prediction(
    measurement: Measurement, predicted: PredictedTest, tolerance: Tolerance, gpu: str
) -> tuple[Verdict, ...]:
    """Return the verdicts on a measured test's prediction, as a whole and phase by phase.

    A peak may differ by ``tolerance`` in either direction: a prediction that is too high is wrong,
    too. A missing prediction fails, and so does a phase that only one of the two has.
    """
    return tuple(_Judged(measurement, gpu).against_prediction(predicted, tolerance))


class _Judged:
    """A measurement, and the verdicts on it."""

    def __init__(self, measurement: Measurement, gpu: str) -> None:
        self._measurement = measurement
        self._device: dict[str, Any] = {
            **{name: getattr(measurement, name) for name in ("device", "simulated", "dry")},
            "gpu": gpu,
        }
        self._peaks: dict[str | None, int] = {None: measurement.peak_allocated}
        """The peaks by phase, that of the whole test under ``None``."""
        self._peaks |= {name: p.peak_allocated for name, p in measurement.phases.items()}

    @property
    def _ran(self) -> str:
        """The phases that ran, as a sentence lists them."""
        return ", ".join(phase for phase in self._peaks if phase is not None)

    def _sites(self, phase: str | None) -> list[Site]:
        """Return the live blocks at the peak of ``phase``, or of the whole test."""
        measured = self._measurement if phase is None else self._measurement.phases[phase]
        return [Site.from_dict(site) for site in measured.sites]

    def unfit(self, kind: str, note: str = "", cause: str = "") -> Verdict:
        """Return the verdict of a test whose peak cannot be compared."""
        peak = self._measurement.peak_allocated
        return self._verdict(kind, actual=peak, notes=(note,) if note else (), cause=cause)

    def limits(
        self, expectation: Expectation, default_phases: Mapping[str, int]
    ) -> Iterator[Verdict]:
        if expectation.max is not None:
            yield self._limit(None, expectation.max)
        if (limit := expectation.max_reserved) is not None:
            yield self._reserved(limit)
        for phase, limit in expectation.phases.items():
            if phase in self._peaks:
                yield self._limit(phase, limit)
            elif expectation.phases != default_phases:
                yield self._did_not_run("limit", phase, limit)

    def leak(self, expectation: Expectation) -> Iterator[Verdict]:
        limit, leaked = expectation.max_leak, self._measurement.leaked
        if limit is not None and leaked is not None:
            passed = leaked <= limit
            left = [] if passed else [Site.from_dict(site) for site in self._measurement.leaks]
            why: dict[str, Any] = {"explanation": holdings(left), "cause": leak_cause(left)}
            yield self._verdict("leak", None, limit, leaked, passed, metric="leaked", **why)

    def against(self, baseline: BaselineEntry, tolerance: Tolerance) -> Iterator[Verdict]:
        for phase, actual, reference in self._pairs(baseline):
            limit = reference + tolerance.allowance(reference)
            passed = actual <= limit
            stored, sites = baseline.peak_of(phase), self._sites(phase)
            changes = explain(sites, stored.sites) if stored and sites else ()
            cause = ""
            if stored and sites and not passed:
                before = Side(stored.sites, baseline.facts)
                cause = cause_of(Growth(Side(sites, self._measurement.facts), before, changes))
            notes = (NOTHING_STORED,) if sites and stored is None and not passed else ()
            why: dict[str, Any] = {"notes": notes, "explanation": changes, "cause": cause}
            compared = _compared(reference, tolerance)
            yield self._verdict("baseline", phase, limit, actual, passed, **compared, **why)
        for phase, reference in baseline.phases.items():
            if phase not in self._peaks:
                limit = reference + tolerance.allowance(reference)
                compared = _compared(reference, tolerance)
                yield self._did_not_run("baseline", phase, limit, **compared)

    def against_prediction(
        self, predicted: PredictedTest, tolerance: Tolerance
    ) -> Iterator[Verdict]:
        if predicted.measurement is None:
            yield self.unfit("prediction", predicted.problem)
            return
        other = _Judged(predicted.measurement, predicted.gpu)
        for phase, actual in self._peaks.items():
            if phase not in other._peaks:
                notes: tuple[str, ...] = (f"simulated phases: {other._ran}",)
                yield self._verdict("prediction", phase, actual=actual, notes=notes)
                continue
            reference = other._peaks[phase]
            allowance = tolerance.allowance(reference)
            passed = abs(actual - reference) <= allowance
            sites, theirs = self._sites(phase), other._sites(phase)
            changes = explain(*_with_equal_names(sites, theirs)) if sites and theirs else ()
            notes = (PREDICTED_TOO_MUCH,) if not passed and actual < reference else ()
            why = {"notes": notes, "explanation": changes, **_compared(reference, tolerance)}
            yield self._verdict("prediction", phase, reference + allowance, actual, passed, **why)
        for phase, peak in other._peaks.items():
            if phase not in self._peaks:
                notes = (f"phases that ran: {self._ran or 'none'}",)
                compared = _compared(peak, tolerance)
                yield self._verdict("prediction", phase, notes=notes, **compared)

    def improvements(self, baseline: BaselineEntry, tolerance: Tolerance) -> Iterator[Improvement]:
        for phase, actual, reference in self._pairs(baseline):
            if actual < reference - tolerance.allowance(reference):
                compared = "peak_allocated", phase, actual, reference, str(tolerance)
                yield Improvement(*compared, **self._device)

    def _pairs(self, baseline: BaselineEntry) -> Iterator[tuple[str | None, int, int]]:
        """Yield phase, measured and stored peak of the test and of each phase in both."""
        for phase, actual in self._peaks.items():
            reference = baseline.peak_allocated if phase is None else baseline.phases.get(phase)
            if reference is not None:
                yield phase, actual, reference

    def _limit(self, phase: str | None, limit: int) -> Verdict:
        actual = self._peaks[phase]
        if actual <= limit:
            return self._verdict("limit", phase, limit, actual, True)
        sites = self._sites(phase)
        cause = absolute_cause(Side(sites, self._measurement.facts), actual - limit)
        held = holdings(sites)
        return self._verdict("limit", phase, limit, actual, explanation=held, cause=cause)

    def _reserved(self, limit: int) -> Verdict:
        """Return the verdict on reserved memory; a failure shows what was allocated of it."""
        actual, why = self._measurement.peak_reserved, dict[str, Any](metric="peak_reserved")
        if actual > limit:
            note = f"at most {format_size(self._peaks[None])} were allocated at once"
            why |= {"notes": (note,), "explanation": holdings(self._sites(None))}
        return self._verdict("limit", None, limit, actual, actual <= limit, **why)

    def _did_not_run(self, kind: str, phase: str, limit: int, **compared: Any) -> Verdict:
        # The 0 of a phase that did not run would exceed a negative limit.
        limit = max(limit, 0)
        note = f"phases that ran: {self._ran or 'none'}"
        names = [name for name in self._peaks if name is not None]
        for close in get_close_matches(phase.lower(), names, n=1, cutoff=0.7):
            note = f"did you mean {close}? {note}"
        return self._verdict(kind, phase, limit, notes=(note,), **compared)

    def _verdict(
        self,
        kind: str,
        phase: str | None = None,
        limit: int | None = None,
        actual: int = 0,
        passed: bool = False,
        *,
        explanation: Iterable[Change] = (),
        **facts: Any,
    ) -> Verdict:
        return Verdict(
            **{"metric": "peak_allocated", "reference": None, **self._device, **facts},
            kind=kind,
            phase=phase,
            limit=None if limit is None else int(limit),
            actual=actual,
            passed=passed,
            written=getattr(limit, "written", ""),
            explanation=tuple(change.to_dict() for change in explanation),
        )


def _compared(reference: int, tolerance: Tolerance) -> dict[str, Any]:
    """Return a verdict's fields on the baseline or prediction that a number is compared with."""
    return {"reference": reference, "tolerance": str(tolerance)}


def _with_equal_names(measured: list[Site], predicted: list[Site]) -> tuple[list[Site], list[Site]]:
    """Return both sides with equal names for equal blocks.

    A real history has no shapes, and C++ names of operators where the simulation has Python names.
    The same program ran twice, so if one unmatched operator of a line is left on each side, the two
    are the same.
    """
    if any(site.shape for site in measured):
        return measured, predicted
    ours, theirs = _operators(measured), _operators(predicted)
    alike = []
    for site in predicted:
        line = site.category, site.module, site.site
        own, others = ours[line] - theirs[line], theirs[line] - ours[line]
        same = site.operator in others and len(own) == len(others) == 1
        operator = next(iter(own)) if same else site.operator
        alike.append(replace(site, shape=None, dtype=None, operator=operator))
    return measured, alike


def _operators(sites: Iterable[Site]) -> defaultdict[tuple[str | None, ...], set[str | None]]:
    """Return the operators of ``sites`` by category, module and line."""
    found: defaultdict[tuple[str | None, ...], set[str | None]] = defaultdict(set)
    for site in sites:
        found[site.category, site.module, site.site].add(site.operator)
    return found
