"""cuBLAS and cuBLASLt workspaces: their bytes by release and capability, and their lifetimes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from pytest_gpumem import simulate
from pytest_gpumem.simulated.gpu.workspaces import (
    Workspaces,
    default_workspace_bytes,
    lt_workspace_bytes,
    workspace_bytes,
)

MIB = 1024 * 1024
SMALL = 8_519_680
LARGE = 32 * MIB


class Memory:
    """An allocator that records allocations and frees in order."""

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
    memory: Any,
    version: tuple[int, int],
    capability: tuple[int, int] = (8, 0),
    config: str | None = "",
    in_autograd_thread: Callable[[], bool] = bool,
) -> Workspaces:
    return Workspaces(cast("Any", memory), version, capability, config, in_autograd_thread)


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
def test_the_default_size_depends_on_release_and_capability(
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


def test_a_second_lt_call_allocates_only_temporaries() -> None:
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


def test_torch_2_15_with_its_cache_on_behaves_like_2_14(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", "1")
    memory = Memory()
    live = workspaces(memory, (2, 15))
    live.gemm()
    live.gemm_lt()
    assert memory.events == [("alloc", SMALL)]


def test_torch_2_8_unifies_workspaces_by_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "1")
    memory = Memory()
    workspaces(memory, (2, 8)).gemm_lt()
    assert memory.events == [("alloc", SMALL)]


@pytest.mark.parametrize("version", [(2, 12), (2, 13), (2, 14)])
def test_a_workspace_of_zero_bytes_is_zero_for_a_sharing_lt_too(version: tuple[int, int]) -> None:
    memory = Memory()
    live = workspaces(memory, version, config=":0:0")
    live.gemm()
    live.gemm_lt()
    assert memory.events == []


@pytest.mark.parametrize(
    ("version", "second"), [((2, 6), 32_768), ((2, 12), 32_768), ((2, 13), 16_384)]
)
def test_config_is_read_at_every_use_up_to_2_12_and_once_since(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, int], second: int
) -> None:
    memory = Memory()
    live = workspaces(memory, version, config=None)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:1")
    live.gemm(stream=1)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:2")
    live.gemm(stream=2)
    assert memory.events == [("alloc", 16_384), ("alloc", second)]


@pytest.mark.parametrize(
    ("version", "second"), [((2, 7), MIB), ((2, 8), 2 * MIB), ((2, 11), 2 * MIB), ((2, 15), MIB)]
)
def test_lts_size_is_read_once_up_to_2_7_and_since_2_13(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, int], second: int
) -> None:
    memory = Memory()
    live = workspaces(memory, version)
    live.gemm_lt(stream=1)
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "2048")
    live.gemm_lt(stream=2)
    lt = [size for kind, size in memory.events if kind == "alloc" and size != SMALL]
    assert lt == [MIB, second]


@pytest.mark.parametrize(
    ("text", "expected"), [(" 2048 KiB", 2 * MIB), ("+16", 16_384), ("x", MIB), ("9" * 12, MIB)]
)
def test_lts_size_is_parsed_as_by_stoi(
    monkeypatch: pytest.MonkeyPatch, text: str, expected: int
) -> None:
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", text)
    assert lt_workspace_bytes((2, 6), SMALL) == expected


@pytest.mark.parametrize(
    ("version", "flag", "expected"),
    [
        ((2, 7), "1", [MIB, SMALL]),
        ((2, 9), "1", [SMALL]),
        ((2, 11), "0", [SMALL, MIB]),
        ((2, 12), "0", [MIB]),
        ((2, 14), "0", [MIB]),
        ((2, 14), "yes", [SMALL]),
        ((2, 15), "1", [MIB]),
    ],
)
def test_unified_workspaces_depend_on_release_and_variable(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, int], flag: str, expected: list[int]
) -> None:
    monkeypatch.setenv("TORCH_CUBLASLT_UNIFIED_WORKSPACE", flag)
    memory = Memory()
    workspaces(memory, version).gemm_lt()
    assert [size for kind, size in memory.events if kind == "alloc"] == expected


def test_torch_2_11_bounds_lts_own_workspace_by_cublass() -> None:
    for version, expected in (((2, 10), MIB), ((2, 11), 16_384)):
        memory = Memory()
        workspaces(memory, version, config=":16:1").gemm_lt()
        assert memory.events == [("alloc", 16_384), ("alloc", expected)]


def test_a_larger_workspace_is_allocated_before_the_smaller_is_freed() -> None:
    """setWorkspaceForHandle since 2.13: the new one is allocated before the old one goes."""
    memory = Memory()
    live = workspaces(memory, (2, 13), config=":16:1")
    live.gemm()
    live.settings.chosen["cublas"] = 32_768
    live.gemm()
    live.settings.chosen["cublas"] = 512
    live.gemm()
    assert memory.events == [("alloc", 16_384), ("alloc", 32_768), ("free", 16_384)]


def allocated_by_a_product() -> int:
    x = torch.ones(8, 8, device="cuda")
    before = torch.cuda.memory_allocated()
    y = x @ x
    return torch.cuda.memory_allocated() - before - 512 * (y is not None)


def test_a_config_set_during_the_simulation_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """test_cublas_workspace_explicit_allocation of PyTorch 2.6."""
    with simulate("T4", torch_version="2.6"):
        assert allocated_by_a_product() == SMALL
        for config, expected in {":4096:8": 33_554_432, ":16:1": 16_384, "": SMALL}.items():
            monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", config)
            torch._C._cuda_clearCublasWorkspaces()
            assert allocated_by_a_product() == expected


def test_a_simulation_with_its_own_config_ignores_the_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with simulate("T4", torch_version="2.6", cublas_workspace_config=":16:2"):
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:1")
        assert allocated_by_a_product() == 32_768


needs_setters = pytest.mark.skipif(
    not hasattr(torch.backends.cuda, "cublas_workspace_size"), reason="came with torch 2.13"
)


@needs_setters
def test_torch_backends_cuda_returns_and_sets_sizes() -> None:
    cuda = torch.backends.cuda
    with simulate("T4*2", torch_version="2.13"):
        assert (cuda.cublas_workspace_size(), cuda.cublaslt_workspace_size()) == (SMALL, MIB)
        assert cuda.cublas_workspace_size(65_536) == 65_536
        # Lt may share the workspace, so its size is no larger.
        assert cuda.cublaslt_workspace_size() == 65_536
        assert allocated_by_a_product() == 65_536
        torch.cuda.set_device(1)
        assert cuda.blas_workspace_size(backend="cublas") == 65_536
        assert cuda.cublaslt_workspace_size(512) == 512
        torch._C._cuda_resetCublasWorkspaceSize()
        torch._C._cuda_resetCublasLtWorkspaceSize()
        assert (cuda.cublas_workspace_size(), cuda.cublaslt_workspace_size()) == (SMALL, MIB)
        with pytest.raises(TypeError, match="a workspace of -1 bytes"):
            cuda.cublas_workspace_size(-1)
    with simulate("H100", torch_version="2.13"):
        assert cuda.cublas_workspace_size() == LARGE


@needs_setters
def test_a_size_set_through_torch_overrides_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:1")
    with simulate("T4", torch_version="2.13"):
        assert torch.backends.cuda.cublas_workspace_size() == 16_384
        torch.backends.cuda.cublas_workspace_size(0)
        assert allocated_by_a_product() == 0


def test_since_2_15_creating_the_handle_allocates_nothing() -> None:
    """The public handle uses the library's own workspace unless ATen's are cached."""
    for version, expected in (("2.14", SMALL), ("2.15", 0)):
        with simulate("T4", torch_version=version) as gpu:
            torch.cuda.current_blas_handle()
            assert gpu.peak_allocated == expected
