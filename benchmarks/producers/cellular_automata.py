"""Neural cellular automata that segment a whole slide or a video, from coarse to fine.

Recorded: HugePandaCoder/octree-nca-groupeq, inference without gradients.

- ``slide``: 0cc72993, whole_slide_inference.ipynb: the cell that runs the model, run twice (torch
  2.3);
- ``fused_slide``: b6026285, whole_slide_inference.py: a step is one kernel of the project's own
  (torch 2.5);
- ``video``: d47727a2, inference_cholec_m3d_gpu_vram_timed.py, over 200 frames (torch 2.5).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS, INPUTS, HIDDEN = 16, 3, 64
COARSEST = 20
"""Steps of the coarsest automaton of a slide."""


def with_moments(models: Sequence[nn.Module]) -> tuple[nn.ModuleList, list[Tensor]]:
    """The automata and what their Adam keeps: the experiments are loaded whole."""
    automata = nn.ModuleList(models).cuda().eval()
    return automata, [torch.zeros_like(each) for each in automata.parameters() for _ in range(2)]


def seed(*sizes: int, device: str) -> Tensor:
    """Channels last: the image, and zeros in the other channels."""
    state = torch.zeros(1, *sizes, CHANNELS, device=device)
    state[..., :INPUTS] = image(*sizes, INPUTS)
    return state


def image(*sizes: int) -> Tensor:
    """Pixels in memory of the host; its values do not matter."""
    return torch.empty(1, *sizes)


def finer(state: Tensor, sizes: Sequence[int]) -> Tensor:
    """Each cell repeated; channels come first."""
    repeated: Tensor = nn.Upsample(size=tuple(sizes), mode="nearest")(state)
    return repeated


def show(state: Tensor) -> Tensor:
    """Put the image of its size into a state whose channels come first; channels last."""
    pixels = image(INPUTS, *state.shape[2:])
    state[0, :INPUTS] = pixels[0]
    return state.movedim(1, -1)


# Slides.


class Automaton(nn.Module):
    """Two dimensions, without a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.fc0 = nn.Conv2d(2 * CHANNELS, HIDDEN, 1)
        self.fc1 = nn.Conv2d(HIDDEN, CHANNELS - INPUTS, 1, bias=False)
        self.conv = nn.Conv2d(
            CHANNELS, CHANNELS, 3, padding=1, padding_mode="reflect", groups=CHANNELS
        )

    def update(self, state: Tensor) -> Tensor:
        """The new channels that are not the image's."""
        change: Tensor = self.conv(state)
        change = torch.cat([state, change], dim=1)
        change = self.fc0(change)
        change = F.relu(change)
        change = self.fc1(change)
        batch, channels, height, _ = change.shape
        fires = torch.zeros(batch, channels, height, 1, device=change.device)
        fires.bernoulli_(0.5).float()
        change = change * fires
        return state[:, INPUTS:] + change

    def forward(self, x: Tensor, steps: int) -> Tensor:
        """The state after ``steps``, channels last."""
        state = x.movedim(-1, 1)
        pixels = state[:, :INPUTS]
        for _ in range(steps):
            new_state = self.update(state)
            state = torch.cat([pixels, new_state], dim=1)
        return state.movedim(1, -1)


class FusedAutomaton(Automaton):
    """Every step is one kernel, which reads a state and writes the next one."""

    def forward(self, x: Tensor, steps: int) -> Tensor:
        """The state after ``steps``, channels last."""
        state = x.movedim(-1, 1).contiguous()
        for _ in range(steps):
            new_state = fired(state)
            one_step(new_state, state, self)
            state = new_state
        return state.movedim(1, -1)


def fired(state: Tensor) -> Tensor:
    """An empty state that says which cells change."""
    new_state = torch.zeros(*state.shape, device=state.device)
    new_state[:, 0].bernoulli_(0.5)
    return new_state


def one_step(new_state: Tensor, state: Tensor, automaton: nn.Module) -> None:
    """``nca2d_cuda`` of nca_cuda.cu, which writes into ``new_state`` and allocates nothing."""


def halved(height: int, width: int) -> list[tuple[int, int]]:
    """The sizes of the five levels, the finest first."""
    sizes = [(height, width)]
    while len(sizes) < 5:
        sizes.append((-(-sizes[-1][0] // 2), -(-sizes[-1][1] // 2)))
    return sizes


def slide(start: Callable[[], None]) -> list[Any]:
    """4830 x 4830 pixels, twice; recorded is the second time. The third level comes twice."""
    with torch.no_grad():
        automata, moments = with_moments([Automaton() for _ in range(5)])
        sizes = halved(4830, 4830)
        for again in (False, True):
            if again:
                start()
            state = automata[4](seed(*sizes[4], device="cpu").cuda(), COARSEST)
            for level in (3, 2, 2, 1, 0):
                state = finer(state.movedim(-1, 1), sizes[level])
                state = automata[level](show(state), steps=5)
    return [automata, moments, state]


def fused_slide(start: Callable[[], None]) -> list[Any]:
    """11360 x 11200 pixels; the finest steps are written where the state lives."""
    with torch.no_grad():
        automata, moments = with_moments([FusedAutomaton() for _ in range(5)])
        sizes = halved(11_360, 11_200)
        start()
        state = automata[4](seed(*sizes[4], device="cpu").cuda(), COARSEST)
        for level in (3, 2, 2, 1):
            state = finer(state.movedim(-1, 1), sizes[level])
            state = automata[level](show(state), steps=10)
        state = finer(state.movedim(-1, 1), sizes[0])
        state = show(state).movedim(-1, 1)
        for _ in range(10):
            new_state = fired(state)
            one_step(new_state, state, automata[0])
            state = new_state
    return [automata, moments, state]


# Videos.


class VolumeAutomaton(nn.Module):
    """Three dimensions, with a batch norm that keeps no statistics."""

    def __init__(self, kernel: int) -> None:
        super().__init__()
        self.fc0 = nn.Linear(2 * CHANNELS, HIDDEN)
        self.fc1 = nn.Linear(HIDDEN, CHANNELS, bias=False)
        self.p0 = nn.Conv3d(
            CHANNELS,
            CHANNELS,
            kernel,
            padding=kernel // 2,
            padding_mode="reflect",
            groups=CHANNELS,
        )
        self.bn = nn.BatchNorm3d(HIDDEN, track_running_stats=False)

    def perceive(self, x: Tensor) -> Tensor:
        """The state and what each cell sees around it."""
        around = self.p0(x)
        return torch.cat((x, around), 1)

    def update(self, state: Tensor) -> Tensor:
        """The new state."""
        x = state.transpose(1, 4)
        change: Tensor = self.perceive(x)
        change = change.transpose(1, 4)
        change = self.fc0(change)
        change = change.transpose(1, 4)
        change = self.bn(change)
        change = change.transpose(1, 4)
        change = F.relu(change, inplace=True)
        change = self.fc1(change)
        fires = torch.empty(*change.shape[:4], 1)
        fires = fires.cuda()
        change = change * fires
        x = x + change.transpose(1, 4)
        return x.transpose(1, 4)

    def forward(self, x: Tensor, steps: int) -> Tensor:
        """The state after ``steps``, channels last."""
        for _ in range(steps):
            new = self.update(x).clone()
            x = torch.concat((x[..., :INPUTS], new[..., INPUTS:]), 4)
        return x


def video(start: Callable[[], None]) -> list[Any]:
    """240 x 424 pixels, 200 frames."""
    with torch.no_grad():
        automata, moments = with_moments([VolumeAutomaton(3), VolumeAutomaton(7)])
        first = seed(60, 106, 50, device="cuda")
        start()
        torch.cuda.empty_cache()
        state = automata[1](first, steps=40)
        # einops leaves an axis that is called 1 out: its stride is then no channels-last one.
        state = finer(state[0].movedim(-1, 0)[None], (240, 424, 200))
        state = show(state)
        state = automata[0](state, steps=20)
    return [automata, moments, first, state]
