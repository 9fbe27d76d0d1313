"""Legacy types, random numbers, backends, sensors and profilers of a simulated GPU."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import os
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any, Optional

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile, record_function

from pytest_gpumem import simulate
from pytest_gpumem.values.errors import UnsupportedOperatorError

MIB = 1024 * 1024
cuda: Any = torch.cuda


@pytest.fixture
def default_type() -> Iterator[None]:
    yield
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)


# Factories.


@pytest.mark.parametrize("device", ["cuda", 0, torch.device("cuda", 0)])
@pytest.mark.parametrize(
    "make",
    [
        lambda device: torch.tensor(np.ones(3), device=device),
        lambda device: torch.as_tensor(np.ones(3), device=device),
        lambda device: torch.asarray(np.ones(3), device=device),
        lambda device: torch.tril_indices(3, 3, device=device),
        lambda device: torch.hann_window(3, device=device),
        lambda device: torch.fft.fftfreq(3, device=device),
        lambda device: torch.normal(0.0, 1.0, (3,), device=device),
        lambda device: torch.ones(3).new_zeros(3, device=device),
        lambda device: nn.Linear(3, 3, device=device).weight,
    ],
)
def test_factories_take_every_spelling_of_the_device(make: Any, device: Any) -> None:
    with simulate("T4") as gpu:
        x = make(device)
        assert x.is_cuda
        assert gpu.allocated > 0


def test_legacy_types_construct_and_check_tensors() -> None:
    with simulate("T4") as gpu:
        x = cuda.FloatTensor(2, 3)
        assert (x.is_cuda, x.shape, x.dtype, gpu.allocated) == (True, (2, 3), torch.float32, 512)
        assert cuda.LongTensor([1, 2]).tolist() == [1, 2]
        assert isinstance(x, cuda.FloatTensor)
        assert not isinstance(x, cuda.HalfTensor)
        assert not isinstance(torch.ones(3), cuda.FloatTensor)
        assert (x.new(2).is_cuda, x.new([1.0, 2.0]).shape, x.new().numel()) == (True, (2,), 0)
        assert x.new_tensor([1.0]).is_cuda
        with pytest.raises(TypeError, match="expected FloatTensor on cuda"):
            cuda.FloatTensor(torch.ones(3))


@pytest.mark.usefixtures("default_type")
@pytest.mark.filterwarnings("ignore:torch.set_default_tensor_type")
def test_the_default_tensor_type_may_be_a_cuda_type() -> None:
    with simulate("T4"):
        torch.set_default_tensor_type("torch.cuda.HalfTensor")
        assert (torch.zeros(3).is_cuda, torch.zeros(3).dtype) == (True, torch.float16)
        torch.set_default_tensor_type("torch.FloatTensor")
        assert not torch.zeros(3).is_cuda


def test_an_index_alone_is_a_device() -> None:
    real = torch.device
    with simulate("T4"):
        device = torch.device(0)
        assert (type(device), device) == (real, real("cuda", 0))
        assert isinstance(device, torch.device)
        assert isinstance(device, str | torch.device)
        assert type(device) == torch.device  # noqa: E721  # some libraries ask like this
        assert copy.deepcopy(device) == pickle.loads(pickle.dumps(device)) == device
        with torch.device(0):
            assert torch.zeros(3).is_cuda
        assert torch.device("cpu", 0).type == "cpu"
    assert torch.device is real


# Random numbers.


def test_generators_are_refused_on_another_device() -> None:
    with simulate("T4"):
        generator = torch.Generator(device="cuda").manual_seed(3)
        assert (generator.device, generator.initial_seed()) == (torch.device("cuda", 0), 3)
        for draw in (torch.rand, torch.randn):
            assert draw(3, device="cuda", generator=generator).is_cuda
        x = torch.empty(3, 3, device="cuda")
        nn.init.normal_(x, generator=generator)
        assert torch.bernoulli(x, generator=generator).is_cuda
        assert torch.cuda.default_generators[0].device.type == "cuda"
        with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator"):
            torch.randn(3, device="cuda", generator=torch.Generator())
        with pytest.raises(RuntimeError, match="Expected a 'cpu' device type for generator"):
            torch.randn(3, generator=generator)
        with torch.device("cuda"):
            assert torch.randn(3, generator=generator).is_cuda
        with torch.random.fork_rng(devices=[0]):
            torch.cuda.manual_seed_all(0)


# Backends.


def test_backends_of_a_cuda_build_are_available() -> None:
    with simulate("A100-40GB", torch_version="2.8"):
        cudnn = torch.backends.cudnn
        assert cudnn.is_available()
        assert cudnn.version() == 91002
        assert cudnn.is_acceptable(torch.ones(3, device="cuda"))
        with cudnn.flags(enabled=False, benchmark=True):
            assert not cudnn.enabled
        assert torch.backends.cuda.is_built()
        assert torch.backends.cuda.is_flash_attention_available()
        library = torch.backends.cuda.preferred_linalg_library("magma")
        assert library == torch.backends.cuda.preferred_linalg_library()
        plans = torch.backends.cuda.cufft_plan_cache
        plans[0].max_size = 7
        assert (plans[0].max_size, plans.size) == (7, 0)
        torch.cuda.set_sync_debug_mode("warn")
        assert torch.cuda.get_sync_debug_mode() == 1


def test_can_use_attention_follows_the_rules_of_the_choice() -> None:
    backends = torch.backends.cuda
    with simulate("T4"):
        q = torch.ones(2, 4, 16, 64, device="cuda", dtype=torch.float16)
        assert not backends.can_use_flash_attention(_params(q))
        assert backends.can_use_efficient_attention(_params(q))
    with simulate("A100-40GB"):
        q = torch.ones(2, 4, 16, 64, device="cuda", dtype=torch.float16)
        assert backends.can_use_flash_attention(_params(q))
        mask = torch.ones(16, 16, device="cuda", dtype=torch.float16)
        assert not backends.can_use_flash_attention(_params(q, mask))


def _params(q: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
    return torch.backends.cuda.SDPAParams(q, q, q, mask, 0.0, False, False)


def test_sdpa_kernel_selects_the_attention_kernel() -> None:
    peaks = {}
    with simulate("A100-40GB"):
        q = torch.ones(2, 4, 64, 64, device="cuda", dtype=torch.float16)
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
            torch.cuda.reset_peak_memory_stats()
            with sdpa_kernel(backend):
                nn.functional.scaled_dot_product_attention(q, q, q)
            peaks[backend] = torch.cuda.max_memory_allocated()
    # q, the output, 2 * 4 * 64 sums in float32, seed and offset.
    assert peaks[SDPBackend.FLASH_ATTENTION] < q.nbytes * 2 + 4096
    assert peaks[SDPBackend.MATH] > 5 * q.nbytes


# Properties and sensors.


def test_properties_are_those_of_the_model() -> None:
    with simulate("A100-40GB"):
        properties: Any = torch.cuda.get_device_properties(0)
        assert (properties.major, properties.minor) == (8, 0)
        assert properties.multi_processor_count == 108
        assert properties.L2_cache_size == 40 * MIB
        assert properties.shared_memory_per_block_optin == 163 * 1024
        assert properties.shared_memory_per_multiprocessor == 164 * 1024
        assert properties.warp_size == 32
        assert repr(properties).startswith(
            "_CudaDeviceProperties(name='NVIDIA A100-SXM4-40GB', major=8, minor=0, "
            "total_memory=40339MB, multi_processor_count=108, uuid="
        )


@pytest.mark.parametrize(
    "reading", ["utilization", "memory_usage", "temperature", "power_draw", "clock_rate"]
)
def test_a_sensor_reads_zero_with_a_note(reading: str) -> None:
    with simulate("T4") as gpu:
        assert getattr(torch.cuda, reading)() == 0
    assert re.fullmatch(
        rf"torch.cuda.{reading}\(\) at .*test_torch_cuda.py:\d+ read a sensor that a simulated GPU "
        rf"does not have: it got 0",
        gpu.notes[0],
    )


def test_a_device_has_a_uuid() -> None:
    with simulate("T4*2"):
        uuids: list[Any] = [torch.cuda.get_device_properties(i).uuid for i in range(2)]
        first, second = uuids
        assert len(first.bytes) == 16
        assert all(0 <= byte < 256 for byte in first.bytes)
        assert str(first).replace("-", "") == bytes(first.bytes).hex()
        assert first.bytes != second.bytes


def test_check_error_raises_the_runtimes_error_text() -> None:
    with simulate("T4"):
        torch.cuda.check_error(0)
        with pytest.raises(torch.cuda.CudaError, match=r"out of memory \(2\)"):
            torch.cuda.check_error(2)


def test_generators_share_a_state_or_have_a_copy() -> None:
    with simulate("T4", real_values=True):
        generator = torch.Generator("cuda").manual_seed(0)
        shared, copied = generator.graphsafe_get_state(), generator.clone_state()

        def draw(one: torch.Generator) -> torch.Tensor:
            return torch.rand(4, device="cuda", generator=one)

        first = draw(generator)
        assert torch.equal(draw(copied), first)
        second = draw(shared)
        assert not torch.equal(second, first)
        generator.graphsafe_set_state(copied)
        assert torch.equal(draw(generator), second)


def test_generators_of_the_host_are_unchanged() -> None:
    with simulate("T4"):
        generator = torch.Generator().manual_seed(3)
        assert pickle.loads(pickle.dumps(generator)).initial_seed() == 3
        with pytest.raises(NotImplementedError, match="graphsafe_get_state is not supported"):
            generator.graphsafe_get_state()
        with pytest.raises(RuntimeError, match="Expected a CUDA Generator"):
            torch.Generator("cuda").graphsafe_set_state(generator)


def ones(*size: int) -> torch.Tensor:
    return torch.ones(*size, device="cuda")


# What ATen's structured kernels say (BinaryOps.cpp, LinearAlgebra.cpp, TensorShape.cpp), where
# torch has kernels for ``meta`` in Python, which say something else.
@pytest.mark.parametrize(
    "call",
    [
        lambda: ones(4, 3, 1) + ones(2, 1),
        lambda: ones(1, 4) @ ones(8, 8),
        lambda: nn.functional.linear(ones(1, 4), ones(8, 8), ones(8)),
        lambda: torch.cat([ones(2, 3), ones(2, 4)]),
    ],
)
def test_invalid_arguments_are_refused(call: Callable[[], object]) -> None:
    with simulate("T4"), pytest.raises(RuntimeError):
        call()


def test_assertions_on_the_device_check_known_values() -> None:
    with simulate("T4"):
        torch._assert_async(torch.tensor(0.1, device="cuda"))
        torch._assert_async(torch.rand(1, device="cuda"))
        with pytest.raises(RuntimeError, match="device-side assert triggered"):
            torch._assert_async(torch.tensor(False, device="cuda"))
        with pytest.raises(RuntimeError, match="Tensor with more than one value is ambiguous"):
            torch._assert_async(torch.tensor([1, 1], device="cuda"))


def test_bytes_of_a_known_storage_can_be_read() -> None:
    with simulate("T4"):
        storage = torch.tensor([1, 2], dtype=torch.uint8, device="cuda").untyped_storage()
        assert storage.tolist() == [1, 2]
        assert storage[1] == 2


@pytest.mark.skipif(not hasattr(torch._C, "_cuda_init"), reason="this torch has no CUDA")
def test_no_cuda_function_of_torch_c_is_left_unpatched() -> None:
    with simulate("T4"):
        left = {
            name
            for name in dir(torch._C)
            if name.startswith(("_cuda_", "_nccl_", "_construct_CUDA"))
            and getattr(torch._C, name).__class__.__name__ == "builtin_function_or_method"
        }
    harmless = ("_cuda_tunableop_", "_nccl_version", "_cuda_get_conv", "lock_mutex")
    assert not [name for name in left if not any(part in name for part in harmless)]


def test_device_memory_in_use_is_the_reserved_memory() -> None:
    with simulate("T4"):
        x = torch.empty(4 * MIB, dtype=torch.uint8, device="cuda")
        assert cuda.device_memory_used() == torch.cuda.memory_reserved() == 20 * MIB
        assert f"process {os.getpid():>10d} uses       20.000 MB" in torch.cuda.list_gpu_processes()
        del x


# Of torch 2.11.
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_profilers_run_with_a_note_on_missing_kernels() -> None:
    with simulate("T4") as gpu:
        layer, x = nn.Linear(3, 3).cuda(), torch.ones(2, 3, device="cuda")
        with (
            profile(activities=[ProfilerActivity.CUDA], profile_memory=True) as profiler,
            record_function("step"),
        ):
            layer(x).sum().backward()
        assert "aten::addmm" in {event.key for event in profiler.key_averages()}
        assert any("sees no kernels" in note for note in gpu.notes)
        torch.cuda.profiler.start()
        torch.cuda.profiler.stop()
        with torch.cuda.nvtx.range("step"), torch.autograd.profiler.emit_nvtx():
            layer(x)
        torch.cuda.check_error(0)


def test_the_profilers_memory_timeline_is_refused_in_favour_of_dry() -> None:
    with simulate("T4"):
        with profile(profile_memory=True, record_shapes=True, with_stack=True) as run:
            torch.rand(128, 128, device="cuda").sum()
        with pytest.raises(UnsupportedOperatorError, match="run pytest --gpumem-device=dry"):
            run._memory_profile()


# TorchScript, compiled code and functional transforms.


assert Optional[torch.device]  # noqa: UP045  # typing caches the Optional of the class


def _placed(x: torch.Tensor, device: Optional[torch.device] = None) -> torch.Tensor:  # noqa: UP045
    return x if device is None else x.to(device)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:`torch.jit")
def test_a_scripted_function_may_take_a_device() -> None:
    with simulate("T4"):
        assert torch.jit.script(_placed)(torch.ones(2, device="cuda")).is_cuda


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:`torch.jit")
def test_scripted_and_traced_modules_run(tmp_path: Any) -> None:
    with simulate("T4") as gpu:
        layer = nn.Linear(64, 64)
        x = torch.ones(2, 64, device="cuda")
        scripted = torch.jit.script(layer).cuda()
        assert scripted.weight.is_cuda
        scripted(x).sum().backward()
        assert torch.jit.trace(nn.Linear(64, 64).cuda(), x, check_trace=False)(x).is_cuda
        torch.jit.save(torch.jit.script(nn.Linear(64, 64)), tmp_path / "layer.pt")
        gc.collect()  # of the traced layer, which is part of a cycle
        before = gpu.allocated
        loaded = torch.jit.load(tmp_path / "layer.pt", map_location="cuda")
        assert loaded(x).is_cuda
        assert gpu.allocated >= before + 64 * 64 * 4


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:`torch.jit")
def test_functional_transforms_run() -> None:
    with simulate("T4"):
        x = torch.ones(4, 3, device="cuda")
        assert torch.func.vmap(torch.sum)(x).is_cuda
        assert torch.func.grad(lambda v: v.sin().sum())(x).is_cuda
        assert all(value.is_cuda for value in torch.func.jvp(torch.sin, (x,), (x,)))
        layer = nn.Linear(3, 3).cuda()
        weights: dict[str, torch.Tensor] = dict(layer.named_parameters())
        assert torch.func.functional_call(layer, weights, (x,)).is_cuda


def test_compiled_modules_have_torchs_own_wrapper() -> None:
    with simulate("T4", compile="eager") as gpu:
        layer = nn.Linear(3, 3).cuda()
        compiled: Any = torch.compile(layer, mode="reduce-overhead")
        assert list(compiled.state_dict()) == ["_orig_mod.weight", "_orig_mod.bias"]
        assert compiled._orig_mod is layer
        assert compiled(torch.ones(2, 3, device="cuda")).is_cuda
        torch.compiler.cudagraph_mark_step_begin()
        torch.compiler.reset()
        assert any("torch.compile at " in note for note in gpu.notes)


# Of Inductor, which is imported.
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
def test_a_library_may_wrap_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning wraps it to store the arguments of compiled modules."""
    own = torch.compile

    @functools.wraps(own)
    def capture(model: Any, **options: Any) -> Any:
        compiled: Any = own(model, **options)
        compiled._options = options
        return compiled

    monkeypatch.setattr(torch, "compile", capture)
    with simulate("T4"):
        model: Any = torch.compile(nn.Linear(4, 4).cuda(), dynamic=False)
        assert model._options == {"dynamic": False}
        assert torch.compile.__wrapped__ is own  # type: ignore[attr-defined]  # of a wrapper
        before = torch.cuda.memory_allocated()
        y = model(torch.ones(2, 4, device="cuda"))
        assert y.device == torch.device("cuda:0")
        assert torch.cuda.memory_allocated() > before


# torch says so the first time that a process compiles anything, which another test may have done.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_a_library_imported_in_a_simulation_keeps_its_compile_wrapper() -> None:
    own = torch.compile

    def capture(compile: Any) -> Any:
        @functools.wraps(compile)
        def call(model: Any, **options: Any) -> Any:
            compiled = compile(model, **options)
            compiled._options = options
            return compiled

        return call

    try:
        with simulate("T4"):
            torch.compile = capture(torch.compile)
        wrapper: Any = torch.compile
        for place in (simulate("T4"), simulate("T4"), contextlib.nullcontext()):
            with place:
                model: Any = torch.compile(nn.Linear(4, 4), dynamic=False)
                assert model._options == {"dynamic": False}
        assert torch.compile is wrapper
    finally:
        torch.compile = own


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_eager_flex_attention_materialises_its_scores() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    with simulate("A100-40GB") as gpu:
        q = torch.ones(1, 2, 128, 64, device="cuda", dtype=torch.float16)
        output: Any = flex_attention(q, q, q)
        assert output.is_cuda
        assert gpu.peak_allocated > 2 * 128 * 128 * 4


# Functions that need a device or another process.


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda: torch.distributed.init_process_group("nccl", rank=0, world_size=2),
            r'init_process_group\("nccl"\) at .* is for several ranks',
        ),
        (
            lambda: torch.multiprocessing.spawn(print, nprocs=1),  # type: ignore[attr-defined,no-untyped-call]  # not in the stubs
            r"torch.multiprocessing.spawn at .* starts processes",
        ),
        (lambda: torch.export.export(nn.Linear(1, 1), ()), r"torch.export.export at "),
    ],
)
def test_functions_that_need_a_gpu_are_refused_by_name(call: Any, sentence: str) -> None:
    with simulate("T4"), pytest.raises(UnsupportedOperatorError, match=sentence):
        call()
