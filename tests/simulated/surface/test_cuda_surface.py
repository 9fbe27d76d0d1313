"""The CUDA interface of torch that unmodified code uses on a machine without a GPU."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytest_gpumem import simulate
from pytest_gpumem.values.errors import UnsupportedOperatorError

MIB = 1024 * 1024


def test_tensors_report_that_they_are_on_cuda() -> None:
    with simulate("T4"):
        x = torch.empty(4, device="cuda")
        assert x.device == torch.device("cuda", 0)
        assert (x.is_cuda, x.is_cpu, x.is_meta, x.get_device()) == (True, False, False, 0)
        assert x.type() == "torch.cuda.FloatTensor"
        assert repr(x) == "tensor(..., device='cuda:0', size=(4,), dtype=torch.float32)"
        on_cpu = torch.zeros(4)
        assert (on_cpu.device.type, on_cpu.is_cuda, on_cpu.is_cpu) == ("cpu", False, True)
        assert repr(on_cpu) == "tensor([0., 0., 0., 0.])"


@pytest.mark.filterwarnings("ignore:Sparse invariant", "ignore:torch.range")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(256, device="cuda"),
        lambda: torch.ones(256, device="cuda:0"),
        lambda: torch.ones(256, device=torch.device("cuda")),
        lambda: torch.ones(256).cuda(),
        lambda: torch.ones(256).cuda(0),
        lambda: torch.ones(256).to(0),
        lambda: torch.ones(256, device=0),
        lambda: torch.ones(256).to("cuda"),
        lambda: torch.ones(256).to(device="cuda", dtype=torch.float32),
        lambda: torch.ones(256).to(torch.zeros(1, device="cuda"))[:],
        lambda: torch.tensor([1.0] * 256, device="cuda"),
        lambda: torch.as_tensor([1.0] * 256, device="cuda"),
        lambda: torch.asarray([1.0] * 256, device="cuda"),
        lambda: torch.arange(256, device="cuda", dtype=torch.float32),
        lambda: torch.range(1, 256, device="cuda"),
        lambda: torch.sparse_coo_tensor(
            [[0]],  # type: ignore[arg-type]  # lists are taken, too
            [[1.0] * 128],
            device="cuda",
        ),
        lambda: torch.zeros(1).new_zeros(256, device="cuda"),
        lambda: torch.ones_like(torch.zeros(256), device="cuda"),
        lambda: torch.ones(256).type(torch.cuda.FloatTensor),  # type: ignore[attr-defined]  # made by torch at run time
    ],
)
def test_every_factory_and_move_allocates_1024_bytes(make: object) -> None:
    with simulate("T4") as gpu:
        x = make()  # type: ignore[operator]  # a lambda of the list above
        gc.collect()
        assert gpu.allocated == 1024
        assert x.device.type == "cuda"
    del x


def test_cpu_tensors_take_no_gpu_memory_and_are_computed() -> None:
    with simulate("T4") as gpu:
        x = torch.arange(6.0)
        for _ in range(3):
            x.add_(1)
        assert (x * 2).tolist() == [6.0, 8.0, 10.0, 12.0, 14.0, 16.0]
        assert gpu.peak_allocated == 0


def test_moving_to_the_same_device_returns_the_same_tensor() -> None:
    with simulate("T4") as gpu:
        x = torch.ones(256, device="cuda")
        assert x.cuda() is x
        assert x.to("cuda:0") is x
        assert x.to(x.device) is x
        assert x.to(torch.float32) is x
        assert gpu.peak_allocated == 1024


def test_default_device_and_device_contexts() -> None:
    with simulate("T4"):
        with torch.device("cuda"):
            assert torch.zeros(3).is_cuda
            assert torch.tensor([1, 2]).is_cuda
            assert nn.Linear(3, 3).weight.is_cuda
        torch.set_default_device("cuda")
        try:
            assert torch.zeros(3).is_cuda
        finally:
            torch.set_default_device(None)
        assert not torch.zeros(3).is_cuda


def test_the_users_meta_tensors_hold_no_memory() -> None:
    with simulate("T4") as gpu:
        layer = nn.Linear(64, 64, device="meta")
        with torch.device("meta"):
            also = nn.Linear(64, 64)
        y = also(layer(torch.empty(2, 64, device="meta")))
        assert y.is_meta
        assert y.device.type == "meta"
        assert gpu.peak_allocated == 0
        assert torch.ones(256, device="cuda").is_cuda


def test_module_cuda_keeps_the_parameters_of_an_earlier_optimizer() -> None:
    with simulate("T4", torch_version="2.6") as gpu:
        model = nn.Linear(8, 8)
        optimizer = torch.optim.Adam(model.parameters())
        weight = model.weight
        model.cuda()
        assert model.weight is weight
        assert isinstance(weight, nn.Parameter)
        model(torch.ones(2, 8, device="cuda")).sum().backward()
        optimizer.step()
        assert [state["exp_avg"].device.type for state in optimizer.state.values()] == ["cuda"] * 2
        # weight, bias, gradients and two moments of each: 8 blocks of 512; two workspaces.
        gc.collect()
        assert gpu.allocated == 8 * 512 + 2 * 8_519_680


def test_tied_weights_stay_tied() -> None:
    with simulate("T4") as gpu:
        one, other = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        other.weight = one.weight
        model = nn.Sequential(one, other).cuda()
        assert one.weight is other.weight
        assert gpu.allocated == 64 * 64 * 4
        copied = copy.deepcopy(model)
        assert copied[0].weight is copied[1].weight
        assert copied[0].weight.is_cuda
        assert gpu.allocated == 2 * 64 * 64 * 4


def test_a_module_moves_with_its_gradients() -> None:
    with simulate("T4") as gpu:
        layer = nn.Linear(64, 64, bias=False)
        layer(torch.ones(1, 64)).sum().backward()
        layer.cuda()
        assert layer.weight.grad is not None
        assert layer.weight.grad.is_cuda
        assert gpu.allocated == 2 * 64 * 64 * 4
        layer.cpu()
        assert layer.weight.device.type == "cpu"
        assert gpu.allocated == 0


def test_deepcopy_of_views_copies_the_storage_they_share() -> None:
    """Numbers of torch 2.15.0+cu132: 512 bytes more for a moment, of an empty tensor."""
    with simulate("T4") as gpu:
        x = torch.ones(1000, device="cuda")
        one, other = copy.deepcopy([x[:10], x[20:30]])
        assert one.data_ptr() + 80 == other.data_ptr()
        assert other.tolist() == [1.0] * 10
    assert (gpu.allocated, gpu.peak_allocated) == (2 * 4096, 2 * 4096 + 512)


def test_deepcopy_of_a_tensor_with_a_gradient() -> None:
    with simulate("T4") as gpu:
        x = torch.ones(256, device="cuda", requires_grad=True)
        x.grad = torch.ones(256, device="cuda")
        y = copy.deepcopy(x)
        assert y.requires_grad
        assert y.grad is not None
        assert y.grad is not x.grad
        assert gpu.allocated == 4 * 1024


def test_modules_move_by_index_and_lazy_ones_before_their_shape() -> None:
    with simulate("T4"):
        assert nn.Linear(2, 2).to(0).weight.is_cuda
        lazy = nn.LazyLinear(4).cuda()
        lazy(torch.ones(2, 8, device="cuda"))
        assert lazy.weight.is_cuda
        assert lazy.weight.shape == (4, 8)
        other = nn.LazyLinear(4).cuda().cpu().cuda()
        with pytest.raises(RuntimeError, match="the shape of an uninitialized parameter"):
            _ = other.weight.shape
        for target in (nn.LazyLinear(4).cuda(), nn.LazyLinear(4)):
            target.load_state_dict(other.state_dict())
        other.load_state_dict(lazy.state_dict())
        assert other.weight.shape == (4, 8)


@pytest.mark.parametrize("half", [False, True])
def test_buffers_of_a_lazy_module_stay_lazy_until_its_first_call(half: bool) -> None:
    with simulate("T4"):
        norm = nn.LazyBatchNorm2d().to("cuda")
        norm = norm.half() if half else norm
        assert type(norm.running_mean) is nn.UninitializedBuffer
        with pytest.raises(ValueError, match="uninitialized parameter in <method 'numpy'"):
            norm.weight.numpy()
        norm(torch.ones(2, 3, 4, 4, device="cuda", dtype=torch.half if half else None))

        assert [tuple(one.shape) for one in (norm.weight, norm.running_mean)] == [(3,), (3,)]
        assert norm.running_mean.is_cuda
        assert norm.running_mean.dtype is (torch.half if half else torch.float32)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("real_values", [False, True])
def test_sparse_tensors_move_to_the_gpu_in_parts(real_values: bool) -> None:
    with simulate("T4", real_values=real_values) as gpu:
        # 200 indices of two dims and 200 numbers.
        moved = torch.eye(200).to_sparse().to("cuda", torch.float64)
        assert (moved.is_cuda, moved.dtype, moved.is_coalesced()) == (True, torch.float64, True)
        assert [entry.size for entry in gpu.trace if entry.action == "alloc"] == [3200, 1600]
        with pytest.raises(UnsupportedOperatorError, match="a sparse tensor moves between host"):
            moved.cpu()
        with pytest.raises(UnsupportedOperatorError, match="a sparse tensor moves between host"):
            torch.eye(3).to_sparse_csr().cuda()


def test_torch_version_cuda_is_a_version() -> None:
    with simulate("T4"):
        assert torch.version.cuda is not None
        major, minor = (int(part) for part in torch.version.cuda.split("."))
        assert (major, minor) >= (12, 0)
        assert torch.cuda.get_arch_list() == ["sm_75"]


def test_state_dict_round_trip() -> None:
    with simulate("T4"):
        model = nn.Linear(8, 8).cuda()
        model.load_state_dict(model.state_dict())
        model.load_state_dict(nn.Linear(8, 8).state_dict())
        assert model.weight.is_cuda


def test_memory_statistics_are_read_by_torchs_functions() -> None:
    with simulate("T4"):
        x = torch.ones(1024, device="cuda")
        assert torch.cuda.memory_allocated() == torch.cuda.memory.memory_allocated() == 4096
        assert torch.cuda.memory_reserved() == 2 * MIB
        stats = torch.cuda.memory_stats()
        assert stats["allocation.all.current"] == 1
        assert stats["segment.small_pool.current"] == 1
        assert stats["requested_bytes.all.peak"] == 4096
        del x
        assert torch.cuda.max_memory_allocated() == 4096
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_allocated() == 0
        torch.cuda.reset_accumulated_memory_stats()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == 0
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == 0
        assert "Tesla T4" in torch.cuda.get_device_name()
        assert "Allocated memory" in torch.cuda.memory_summary()


def test_snapshot_has_torchs_schema() -> None:
    with simulate("T4", torch_version="2.6") as gpu:
        x = torch.ones(1000, device="cuda")
        snapshot = torch.cuda.memory._snapshot()
        assert snapshot["segments"] == gpu.snapshot()["segments"]
        (bare,) = torch.cuda.memory_snapshot()
        assert bare["address"] == snapshot["segments"][0]["address"]
        assert [block["frames"] for block in bare["blocks"]] == [[], []]
        (segment,) = snapshot["segments"]
        assert (segment["total_size"], segment["segment_type"]) == (2 * MIB, "small")
        first = segment["blocks"][0]
        sizes = (first["size"], first["requested_size"], first["state"])
        assert sizes == (4096, 4000, "active_allocated")
        assert segment["blocks"][0]["address"] == x.data_ptr() == x.untyped_storage().data_ptr()
        assert x[250:].data_ptr() - x.data_ptr() == 1000
        actions = [event["action"] for event in snapshot["device_traces"][0]]
        assert actions == ["segment_alloc", "alloc"]


def test_device_queries() -> None:
    with simulate("H100"):
        assert torch.cuda.is_available()
        assert torch.cuda.is_initialized()
        assert torch.cuda.device_count() == 1
        assert torch.cuda.current_device() == 0
        assert torch.cuda.get_device_capability() == (9, 0)
        assert torch.cuda.is_bf16_supported()
        properties = torch.cuda.get_device_properties(0)
        assert properties.multi_processor_count == 132
        free, total = torch.cuda.mem_get_info()
        assert free == total == properties.total_memory
        with torch.cuda.device(0):
            torch.cuda.synchronize()
        assert torch.accelerator.is_available()
        assert torch.accelerator.current_accelerator() == torch.device("cuda")
        torch.accelerator.synchronize()


def test_a_missing_device_is_an_error() -> None:
    with simulate("T4"):
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            torch.ones(3, device="cuda:1")
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            torch.ones(3).to("cuda:1")
        with pytest.raises(RuntimeError, match="Invalid device, must be cuda device"):
            torch.ones(3).cuda("cpu")


def test_bf16_needs_ampere_without_emulation() -> None:
    with simulate("T4"):
        assert not torch.cuda.is_bf16_supported(including_emulation=False)
    with simulate("A10"):
        assert torch.cuda.is_bf16_supported(including_emulation=False)


def test_streams_and_events() -> None:
    with simulate("T4", torch_version="2.6") as gpu:
        side = torch.cuda.Stream()
        a = torch.ones(4, 4, device="cuda")
        b = a @ a
        with torch.cuda.stream(side):
            assert torch.cuda.current_stream() == side
            c = a @ a
        assert torch.cuda.current_stream() != side
        side.synchronize()
        torch.cuda.current_stream().wait_stream(side)
        c.record_stream(torch.cuda.current_stream())
        # One cuBLAS workspace per stream.
        assert gpu.allocated == 3 * 512 + 2 * 8_519_680
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        end.record()
        end.synchronize()
        assert start.query()
        assert start.elapsed_time(end) >= 0
        del b


def test_random_state() -> None:
    with simulate("T4"):
        torch.manual_seed(0)
        torch.cuda.manual_seed_all(1)
        generator = torch.Generator(device="cuda").manual_seed(2)
        assert torch.randn(3, device="cuda", generator=generator).is_cuda
        torch.cuda.set_rng_state(torch.cuda.get_rng_state())


def test_a_random_state_has_16_bytes() -> None:
    with simulate("T4", real_values=True):
        torch.cuda.manual_seed(5)
        state = torch.cuda.get_rng_state()
        assert (state.dtype, state.shape, state.device.type) == (torch.uint8, (16,), "cpu")
        assert int.from_bytes(bytes(state[:8].tolist()), "little") == 5
        assert torch.equal(torch.cuda.get_rng_state(), state)
        drawn = torch.rand(3, device="cuda").tolist()
        assert not torch.equal(torch.cuda.get_rng_state(), state)
        torch.cuda.set_rng_state(state)
        assert torch.rand(3, device="cuda").tolist() == drawn
        # The state of a GPU, out of a checkpoint: its seed is kept.
        torch.cuda.set_rng_state(torch.tensor([7] + [0] * 7 + [4] + [1] * 7, dtype=torch.uint8))
        assert torch.cuda.initial_seed() == 7
        generator = torch.Generator("cuda").manual_seed(2)
        assert generator.get_state().numel() == 16
        generator.set_state(generator.get_state())
        assert generator.initial_seed() == 2
        with pytest.raises(RuntimeError, match="RNG state is wrong size"):
            torch.cuda.set_rng_state(torch.get_rng_state())


def test_profiler_ranges_and_data_parallel_on_one_device() -> None:
    with simulate("T4"):
        torch.cuda.nvtx.range_push("step")
        torch.cuda.nvtx.mark("here")
        parallel = nn.DataParallel(nn.Linear(3, 3).cuda(), device_ids=[0])
        assert parallel(torch.ones(2, 3, device="cuda")).shape == (2, 3)
        torch.cuda.nvtx.range_pop()


def test_pinned_loading() -> None:
    with simulate("T4") as gpu:
        assert torch.empty(3, pin_memory=True).device.type == "cpu"
        numbers = torch.tensor([1.0, 2.0], pin_memory=True, requires_grad=True)
        assert (numbers.is_pinned(), numbers.is_leaf, numbers.tolist()) == (True, True, [1, 2])
        batch = torch.ones(256).pin_memory().cuda(non_blocking=True)
        assert batch.is_cuda
        assert gpu.allocated == 1024


def test_out_of_memory_is_torchs_exception_with_its_words() -> None:
    with simulate("T4", torch_version="2.6") as gpu:
        x = torch.ones(256, device="cuda")
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.empty(20 * 1024**3, dtype=torch.uint8, device="cuda")
        text = str(caught.value)
        assert text.startswith("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total")
        assert "Of the allocated memory 1024 bytes is allocated by PyTorch" in text
        assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in text
        assert gpu.allocated == 1024
        assert torch.cuda.memory_stats()["num_ooms"] == 1
        del x


@pytest.mark.parametrize(
    "call", [torch.relu, methodcaller("softmax", -1), methodcaller("to", torch.float64)]
)
def test_a_failed_calls_temporaries_are_freed(
    call: Callable[[torch.Tensor], Any],
) -> None:
    # C++ has released the sum; the frames of the traceback keep x alone.
    def run() -> None:
        x = torch.empty(13 << 28, device="cuda")
        call(x[: 1 << 28] + 1)

    with simulate("T4"):
        try:
            run()
        except torch.OutOfMemoryError:
            assert torch.cuda.memory_allocated() == 13 << 30
            torch.cuda.empty_cache()
            assert torch.cuda.memory_reserved() == 13 << 30
        else:
            pytest.fail("everything fits")


def test_a_model_that_does_not_fit_fails_while_it_is_built() -> None:
    with (
        simulate("T4"),
        pytest.raises(torch.OutOfMemoryError),
        torch.device("cuda"),
    ):
        nn.Sequential(*[nn.Linear(32768, 32768) for _ in range(8)])


def test_resizing_and_out_arguments_reallocate() -> None:
    with simulate("T4") as gpu:
        x = torch.empty(0, device="cuda")
        torch.add(torch.ones(256, device="cuda"), 1, out=x)
        gc.collect()
        assert gpu.allocated == 1024
        x.resize_(512)
        assert gpu.allocated == 2048
        x.resize_(256)
        assert gpu.allocated == 2048  # torch does not shrink a storage either


def test_numbers_assigned_to_elements_allocate_nothing() -> None:
    with simulate("T4") as gpu:
        x = torch.zeros(256, device="cuda")
        x[0] = 1.0
        x[1:3] = 2
        assert gpu.peak_allocated == 1024


def test_compiled_code_runs_eagerly_on_request_with_a_note() -> None:
    with simulate("T4", compile="eager") as gpu:
        compile: Any = torch.compile
        double = compile(lambda x: x * 2)
        triple = compile(fullgraph=True)(lambda x: x * 3)
        assert double(torch.ones(3, device="cuda")).is_cuda
        assert triple(torch.ones(3, device="cuda")).is_cuda
        assert any("torch.compile at " in note for note in gpu.notes)


def test_composite_operators_are_decomposed_in_inference_mode() -> None:
    with simulate("T4", torch_version="2.6") as gpu:
        layer = nn.Linear(8, 8).cuda()
        with torch.inference_mode():
            layer(torch.ones(2, 8, device="cuda"))
        # The bias is added by cuBLASLt, which creates a cuBLAS workspace too.
        assert gpu.allocated == 2 * 512 + 8_519_680


def test_torch_is_restored_after_the_simulation(tmp_path: Path) -> None:
    before = (
        torch.cuda.is_available(),
        torch.Tensor.device,
        torch.empty,
        torch.Tensor.__dict__.get("to"),
        sorted(name for name in dir(torch._C) if name.startswith("_cuda")),
        torch._C._only_lift_cpu_tensors(),
    )
    with simulate("T4"), torch.autocast("cuda"):
        x = torch.ones(3, device="cuda")
    after = (
        torch.cuda.is_available(),
        torch.Tensor.device,
        torch.empty,
        torch.Tensor.__dict__.get("to"),
        sorted(name for name in dir(torch._C) if name.startswith("_cuda")),
        torch._C._only_lift_cpu_tensors(),
    )
    assert before == after
    assert x.is_meta
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


def test_tensors_freed_after_the_simulation_are_freed_on_the_device() -> None:
    with simulate("T4") as gpu:
        x = torch.ones(256, device="cuda")
    assert gpu.allocated == 1024
    del x
    assert gpu.allocated == 0


def test_simulations_nest_and_the_outer_one_comes_back() -> None:
    with simulate("T4") as outer:
        x = torch.ones(256, device="cuda")
        with simulate("H100") as inner:
            y = torch.ones(512, device="cuda")
            assert torch.cuda.get_device_capability() == (9, 0)
            assert (outer.allocated, inner.allocated) == (1024, 2048)
            del x
        assert torch.cuda.get_device_capability() == (7, 5)
        assert outer.allocated == 0
        del y


def test_an_exception_inside_restores_torch() -> None:
    with pytest.raises(ZeroDivisionError), simulate("T4"):
        1 / 0  # noqa: B018  # raises
    assert not torch.cuda.is_available()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"model": "T5"}, "'T5' is not a GPU model"),
        ({"model": "T4", "torch_version": "1.13"}, "torch_version='1.13' is not a release"),
        ({"model": "T4", "torch_version": "new"}, "torch_version='new' is not a release"),
        ({"model": "T4", "alloc_conf": "foo:1"}, "Unrecognized"),
    ],
)
def test_bad_settings_are_one_sentence(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence), simulate(**arguments):
        pass  # pragma: no cover


def test_allocator_calls_below_tensors() -> None:
    with simulate("T4", torch_version="2.6") as gpu:
        address = torch.cuda.caching_allocator_alloc(1000)
        assert gpu.allocated == 1024
        torch.cuda.caching_allocator_delete(address)
        assert gpu.allocated == 0
        assert torch.cuda.get_allocator_backend() == "native"
        torch.cuda.memory._record_memory_history()
        torch.cuda.memory._record_memory_history(None)
        torch.cuda.current_blas_handle()
        assert gpu.allocated == 8_519_680
        torch._C._cuda_clearCublasWorkspaces()
        assert gpu.allocated == 0


def test_memory_fraction_limits_the_process() -> None:
    with simulate("T4", torch_version="2.6"):
        torch.cuda.set_per_process_memory_fraction(0.1)
        with pytest.raises(torch.OutOfMemoryError, match=r"1\.47 GiB allowed"):
            torch.empty(2 * 1024**3, dtype=torch.uint8, device="cuda")


def test_device_management() -> None:
    with simulate("T4"):
        torch.cuda.init()
        torch.cuda.set_device(0)
        assert torch.cuda.device_count() == 1
        assert not torch.cuda.can_device_access_peer(0, 0)
        torch.cuda.ipc_collect()
        torch.cuda._sleep(1)
        assert torch.cuda.default_stream() == torch.cuda.current_stream()
        assert torch.cuda.current_stream().query()
        assert torch.cuda.current_stream().device == torch.device("cuda", 0)
        assert torch.cuda.current_stream().cuda_stream == 0
        assert not torch.cuda.is_current_stream_capturing()
        assert len({torch.cuda.Stream(), torch.cuda.Stream()}) == 2
        assert "cuda_stream=" in repr(torch.cuda.current_stream())
        event = torch.cuda.current_stream().record_event()
        torch.cuda.Stream().wait_event(event)
        event.wait()
        with torch.cuda.device_of(torch.ones(1, device="cuda")):
            assert torch.cuda.current_device() == 0


def test_get_device_module_is_not_cached_beyond_the_simulation() -> None:
    outside = torch.get_device_module()
    with simulate("T4"):
        assert torch.get_device_module() is torch.get_device_module("cuda") is torch.cuda
        assert torch.get_device_module("cpu") is torch.cpu
    assert torch.get_device_module() is outside


def test_torch_accelerator_is_the_simulated_device() -> None:
    with simulate("T4") as gpu:
        accelerator = torch.accelerator
        x = torch.ones(256, device=accelerator.current_accelerator())
        assert accelerator.device_count() == 1
        assert accelerator.current_stream() == torch.cuda.current_stream()
        accelerator.set_stream(torch.cuda.current_stream())
        if hasattr(accelerator, "max_memory_allocated"):  # came with 2.9
            assert accelerator.max_memory_allocated() == 1024
            del x
            accelerator.reset_peak_memory_stats()
            accelerator.reset_accumulated_memory_stats()
            accelerator.empty_cache()
            assert gpu.reserved == 0
            assert accelerator.memory_stats()["allocated_bytes.all.peak"] == 0


def test_types_and_attributes_of_cpu_tensors_are_unchanged() -> None:
    with simulate("T4"):
        x = torch.ones(3)
        assert x.type() == "torch.FloatTensor"
        assert x.type(torch.float64).dtype == torch.float64
        assert x.type("torch.cuda.HalfTensor").dtype == torch.float16
        assert not x.is_pinned()
        assert x.data_ptr() == x.untyped_storage().data_ptr() != 0
        assert x.get_device() == -1
        assert bool(x.sum() > 0)
        assert x.numpy().tolist() == [1.0, 1.0, 1.0]
        assert list(x.__array__()) == [1.0, 1.0, 1.0]
        assert copy.deepcopy(x).tolist() == [1.0, 1.0, 1.0]
        with pytest.raises(RuntimeError, match="record_stream is not implemented"):
            x.record_stream(torch.cuda.current_stream())
        y = torch.ones(3, device="cuda", requires_grad=True)
        assert "requires_grad=True" in repr(y)
        assert "grad_fn=<MulBackward0>" in repr(y * 2)
        assert repr(torch.ones(1, device="meta")).startswith("tensor(..., device='meta'")


def test_data_of_a_tensor_can_be_assigned() -> None:
    with simulate("T4") as gpu:
        x = torch.ones(256, device="cuda")
        x.data = torch.ones(512, device="cuda")
        assert x.shape == (512,)
        assert x.data.is_cuda
        assert gpu.allocated == 2048


def test_as_tensor_follows_the_default_device() -> None:
    with simulate("T4"):
        on_cpu = torch.as_tensor([1.0])
        assert not on_cpu.is_cuda
        with torch.device("cuda"):
            assert torch.as_tensor([1.0]).is_cuda
            assert torch.as_tensor(on_cpu).is_cuda
        assert torch.as_tensor(on_cpu, device="cuda", dtype=torch.float16).dtype == torch.float16


def test_methods_work_inside_function_modes() -> None:
    with simulate("T4") as gpu, torch.device("cuda"):
        x = torch.ones(256, device="cpu")
        assert x.cuda().is_cuda
        assert x.to("cuda").get_device() == 0
        assert x.type() == "torch.FloatTensor"
        assert x.tolist()[0] == 1.0
        assert bool(x[0])
        assert x.numpy()[0] == 1.0
        assert x.data_ptr() != 0
        y = x.cuda()
        assert y.cpu().device.type == "cpu"
        assert gpu.allocated == 1024


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_cpu_tensors_stay_on_the_cpu() -> None:
    with simulate("T4") as gpu:
        sparse = torch.sparse_coo_tensor(
            torch.tensor([[0, 2]]), torch.ones(2), (3,), check_invariants=True
        )
        assert sparse.device.type == "cpu"
        assert gpu.peak_allocated == 0
