"""Recurrent layers, which run cuDNN's kernels with their parameters in one buffer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

STEPS, BATCH, INPUTS, HIDDEN = 10, 4, 32, 64


@pytest.mark.parametrize(
    ("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)], ids=["lstm", "gru", "rnn"]
)
def test_parameters_of_a_layer_share_one_buffer(on: Any, kind: Any, gates: int) -> None:
    on()
    layer = kind(INPUTS, HIDDEN).cuda()
    elements = gates * HIDDEN * (INPUTS + HIDDEN + 2)
    storages = {parameter.untyped_storage()._cdata for parameter in layer.parameters()}
    assert len(storages) == 1
    assert torch.cuda.memory_allocated() == elements * 4


def test_forward_keeps_output_and_states(on: Any) -> None:
    gpu = on()
    layer = nn.LSTM(INPUTS, HIDDEN).cuda()
    x = torch.randn(STEPS, BATCH, INPUTS, device="cuda")
    state = BATCH * HIDDEN * 4
    zeros = [state, state]
    output = STEPS * BATCH * HIDDEN * 4
    # Estimates: 8 MiB, the matrices and 256 bytes; copies of the sequences, their lengths, and the
    # states in and out; four gates, once and four times, and four states. Kept are four gates and
    # a cell of each step.
    matrices = 4 * HIDDEN * (INPUTS + HIDDEN) * 4
    copies = STEPS * BATCH * (INPUTS + HIDDEN) * 4 + 8 * BATCH + 4 * state
    workspace = 8 * 2**20 + matrices + 256 + copies + 5 * 4 * output + 4 * state
    reserve = 5 * output + 256
    kept = [*zeros, output, state, state, workspace]
    assert gpu.of(lambda: layer(x)) == [*kept, reserve, -workspace]
    layer.eval()
    with torch.no_grad():
        assert gpu.of(lambda: layer(x)) == [*kept, -workspace, -state, -state]


def test_the_buffer_has_room_for_biases_without_biases(on: Any) -> None:
    on()
    layer = nn.LSTM(INPUTS, HIDDEN, bias=False).cuda()
    assert len(list(layer.parameters())) == 2
    assert torch.cuda.memory_allocated() == 4 * HIDDEN * (INPUTS + HIDDEN + 2) * 4


def test_lstm_cell_is_one_kernel_behind_two_products(on: Any) -> None:
    gpu = on()
    cell = nn.LSTMCell(INPUTS, HIDDEN).cuda()
    x, state = (torch.randn(BATCH, size, device="cuda") for size in (INPUTS, HIDDEN))
    cell(x, (state, state))  # takes cuBLAS's workspace
    gates, vector = BATCH * HIDDEN * 4 * 4, BATCH * HIDDEN * 4
    # The products, the kernel's workspace, both states; backward needs no product.
    assert gpu.of(lambda: cell(x, (state, state)))[:5] == [gates, gates, gates, vector, vector]


def test_a_gru_cell_saves_five_vectors(on: Any) -> None:
    gpu = on()
    cell = nn.GRUCell(INPUTS, HIDDEN).cuda()
    x, state = (torch.randn(BATCH, size, device="cuda") for size in (INPUTS, HIDDEN))
    cell(x, state)
    gates, vector = BATCH * HIDDEN * 3 * 4, BATCH * HIDDEN * 4
    events = gpu.of(lambda: cell(x, state))
    # The gates stay, too: the gradient may be differentiated.
    assert events == [gates, gates, 5 * vector, vector]
    output = cell(x, state)
    gradient = torch.ones_like(output)
    backward = gpu.of(lambda: output.backward(gradient))
    assert backward[:5] == [gates, gates, vector, 3 * HIDDEN * 4, 3 * HIDDEN * 4]


def test_weight_gradients_are_views_of_one_buffer(on: Any) -> None:
    gpu = on()
    layer = nn.GRU(INPUTS, HIDDEN).cuda()
    output, _ = layer(torch.randn(STEPS, BATCH, INPUTS, device="cuda"))
    gradient = torch.ones_like(output)
    events = gpu.of(lambda: output.backward(gradient))
    assert 3 * HIDDEN * (INPUTS + HIDDEN + 2) * 4 in events
    gradients = [parameter.grad for parameter in layer.parameters()]
    assert (
        len({gradient.untyped_storage()._cdata for gradient in gradients if gradient is not None})
        == 1
    )


def test_packed_sequences_run_cudnn(on: Any) -> None:
    on()
    layer = nn.LSTM(INPUTS, HIDDEN, batch_first=True).cuda()
    x = torch.randn(BATCH, STEPS, INPUTS, device="cuda")
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([10, 8, 5, 2]), batch_first=True)
    output, _ = layer(packed)
    assert output.data.shape == (25, HIDDEN)
    assert output.data.grad_fn.name() == "CudnnRnnBackward0"


def test_autocast_copies_all_parameters_into_one_buffer_of_halves(on: Any) -> None:
    gpu = on()
    layer = nn.LSTM(INPUTS, HIDDEN).cuda()
    x = torch.randn(STEPS, BATCH, INPUTS, device="cuda")
    state = BATCH * HIDDEN * 2
    elements = 4 * HIDDEN * (INPUTS + HIDDEN + 2)
    with torch.autocast("cuda", dtype=torch.bfloat16):  # float16 all the same
        events = gpu.of(lambda: layer(x))
    zeros = [2 * state, 2 * state]
    # The buffer; the cell's state, the hidden one and the input are cast, the last argument first.
    casts = [elements * 2, state, state, STEPS * BATCH * INPUTS * 2]
    assert events[:8] == [*zeros, *casts, STEPS * BATCH * HIDDEN * 2, state]


@pytest.mark.parametrize(("version", "by_cudnn"), [("2.10", False), ("2.11", True)])
def test_bfloat16_runs_cudnn_since_2_11(on: Any, version: str, by_cudnn: bool) -> None:
    gpu = on("A100-40GB", version)
    layer = nn.LSTM(INPUTS, HIDDEN).cuda().bfloat16()
    x = torch.randn(STEPS, BATCH, INPUTS, device="cuda", dtype=torch.bfloat16)
    state = BATCH * HIDDEN * 2
    events = gpu.of(lambda: layer(x))[2:]
    if by_cudnn:  # output, states, and a buffer for parameters that are not in one
        elements = 4 * HIDDEN * (INPUTS + HIDDEN + 2)
        assert events[:4] == [STEPS * BATCH * HIDDEN * 2, state, state, elements * 2]
    else:
        assert events.count(4 * state) == 3 * STEPS  # two products and a workspace of each cell


@pytest.mark.parametrize("has_biases", [True, False])
def test_each_step_is_a_cell_without_cudnn(on: Any, has_biases: bool) -> None:
    gpu = on()
    layer = nn.LSTM(INPUTS, HIDDEN, bias=has_biases).cuda()
    x = torch.randn(2, BATCH, INPUTS, device="cuda")
    state = BATCH * HIDDEN * 4
    layer(x)  # takes cuBLAS's workspace
    with torch.backends.cudnn.flags(enabled=False):
        events = gpu.of(lambda: layer(x))
    cell = [4 * state, 4 * state, 4 * state, state, state]
    workspaces = {event for event in map(abs, events) if event > 1 << 20}
    steps = [event for event in events if abs(event) not in workspaces]
    # The states that begin, two steps, the outputs of both, and the last states.
    assert steps[:15] == [state, state, *cell, *cell, 2 * state, state, state]


def test_the_dropout_state_lives_until_the_generator_is_seeded(on: Any) -> None:
    """The state was recorded on an H100 with cuDNN 9.19."""
    gpu = on("H100")
    layer = nn.GRU(INPUTS, HIDDEN, 2, dropout=0.5).cuda()
    x = torch.randn(STEPS, BATCH, INPUTS, device="cuda")
    seed, state = torch.int64.itemsize, 6_488_064

    def of_dropout() -> list[int]:
        return [size for size in gpu.of(lambda: layer(x)) if abs(size) in (seed, state)]

    assert of_dropout() == [seed, -seed, state]
    assert of_dropout() == []
    torch.manual_seed(1)
    assert of_dropout() == [seed, -seed, state, -state]
    torch.cuda.set_rng_state(torch.cuda.get_rng_state())
    assert of_dropout() == [seed, -seed, state, -state]
    torch.cuda.default_generators[0].set_offset(4)
    assert of_dropout() == []
    torch.manual_seed(1)
    layer.eval()
    assert of_dropout() == []
