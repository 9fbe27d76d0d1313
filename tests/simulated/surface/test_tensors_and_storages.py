"""Storages, subclasses, sparse and pinned tensors of a simulated GPU."""

from __future__ import annotations

import copy
import gc
import pickle
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention.bias import causal_lower_right
from torch.utils._pytree import tree_map

from pytest_gpumem import simulate
from pytest_gpumem.values.errors import UnknownValueError, UnsupportedOperatorError


def test_storages_report_their_device() -> None:
    with simulate("T4"):
        x = torch.ones(4, device="cuda")
        storage = x.untyped_storage()
        assert (storage.device, storage.is_cuda, storage.size()) == (x.device, True, 16)
        assert storage.data_ptr() == x.data_ptr()
        assert not torch.ones(4).untyped_storage().is_cuda
        assert x.share_memory_() is x
        assert x.is_shared()


def test_resizing_a_storage_frees_and_reallocates() -> None:
    with simulate("T4") as gpu:
        x = torch.ones(1024, device="cuda")
        storage = x.untyped_storage()
        storage.resize_(0)
        assert gpu.allocated == 0
        storage.resize_(4096)
        assert (gpu.allocated, storage.size()) == (4096, 4096)
        # A resize to the same size allocates before it frees.
        storage.resize_(4096)
        assert (gpu.allocated, gpu.peak_allocated) == (4096, 8192)
        on_cpu = torch.ones(4).untyped_storage()
        assert on_cpu.resize_(32).size() == 32


def test_storages_are_made_on_the_device_as_torch_load_does(tmp_path: Path) -> None:
    with simulate("T4") as gpu:
        made = torch.UntypedStorage(1024, device="cuda")
        assert (made.device.type, gpu.allocated) == ("cuda", 1024)
        assert made.clone().is_cuda
        torch.save(torch.arange(256.0), tmp_path / "tensor.pt")
        loaded = torch.load(tmp_path / "tensor.pt", map_location="cuda")
        assert (loaded.is_cuda, gpu.allocated) == (True, 2048)
    assert len(torch.UntypedStorage(4)) == 4


def test_a_slice_of_a_storage_is_part_of_its_memory() -> None:
    """CUDA graphs of torch.compile copy inputs whose elements overlap by slices of storages."""
    with simulate("T4") as gpu:
        x, y = torch.arange(4.0).cuda(), torch.tensor([8.0, 9.0], device="cuda")
        part = x.untyped_storage()[8:16]
        assert (part.nbytes(), part.is_cuda, part.data_ptr() - x.data_ptr()) == (8, True, 8)
        part.copy_(y.untyped_storage()[0:8])
        assert x.tolist() == [0.0, 1.0, 8.0, 9.0]
        part.copy_(torch.rand(5000, device="cuda").untyped_storage()[4:12])
        with pytest.raises(UnknownValueError):
            x.tolist()
        del x, y
        gc.collect()
        assert gpu.allocated == 512
        del part
        assert gpu.allocated == 0


@pytest.mark.parametrize(
    "hand_over",
    [
        lambda x: x.untyped_storage()._share_cuda_(),
        lambda x: x.untyped_storage()[0],
        lambda x: x.__dlpack__(),
        lambda x: vars(torch.utils.dlpack)["to_dlpack"](x),
        lambda x: x.__cuda_array_interface__,
        lambda x: vars(torch)["from_dlpack"](x.cpu()),
        lambda x: torch.utils.dlpack.from_dlpack(x),
        lambda x: vars(torch.utils.dlpack)["to_dlpack"](x.cpu()),
        lambda x: np.from_dlpack(x),
    ],
)
def test_handing_over_simulated_memory_is_refused(hand_over: Any) -> None:
    with simulate("T4"), pytest.raises(UnsupportedOperatorError, match=r" at tests/simulated/surf"):
        hand_over(torch.rand(3, device="cuda"))


def test_cpu_tensors_are_handed_over_unchanged() -> None:
    with simulate("T4"):
        x = torch.arange(3.0)
        assert torch.utils.dlpack.from_dlpack(x).tolist() == [0.0, 1.0, 2.0]
        assert x.untyped_storage()[0] == 0
        assert not hasattr(x, "__cuda_array_interface__")


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: torch.sparse_csr_tensor([0, 1], [0], [1.0], (1, 1), device="cuda"),
            r"torch\.sparse_csr_tensor at .* use sparse_coo_tensor$",
        ),
        (
            lambda: torch.nested.nested_tensor([torch.ones(3)], device="cuda"),
            r"torch\.nested\.nested_tensor at .* use layout=torch\.jagged$",
        ),
        (
            lambda: torch.nested.as_nested_tensor([torch.ones(3, device="cuda")]),
            r"torch\.nested\.as_nested_tensor at .* use layout=torch\.jagged$",
        ),
        (
            lambda: torch.eye(3).to_sparse().cuda() @ torch.eye(3).to_sparse().cuda(),
            r"aten\._sparse_sparse_matmul\.default at .* has no shape-only implementation",
        ),
    ],
)
def test_layouts_without_shapes_are_refused_by_name(make: Any, sentence: str) -> None:
    with simulate("T4"), pytest.raises(UnsupportedOperatorError, match=sentence):
        make()


class Tagged(torch.Tensor):
    """A subclass that changes nothing."""


TABLE = {torch._C.TensorBase.to: "to", torch._C.TensorBase.cpu: "cpu"}


class Asked(torch.Tensor):
    """A subclass that looks up functions in a table from before the simulation."""

    names: list[str | None] = []  # noqa: RUF012 - one test's

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            cls.names.append(TABLE.get(func))
            return func(*args, **(kwargs or {}))


class Wrapper(torch.Tensor):
    """A wrapper subclass that holds another tensor, as quantised weights do."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device, strides=inner.stride()
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.held = inner

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub lacks func
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        unwrapped = tree_map(
            lambda v: v.held if isinstance(v, Wrapper) else v, (args, kwargs or {})
        )
        result = func(*unwrapped[0], **unwrapped[1])
        return tree_map(lambda v: Wrapper(v) if isinstance(v, torch.Tensor) else v, result)


def test_subclasses_of_tensors_keep_their_class() -> None:
    with simulate("T4") as gpu:
        x = Tagged(torch.ones(256)).cuda()
        assert (type(x), x.device.type, gpu.allocated) == (Tagged, "cuda", 1024)
        assert type(x * 2) is Tagged
        assert type(x.cpu()) is Tagged
        assert (type(Tagged(x)), Tagged(x).data_ptr()) == (Tagged, x.data_ptr())
    assert type(Tagged(torch.ones(3)) * 2) is Tagged


def test_torch_function_receives_the_unpatched_methods() -> None:
    with simulate("T4"):
        moved = torch.ones(3, device="cuda").as_subclass(Asked)
        Asked.names.clear()
        torch.Tensor.cpu(moved)
        moved.to(torch.float64)
        assert Asked.names == ["cpu", "to"]


def test_methods_are_copied_and_pickled_by_name() -> None:
    with simulate("T4"):
        table = {name: getattr(torch.Tensor, name) for name in ("item", "cuda", "numpy")}
        assert copy.deepcopy(table) == pickle.loads(pickle.dumps(table)) == table


def test_inner_tensors_of_a_wrapper_are_allocated() -> None:
    with simulate("T4") as gpu:
        wrapped = Wrapper(torch.ones(256, device="cuda"))
        doubled: Any = wrapped * 2
        assert (type(doubled), doubled.is_cuda, doubled.device.type) == (Wrapper, True, "cuda")
        assert doubled.held.is_cuda
        assert gpu.allocated == 2048


def test_jagged_tensors_and_attention_biases_are_wrappers_too() -> None:
    with simulate("A100-40GB"):
        parts = [torch.ones(2, 3), torch.ones(4, 3)]
        nested = torch.nested.nested_tensor(parts, device="cuda", layout=torch.jagged)
        assert (nested * 2).sin().is_cuda
        q = torch.ones(1, 2, 32, 64, device="cuda", dtype=torch.float16)
        bias = causal_lower_right(32, 32)
        assert nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=bias).is_cuda


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_gradients_and_tensors_are_on_the_device() -> None:
    with simulate("T4") as gpu:
        table = nn.Embedding(1000, 4, sparse=True).cuda()
        table(torch.tensor([1, 2], device="cuda")).sum().backward()
        assert table.weight.grad is not None
        assert table.weight.grad.is_sparse
        assert table.weight.grad.is_cuda
        # 1000 x 4 weights, the two indices twice, 2 x 4 values.
        assert gpu.allocated <= 16384 + 4 * 512
        eye = torch.eye(3).to_sparse().cuda()
        assert (eye.is_cuda, eye.device.type) == (True, "cuda")


def test_pinned_memory_is_remembered() -> None:
    with simulate("T4") as gpu:
        x = torch.arange(3.0)
        pinned = x.pin_memory()
        assert (x.is_pinned(), pinned.is_pinned(), pinned.device.type) == (False, True, "cpu")
        assert pinned.pin_memory() is pinned
        assert pinned.data_ptr() != x.data_ptr()
        assert pinned.untyped_storage().is_pinned()
        assert pinned[1:].is_pinned()
        assert torch.empty(3, pin_memory=True).is_pinned()
        assert not torch.empty(3).is_pinned()
        assert gpu.peak_allocated == 0
        with pytest.raises(
            RuntimeError, match=r"cannot pin 'torch.cuda.FloatTensor' only dense CPU"
        ):
            torch.ones(3, device="cuda").pin_memory()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_model_moves_under_a_profiler_with_record_shapes() -> None:
    with (
        simulate("T4") as gpu,
        torch.profiler.profile(record_shapes=True, profile_memory=True),
    ):
        layer = nn.Linear(256, 256, bias=False)
        layer(torch.ones(2, 256))
        layer.cuda()
        assert gpu.allocated == 256 * 256 * 4


@pytest.mark.parametrize("mode", [nullcontext, torch.inference_mode])
def test_a_parameter_keeps_its_identity_on_another_device(mode: Any) -> None:
    # torch/csrc/autograd/variable.cpp, VariableHooks::set_data: gradient and graph are left alone.
    with simulate("T4") as gpu:
        weight = nn.Parameter(torch.ones(256, device="cuda"))
        loss = (weight * 2).sum()
        with mode():
            weight.data = torch.ones(128)
            assert (weight.device.type, weight.shape) == ("cpu", (128,))
            weight.data = torch.ones(256, device="cuda")
        loss.backward()
        gradient = weight.grad
        assert gradient is not None
        with mode():
            weight.data = torch.ones(256)
            del loss
        # FSDP with offloaded parameters takes the gradient up there and reduces it.
        assert weight.grad is gradient
        assert (gradient.device.type, gpu.allocated) == ("cuda", 1024)


def test_an_inference_tensor_moves_in_place() -> None:
    with simulate("T4") as gpu, torch.inference_mode():
        layer = nn.Linear(256, 256, bias=False)
        weight = layer.weight
        assert layer.cuda().weight is weight
        assert gpu.allocated == 256 * 256 * 4
        layer.cpu()
        assert (weight.is_cuda, gpu.allocated) == (False, 0)


def test_saved_seeds_of_attention_stay_on_the_host() -> None:
    with simulate("A100-40GB", torch_version="2.13"):
        x = torch.randn(2, 3, 64, 32, device="cuda", requires_grad=True)
        with torch.autograd.graph.save_on_cpu():
            out = nn.functional.scaled_dot_product_attention(x, x, x)
        out.sum().backward()
        seed = torch.ops.aten._scaled_dot_product_efficient_attention(x, x, x, None, True)[2]
        assert (seed.device.type, seed.is_cpu) == ("cpu", True)


@pytest.mark.parametrize("named", [False, True])
def test_a_module_moves_to_the_device_of_a_tensor(named: bool) -> None:
    with simulate("T4*2"):
        module: Any = torch.nn.Linear(2, 2)
        for device in ("cuda:1", "cuda:0", "cpu"):
            there = torch.zeros(1, device=device)
            module = module.to(tensor=there) if named else module.to(there)
            assert module.weight.device == there.device
            assert module.weight.cpu().shape == (2, 2)
