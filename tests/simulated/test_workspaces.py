"""cuBLAS and cuBLASLt workspaces: bytes by version and capability, and when they live."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_gpumem.simulated.workspaces import (
    Workspaces,
    default_workspace_bytes,
    lt_workspace_bytes,
    workspace_bytes,
)

MIB = 1024 * 1024
SMALL = 8_519_680
LARGE = 32 * MIB


class Memory:
    """Records what is allocated and freed, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self._sizes: dict[int, int] = {}

    def malloc(self, size: int, stream: int = 0, context: object = None) -> int:
        address = 4096 * (len(self.events) + 1)
        self._sizes[address] = size
        self.events.append(("alloc", size))
        return address

    def free(self, address: int) -> None:
        self.events.append(("free", self._sizes.pop(address)))


def workspaces(
    memory: Memory,
    version: tuple[int, int],
    capability: tuple[int, int] = (8, 0),
    config: str | None = "",
    in_autograd_thread: Callable[[], bool] = bool,
) -> Workspaces:
    return Workspaces(memory, version, capability, config, in_autograd_thread)


@pytest.mark.parametrize(
    ("version", "capability", "expected"),
    [
        ((2, 6), (7, 5), SMALL),
        ((2, 6), (9, 0), LARGE),
        ((2, 11), (9, 0), LARGE),
        # Up to 2.11 the test is for exactly 9.0: Blackwell is left with the small one.
        ((2, 11), (10, 0), SMALL),
        ((2, 12), (10, 0), LARGE),
        ((2, 13), (12, 0), LARGE),
        ((2, 13), (11, 0), SMALL),
        ((2, 14), (11, 0), LARGE),
        ((2, 15), (8, 9), SMALL),
    ],
)
def test_default_size_depends_on_release_and_capability(
    version: tuple[int, int], capability: tuple[int, int], expected: int
) -> None:
    assert default_workspace_bytes(version, capability) == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (":4096:8", 4096 * 1024 * 8),
        (":16:8", 16 * 1024 * 8),
        (":4096:2:16:8", SMALL),
        (":0:0", 0),
        (None, SMALL),
        ("", SMALL),
    ],
)
def test_workspace_config_pairs_are_summed_in_kib(config: str | None, expected: int) -> None:
    assert workspace_bytes(config, (2, 6), (7, 5)) == expected


def test_workspace_config_without_a_pair_warns_and_falls_back() -> None:
    with pytest.warns(UserWarning, match="CUBLAS_WORKSPACE_CONFIG='junk' has no :SIZE:COUNT pair"):
        assert workspace_bytes("junk", (2, 6), (7, 5)) == SMALL


def test_lt_workspace_size_comes_from_the_environment_in_kib(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert lt_workspace_bytes((2, 6), SMALL) == MIB
    assert lt_workspace_bytes((2, 12), SMALL) == SMALL
    assert lt_workspace_bytes((2, 13), SMALL) == MIB
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "2048")
    assert lt_workspace_bytes((2, 6), SMALL) == 2 * MIB


def test_a_handle_takes_its_workspace_once_and_keeps_it() -> None:
    memory = Memory()
    live = workspaces(memory, (2, 6))
    live.gemm()
    live.gemm()
    assert memory.events == [("alloc", SMALL)]
    live.clear()
    assert memory.events == [("alloc", SMALL), ("free", SMALL)]
    assert live.live == {}


def test_autograd_thread_and_streams_have_workspaces_of_their_own() -> None:
    memory = Memory()
    backward = False
    live = workspaces(memory, (2, 6), in_autograd_thread=lambda: backward)
    live.gemm()
    backward = True
    live.gemm()
    live.gemm(stream=7)
    assert memory.events == [("alloc", SMALL)] * 3
    assert sum(live.live.values()) == 3 * SMALL


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        # The temporary comes before the Lt handle, whose first use creates cuBLAS's workspace.
        ((2, 6), [("alloc", MIB), ("alloc", SMALL), ("free", MIB)]),
        ((2, 8), [("alloc", MIB), ("alloc", SMALL), ("free", MIB)]),
        ((2, 9), [("alloc", SMALL), ("alloc", MIB)]),
        ((2, 11), [("alloc", SMALL), ("alloc", MIB)]),
        ((2, 12), [("alloc", SMALL)]),
        ((2, 14), [("alloc", SMALL)]),
        ((2, 15), [("alloc", MIB), ("free", MIB)]),
    ],
)
def test_first_lt_call(version: tuple[int, int], expected: list[tuple[str, int]]) -> None:
    memory = Memory()
    workspaces(memory, version).gemm_lt()
    assert memory.events == expected


def test_second_lt_call_takes_only_temporaries() -> None:
    for version, expected in (((2, 6), [("alloc", MIB), ("free", MIB)]), ((2, 10), [])):
        memory = Memory()
        live = workspaces(memory, version)
        live.gemm_lt()
        first = len(memory.events)
        live.gemm_lt()
        assert memory.events[first:] == expected


def test_since_2_15_every_gemm_takes_and_returns_a_workspace() -> None:
    memory = Memory()
    live = workspaces(memory, (2, 15))
    live.gemm()
    live.gemm()
    assert memory.events == [("alloc", SMALL), ("free", SMALL)] * 2


def test_2_15_with_its_cache_on_behaves_like_2_14(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", "1")
    memory = Memory()
    live = workspaces(memory, (2, 15))
    live.gemm()
    live.gemm_lt()
    assert memory.events == [("alloc", SMALL)]


def test_2_8_unified_workspace_is_a_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "1")
    memory = Memory()
    workspaces(memory, (2, 8)).gemm_lt()
    assert memory.events == [("alloc", SMALL)]


def test_workspace_off_allocates_nothing_but_lt_grows_it_since_2_13() -> None:
    memory = Memory()
    live = workspaces(memory, (2, 13), config=":0:0")
    live.gemm()
    assert memory.events == []
    live.gemm_lt()
    assert memory.events == [("alloc", MIB)]


def test_config_is_read_from_the_environment_at_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory()
    live = workspaces(memory, (2, 6), config=None)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    live.gemm()
    assert memory.events == [("alloc", 16 * 1024 * 8)]
