"""Patched functions on CPU tensors: every form of every call equals the unpatched one."""

from __future__ import annotations

import copy
import math
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.while_loop import while_loop
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from pytest_gpumem import simulate
from pytest_gpumem.simulated.simulation import SimulatedGPU
from pytest_gpumem.values.errors import SimulationError

Call = Callable[[], Any]
untyped: Any = torch
"""What is called wrongly on purpose."""


class Signature(NamedTuple):
    """Positional arguments in their order, then keyword-only arguments."""

    positional: dict[str, Any]
    named: dict[str, Any] = {}  # noqa: RUF012  # a default that is never changed


_SIZE: dict[str, Any] = {"size": (2, 3)}
_WINDOW = [
    Signature({"window_length": 5}),
    Signature({"window_length": 5, "periodic": False}),
]
_STEPS = {"start": 1.0, "end": 4.0, "steps": 3}

FACTORIES: dict[str, list[Signature]] = {
    "arange": [
        Signature({"end": 5}),
        Signature({"start": 1, "end": 5}),
        Signature({"start": 1, "end": 5, "step": 2}),
        Signature({"start": 0.5, "end": 3.0}),
    ],
    "asarray": [
        Signature({"obj": [1.0, 2.0]}, {"copy": True}),
        Signature({"obj": np.arange(3)}),
        Signature({"obj": torch.arange(3)}, {"copy": False}),
        Signature({"obj": 3}),
    ],
    "bartlett_window": _WINDOW,
    "blackman_window": _WINDOW,
    "empty": [Signature(_SIZE), Signature({"size": 3})],
    "empty_permuted": [Signature({"size": (2, 3), "physical_layout": (1, 0)})],
    "empty_strided": [Signature({"size": (2, 3), "stride": (1, 2)})],
    "eye": [Signature({"n": 3}), Signature({"n": 2, "m": 4})],
    "full": [
        Signature({"size": (2, 3), "fill_value": 7}),
        Signature({"size": (2,), "fill_value": 1.5}),
        Signature({"size": (), "fill_value": True}),
    ],
    "hamming_window": [*_WINDOW, Signature({"window_length": 5, "periodic": True, "alpha": 0.5})],
    "hann_window": _WINDOW,
    "kaiser_window": [*_WINDOW, Signature({"window_length": 5, "periodic": True, "beta": 9.0})],
    "linspace": [
        Signature(_STEPS),
        Signature({**_STEPS, "start": torch.tensor(1.0)}),
        Signature({**_STEPS, "start": torch.tensor(1.0), "end": torch.tensor(2.0)}),
    ],
    "logspace": [Signature(_STEPS), Signature({**_STEPS, "base": 2.0})],
    "normal": [
        Signature({"mean": 0.0, "std": 1.0, "size": (2, 3)}),
        Signature({"mean": torch.zeros(3), "std": 2.0}),
        Signature({"mean": torch.zeros(3)}),
        Signature({"mean": 0.0, "std": torch.ones(3)}),
        Signature({"mean": torch.zeros(3), "std": torch.ones(3)}),
        Signature({"mean": torch.zeros(3), "std": -1.0}),
    ],
    "ones": [Signature(_SIZE)],
    "rand": [Signature(_SIZE)],
    "randint": [
        Signature({"high": 10, "size": (3,)}),
        Signature({"low": 5, "high": 10, "size": (3,)}),
        Signature({"low": 5, "high": 5, "size": (3,)}),
    ],
    "randn": [Signature(_SIZE)],
    "randperm": [Signature({"n": 5})],
    "range": [
        Signature({"start": 1, "end": 5}),
        Signature({"end": 5}),
        Signature({"start": 1, "end": 5, "step": 2}),
    ],
    "scalar_tensor": [Signature({"s": 3})],
    "sparse_coo_tensor": [
        Signature({"indices": [[0, 1]], "values": [1.0, 2.0]}),
        Signature({"indices": torch.tensor([[0, 1]]), "values": torch.ones(2), "size": (3,)}),
        Signature(
            {"indices": [[0, 1]], "values": [1.0, 2.0], "size": (3,)}, {"is_coalesced": True}
        ),
        Signature({"size": (3, 4)}),
        Signature(
            {"indices": [[0, 9]], "values": [1.0, 2.0], "size": (3,)}, {"check_invariants": True}
        ),
    ],
    "tensor": [
        Signature({"data": [[1, 2], [3, 4]]}),
        Signature({"data": 1.5}),
        Signature({"data": np.ones(3)}),
        Signature({"data": torch.ones(3)}),
        Signature({"data": [torch.tensor(1.0), 2.0]}),
        Signature({"data": "no number"}),
    ],
    "as_tensor": [
        Signature({"data": [[1, 2], [3, 4]]}),
        Signature({"data": np.ones(3)}),
        Signature({"data": torch.ones(3), "dtype": torch.float64}),
        Signature({"data": torch.ones(3), "dtype": None, "device": "cpu"}),
    ],
    "tril_indices": [Signature({"row": 3, "col": 3}), Signature({"row": 3, "col": 3, "offset": 1})],
    "triu_indices": [Signature({"row": 3, "col": 3}), Signature({"row": 3, "col": 3, "offset": 1})],
    "zeros": [Signature(_SIZE), Signature({"size": (2, "three")})],
    **{
        name: [Signature({"input": torch.ones(2, 3).t()}), Signature({"input": [1.0]})]
        for name in ("empty_like", "ones_like", "rand_like", "randn_like", "zeros_like")
    },
    "full_like": [Signature({"input": torch.ones(2, 3), "fill_value": 2})],
    "randint_like": [
        Signature({"input": torch.ones(2, 3), "high": 9}),
        Signature({"input": torch.ones(2, 3), "low": 3, "high": 9}),
    ],
    "fftfreq": [Signature({"n": 5}), Signature({"n": 5, "d": 0.5})],
    "rfftfreq": [Signature({"n": 5}), Signature({"n": 5, "d": 0.5})],
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"dtype": torch.float64},
    {"dtype": torch.int32},
    {"dtype": None, "device": None},
    {"device": "cpu"},
    {"device": torch.device("cpu")},
    {"device": "meta"},
    {"device": "nowhere"},
    {"layout": torch.strided},
    {"requires_grad": True},
    {"pin_memory": False},
    {"memory_format": torch.contiguous_format},
    {"out": "empty"},
    {"generator": 3},
    {"generator": 3, "out": "empty"},
    {"generator": 3, "dtype": torch.float64, "device": "cpu"},
    {"generator": None},
    {"unheard_of": 1},
]
"""``out`` and ``generator`` are made anew for each call."""

_VARIADIC = frozenset({"empty", "ones", "rand", "randn", "zeros"})


def forms(signature: Signature) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return the calls with every number of positional arguments, the rest by name."""
    names = list(signature.positional)
    for count in range(len(names) + 1):
        given = tuple(signature.positional[name] for name in names[:count])
        rest = {name: signature.positional[name] for name in names[count:]}
        yield given, {**rest, **signature.named}


def factory_calls(name: str) -> Iterator[tuple[str, Call]]:
    """Return the calls of factory ``name`` in every form, with every option."""
    owner = torch.fft if name.endswith("fftfreq") else torch
    signatures = [
        (form, options) for s in FACTORIES[name] for form in forms(s) for options in OPTIONS
    ]
    signatures.append((((), {}), {}))
    if name in _VARIADIC:
        signatures += [(((2, 3), {}), options) for options in OPTIONS]
        signatures += [(((), {"size": (2, 3), "out": "empty"}), {}), (((2, 3.5), {}), {})]
    for (args, named), options in signatures:
        kwargs = {**named, **options}

        def call(args: Any = args, kwargs: Any = kwargs) -> Any:
            made = dict(kwargs)
            if made.get("out") == "empty":
                made["out"] = torch.empty(0, dtype=made.get("dtype"))
            if made.get("generator") is not None:
                made["generator"] = torch.Generator().manual_seed(3)
            result = getattr(owner, name)(*args, **made)
            if "empty" in name:
                return result.shape, result.stride(), result.dtype, result.requires_grad
            return result, made.get("out")

        yield f"{name}(*{args}, **{kwargs})", call


class Tagged(Tensor):
    """A subclass that changes nothing."""


class Handling(Tensor):
    """A subclass that handles operators itself."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub lacks func
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError


KINDS: dict[str, Callable[[], Tensor]] = {
    "plain": lambda: torch.arange(6.0).view(2, 3),
    "integers": lambda: torch.arange(6).view(2, 3),
    "leaf": lambda: torch.arange(6.0).view(2, 3).requires_grad_(),
    "computed": lambda: torch.arange(6.0, requires_grad=True).view(2, 3) * 2,
    "parameter": lambda: nn.Parameter(torch.arange(6.0).view(2, 3)),
    "subclass": lambda: torch.arange(6.0).view(2, 3).as_subclass(Tagged),
    "one number": lambda: torch.tensor(2.0),
    "none at all": lambda: torch.empty(0),
    "half": lambda: torch.arange(6.0).view(2, 3).half(),
    "meta": lambda: torch.empty(2, 3, device="meta"),
    "conjugate": lambda: torch.tensor([[1 + 2j]]).conj(),
}


def _assign(tensor: Tensor, name: str, value: Any) -> Any:
    setattr(tensor, name, value)
    return getattr(tensor, name)


def _write(tensor: Tensor, index: Any, value: Any) -> Tensor:
    tensor[index] = value
    return tensor


def _drop(tensor: Tensor, name: str) -> Any:
    delattr(tensor, name)
    return getattr(tensor, name)


def _stored(tensor: Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


def _shapes_of(name: str, x: Any) -> Any:
    given = [0.5] * ("quantile" in name)
    return getattr(x, name)(*given).shape, getattr(torch, name)(x, *given).shape


METHODS: dict[str, list[Callable[[Any], Any]]] = {
    "device": [lambda x: x.device, lambda x: _assign(x, "device", "cpu")],
    "is_cuda": [lambda x: x.is_cuda],
    "is_cpu": [lambda x: x.is_cpu],
    "is_meta": [lambda x: x.is_meta],
    "data": [
        lambda x: x.data,
        lambda x: _assign(x, "data", torch.ones(4)),
        lambda x: _assign(x, "data", torch.ones(4, dtype=torch.int32)),
        lambda x: _assign(x, "data", 3),
        lambda x: _drop(x, "data"),
    ],
    "grad": [
        lambda x: x.grad,
        lambda x: _assign(x, "grad", torch.ones(2, 3)),
        lambda x: _assign(x, "grad", torch.ones(7)),
        lambda x: _assign(x, "grad", torch.ones(2, 3, dtype=torch.float64)),
        lambda x: _assign(x, "grad", None),
        lambda x: _assign(x, "grad", 3),
        lambda x: _assign(x, "grad", x),
        lambda x: _drop(x, "grad"),
    ],
    "to": [
        lambda x: x.to(torch.float64),
        lambda x: x.to(dtype=torch.float64),
        lambda x: x.to("cpu"),
        lambda x: x.to("cpu") is x,
        lambda x: x.to("cpu", copy=True) is x,
        lambda x: x.to("cpu", torch.float64, True, True),
        lambda x: x.to(device="cpu", dtype=torch.int32, non_blocking=True),
        lambda x: x.to(torch.device("cpu"), torch.float64),
        lambda x: x.to(torch.ones(1, dtype=torch.float64)),
        lambda x: x.to(other=torch.ones(1, dtype=torch.float64)),
        lambda x: x.to(tensor=torch.ones(1, dtype=torch.float64), copy=True),
        lambda x: x.to(torch.ones(1), non_blocking=True, copy=True),
        lambda x: x.to(memory_format=torch.contiguous_format),
        lambda x: x.to(dtype=None, device=None),
        lambda x: x.to("cpu", None),
        lambda x: x.to(None),
        lambda x: x.to(),
        lambda x: x.to("nowhere"),
        lambda x: x.to(1.5),
        lambda x: x.to("meta"),
        lambda x: x.to(unheard_of=1),
    ],
    "cpu": [lambda x: x.cpu(), lambda x: x.cpu(memory_format=torch.preserve_format)],
    "cuda": [lambda x: x.cuda("cpu")],
    "get_device": [lambda x: x.get_device()],
    "data_ptr": [lambda x: x.data_ptr() == _stored(x).data_ptr()],
    "type": [
        lambda x: x.type(),
        lambda x: x.type(torch.float64),
        lambda x: x.type("torch.DoubleTensor"),
        lambda x: x.type(torch.DoubleTensor),
        lambda x: x.type(dtype=torch.int32),
        lambda x: x.type(dtype="torch.IntTensor", non_blocking=True),
        lambda x: x.type(torch.float64, True),
        lambda x: x.type("nonsense"),
    ],
    "numpy": [
        lambda x: x.numpy(),
        lambda x: x.numpy(force=True),
        lambda x: x.numpy(unheard_of=1),
        lambda x: np.shares_memory(x.numpy(), x.numpy()),
    ],
    "tolist": [lambda x: x.tolist()],
    "item": [lambda x: x.item(), lambda x: float(x), lambda x: int(x)],
    "__getitem__": [
        lambda x: x[0],
        lambda x: x[[0, 1]],
        lambda x: x[[1], [2]],
        lambda x: x[..., None, 1:],
        lambda x: x[x > 1],
        lambda x: x[torch.tensor([0, 1])],
        lambda x: x[np.array([0, 1])],
        lambda x: x[[True, False]],
        lambda x: x[(0, [1, 2])],
        lambda x: x[[[0, 1], [1, 0]]],
        lambda x: x[9],
        lambda x: x["no"],
        lambda x: x[()],
    ],
    "__setitem__": [
        lambda x: _write(x, 0, 1.0),
        lambda x: _write(x, [0, 1], torch.ones(3)),
        lambda x: _write(x, (slice(None), [1]), 5),
        lambda x: _write(x, x > 1, 0),
        lambda x: _write(x, ..., torch.ones(7)),
        lambda x: _write(x, 9, 0),
    ],
    "__array__": [
        lambda x: np.asarray(x),
        lambda x: x.__array__(np.float64),
        lambda x: x.__array__(dtype=np.float64),
        lambda x: np.array(x, dtype=np.int32),
    ],
    "__bool__": [lambda x: bool(x), lambda x: not x],
    "__deepcopy__": [lambda x: copy.deepcopy(x), lambda x: copy.deepcopy([x, x])[0]],
    "__copy__": [lambda x: copy.copy(x)],
    "__repr__": [lambda x: repr(x), lambda x: str(x), lambda x: x.__repr__(tensor_contents="c")],
    "__new__": [
        lambda x: Tensor(x),
        lambda x: type(x)(x),
        lambda x: Tensor([1.0, 2.0]),
        lambda x: Tensor(2, 3).shape,
        lambda x: Tensor(device="cpu"),
        lambda x: nn.Parameter(x, requires_grad=False),
    ],
    "new_empty": [
        lambda x: x.new_empty((2, 3)).shape,
        lambda x: x.new_empty(2, 3).dtype,
        lambda x: x.new_empty(size=(2, 3), dtype=torch.int32, device="cpu").dtype,
    ],
    "new_empty_strided": [
        lambda x: x.new_empty_strided((2, 3), (1, 2)).stride(),
        lambda x: x.new_empty_strided(size=(2, 3), stride=(1, 2), device="cpu").stride(),
    ],
    "new_full": [
        lambda x: x.new_full((2,), 3.0),
        lambda x: x.new_full(size=(2,), fill_value=3.0, dtype=torch.float64, requires_grad=True),
        lambda x: x.new_full((2,)),
    ],
    "new_ones": [lambda x: x.new_ones(2, 3), lambda x: x.new_ones(size=(2,), device="cpu")],
    "new_zeros": [
        lambda x: x.new_zeros(2, 3),
        lambda x: x.new_zeros((2, 3), dtype=torch.float64),
        lambda x: x.new_zeros(size=(2,), device="meta").shape,
    ],
    "new": [
        lambda x: x.new(2, 3).shape,
        lambda x: x.new([1, 2]),
        lambda x: x.new(torch.Size((2,))).shape,
        lambda x: x.new(x),
        lambda x: x.new().shape,
        lambda x: x.new(size=(2, 3)).shape,
        lambda x: x.new(2, device="cpu").shape,
    ],
    "new_tensor": [
        lambda x: x.new_tensor([1, 2]),
        lambda x: x.new_tensor(data=[1, 2], dtype=torch.float64, device="cpu"),
        lambda x: x.new_tensor([1.0], requires_grad=True),
        lambda x: x.new_tensor(np.ones(2)),
        lambda x: x.new_tensor([1.0], device="cpu", pin_memory=False),
    ],
    "type_as": [
        lambda x: x.type_as(torch.ones(1, dtype=torch.float64)),
        lambda x: x.type_as(other=torch.ones(1, dtype=torch.float64)),
        lambda x: x.type_as(x) is x,
    ],
    "copy_": [
        lambda x: x.copy_(torch.ones(3)),
        lambda x: x.copy_(src=torch.ones(3), non_blocking=True),
        lambda x: x.copy_(torch.ones(3), True),
        lambda x: x.copy_(other=torch.ones(3)),
        lambda x: x.copy_(torch.ones(7)),
        lambda x: x.copy_(3.0),
    ],
    "register_hook": [
        lambda x: type(x.register_hook(lambda grad: None)),
        lambda x: type(x.register_hook(hook=lambda grad: None)),
        lambda x: x.register_hook(),
    ],
    "_reduce_ex_internal": [lambda x: pickle.loads(pickle.dumps(x))],
    "__dlpack__": [
        lambda x: np.from_dlpack(x),
        lambda x: untyped.from_dlpack(x),
        lambda x: np.from_dlpack(x.detach()),
        lambda x: torch.utils.dlpack.from_dlpack(x.detach().__dlpack__(stream=None)),
    ],
    "__dlpack_device__": [lambda x: x.__dlpack_device__()],
    "to_dlpack": [
        lambda x: torch.utils.dlpack.from_dlpack(vars(torch.utils.dlpack)["to_dlpack"](x.detach()))
    ],
    "__cuda_array_interface__": [
        lambda x: hasattr(x, "__cuda_array_interface__"),
        lambda x: x.__cuda_array_interface__,
    ],
    "is_pinned": [
        lambda x: x.is_pinned(),
        lambda x: _stored(x).is_pinned(),
    ],
    "one_hot": [
        lambda x: F.one_hot(x.long()),
        lambda x: F.one_hot(tensor=x.long(), num_classes=7),
        lambda x: F.one_hot(x.long(), 2),
        lambda x: untyped._C._nn.one_hot(x.long(), num_classes=9),
    ],
    **{
        name: [partial(_shapes_of, name)] for name in ("quantile", "nanquantile", "cov", "corrcoef")
    },
    "pad_sequence": [
        lambda x: nn.utils.rnn.pad_sequence([x, x[:1]], batch_first=True),
        lambda x: nn.utils.rnn.pad_sequence([x, x[:1]], padding_value=3.0),
        lambda x: untyped._C._nn.pad_sequence(sequences=[x], padding_side="left"),
    ],
    "storage": [
        lambda x: _stored(x).device,
        lambda x: _stored(x).is_cuda,
        lambda x: _stored(x).is_shared(),
        lambda x: _stored(x)[0],
        lambda x: _stored(x)[1:3],
        lambda x: _stored(x).tolist(),
        lambda x: _stored(x.clone()).resize_(4).nbytes(),
        lambda x: _stored(x.detach().clone()).share_memory_().is_shared(),
        lambda x: torch.UntypedStorage(4).nbytes(),
        lambda x: torch.UntypedStorage([1, 2]).tolist(),
        lambda x: torch.UntypedStorage(4, device="cpu").device,
        lambda x: torch.UntypedStorage(size=4).nbytes(),
        lambda x: torch.UntypedStorage(4, device="meta").device,
        lambda x: copy.deepcopy(_stored(x)).tolist(),
        lambda x: pickle.loads(pickle.dumps(x.storage())).tolist(),
        lambda x: x.storage()[0],
    ],
    "record_stream": [lambda x: callable(x.record_stream)],
    "_parse_to": [
        lambda x: nn.Linear(2, 2).to(torch.float64).weight.dtype,
        lambda x: nn.Linear(2, 2).to("cpu", torch.float64, non_blocking=True).weight.dtype,
        lambda x: nn.Linear(2, 2).to(x).weight.dtype,
        lambda x: untyped.nn.Linear(2, 2).to(tensor=x).weight.dtype,
        lambda x: nn.Linear(2, 2).to(device="cpu", dtype=torch.float16).weight.dtype,
        lambda x: nn.Linear(2, 2).to(torch.int32),
        lambda x: untyped.nn.Linear(2, 2).to(memory_format=torch.channels_last).weight.dtype,
        lambda x: untyped.nn.Linear(2, 2).to(),
        lambda x: nn.Linear(2, 2).to("meta").weight.device,
    ],
    "_group_tensors_by_device_and_dtype": [
        lambda x: sorted(
            map(
                str,
                torch.utils._foreach_utils._group_tensors_by_device_and_dtype([[x, x.double()]]),
            )
        )
    ],
    "_has_compatible_shallow_copy_type": [
        lambda x: torch._has_compatible_shallow_copy_type(x, torch.ones(1)),
        lambda x: torch._has_compatible_shallow_copy_type(x, torch.ones(1, device="meta")),
    ],
}

_TAKES_META_FOR_CUDA = frozenset({"one_hot", "pad_sequence", "storage"})
"""Begin in C++ with a factory that is told the device alone, which is ``meta`` for both."""


def _gradient_of_a_loop() -> Any:
    x = untyped.arange(3.0, requires_grad=True)
    count = untyped.tensor(0)
    _, y = while_loop(lambda i, x: i < 2, lambda i, x: (i + 1, x * 2), (count, x))
    y.sum().backward()
    return x.grad


FUNCTIONS: dict[str, list[Call]] = {
    "UninitializedTensorMixin.shape": [
        lambda: torch.nn.UninitializedParameter().shape,
        lambda: torch.nn.UninitializedParameter().size(),
        lambda: repr(torch.nn.LazyLinear(2).load_state_dict(torch.nn.LazyLinear(2).state_dict())),
    ],
    "_disable_current_modes": [_gradient_of_a_loop],
    "device": [
        lambda: untyped.device("cpu"),
        lambda: untyped.device("cpu", 0),
        lambda: untyped.device(type="cpu"),
        lambda: untyped.device(type="cpu", index=0),
        lambda: untyped.device(untyped.device("cpu")),
        lambda: untyped.device(device="cpu"),
        lambda: untyped.device("nowhere"),
        lambda: untyped.device(),
        lambda: isinstance(untyped.device("cpu"), untyped.device),
        lambda: isinstance("cpu", untyped.device),
        lambda: untyped.device.__name__,
        lambda: pickle.loads(pickle.dumps(untyped.device("cpu", 1))),
        lambda: _inside(untyped.device("cpu"), lambda: untyped.ones(2)),
    ],
    "Generator": [
        lambda: untyped.Generator().device,
        lambda: untyped.Generator("cpu").manual_seed(7).initial_seed(),
        lambda: untyped.Generator(device="cpu").manual_seed(7).get_state(),
        lambda: _restored(untyped.Generator()),
        lambda: untyped.Generator("meta").device,
        lambda: untyped.Generator("nowhere"),
        lambda: pickle.loads(pickle.dumps(untyped.Generator().manual_seed(3))).initial_seed(),
        lambda: untyped.Generator().manual_seed(3).clone_state().initial_seed(),
        lambda: isinstance(untyped.default_generator, untyped.Generator),
    ],
    "set_default_tensor_type": [
        lambda: _defaults(lambda: untyped.set_default_tensor_type(untyped.DoubleTensor)),
        lambda: _defaults(lambda: untyped.set_default_tensor_type("untyped.DoubleTensor")),
        lambda: _defaults(lambda: untyped.set_default_tensor_type(t="untyped.HalfTensor")),
        lambda: _defaults(lambda: untyped.set_default_tensor_type("untyped.IntTensor")),
        lambda: _defaults(lambda: untyped.set_default_tensor_type("nonsense")),
    ],
    "set_autocast_enabled": [
        lambda: _inside(untyped.autocast("cpu"), lambda: untyped.ones(2, 2) @ untyped.ones(2, 2)),
        lambda: _inside(untyped.autocast("cpu", untyped.float16), untyped.get_autocast_cpu_dtype),
        lambda: untyped.set_autocast_enabled(),
        lambda: untyped.set_autocast_enabled("cpu", False),
        lambda: untyped.set_autocast_enabled("nowhere", True),
    ],
    "clear_autocast_cache": [lambda: untyped.clear_autocast_cache()],
    "autocast": [
        lambda: _inside(untyped.autocast("cpu"), lambda: untyped.ones(2, 2) @ untyped.ones(2, 2)),
        lambda: _inside(untyped.autocast("cpu", enabled=False), untyped.is_autocast_cpu_enabled),
        lambda: _inside(untyped.autocast("cpu"), lambda: _inside(untyped.autocast("cpu"), int)),
        lambda: untyped.autocast("nowhere"),
    ],
    "__torch_function__": [
        lambda: _inside(untyped.device("cpu"), lambda: untyped.as_tensor([1.0])),
        lambda: _inside(untyped.device("meta"), lambda: untyped.as_tensor([1.0]).shape),
        lambda: _inside(untyped.device("meta"), lambda: untyped.zeros(3).device),
        lambda: _inside(untyped.device("meta"), lambda: untyped.zeros(3, device="cpu")),
        lambda: _inside(untyped.device("meta"), lambda: nn.Linear(3, 3).weight.device),
    ],
    "_builtin_table": [lambda: untyped.jit.script(_scripted)(untyped.ones(2))],
    "try_ann_to_type": [
        lambda: str(untyped.jit.annotations.try_ann_to_type(untyped.device, None)),
        lambda: str(untyped.jit.annotations.try_ann_to_type(untyped.device | None, None)),
        lambda: untyped.jit.annotations.try_ann_to_type(3, None),
    ],
    "load": [lambda: _reloaded("cpu"), lambda: _reloaded(None)],
    "save_on_cpu": [
        lambda: _inside(untyped.autograd.graph.save_on_cpu(), lambda: _gradient(untyped.ones(3))),
        lambda: untyped.autograd.graph.save_on_cpu(False, "cpu") is not None,
        lambda: untyped.autograd.graph.save_on_cpu(unheard_of=1),
    ],
    "comm": [lambda: nn.parallel.comm.reduce_add([untyped.ones(2)])],
    "threads": [
        lambda: _threaded(lambda: untyped.ones(2) * 2),
        lambda: threading.Thread().start(),
        lambda: threading.Thread(target=None).join(),
        lambda: _pooled(pow, 2, 3),
        lambda: _pooled(int, "ff", base=16),
        lambda: _pooled(),
        lambda: _unfinished().result(timeout=0),
        lambda: _unfinished().result(0),
    ],
    "sparse_csr_tensor": [
        lambda: untyped.sparse_csr_tensor([0, 1], [0], [1.0], (1, 1)).to_dense(),
        lambda: untyped.sparse_csr_tensor(
            [0, 1], [0], values=[1.0], dtype=untyped.float64
        ).to_dense(),
        lambda: untyped.sparse_csr_tensor(),
    ],
    "sparse_csc_tensor": [
        lambda: untyped.sparse_csc_tensor([0, 1], [0], [1.0], size=(1, 1)).to_dense()
    ],
    "sparse_bsr_tensor": [lambda: untyped.sparse_bsr_tensor([0, 1], [0], [[[1.0]]]).to_dense()],
    "sparse_bsc_tensor": [lambda: untyped.sparse_bsc_tensor([0, 1], [0], [[[1.0]]]).to_dense()],
    "sparse_compressed_tensor": [
        lambda: untyped.sparse_compressed_tensor(
            [0, 1], [0], [1.0], (1, 1), layout=untyped.sparse_csr
        ).to_dense()
    ],
    "nested_tensor": [
        lambda: untyped.nested.nested_tensor([untyped.ones(2)]).unbind(),
        lambda: untyped.nested.nested_tensor([torch.ones(2)], dtype=torch.half).dtype,
        lambda: untyped.nested.nested_tensor(),
    ],
    "as_nested_tensor": [
        lambda: untyped.nested.as_nested_tensor([untyped.ones(2)]).unbind(),
        lambda: untyped.nested.as_nested_tensor(ts=[torch.ones(2)], layout=torch.jagged).unbind(),
    ],
    "_engine_run_backward": [
        lambda: untyped.autograd.grad(_doubled().sum(), [_LEAF], create_graph=True)[0].shape,
        lambda: untyped.autograd.grad(_doubled().sum(), []),
        lambda: _doubled().sum().backward(),
    ],
    "_find_common_device": [lambda: twice_a_fake().shape],
    "init_gpu_context": [lambda: FakeTensorMode().from_tensor(untyped.ones(2)).shape],
    "_get_obj_state": [lambda: pickle.loads(pickle.dumps(Tagged([1.0])))],
    "get_default_nowrap_functions": [lambda: Tagged([1.0]).requires_grad_().grad],
    "_make_subclass": [
        lambda: untyped.Tensor._make_subclass(Tagged, untyped.ones(2), True),
        lambda: untyped.Tensor._make_subclass(cls=Tagged, data=untyped.ones(2)),
        lambda: untyped.Tensor._make_subclass(),
    ],
    "_make_wrapper_subclass": [
        lambda: untyped.Tensor._make_wrapper_subclass(Tagged, (2,)),
        lambda: untyped.Tensor._make_wrapper_subclass(Handling, (2,)).shape,
        lambda: (
            untyped.Tensor._make_wrapper_subclass(
                Handling, (2,), dtype=untyped.half, device="cpu"
            ).dtype
        ),
        lambda: untyped.Tensor._make_wrapper_subclass(Handling, (2,), (3,), 1).stride(),
        lambda: untyped.Tensor._make_wrapper_subclass(Handling, size=(2,), device="meta").device,
    ],
    "get_fastpath_enabled": [
        lambda: untyped.backends.mha.get_fastpath_enabled(),
        lambda: _encoded(),
    ],
}


def _inside(context: Any, call: Call) -> Any:
    with context:
        return call()


def _restored(generator: torch.Generator) -> Any:
    generator.set_state(torch.Generator().manual_seed(9).get_state())
    return torch.rand(3, generator=generator)


def _defaults(call: Call) -> Any:
    before = torch.get_default_dtype()
    try:
        call()
        return torch.get_default_dtype(), torch.ones(1).dtype
    finally:
        torch.set_default_dtype(before)


def _scripted(x: Tensor) -> Tensor:
    return torch.zeros_like(x) + torch.ones([2]) + torch.full([2], 3.0) + torch.tensor([1.0, 2.0])


def _reloaded(place: Any) -> Any:
    import io

    file = io.BytesIO()
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), file)
    file.seek(0)
    return torch.jit.load(file, place)(torch.ones(1, 2)).shape


def _gradient(x: Tensor) -> Any:
    x.requires_grad_()
    x.exp().sum().backward()
    return x.grad


def _threaded(call: Call) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join(timeout=10)
    return found[0], thread.is_alive()


def _unfinished() -> Any:
    return Future()


def _pooled(*args: Any, **kwargs: Any) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(*args, **kwargs).result()


def _encoded() -> Any:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    with torch.no_grad():
        return layer(torch.ones(1, 3, 8))


_LEAF: torch.Tensor = torch.ones(3, requires_grad=True)


def _doubled() -> Any:
    return _LEAF * 2


def twice_a_fake() -> Any:
    with FakeTensorMode() as mode:
        return mode.from_tensor(untyped.ones(2)) * 2


NOT_OF_THE_CPU = frozenset(
    {
        "get_device_module",  # whose answer is the point
        "Stream",
        "Event",
        "compile",  # runs eagerly, which it says
        "reset",
        "cudagraph_mark_step_begin",
        "pin_memory",  # needs a driver without a simulation
        "_share_cuda_",
        "RecursiveScriptModule._apply",
        "profile.__init__",
        "CDLL.__init__",  # no call of torch's
        "export",
        "spawn",
        "start_processes",
        "default_pg_nccl_timeout",  # of builds without NCCL
        "_new_process_group_helper",  # connects GPUs, or one with itself
        "init_process_group",
        "DeviceMesh.__init__",
        "CUDAPluggableAllocator.__init__",
        "DataParallel.__init__",
        "DataParallel.forward",
        "DistributedDataParallel.__init__",
        "emit_nvtx",
        "_memory_profile",
        "HigherOrderOperator.dispatch",
        "run",  # of Triton's kernels
        "GridExecutor.__call__",  # of Triton's interpreter
        "_active",  # Triton's driver
        "active",
        "_JittedFunction.__call__",
    }
)
_OF_CUDA = ("torch.cuda", "torch.backends.cud", "torch.version", "graph")
"""Owners whose names are about a GPU."""
_ELSEWHERE = {
    "UntypedStorage": "storage",
    "TypedStorage": "storage",
    "Thread": "threads",
    "ThreadPoolExecutor": "threads",
    "Future": "threads",
    "torch.nn.parallel.comm": "comm",
    "save_on_cpu": "save_on_cpu",
    "autocast": "autocast",
}
"""By owner: under which name its calls stand."""


def outcome(call: Call) -> Any:
    """Return the result or the error of ``call`` as plain values that can be compared."""
    torch.default_generator.manual_seed(0)  # torch's function notes a stack for each other device
    try:
        return shown(call())
    except (Exception, SimulationError) as error:
        # Then follow the arguments in any order, and the class of generators, which is ours.
        return type(error).__name__, str(error).partition(" - got (")[0]


def shown(value: Any) -> Any:
    """Return ``value`` as plain values, without addresses."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            return "sparse", value.shape, shown(value._indices()), shown(value._values())
        kind = value.resolve_conj().detach().as_subclass(Tensor)
        values = (
            None
            if str(value.device) == "meta"
            else kind.double().tolist()
            if (kind.dtype is torch.half)
            else kind.tolist()
        )
        place = str(value.device), value.is_cpu, value.is_meta, value.requires_grad, value.is_leaf
        return type(value), value.dtype, tuple(value.shape), value.stride(), place, shown(values)
    if isinstance(value, np.ndarray):
        return "array", value.dtype, value.shape, shown(value.tolist())
    if isinstance(value, (list, tuple)):
        return [shown(item) for item in value]
    if isinstance(value, float):
        return "nan" if math.isnan(value) else value
    if isinstance(value, torch.UntypedStorage):
        return "storage", shown(value.device), value.tolist()
    return str(value) if isinstance(value, (torch.device, nn.Module)) else value


def compare(calls: dict[str, Call]) -> None:
    """Compare every call without patches with the same call during a simulation."""
    wanted = {name: outcome(call) for name, call in calls.items()}
    found = {}
    with simulate("T4*2") as gpu:
        for name, call in calls.items():
            before = len(gpu.trace)
            found[name] = outcome(call)
            if len(gpu.trace) > before:
                found[name] = "took memory of the GPU", found[name]
    differing = {name: (wanted[name], found[name]) for name in calls if wanted[name] != found[name]}
    assert not differing


pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)


@pytest.mark.parametrize("name", FACTORIES)
def test_factories_return_the_same_on_the_cpu(name: str) -> None:
    compare(dict(factory_calls(name)))


@pytest.mark.parametrize("kind", KINDS)
def test_methods_return_the_same_on_the_cpu(kind: str) -> None:
    make = KINDS[kind]
    compare(
        {
            f"{name} {number}": lambda call=call: call(make())  # type: ignore[misc]  # bound now
            for name, calls in METHODS.items()
            if kind != "meta" or name not in _TAKES_META_FOR_CUDA
            for number, call in enumerate(calls)
        }
    )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_return_the_same_on_the_cpu(name: str) -> None:
    compare({f"{name} {number}": call for number, call in enumerate(FUNCTIONS[name])})


def test_every_patched_name_is_compared() -> None:
    (gpu, *_) = SimulatedGPU.machine("T4*2")
    known = {*FACTORIES, *METHODS, *FUNCTIONS, *NOT_OF_THE_CPU}
    left_out = []
    for owner, name, _ in gpu.simulation._patches.added:
        kind = getattr(owner, "__name__", str(owner))
        if kind.startswith(_OF_CUDA) or (kind == "torch._C" and name not in METHODS):
            continue
        names = {name, f"{kind}.{name}", _ELSEWHERE.get(kind, name)}
        if not names & known:
            left_out.append(f"{kind}.{name}")
    assert not left_out


def test_operators_decomposed_for_cuda_keep_their_cpu_kernel() -> None:
    numbers = torch.linspace(-2, 2, 5, requires_grad=True)
    (expected,) = torch.autograd.grad(F.mish(numbers).sum(), numbers)
    with simulate("T4"):
        (found,) = torch.autograd.grad(F.mish(numbers).sum(), numbers)
    assert torch.equal(found, expected)
