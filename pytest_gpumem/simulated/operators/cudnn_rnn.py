"""Bytes that cuDNN takes for a recurrent layer: the workspace of a call, the reserve for backward.

PyTorch asks cudnnGetRNNTempSpaceSizes for both. No source tells them: they were found from 160
layers on an H100 (torch 2.11, cuDNN 9.19, CUDA 13.0), drawn at random: LSTM, GRU and RNN of 8 to
1024 numbers, one to three layers, one or both directions, projected, packed, with dropout, float32,
float16 and bfloat16, up to 257 steps of 128 sequences. All 160 workspaces of inference and all
reserves are exact, and 159 workspaces of training. Not used for this: the nine of a benchmark, all
exact; and 144 tiny ones of PyTorch's module samples, of two or three numbers, of which 94 are exact
and the others less than 65 bytes off. The reserves of cuDNN 6 in pytorch#2895 are these without the
256 bytes. Of 312 more of 192 numbers, by which two limits below were found, 273 are exact: off
are those of bfloat16 above 256 steps (6 % too high at 1,000) and of two layers of RNN (0.3 % low).
Other GPUs were not measured: all of it is marked as estimated.

A workspace is 8 MiB for each layer and direction, the matrices, and the largest need of three
kernels: forward, backward for the weights and backward for the data, the last two in training.
Buffers begin at multiples of 32 bytes. Three choices of cuDNN show in the sizes:

- Padded sequences are copied in and out, with their states, and their gradients likewise; packed
  ones are not.
- Small states of float32 and float16 (autocast's type) have kernels of their own, which take four
  times the gates in addition: up to 192 numbers, of RNN in float32 256, in padded sequences.
- Several layers in one direction run as a wave: a buffer between two of them has 16 steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pytest_gpumem.simulated.operators.layout import round_up

_PER_LAYER = 8 * 2**20
"""Bytes for each layer and direction."""
_ALWAYS = 256
_ALIGNMENT = 32
_WAVE = 16
"""Steps between a layer and the next one."""
_LONG = 256
"""Steps above which the forward kernel of one direction holds the gates of one layer less."""
_SMALL, _SMALL_RNN_FLOAT32 = 192, 256
"""Most numbers of a state for which the small kernels run; for the first, 256 is too many."""


class _Cell(NamedTuple):
    """Counts for a kind of layer; states are for each layer and direction."""

    gates: int
    kept: int
    """Vectors that backward needs of each step."""
    copies: int
    """Tensors of states that are copied in, and out."""
    forward: int
    backward: int
    small: int
    """States of the kernels for small ones, either way."""
    small_backward: int
    """Vectors of each step that the small kernel for the weights takes."""


_RNN = _Cell(1, 1, 1, 1, 1, 2, 10)
_CELLS = {
    "lstm": _Cell(4, 5, 2, 6, 3, 4, 13),
    "gru": _Cell(3, 6, 1, 3, 1, 2, 15),
    "rnn_tanh": _RNN,
    "rnn_relu": _RNN,
}


@dataclass(frozen=True)
class Recurrent:
    """A call of a recurrent layer."""

    name: str
    """``lstm``, ``gru``, ``rnn_tanh`` or ``rnn_relu``."""
    input: int
    hidden: int
    projected: int
    """Numbers of a projected state, 0 where none is."""
    layers: int
    directions: int
    batch: int
    """Sequences."""
    steps: int
    """Steps of the longest sequence."""
    rows: int
    """Steps of all sequences."""
    element_bytes: int
    is_bfloat16: bool
    is_packed: bool
    has_dropout: bool
    is_training: bool

    @property
    def cell(self) -> _Cell:
        """The counts of its kind."""
        return _CELLS[self.name]

    @property
    def pseudo_layers(self) -> int:
        """Layers of all directions."""
        return self.layers * self.directions

    @property
    def output(self) -> int:
        """Numbers of one direction's output at a step."""
        return self.projected or self.hidden

    @property
    def is_small(self) -> bool:
        """Whether it has the kernels for small states."""
        of_rnn = self.name not in ("lstm", "gru") and self.element_bytes == 4
        return (
            not (self.is_packed or self.projected or self.is_bfloat16)
            and self.element_bytes <= 4
            and self.hidden <= (_SMALL_RNN_FLOAT32 if of_rnn else _SMALL)
        )

    @property
    def drops(self) -> bool:
        """Whether numbers between layers are dropped."""
        return self.is_training and self.has_dropout and self.layers > 1

    def bytes_of(self, rows: int, width: int = 1) -> int:
        """Return the bytes of a buffer of ``rows`` vectors of ``width`` numbers."""
        return round_up(rows * width * self.element_bytes, _ALIGNMENT)


def reserve_bytes(call: Recurrent) -> int:
    """Return the bytes that a recurrent layer keeps for its backward.

    Each layer keeps numbers of its gates, and all layers but the last their outputs, and a bit for
    each number that may be dropped.
    """
    own = call.cell.kept * call.hidden
    if call.projected:
        own += call.hidden + call.projected
    between = (call.layers - 1) * call.directions
    nbytes = call.bytes_of(call.rows, call.pseudo_layers * own)
    nbytes += call.bytes_of(call.rows, between * call.hidden)
    if call.drops:
        numbers = call.directions * call.steps * call.batch * call.output
        nbytes += between * round_up(numbers // 8, _ALIGNMENT)
    return nbytes + _ALWAYS


def workspace_bytes(call: Recurrent) -> int:
    """Return the bytes of a recurrent layer's workspace, of its largest kernel."""
    needs = [_copied(call) + _forward(call)]
    if call.is_training:
        needs += [2 * _copied(call) + need for need in _backward(call)]
    lengths = 0 if call.is_packed else round_up(8 * call.batch, _ALIGNMENT)
    fixed = call.pseudo_layers * _PER_LAYER + call.bytes_of(_matrices(call))
    return fixed + _ALWAYS + lengths + max(needs)


def _matrices(call: Recurrent) -> int:
    """Return the elements of all matrices: those of the input, of the state, and projections."""
    above = call.directions * call.output
    columns = call.input + (call.layers - 1) * above + call.layers * call.output
    projections = call.layers * call.projected
    return call.directions * call.hidden * (call.cell.gates * columns + projections)


def _copied(call: Recurrent) -> int:
    """Return bytes of padded sequences in and out, and of states: the first, projected, and all."""
    if call.is_packed:
        return 0
    states = call.pseudo_layers * call.batch
    own = call.bytes_of(states, call.hidden) + call.bytes_of(states, call.output)
    output = call.bytes_of(call.rows, call.directions * call.output)
    return call.bytes_of(call.rows, call.input) + output + call.cell.copies * own


def _states(call: Recurrent, each: int) -> int:
    """Return the states of one step; both directions have more."""
    if call.directions == 2:
        each += 1 if call.is_small else 2
    return each * call.pseudo_layers


def _forward(call: Recurrent) -> int:
    cell, directions = call.cell, call.directions
    states = _states(call, cell.small if call.is_small else cell.forward)
    if call.steps > _LONG and directions == 1 and not (call.is_small or call.is_packed):
        states -= cell.gates
    vectors = [directions * cell.gates]
    vectors += [4] if directions == 2 else []
    vectors += [directions] if call.projected else []
    vectors += [4 * cell.gates] if call.is_small else []
    nbytes = sum(call.bytes_of(call.rows, count * call.hidden) for count in vectors)
    if call.drops and directions == 1:
        nbytes += call.bytes_of(call.rows, call.output)
    return nbytes + call.bytes_of(states * call.batch, call.hidden)


def _backward(call: Recurrent) -> tuple[int, int]:
    """Return the needs of the kernels for the weights, and for the data."""
    cell, directions, hidden = call.cell, call.directions, call.hidden
    both = directions == 2
    inputs = call.bytes_of(call.rows, (4 if both else 1) * call.input)
    between = directions if call.layers > 1 else 0
    if call.is_small:
        own = call.bytes_of(call.rows, (cell.small_backward + directions - 1) * hidden)
        own += call.bytes_of(call.rows, between * hidden)
        weights = inputs + own
        data = own + call.bytes_of(call.rows, (4 if both else 1) * hidden)
    elif both:
        projected = 2 if call.projected else 0
        weights = inputs + call.bytes_of(call.rows, (2 + between + projected) * hidden)
        data = call.bytes_of(call.rows, (6 + between) * hidden)
    else:
        rows = call.rows
        if call.layers > 1:
            rows = min(rows, _WAVE * (call.layers - 1) * call.batch)
        projected = call.rows if call.projected else 0
        weights = inputs + call.bytes_of(rows + projected, hidden)
        data = call.bytes_of(call.rows + rows, hidden)
    each = cell.small if call.is_small else cell.backward
    states = call.bytes_of(_states(call, each) * call.batch, hidden)
    return weights + states, data + states
