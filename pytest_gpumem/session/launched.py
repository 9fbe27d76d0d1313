"""A run under torchrun: each rank is a process, all of them measure, and rank 0 judges.

Every process runs every test, on its own device. After each measured test all ranks send their
peaks to rank 0, which judges the highest one, and adopt its verdict, so that ``-x``, reruns and
expected failures agree. At the end all leave with one exit status, after rank 0 has written
everything, because torchrun terminates the other processes when one has left.

Where nothing is measured, each process behaves as without the plugin.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from _pytest.config import create_terminal_writer

from pytest_gpumem.device import DeviceError
from pytest_gpumem.dry import scope
from pytest_gpumem.report.pytest_reports import HARMLESS
from pytest_gpumem.session.rerun import collected_error
from pytest_gpumem.simulated.distributed.worst import imbalance, worst_of
from pytest_gpumem.values.errors import SimulationError
from pytest_gpumem.values.measurement import Measurement
from pytest_gpumem.values.world import address_of_process

if TYPE_CHECKING:
    from types import FrameType

    from torch._C._distributed_c10d import Store

    from pytest_gpumem.device.select import DeviceSelector
    from pytest_gpumem.session.expected import Expectations
    from pytest_gpumem.session.item import MeasuredItem
    from pytest_gpumem.session.results import Results
    from pytest_gpumem.simulated.distributed.exchange import RankExchange
    from pytest_gpumem.values.world import World

_SKIPS = (pytest.skip.Exception, SimulationError)

_ENDED = (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR)
"""Exit codes of a run that did not complete: the other ranks may be in any test."""


class TorchrunRank:
    """The process of one rank, and its exchange with the others."""

    def __init__(self, config: pytest.Config, world: World, selector: DeviceSelector) -> None:
        self._config = config
        self._selector = selector
        self.world = world
        self._address = address_of_process(os.environ)
        self._exchange: RankExchange | None = None
        self._has_joined = False
        self._group = ExitStack()
        self._ensure_group: Callable[[], None] | None = None
        self._status: int | None = None
        """The exit status of all ranks, once they have agreed."""
        self._terminate: Any = None
        """The former handler of SIGTERM."""
        self._kept: io.StringIO | None = None
        self._failures: dict[str, str] = {}
        """The first line of each failure, by node id: of tests and of collection errors."""
        if world.rank:
            # Only rank 0 writes files of the run.
            if hasattr(config.option, "xmlpath"):
                config.option.xmlpath = None
            if config.option.basetemp:
                config.option.basetemp = f"{config.option.basetemp}-rank{world.rank}"

    def keep_output(self) -> None:
        """Hold back pytest's output: only rank 0 writes to the terminal."""
        reporter = self._config.pluginmanager.getplugin("terminalreporter")
        if self.world.rank and reporter is not None:
            self._kept = io.StringIO()
            reporter._tw = create_terminal_writer(self._config, self._kept)

    @property
    def writes_output(self) -> bool:
        """Whether this process writes the output of the run."""
        return self.world.rank == 0 or not self._has_joined

    def join_ranks(self, items: Sequence[pytest.Item], expectations: Expectations) -> None:
        """Connect to the other ranks if any of ``items`` is measured, else write held output."""
        if not any(map(expectations.is_measured, items)):
            reporter = self._config.pluginmanager.getplugin("terminalreporter")
            if self._kept is not None and reporter is not None:
                reporter._tw = create_terminal_writer(self._config, sys.stdout)
                reporter._tw.write(self._kept.getvalue(), flush=True)
            return
        # This import of torch is needed only where ranks exchange data.
        from pytest_gpumem.simulated.distributed.exchange import exchange_of

        self._has_joined = True
        with self._with_all_ranks():
            self._exchange = exchange = exchange_of(self.world, self._address)
            if self.world.rank == 0 and _is_main_thread():
                self._terminate = signal.signal(signal.SIGTERM, self._terminated)
            own = sha256("\n".join(item.nodeid for item in items).encode()).hexdigest()
            hashes = exchange.gather("its tests", own)
            problems = [
                f"rank {rank} would run other tests than rank 0, or in another order: start all of "
                "them alike, with -p no:randomly, or one seed, where a plugin shuffles tests"
                for rank, one in enumerate(hashes)
                if one != own
            ]
            problem = exchange.broadcast("its tests", problems[0] if problems else None)
        if problem:
            self._leave(problem, pytest.ExitCode.USAGE_ERROR)

    @contextmanager
    def one_outcome(
        self, item: pytest.Item, current: Callable[[], MeasuredItem | None], *, called: bool
    ) -> Iterator[None]:
        """Set up ``item`` inside, or call it if ``called``, with one outcome on all ranks."""
        try:
            # A device that cannot be had is reported when the test begins.
            gpu = None
            with suppress(DeviceError):
                gpu = None if called or self._exchange is None else self._selector.measured_device()
            if self._exchange is not None and gpu is not None:
                if self._ensure_group is None:
                    own = own_group(self._exchange.store, self.world)
                    self._ensure_group = self._group.enter_context(own)
                with scope.opened():  # no device is active yet
                    self._ensure_group()
            yield
        except BaseException as error:
            self._agree(item, current(), error)
            raise
        if called:
            self._agree(item, current(), collected_error(item))

    def _agree(
        self, item: pytest.Item, current: MeasuredItem | None, error: BaseException | None
    ) -> None:
        """Exchange the outcome of ``item`` with the other ranks; rank 0 judges the highest peak.

        Raises the failure that the ranks agree on, unless this rank has raised ``error`` itself.
        """
        if self._exchange is None or isinstance(error, KeyboardInterrupt | pytest.exit.Exception):
            return
        measurement = current.measurement if current is not None and error is None else None
        failed = "skipped" if isinstance(error, _SKIPS) else "failed"
        outcome = {
            "outcome": "passed" if error is None else failed,
            "text": _text(item, error),
            "measurement": measurement and measurement.to_dict(),
        }
        with self._with_all_ranks():
            outcomes = self._exchange.gather(item.nodeid, outcome)
        verdict = error
        if self.world.rank == 0 and error is None:
            try:
                self._judge(current, outcomes)
            except (Exception, pytest.fail.Exception) as failure:
                verdict = failure
        with self._with_all_ranks():
            failure_of_first = self._exchange.broadcast(item.nodeid, _text(item, verdict))
        if error is not None:
            return
        if verdict is not None:
            raise verdict
        if failure_of_first is not None and self.world.rank:
            pytest.fail(f"rank 0: {failure_of_first}", pytrace=False)

    def _judge(self, current: MeasuredItem | None, outcomes: Sequence[Mapping[str, Any]]) -> None:
        for rank, one in enumerate(outcomes):
            if one["outcome"] == "failed":
                pytest.fail(f"rank {rank} failed: {one['text']}", pytrace=False)
        if current is None:
            return
        measured = {
            rank: Measurement.from_dict(one["measurement"])
            for rank, one in enumerate(outcomes)
            if one["measurement"] is not None
        }
        if 0 not in measured:
            return  # an unmarked test that used no device
        skipped = [f"rank {n}" for n, one in enumerate(outcomes) if one["outcome"] == "skipped"]
        expectation = current.prepared.expectation
        named = expectation.rank if expectation is not None else None
        peaks = {rank: one.peak_allocated for rank, one in measured.items()}
        judged = named if isinstance(named, int) and named in measured else worst_of(peaks)
        notes = [imbalance(peaks)] if len(peaks) > 1 else []
        notes += [f"{', '.join(skipped)} skipped the test"] if skipped else []
        own = replace(measured[judged], notes=(*measured[judged].notes, *notes))
        if judged == named:  # then limits apply only to it
            current.judge(own, (), ranks=f"rank {judged} of {self.world.size}")
            return
        others = [
            replace(one, device=f"rank {rank}") for rank, one in measured.items() if rank != judged
        ]
        current.judge(own, others, ranks=f"worst rank of {self.world.size}")

    def finish(self, session: pytest.Session, results: Results) -> None:
        """Agree on one exit status for all ranks."""
        if self._exchange is None or session.exitstatus in _ENDED:
            return
        with self._with_all_ranks():
            own = {"status": int(session.exitstatus), "failures": self._failures}
            others = self._exchange.gather("the end of its tests", own)
            for rank, one in enumerate(others):
                for nodeid, text in one["failures"].items():
                    if nodeid not in self._failures:
                        note = f"{nodeid} failed on rank {rank}, and not on rank 0: {text}"
                        results.notes.append(note)
            if session.exitstatus in HARMLESS:
                bad = (one["status"] for one in others if one["status"] not in HARMLESS)
                session.exitstatus = next(bad, session.exitstatus)
            status: int = self._exchange.broadcast("its exit status", int(session.exitstatus))
        session.exitstatus = self._status = status

    def end(self) -> None:
        """Wait until rank 0 has written its output: torchrun ends all ranks when one leaves."""
        exchange, self._exchange = self._exchange, None
        self._group.close()
        if self._terminate is not None:
            signal.signal(signal.SIGTERM, self._terminate)
        if exchange is None or self._status is None:
            return  # the others may be in any test, or gone
        sys.stdout.flush()
        if self._status not in HARMLESS and _is_main_thread():
            # torchrun terminates remaining ranks of a failed run, and would report that instead.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        from pytest_gpumem.simulated.distributed.exchange import RankExchangeError

        with suppress(RankExchangeError):  # rank 0 has left already
            exchange.broadcast("the end", None)

    def pytest_runtest_logreport(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        """Record a failure of a test or of collection, which another rank may not have."""
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            lines = (crash.message if crash else report.longreprtext).splitlines()
            self._failures.setdefault(report.nodeid, lines[0] if lines else "")

    pytest_collectreport = pytest_runtest_logreport

    @contextmanager
    def _with_all_ranks(self) -> Iterator[None]:
        """End the run if another rank is gone."""
        from pytest_gpumem.simulated.distributed.exchange import RankExchangeError

        try:
            yield
        except RankExchangeError as error:
            self._leave(str(error), pytest.ExitCode.INTERRUPTED)

    def _terminated(self, number: int, frame: FrameType | None) -> NoReturn:
        """End the run with the reason of torchrun's SIGTERM: usually another rank has ended."""
        lost = self._exchange.lost() if self._exchange is not None else []
        ended = [f"rank {rank} has ended before the run was over" for rank in lost]
        self._leave("; ".join(ended) or "SIGTERM has ended the run", pytest.ExitCode.INTERRUPTED)

    def _leave(self, sentence: str, status: pytest.ExitCode) -> NoReturn:
        self._exchange = None
        pytest.exit(sentence, returncode=int(status))


def _text(item: pytest.Item, error: BaseException | None) -> str | None:
    """Return pytest's text for ``error``, ``None`` where it is none or a skip."""
    if error is None or isinstance(error, _SKIPS):
        return None
    found = pytest.ExceptionInfo.from_exception(error)
    if isinstance(error, pytest.fail.Exception) and not error.pytrace:
        return str(error)
    return f"{found.exconly(tryshort=True).splitlines()[0]}\n\n{item.repr_failure(found)}"


def _is_main_thread() -> bool:
    """Return whether this is the main thread, the only one that may set signal handlers."""
    return threading.current_thread() is threading.main_thread()


@contextmanager
def own_group(store: Store, world: World) -> Iterator[Callable[[], None]]:
    """Yield a function that initialises ``torch.distributed`` once, on all ranks together.

    A simulated rank does the same. If code calls ``init_process_group`` itself, its group replaces
    this one. NCCL is for tensors on GPUs, gloo for CPU tensors, and for all if torch has no NCCL.
    """
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed import distributed_c10d as c10d

    init, count, is_there = c10d.init_process_group, 0, False

    def ensure() -> None:
        nonlocal count, is_there
        if not dist.is_initialized():
            count += 1
            init(
                "cpu:gloo,cuda:nccl" if dist.is_nccl_available() else "gloo",
                store=PrefixStore(f"group/{count}", store),
                rank=world.rank,
                world_size=world.size,
            )
            is_there = True

    def destroy_group() -> None:
        nonlocal is_there
        if is_there and dist.is_initialized():
            dist.destroy_process_group()
        is_there = False

    def init_after_destroying(*args: Any, **kwargs: Any) -> Any:
        destroy_group()
        return init(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patches:
        for owner in (dist, c10d):
            patches.setattr(owner, "init_process_group", init_after_destroying)
        yield ensure
    destroy_group()
