"""The allocator's events as lifetimes of blocks, and the live blocks at its peaks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

FOREVER = 1 << 62
"""Position of the free of a block that is still live."""


SUPPLY = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
"""The actions that change the bytes held from the driver, and their signs."""


class Origin(Protocol):
    """The origin of a block; each property may be unknown."""

    @property
    def source_line(self) -> tuple[str, int, str] | None:
        """The file, line and function of the user's code that allocated it."""

    @property
    def frames(self) -> Sequence[Mapping[str, Any]]:
        """The frames of the code that allocated it, innermost first: filename, line and name."""

    @property
    def operator_name(self) -> str | None:
        """The operator's public name: ``torch.softmax``."""

    @property
    def kind(self) -> str:
        """``copy`` from the host, ``factory`` or ``computed``; with sharding also ``unsharded``
        (parameters) and ``buffer``."""

    @property
    def library(self) -> str | None:
        """The library whose workspace it is."""

    @property
    def node(self) -> str | None:
        """The running autograd node, ``SoftmaxBackward0``; ``None`` outside backward."""

    @property
    def sequence(self) -> int:
        """The sequence number of the running node, else of the next new one; -1 if unknown."""

    @property
    def has_node(self) -> bool:
        """Whether autograd made a node for the operator; true if that is unknown."""

    @property
    def shape(self) -> Sequence[int] | None:
        """The shape of the tensor that the block was allocated for."""

    @property
    def dtype(self) -> object:
        """The dtype of the same tensor: ``torch.float32``, ``None`` where unknown."""


class Event(NamedTuple):
    """An allocation or free; ``nbytes`` is the block's size after rounding."""

    is_alloc: bool
    address: int
    nbytes: int
    origin: Origin | None


class Observation(NamedTuple):
    """The content of an address, observed before the event number ``position``."""

    position: int
    address: int
    category: str
    module: str
    """Path of the module that owns it; empty if there is none."""
    name: str
    """The attribute: ``weight``, ``exp_avg``."""


class Span(NamedTuple):
    """A range from before the event number ``begin`` to before the event number ``end``."""

    name: str
    begin: int
    end: int


@dataclass(eq=False, slots=True)
class BlockLifetime:
    """A block with the positions of its allocation and its free; the first event is 0."""

    address: int
    nbytes: int
    origin: Origin | None
    made_at: int
    freed_at: int = FOREVER
    observation: Observation | None = None


@dataclass
class History:
    """The events on one device while the body of a test ran.

    ``held`` are the live blocks at the start: address, bytes and origin.
    """

    held: Iterable[tuple[int, int, Origin | None]]
    events: Iterable[Event]
    phases: Sequence[Span]
    """The windows of the test's phases."""
    automatic: Sequence[Span] = ()
    """The automatic phases forward, backward and step."""
    modules: Sequence[tuple[int, str]] = ()
    """Position, and the path of the module that runs from then on; empty outside modules."""
    observations: Sequence[Observation] = ()
    excluded_windows: Sequence[tuple[int, int]] = ()
    """Ranges in which the body's ``getfixturevalue`` set up fixtures; they count as before it."""
    unmeasured: Sequence[tuple[int, int]] = ()
    """Ranges in which no peak counts."""
    reserved: Sequence[int] = ()
    """Reserved bytes before each event, and after the last one; empty if unknown."""
    split: Sequence[int] = ()
    """Bytes of inactive splits at the same positions; empty if unknown."""
    root: str = ""
    """The folder that paths are relative to."""
    classify: Callable[[str, int, Origin], str] | None = None
    """Function that returns a block's final category from its category, bytes and origin."""
    locate: Callable[[Origin], tuple[str, int, str] | None] | None = None
    """Function that returns an allocation's line, if not the innermost line of the user's code."""
    lifetimes: list[BlockLifetime] = field(init=False)
    length: int = field(init=False)

    def __post_init__(self) -> None:
        self.lifetimes = [BlockLifetime(*block, -1) for block in self.held]
        self.length = self._live(self.events)
        for begin, end in self.excluded_windows:
            self._put_before(begin, end)
        self._recognise()

    def peaks(self) -> Mapping[str, int]:
        """Return the position of each phase's peak: that of the event before it."""
        allocated = self.allocated()
        for begin, end in self.unmeasured:
            allocated[begin + 1 : end] = [-1] * max(end - begin - 1, 0)
        peaks: dict[str, tuple[int, int]] = {}
        for phase in self.phases:
            # Index i holds the bytes allocated before event i.
            window = allocated[phase.begin : phase.end + 1]
            highest = max(window)
            if phase.name not in peaks or highest > peaks[phase.name][0]:
                peaks[phase.name] = highest, phase.begin + window.index(highest) - 1
        return {name: position for name, (_, position) in peaks.items()}

    def allocated(self, lives: Iterable[BlockLifetime] | None = None) -> list[int]:
        """Return the bytes of ``lives``, or of all blocks, before each event and after the last."""
        changes = [0] * (self.length + 1)
        for life in self.lifetimes if lives is None else lives:
            changes[life.made_at + 1] += life.nbytes
            if life.freed_at < self.length:
                changes[life.freed_at + 1] -= life.nbytes
        return list(accumulate(changes))

    def live_at(self, position: int) -> list[BlockLifetime]:
        """Return the live blocks after the event number ``position``."""
        return [life for life in self.lifetimes if life.made_at <= position < life.freed_at]

    def module_at(self, position: int) -> str:
        """Return the path of the module that ran at the event number ``position``."""
        index = bisect_right(self.modules, position, key=lambda mark: mark[0]) - 1
        return self.modules[index][1] if index >= 0 else ""

    def span_at(self, position: int) -> Span | None:
        """Return the automatic phase that the event number ``position`` belongs to."""
        index = bisect_right(self.automatic, position, key=lambda span: span.begin) - 1
        if index >= 0 and position < self.automatic[index].end:
            return self.automatic[index]
        return None

    def place_of(self, origin: Origin) -> tuple[str, int, str] | None:
        """Return file, line and function that name the allocations of ``origin``."""
        return origin.source_line if self.locate is None else self.locate(origin)

    def next_backward(self, position: int) -> int:
        """Return the begin of the first backward after ``position``, else the last position."""
        index = bisect_right(self.automatic, position, key=lambda span: span.begin)
        return next(
            (span.begin for span in self.automatic[index:] if span.name == "backward"), self.length
        )

    def _live(self, events: Iterable[Event]) -> int:
        living = {life.address: life for life in self.lifetimes}
        position = -1
        for position, (is_alloc, address, nbytes, origin) in enumerate(events):
            if is_alloc:
                life = living[address] = BlockLifetime(address, nbytes, origin, position)
                self.lifetimes.append(life)
            elif (dead := living.pop(address, None)) is not None:
                dead.freed_at = position
        return position + 1

    def _put_before(self, begin: int, end: int) -> None:
        """Count the blocks allocated in this range as held, without those freed in it."""
        inside = [life for life in self.lifetimes if begin <= life.made_at < end]
        freed = {id(life) for life in inside if life.freed_at < end}
        for life in inside:
            life.made_at = -1
        self.lifetimes = [life for life in self.lifetimes if id(life) not in freed]

    def _recognise(self) -> None:
        by_address: dict[int, list[BlockLifetime]] = {}
        wanted = {observation.address for observation in self.observations}
        for life in self.lifetimes:
            if life.address in wanted:
                by_address.setdefault(life.address, []).append(life)
        for observation in self.observations:
            for life in by_address.get(observation.address, ()):
                if not life.made_at < observation.position <= life.freed_at:
                    continue
                # A later observation of the same tensor may also have its owner's path.
                known = life.observation or observation
                gain = _STRENGTH.index(observation.category) - _STRENGTH.index(known.category)
                path = len(observation.module) - len(known.module)
                if life.observation is None or (gain, path) > (0, 0):
                    life.observation = observation


CATEGORIES = (
    *("parameters", "gradients", "optimizer state", "inputs"),
    *("activations", "workspace", "temporaries", "other"),
)
PARAMETERS, GRADIENTS, OPTIMIZER_STATE, INPUTS = CATEGORIES[:4]
ACTIVATIONS, WORKSPACE, TEMPORARIES, OTHER = CATEGORIES[4:]

_STRENGTH = (INPUTS, OTHER, OPTIMIZER_STATE, GRADIENTS, PARAMETERS, WORKSPACE)
"""Observed categories, the weakest first: a buffer passed to a module remains a buffer."""
