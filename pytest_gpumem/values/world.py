"""The rank of a process and the number of ranks, from torchrun's variables; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

from pytest_gpumem.marker import MOST_RANKS, is_int
from pytest_gpumem.quoting import quoted

MOST_LOCAL = 8
"""The most ranks in a machine whose number of GPUs is not given: the GPUs of an HGX board."""

NCCL_TIMEOUT = timedelta(minutes=10)
"""kProcessGroupNCCLDefaultTimeout of ProcessGroupNCCL.hpp."""
_STARTED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that ``init_process_group`` reads, which torchrun or a similar launcher has set.

Source: torch/distributed/rendezvous.py (``_env_rendezvous_handler``).
"""
_SIMULATED = "simulated"
"""The ``TORCHELASTIC_RUN_ID`` of a simulated rank, which runs without the other ranks."""


class WorldError(ValueError):
    """An invalid rank or number of ranks; the message is one sentence."""


@dataclass(frozen=True)
class World:
    """A rank and its position among all ranks; each rank has its own GPU."""

    size: int
    """The number of ranks, ``WORLD_SIZE``."""
    rank: int
    """The index of this process's rank, ``RANK``, from 0."""
    local_size: int
    """The number of ranks in its machine, ``LOCAL_WORLD_SIZE``."""

    @property
    def local_rank(self) -> int:
        """The rank's index in its machine, ``LOCAL_RANK``, which is the index of its GPU."""
        return self.rank % self.local_size

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables that torchrun sets, with the values of a run on equal machines.

        Source: torch/distributed/elastic/agent/server/local_elastic_agent.py
        (``LocalElasticAgent._start_workers``), torch 2.6 to 2.15; 29500 is torchrun's own port.
        """
        return {
            "LOCAL_RANK": str(self.local_rank),
            "RANK": str(self.rank),
            "GROUP_RANK": str(self.rank // self.local_size),
            "ROLE_RANK": str(self.rank),
            "ROLE_NAME": "default",
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "WORLD_SIZE": str(self.size),
            "GROUP_WORLD_SIZE": str(self.size // self.local_size),
            "ROLE_WORLD_SIZE": str(self.size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RUN_ID": _SIMULATED,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        }


class RequestedRank(NamedTuple):
    """The rank that a test requests."""

    size: int
    rank: int
    is_worst: bool = False
    """Whether all ranks run and the one with the highest peak is judged."""
    per_machine: int | None = None
    """The number of ranks in a machine, where torchrun gives it."""

    @property
    def name(self) -> str:
        """The name of the rank in texts and baselines."""
        which = "worst rank" if self.is_worst else f"rank {self.rank}"
        return f"{which} of {self.size}"


def world_of_process(variables: Mapping[str, str]) -> World | None:
    """Return the rank that this process was started as; ``None`` for a single process.

    It is read from the ``variables`` that torchrun sets; those of a simulated rank or of a single
    rank give ``None``. Raises :class:`WorldError`.
    """
    if any(name not in variables for name in _STARTED):
        return None
    if variables.get("TORCHELASTIC_RUN_ID") == _SIMULATED:
        return None
    size, rank = (_number(name, variables[name]) for name in ("WORLD_SIZE", "RANK"))
    if size == 1:
        return None
    local = _number("LOCAL_WORLD_SIZE", variables.get("LOCAL_WORLD_SIZE", "0"))
    # If machines have unequal numbers of ranks, this machine's number does not hold for others.
    return world_of(size, rank, per_machine=local if local and size % local == 0 else None)


class Address(NamedTuple):
    """The address of the store of a run's ranks."""

    host: str
    port: int
    is_served: bool
    """Whether torchrun serves the store; else rank 0 has to."""


def address_of_process(variables: Mapping[str, str]) -> Address:
    """Return the address of the store for this process, a rank; raises :class:`WorldError`."""
    served = variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    port = _number("MASTER_PORT", variables["MASTER_PORT"])
    return Address(variables["MASTER_ADDR"], port, served)


def _number(name: str, text: str) -> int:
    if not text.isdecimal() or not text.isascii():
        raise WorldError(f"{name}={quoted(text)} is not a number; torchrun sets it")
    return int(text)


def world_of(size: int, rank: int = 0, *, per_machine: int | None = None) -> World:
    """Return rank ``rank`` of ``size``, in machines of ``per_machine`` GPUs.

    Without ``per_machine`` they are the largest equal machines of at most eight GPUs. Raises
    :class:`WorldError`.
    """
    if not is_int(size, 1, MOST_RANKS):
        raise WorldError(
            f"{quoted(size)} is not a number of ranks; write an int from 1 to {MOST_RANKS:,}"
        )
    if not is_int(rank, 0, size - 1):
        raise WorldError(
            f"{quoted(rank)} is not a rank of {size}; write an int from 0 to {size - 1}"
        )
    if per_machine is None:
        return World(size, rank, next(n for n in range(MOST_LOCAL, 0, -1) if size % n == 0))
    if size % per_machine:
        raise WorldError(
            f"{size} ranks do not fill machines of {per_machine} GPUs; write a multiple of "
            f"{per_machine}"
        )
    return World(size, rank, per_machine)
