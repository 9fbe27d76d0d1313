"""The exchange of results between processes that torchrun has started, one for each rank.

Numbers and verdicts are exchanged, no tensors: each rank computes by itself, or in its own process
groups. They use the store that torchrun serves at ``MASTER_ADDR:MASTER_PORT``; without one, rank 0
serves it, as for ``init_process_group("nccl")``.

Source: torch/distributed/rendezvous.py (``_env_rendezvous_handler``, ``_create_c10d_store``), torch
2.6 to 2.15.
"""

from __future__ import annotations

import json
import os
import socket
import time
import zlib
from base64 import b64decode, b64encode
from collections.abc import Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from pytest_gpumem.sharing.database import Process, is_alive, this_process
from pytest_gpumem.values.world import Address, World

JOINING = timedelta(minutes=5)
"""The time that a rank may take to start."""
WAITING = timedelta(minutes=30)
"""The time that a rank may take until it sends a value: torch's ``default_pg_timeout``."""
_CHECK_SECONDS = 1.0
"""Seconds between two checks whether a process still runs."""


class RankExchangeError(RuntimeError):
    """A rank has ended, or is at another point of the program; the message is one sentence."""


class RankExchange:
    """One rank's side of the exchange; all ranks call the same methods in the same order."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = PrefixStore("pytest-gpumem", store)
        self.store = PrefixStore("more", self._store)
        """A store for other values that the ranks share."""
        self.rank, self.size = rank, size
        self._count = 0
        self._members: dict[int, tuple[str, Process]] = {}
        self._store.set(f"member/{rank}", _packed([socket.gethostname(), *this_process()]))

    def gather(self, topic: str, value: Any) -> Sequence[Any]:
        """Return every rank's value of ``topic`` on rank 0, by rank; elsewhere only the rank's own.

        ``value`` is JSON. Raises :class:`RankExchangeError`.
        """
        self._count += 1
        key = f"{self._count}"
        self._set(f"{key}/{self.rank}", [topic, value])
        if self.rank:
            return [value]
        values = [self._received(f"{key}/{rank}", rank, topic) for rank in range(self.size)]
        for rank in range(self.size):  # they are not read again, and a run has many
            self._store.delete_key(f"{key}/{rank}")
        return values

    def broadcast(self, topic: str, value: Any) -> Any:
        """Return rank 0's value of ``topic``; ``value`` is used on rank 0 only."""
        self._count += 1
        key = f"{self._count}/0"
        if self.rank == 0:
            self._set(key, [topic, value])
            return value
        return self._received(key, 0, topic)

    def lost(self) -> list[int]:
        """Return the ranks of this host whose process has ended."""
        return [rank for rank in range(self.size) if self._is_gone(rank)]

    def _set(self, key: str, value: Any) -> None:
        try:
            self._store.set(key, _packed(value))
        except RuntimeError as error:
            raise RankExchangeError(_cut_off(self.rank, error)) from None

    def _received(self, key: str, rank: int, topic: str) -> Any:
        try:
            self._wait(key, rank, topic)
            theirs, value = _unpacked(self._store.get(key))
        except RankExchangeError:
            raise
        except RuntimeError as error:
            raise RankExchangeError(_cut_off(self.rank, error)) from None
        if theirs != topic:
            raise RankExchangeError(
                f"rank {rank} runs {theirs} while rank {self.rank} runs {topic}; every rank must "
                "run the same tests in the same order"
            )
        return value

    def _wait(self, key: str, rank: int, topic: str) -> None:
        began = looked = time.monotonic()
        pause = 0.001
        while not self._store.check([key]):
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
            now = time.monotonic()
            if now - looked < _CHECK_SECONDS:
                continue
            looked = now
            # The rank may have written it between the two checks.
            if self._is_gone(rank) and not self._store.check([key]):
                raise RankExchangeError(f"rank {rank} ended before it sent {topic}")
            if self._member(rank) is None and now - began > JOINING.total_seconds():
                raise RankExchangeError(
                    f"rank {rank} has not started within {JOINING.total_seconds():.0f} s: "
                    f"WORLD_SIZE says that there are {self.size} ranks"
                )
            if now - began > WAITING.total_seconds():
                raise RankExchangeError(
                    f"rank {rank} did not send {topic} within {WAITING.total_seconds():.0f} s"
                )

    def _member(self, rank: int) -> tuple[str, Process] | None:
        if rank not in self._members and self._store.check([f"member/{rank}"]):
            host, pid, started = _unpacked(self._store.get(f"member/{rank}"))
            self._members[rank] = host, Process(pid, started)
        return self._members.get(rank)

    def _is_gone(self, rank: int) -> bool:
        member = self._member(rank)
        if member is None or member[0] != socket.gethostname():
            return False  # processes of other hosts cannot be seen
        return not is_alive(member[1])


def exchange_of(world: World, address: Address) -> RankExchange:
    """Return this process's exchange with the other ranks; raises RankExchangeError."""
    return _exchange(world, address, os.getpid())


@lru_cache(maxsize=1)
def _exchange(world: World, address: Address, pid: int) -> RankExchange:
    try:
        # Like _create_c10d_store; the code under test may use the same server.
        store = TCPStore(
            address.host,
            address.port,
            world_size=world.size,
            is_master=world.rank == 0 and not address.is_served,
            timeout=JOINING,
            wait_for_workers=False,
            multi_tenant=not address.is_served,
        )
    except (RuntimeError, ValueError) as error:
        place = f"{address.host}:{address.port}"
        raise RankExchangeError(f"{_cut_off(world.rank, error)}, at {place}") from None
    return RankExchange(store, world.rank, world.size)


def _cut_off(rank: int, error: Exception) -> str:
    first = str(error).partition("\n")[0]
    return f"rank {rank} cannot reach the store of all ranks: {first}"


def _packed(value: Any) -> str:
    return b64encode(zlib.compress(json.dumps(value).encode())).decode()


def _unpacked(data: bytes) -> Any:
    return json.loads(zlib.decompress(b64decode(data)))
