"""Wrapper subclasses with ``__torch_dispatch__``, like those of torchao."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import get_device_states

from pytest_gpumem import simulate

ELEMENTS = 1024
CODES, SCALES = ELEMENTS, ELEMENTS // 256 * 4
"""Bytes of one byte for each element, and of a float32 for each 256 of them."""


class Quantised(Tensor):
    """An optimizer's quantised state: codes of one byte and a scale for each block of 256."""

    codes: Tensor
    scales: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor) -> Quantised:
        return Tensor._make_wrapper_subclass(cls, codes.shape, device=codes.device)

    def __init__(self, codes: Tensor, scales: Tensor) -> None:
        self.codes, self.scales = codes, scales

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scales"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: Any, context: Any, *_: Any) -> Quantised:
        return cls(parts["codes"], parts["scales"])

    @classmethod
    def zeros(cls, count: int, device: Any) -> Quantised:
        codes = torch.zeros(count, dtype=torch.uint8, device=device)
        return cls(codes, torch.zeros(count // 256, device=device))

    def dequantised(self) -> Tensor:
        blocks = self.codes.float().view(-1, 256) * self.scales[:, None]
        return blocks.view(self.codes.shape)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub lacks func
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name == "copy_":
            return cls._copied(*args[:2])
        if name in ("detach", "clone", "_to_copy", "empty_like", "zeros_like"):
            options = {n: v for n, v in (kwargs or {}).items() if n == "device"}
            return cls(func(args[0].codes, **options), func(args[0].scales, **options))
        if name == "is_pinned":
            return args[0].codes.is_pinned() and func(args[0].scales)
        if name == "_pin_memory":
            return cls(args[0].codes.pin_memory(), func(args[0].scales))
        if name in ("zero_", "fill_"):
            args[0].codes.zero_()
            return args[0]
        plain = tree_map(lambda v: v.dequantised() if isinstance(v, cls) else v, (args, kwargs))
        return func(*plain[0], **(plain[1] or {}))

    @classmethod
    def _copied(cls, target: Any, source: Any) -> Any:
        if not isinstance(target, cls):
            return target.copy_(source.dequantised())
        if isinstance(source, cls):
            target.codes.copy_(source.codes)
            target.scales.copy_(source.scales)
        else:
            blocks = source.to(target.device).view(-1, 256)
            target.scales.copy_(blocks.abs().amax(-1))
            target.codes.copy_((blocks / target.scales[:, None]).view(target.codes.shape).byte())
        return target


class Silent(Quantised):
    """A wrapper without ``__torch_function__``, which handles operators alone."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # torch's way to say it


class Choosy(Quantised):
    """A wrapper that ``swap_tensors`` replaces by one of its class and shape alone."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._has_compatible_shallow_copy_type:
            one, other = args
            return type(one) is type(other) and one.shape == other.shape
        plain: Any = super().__torch_function__
        return plain(func, types, args, kwargs or {})


def _module(weight: Tensor) -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(weight, requires_grad=False)
    return module


def _loaded(weight: Any) -> Tensor:
    module = _module(weight)
    module.load_state_dict(module.state_dict())
    return module.weight  # type: ignore[return-value]  # not a module


def _moved(weight: Any, place: str) -> Tensor:
    return _module(weight).to(place).weight  # type: ignore[return-value]  # not a module


def _reloaded(weight: Any) -> Any:
    file = io.BytesIO()
    torch.save({"codes": weight.codes, "scales": weight.scales}, file)
    file.seek(0)
    return type(weight)(**torch.load(file))


def _product(weight: Any) -> Tensor:
    x = torch.ones(2, ELEMENTS, device="cuda", requires_grad=True)
    (x * weight).sum().backward()
    assert x.grad is not None
    return x.grad


def _own_gradient(weight: Any) -> Any:
    weight.requires_grad_()
    (weight * 2.0).sum().backward()
    return weight.grad


WAYS: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "copy of a tensor": (lambda w: w.copy_(torch.rand(ELEMENTS, device="cuda")), True),
    "copy of its kind": (lambda w: w.copy_(w.clone()), True),
    "copy from the host": (lambda w: w.copy_(torch.rand(ELEMENTS)), True),
    "copy to a tensor": (lambda w: torch.empty(ELEMENTS, device="cuda").copy_(w), False),
    "to": (lambda w: w.cpu().to("cuda"), True),
    "to where it is": (lambda w: w.to("cuda"), True),
    "to by number": (lambda w: w.cpu().to(0), True),
    "cuda": (lambda w: w.cpu().cuda(), True),
    "detach": (lambda w: w.detach(), True),
    "clone": (lambda w: w.clone(), True),
    "deepcopy": (lambda w: copy.deepcopy(w), True),
    "empty_like": (lambda w: torch.empty_like(w), True),
    "zero_": (lambda w: w.zero_(), True),
    "parameter": (lambda w: nn.Parameter(w, requires_grad=False), True),
    "load_state_dict": (_loaded, True),
    "module to": (lambda w: _moved(_moved(w, "cpu"), "cuda"), True),
    "saved": (_reloaded, True),
    "product": (_product, False),
    "its own gradient": (_own_gradient, False),
    "computed": (lambda w: w + 1, False),
    "lerp": (lambda w: w.lerp(torch.ones(ELEMENTS, device="cuda"), 0.1), False),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [Quantised, Silent])
def test_wrappers_move_like_plain_tensors(kind: type[Quantised], way: str) -> None:
    go, stays_wrapped = WAYS[way]
    with simulate("A100-40GB") as gpu:
        weight = kind.zeros(ELEMENTS, "cuda")
        assert gpu.allocated == 1024 + 512
        result: Any = go(weight)
        assert (result.device.type, result.is_cuda, result.is_cpu) == ("cuda", True, False)
        assert isinstance(result, Quantised) is stays_wrapped
        assert result.numel() == ELEMENTS or way == "product"
        if stays_wrapped:
            assert (result.codes.is_cuda, result.scales.is_cuda) == (True, True)


def test_a_wrapper_takes_the_memory_of_its_inner_tensors() -> None:
    with simulate("A100-40GB") as gpu:
        weight = Quantised.zeros(64 * ELEMENTS, "cuda")
        assert gpu.allocated == 64 * (CODES + SCALES)
        on_host: Any = weight.cpu()
        assert (on_host.device.type, on_host.is_cuda) == ("cpu", False)
        assert on_host.codes.device.type == "cpu"
        del weight
        assert gpu.allocated == 0
        again = on_host.to("cuda:0", non_blocking=True)
        assert (again.device, gpu.allocated) == (torch.device("cuda", 0), 64 * (CODES + SCALES))
    assert on_host.device.type == "cpu"


@pytest.mark.parametrize(
    ("name", "per_element", "block", "tables"),
    [("AdamW8bit", 1.0, 256, 256), ("AdamW4bit", 0.5, 128, 16), ("AdamWFp8", 1.0, 256, 0)],
)
def test_torchaos_optimizers(name: str, per_element: float, block: int, tables: int) -> None:
    """Source: torchao/optim/subclass_8bit.py, subclass_4bit.py and subclass_fp8.py.

    Moments of tensors of 4096 elements and more are codes, a float32 for each block of them and a
    table of codes; those of smaller ones are as their parameters are.
    """
    optim = pytest.importorskip("torchao.optim")
    with simulate("H100") as gpu:
        layer = nn.Linear(1024, 1024).to("cuda", torch.bfloat16)
        optimizer = getattr(optim, name)(layer.parameters())
        x = torch.rand(8, 1024, device="cuda", dtype=torch.bfloat16)
        for step in range(3):
            layer(x).sum().backward()
            before = gpu.allocated
            optimizer.step()
            if step:
                assert gpu.allocated == before
            else:
                count = 1024 * 1024
                table = -(-tables * 4 // 512) * 512
                moment = int(count * per_element) + count // block * 4 + table + 1024 * 2
                assert gpu.allocated - before == 2 * moment
            optimizer.zero_grad()
        optimizer.load_state_dict(optimizer.state_dict())
        assert optimizer.state[layer.weight]["exp_avg"].is_cuda


def test_wrappers_are_saved_and_move_between_gpus() -> None:
    with simulate("A10*2") as gpu:
        weight: Any = Quantised.zeros(ELEMENTS, "cuda:0")
        moved = weight.to("cuda:1")
        assert (moved.device.index, moved.codes.device.index) == (1, 1)
        assert [one.allocated for one in gpu.devices] == [1536, 1536]
        file = io.BytesIO()
        torch.save(moved, file)
        for place in ("cpu", "cuda:0"):
            file.seek(0)
            loaded = torch.load(file, map_location=place, weights_only=False)
            assert (str(loaded.device), str(loaded.codes.device)) == (place, place)


def test_gradients_of_jagged_tensors() -> None:
    with simulate("A10"):
        parts = [torch.rand(2, 3), torch.rand(4, 3)]
        nested = torch.nested.nested_tensor(parts, device="cuda", layout=torch.jagged)
        layer = nn.Linear(3, 5).cuda()
        layer(nested).values().sum().backward()
        assert layer.weight.grad is not None
        assert layer.weight.grad.is_cuda
        assert nested.cpu().to("cuda").is_cuda
        assert nested.to("cuda") is nested


def test_padded_jagged_tensors_become_rows_again() -> None:
    with simulate("A10") as gpu:
        parts = [torch.rand(2, 3, device="cuda"), torch.rand(4, 3, device="cuda")]
        nested = torch.nested.as_nested_tensor(parts, layout=torch.jagged).requires_grad_()
        start = len(gpu.trace)
        assert nested.detach().softmax(1).shape == nested.shape
        taken = [event.size for event in gpu.trace[start:] if event.action == "alloc"]
        # Padded, and its softmax; six rows of three floats, made twice.
        assert taken[:4] == [2 * 4 * 3 * 4, 2 * 4 * 3 * 4, 6 * 3 * 4, 6 * 3 * 4]
        nested.to_padded_tensor(0.0).sum().backward()
        assert nested.grad is not None


def test_a_fake_tensor_mode_of_the_user_takes_no_memory() -> None:
    with simulate("A10") as gpu:
        with FakeTensorMode():
            layer = nn.Linear(4, 4, device="cuda")
            x = torch.tensor([[1.0, 2.0, 3.0, 4.0]], device="cuda")
            loss = (layer(x) @ torch.rand(4, 2, device="cuda")).sum()
            loss.backward()
            assert layer.weight.grad is not None
            assert {str(t.device) for t in (x, loss, layer.weight.grad)} == {"cuda:0"}
            assert loss.cpu().device.type == "cpu"
            assert (x.is_cuda, x.is_meta, x.cpu().is_cuda) == (True, False, False)
            assert torch.ones(4).type_as(x).is_cuda
            assert x.new_tensor([1.0]).is_cuda
            nn.functional.dropout(layer(x)).sum().backward()
        assert gpu.allocated == 0
        assert FakeTensorMode().from_tensor(torch.ones(3, device="cuda")).device.type == "cuda"


def test_fake_tensors_work_outside_of_their_mode() -> None:
    with simulate("A10") as gpu:
        w = FakeTensorMode().from_tensor(torch.ones(4, 4, device="cuda", requires_grad=True))
        (w @ w.t()).sum().backward()
        assert w.grad is not None
        assert w.grad.shape == (4, 4)
        assert str(w.grad.device) == "cuda:0"
        assert (w.cpu().is_cuda, w.cpu().cuda().is_cuda) == (False, True)
        assert gpu.allocated == 0


def test_numbers_combine_with_fake_gpu_tensors() -> None:
    # In C++ the number becomes a tensor where it takes the other to be, which is meta here.
    with simulate("A100-40GB", alloc_conf=""), FakeTensorMode():
        x = torch.zeros(16, device="cuda")
        assert torch.where(x != 3, x, 0).device == torch.device("cuda", 0)
        with pytest.raises(RuntimeError, match=r"found .*two (different )?devices"):
            x + torch.zeros(16, device="meta")


@pytest.mark.parametrize("kind", [Quantised, Silent])
def test_pinning_a_wrapper_pins_its_inner_tensors(kind: type[Quantised]) -> None:
    with simulate("A100-40GB"):
        weight = kind.zeros(ELEMENTS, "cpu")
        assert not weight.is_pinned()
        pinned: Any = weight.pin_memory()
        assert type(pinned) is kind
        assert pinned.is_pinned()
        assert pinned.codes.is_pinned()
        assert pinned.scales.is_pinned()
        assert not weight.is_pinned()
        assert pinned.pin_memory() is pinned
        assert not kind.zeros(ELEMENTS, "cuda").is_pinned()


def test_a_wrapper_decides_which_tensors_may_replace_it() -> None:
    with simulate("A100-40GB"):
        of_its_own = Choosy.zeros(ELEMENTS, "cuda")
        assert torch._has_compatible_shallow_copy_type(of_its_own, of_its_own)
        assert not torch._has_compatible_shallow_copy_type(
            of_its_own, Choosy.zeros(2 * ELEMENTS, "cuda")
        )
        assert not torch._has_compatible_shallow_copy_type(torch.zeros(1), of_its_own)


def test_a_checkpoint_keeps_the_random_state_of_a_wrappers_gpu() -> None:
    """torch.utils.checkpoint asks arguments that are on no CPU for ``get_device()``."""
    with simulate("T4*2"):
        for device in ("cuda:0", "cuda:1"):
            state = Quantised.zeros(ELEMENTS, device)
            assert (state.get_device(), Quantised.zeros(ELEMENTS, "cpu").get_device()) == (
                torch.device(device).index,
                -1,
            )
            devices, states = get_device_states(state)
            assert (devices, len(states)) == ([torch.device(device).index], 1)
