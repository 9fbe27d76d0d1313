"""The admissions of one test to shared devices: several, where it is run again."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pytest_gpumem.device.device import Device
from pytest_gpumem.sharing.admission import FailedAllocation, FailureCause, Need, cause_of
from pytest_gpumem.sharing.database import SharingError
from pytest_gpumem.sharing.gate import Admission, Gate
from pytest_gpumem.sizes import format_size

MOST_QUIET_SECONDS = 30.0
"""The most seconds that a crowded-out test waits for other processes to free memory."""

MOST_YIELDS = 2
"""The number of times that an opportunistic test yields; then it counts as guaranteed."""


@dataclass(frozen=True)
class NextRun:
    """The need of a test for one more run, and the reason."""

    need: Need
    note: str
    """A note for the record; empty where the numbers suffice."""
    quota: int | None = None
    """The bytes that it may reserve in that run, if the limit has grown."""


@dataclass(eq=False)
class DeviceAdmissions:
    """The admissions of a test to its devices, one after the other."""

    gate: Gate
    nodeid: str
    need: Need
    device: Device
    is_elastic: bool
    """Whether its quota may grow as long as the device has room."""
    quota: int | None = None
    """The bytes that an elastic quota has grown to."""
    why_not: str | None = None
    """The reason why the test may not run at all."""
    admission: Admission | None = None
    _inside: ExitStack = field(default_factory=ExitStack)
    _waited: float = 0.0
    _waited_for: str = ""
    _yields: int = 0
    _notes: list[str] = field(default_factory=list)
    _own_quota: int | None = None

    def enter(self) -> None:
        """Wait until the test may run; :attr:`why_not` is set if it may not."""
        try:
            passing = self.gate.admitted(self.nodeid, self.need)
            self.admission = self._inside.enter_context(passing)
        except SharingError as error:
            self.why_not = str(error)
            return
        self._inside.callback(self.device.empty_cache)
        self._waited += self.admission.waited
        self._waited_for = self.admission.waited_for or self._waited_for

    def leave(self) -> None:
        """Release the memory to other tests."""
        self._inside.close()
        self.admission = None

    def enter_again(self, run: NextRun) -> None:
        """Leave, and wait for the memory that the test needs now."""
        self.leave()
        self.need = run.need
        self._notes += filter(None, [run.note])
        self.quota = run.quota or self.quota
        self.enter()

    def next_run(
        self, error: BaseException | None, failed: FailedAllocation | None, quota: int | None
    ) -> NextRun | None:
        """Return the run to make after one that raised ``error``, ``None`` if there is none."""
        need = self.need
        if isinstance(error, YieldedError):
            self._yields += 1
            guaranteed = need.guaranteed or self._yields >= MOST_YIELDS
            note = "made room for a guaranteed test, and was run again"
            return NextRun(replace(need, guaranteed=guaranteed), note)
        if failed is None:
            return None
        cause = cause_of(failed, quota)
        if cause is FailureCause.NEIGHBOUR and not need.quiet_seconds:
            return self._run_alone(failed)
        if cause is FailureCause.QUOTA and isinstance(error, torch.OutOfMemoryError):
            return self._run_with_larger_quota(failed, quota)
        return None

    def crowded_out(self, failed: FailedAllocation | None, quota: int | None) -> str | None:
        """Return the sentence on a test that found too little memory even when it ran alone."""
        if failed is None or not self.need.quiet_seconds:
            return None
        if cause_of(failed, quota) is not FailureCause.NEIGHBOUR:
            return None
        holders = self.gate.foreign_processes() or "they have ended since"
        return (
            f"infrastructure error, not the test's: {format_size(failed.asked)} could not be "
            f"allocated ({format_size(failed.reserved)} was reserved already), even when "
            f"{self.nodeid} ran alone: other processes held {format_size(failed.of_others)} "
            f"({holders})"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form; sizes in bytes, times in seconds."""
        admission = self.admission
        return {
            "needed": self.need.bytes,
            "source": self.need.source,
            "waited": round(self._waited, 3),
            "waited_for": self._waited_for or None,
            "alone": admission.alone if admission else False,
            "borrowed": (self.quota or 0) - (self._own_quota or 0) if self.quota else 0,
            "notes": list(self._notes),
        }

    def _run_alone(self, failed: FailedAllocation) -> NextRun:
        # Other processes' memory may come and go: as long as the test took, and a second at least.
        granted = self.admission.granted if self.admission else 0.0
        quiet = min(max(time.time() - granted, 1.0), MOST_QUIET_SECONDS)
        least = max(self.need.bytes or 0, failed.wanted)
        return NextRun(
            replace(self.need, bytes=least, exclusive=True, quiet_seconds=quiet),
            f"run again alone: other processes held {format_size(failed.of_others)} of the "
            f"device when {format_size(failed.asked)} were asked for",
        )

    def _run_with_larger_quota(self, failed: FailedAllocation, quota: int | None) -> NextRun | None:
        """Return a run with twice the quota, or with the requested bytes if those are more."""
        most = self.gate.first.capacity
        if not self.is_elastic or quota is None or quota >= most or failed.wanted > most:
            return None
        larger = min(max(2 * quota, failed.wanted), most)
        self._own_quota = self._own_quota or quota
        needed = self.need.bytes
        need = replace(self.need, bytes=needed if needed is None else max(needed, larger))
        return NextRun(need, "", quota=larger)


CHECK_SECONDS = 0.1
"""Seconds between two checks whether another test waits."""

_SIGNAL = getattr(signal, "SIGUSR2", None)


class YieldedError(BaseException):
    """A test is stopped to free its device for another; no ``Exception``, so no test handles it."""


@contextmanager
def interruptible(has_to_yield: Callable[[], bool]) -> Iterator[None]:
    """Raise :class:`YieldedError` inside as soon as ``has_to_yield``, called in a thread, is true.

    This works only in the main thread, and on systems with signals (Linux, macOS); elsewhere the
    test runs to its end. The signal interrupts a sleep or a wait, but not a wait for a kernel.
    """
    if _SIGNAL is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    inside = True

    def interrupt(number: int, frame: object) -> None:
        if inside:
            raise YieldedError

    before = signal.signal(_SIGNAL, interrupt)
    done = threading.Event()
    main = threading.get_ident()

    def watch() -> None:
        while not done.wait(CHECK_SECONDS):
            if has_to_yield():
                signal.pthread_kill(main, _SIGNAL)
                return

    watcher = threading.Thread(target=watch, name="gpumem-yield", daemon=True)
    watcher.start()
    try:
        try:
            yield
        finally:
            inside = False
    finally:  # also if the signal arrives while the block is being left
        done.set()
        watcher.join()
        signal.signal(_SIGNAL, before)
