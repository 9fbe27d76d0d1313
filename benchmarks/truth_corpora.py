"""The programs that torch's own CUDA code and the simulated device are compared by.

A group is what one process runs: the samples of an operator, the configurations of a module or of
an optimizer, one scenario, one program. It yields cases; a case runs its passes one after the
other, each through the function that it is given.
"""

from __future__ import annotations

import contextlib
import gc
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves, tree_map
from truth_programs import programs

from pytest_gpumem.values.world import World, world_of

if TYPE_CHECKING:
    from strangers import Program

Record = Callable[[str, Callable[[], Any]], Any]
"""Runs one pass under a name, and returns what it returns."""

DTYPES = {
    "f32": torch.float32,
    "f64": torch.float64,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i64": torch.int64,
    "u8": torch.uint8,
    "bool": torch.bool,
    "c64": torch.complex64,
    "amp": torch.float32,
    "amp16": torch.float32,
}
"""By the names of ``--dtype``; ``amp`` and ``amp16`` run under autocast to bf16 and f16."""


@dataclass(frozen=True)
class Case:
    """One sample: what is known of it before it runs, and its passes."""

    name: str
    """``corpus/what/dtype/index``."""
    run: Callable[[Record], None]
    given: str = ""
    """Shapes of its inputs."""


@dataclass(frozen=True)
class Group:
    """What one process runs."""

    name: str
    """``corpus/what``."""
    cases: Callable[[], Iterator[Case]]
    world: World | None = None
    """The rank that its cases run as."""
    alloc_conf: str = ""
    """The allocator's settings."""
    has_values: bool = False
    """Whether all values are computed on both devices: the cases go by them."""


def groups(
    corpora: Sequence[str], dtypes: Sequence[str], samples: int, programs: str
) -> Iterator[Group]:
    """Yield the groups of ``corpora``, with at most ``samples`` cases of each dtype.

    ``programs``: the folder of random programs.
    """
    for corpus in corpora:
        if corpus == "random":
            yield from _random(Path(programs))
        else:
            yield from _CORPORA[corpus](dtypes, samples)


_BY_VALUES = frozenset(
    """
    linalg_eig linalg_eigvals matrix_exp normal cov isin repeat_interleave
    _segment_reduce_lengths _segment_reduce_offsets index_fill
    argwhere bincount combinations masked_scatter masked_select nonzero to_sparse unique
    unique_consecutive sparse_sampled_addmm masked_fill prod masked_prod cumprod index_put
    __getitem__ nn_functional_one_hot nn_BatchNorm1d nn_BatchNorm2d nn_BatchNorm3d
    """.split()
)
"""Operators and modules whose values decide what is taken, or whether they fail."""


def _operators(dtypes: Sequence[str], samples: int, corpus: str = "op") -> Iterator[Group]:
    """Yield each operator of ``op_db``, with tensors as they are, turned, or for the results."""
    from torch.testing._internal.common_methods_invocations import op_db

    for op in op_db:
        if (corpus == "out" and not op.supports_out) or (
            corpus == "inplace" and op.inplace_variant is None
        ):
            continue
        name = f"{corpus}/{op.formatted_name}"
        has_values = op.formatted_name in _BY_VALUES
        yield Group(name, partial(_samples, op, name, dtypes, samples), has_values=has_values)


def _samples(op: Any, name: str, dtypes: Sequence[str], samples: int) -> Iterator[Case]:
    """Yield some of the samples of ``op``, in an order that depends on nothing but their number."""
    for dtype in dtypes:
        if DTYPES[dtype] not in op.supported_dtypes("cuda"):
            continue
        _seed()
        real = DTYPES[dtype]
        writes = {"out": _written, "inplace": _changed}.get(name.partition("/")[0])
        may_have_one = op.supports_autograd and (real.is_floating_point or real.is_complex)
        has_gradient = may_have_one and writes is None
        found = list(op.sample_inputs("cpu", real, requires_grad=has_gradient))
        order = list(range(len(found)))
        random.Random(0).shuffle(order)
        for index in order[:samples]:
            sample = found[index]
            given = (sample.input, sample.args, sample.kwargs)
            if name.startswith("layout/"):
                given = tree_map(_turned, given)
            yield Case(
                f"{name}/{dtype}/{index}",
                partial(writes, op, given, dtype)
                if writes is not None
                else partial(_called, op, given, dtype, has_gradient),
                _shapes(given),
            )


def _turned(value: Any) -> Any:
    """Return a tensor with its channels last, or transposed; others as they are."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.dim() < 2:
        return value
    if value.dim() in (4, 5):
        format = torch.channels_last if value.dim() == 4 else torch.channels_last_3d
        turned = value.detach().contiguous(memory_format=format)
    else:
        turned = value.detach().transpose(0, -1).contiguous().transpose(0, -1)
    return turned.requires_grad_(value.requires_grad)


def _called(op: Any, given: Any, dtype: str, has_gradient: bool, record: Record) -> None:
    """Call ``op`` forward and backward with copies of its inputs on the device."""
    first, args, kwargs = _moved(given)
    with _autocast(dtype):
        result = record("forward", lambda: op(first, *args, **kwargs))
    if has_gradient:
        _backward(result, record)


def _written(op: Any, given: Any, dtype: str, record: Record) -> None:
    """Have ``op`` write its results to tensors without elements, and to some of the right size."""
    first, args, kwargs = _moved(given)
    with _autocast(dtype):
        result = op(first, *args, **kwargs)
        for name, likes in (("empty", lambda one: one.new_empty(0)), ("sized", torch.empty_like)):
            out = likes(result) if isinstance(result, torch.Tensor) else tuple(map(likes, result))

            def write(out: Any = out) -> Any:
                return op(first, *args, **kwargs, out=out)

            record(name, write)


def _changed(op: Any, given: Any, dtype: str, record: Record) -> None:
    """Have ``op`` write to its first argument."""
    first, args, kwargs = _moved(given)
    with _autocast(dtype):
        record("in place", partial(op.inplace_variant, first, *args, **kwargs))


def _backward(result: Any, record: Record) -> None:
    """Run the gradients of all of ``result``."""
    outputs = [
        one for one in tree_leaves(result) if isinstance(one, torch.Tensor) and one.requires_grad
    ]
    if outputs:
        gradients = [torch.ones_like(one) for one in outputs]
        record("backward", lambda: torch.autograd.backward(outputs, gradients))


def _modules(dtypes: Sequence[str], samples: int) -> Iterator[Group]:
    """Yield each module of ``module_db``."""
    from torch.testing._internal.common_modules import module_db

    for info in module_db:
        name = f"module/{info.formatted_name}"
        has_values = info.formatted_name in _BY_VALUES
        cases = partial(_configurations, info, name, dtypes, samples)
        yield Group(name, cases, has_values=has_values)


def _configurations(info: Any, name: str, dtypes: Sequence[str], samples: int) -> Iterator[Case]:
    """Yield the module's configurations, in training and in inference."""
    for dtype in dtypes:
        real = DTYPES[dtype]
        if not real.is_floating_point:
            continue
        if real not in info.dtypes and real not in (torch.float16, torch.bfloat16):
            continue
        for is_training in (True, False):
            _seed()
            # The functions look at the device for what it can do.
            found = info.module_inputs_func(
                info, device="cpu", dtype=real, requires_grad=is_training, training=is_training
            )
            mode = "train" if is_training else "eval"
            for index, one in enumerate(islice(found, samples)):
                yield Case(
                    f"{name}/{dtype}/{mode}{index}",
                    partial(_module_passes, info.module_cls, one, dtype, is_training),
                    f"{one.desc} {_constructor(one)} {_shapes(_arguments(one.forward_input))}",
                )


def _module_passes(kind: Any, given: Any, dtype: str, is_training: bool, record: Record) -> None:
    """Build the module, and run it forward and backward."""
    _seed()
    args, kwargs = _arguments(given.constructor_input)
    module = kind(*args, **kwargs)
    module.to(device="cuda", dtype=DTYPES[dtype]).train(is_training)
    args, kwargs = _moved(_arguments(given.forward_input))
    with _autocast(dtype), contextlib.nullcontext() if is_training else torch.no_grad():
        result = record("forward", lambda: module(*args, **kwargs))
    if is_training:
        _backward(result, record)


def _arguments(given: Any) -> tuple[Any, Any]:
    """Return the arguments of a call, none where none is given."""
    return (given.args, given.kwargs) if given is not None else ((), {})


def _constructor(given: Any) -> str:
    """Return what a module is built with, in short."""
    args, kwargs = _arguments(given.constructor_input)
    return ", ".join([*map(str, args), *(f"{key}={value}" for key, value in kwargs.items())])[:120]


def _optimizers(dtypes: Sequence[str], samples: int) -> Iterator[Group]:
    """Yield each optimizer of ``optim_db``."""
    from torch.testing._internal.common_optimizers import optim_db

    for info in optim_db:
        kind: Any = info.optim_cls
        name = f"optim/{kind.__name__}"
        yield Group(name, partial(_optimizer_settings, info, name, dtypes))


def _optimizer_settings(info: Any, name: str, dtypes: Sequence[str]) -> Iterator[Case]:
    """Yield the optimizer's settings, in each of its implementations."""
    for dtype in dtypes:
        if not DTYPES[dtype].is_floating_point or dtype.startswith("amp"):
            continue
        for index, one in enumerate(info.optim_inputs_func(device="cpu")):
            for way in ("default", *info.supported_impls):
                if way in one.kwargs or way == "differentiable":
                    continue
                chosen = {way: True} if way in ("foreach", "fused") else {}
                settings = {**one.kwargs, **chosen}
                yield Case(
                    f"{name}/{dtype}/{way}{index}",
                    partial(_steps, info.optim_cls, settings, DTYPES[dtype]),
                    f"{one.desc} {settings}",
                )


def _steps(kind: Any, settings: dict[str, Any], dtype: torch.dtype, record: Record) -> None:
    """Take three steps of a small net."""
    _seed()
    has_bias = kind.__name__ != "Muon"  # which takes matrices alone
    layers = (torch.nn.Linear(64, 300, bias=has_bias), torch.nn.Linear(300, 7, bias=has_bias))
    net = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1])
    net.to(device="cuda", dtype=dtype)
    given = torch.randn(32, 64, dtype=dtype).cuda()
    optimizer = kind(net.parameters(), **settings)

    def loss() -> Any:
        optimizer.zero_grad()
        found = net(given).square().mean()
        found.backward()
        return found

    for step in range(3):
        record(f"step {step}", lambda: optimizer.step(loss))


def _scenarios(dtypes: Sequence[str], samples: int) -> Iterator[Group]:
    """Yield the scenarios of the twin run under the allocator's default settings."""
    del dtypes, samples
    from scenarios import scenarios

    for name, scenario in scenarios().items():
        if scenario.possible and not scenario.alloc_conf and not scenario.is_warmed:
            yield Group(f"scenario/{name}", partial(_one_pass, f"scenario/{name}", scenario.run))


def _programs(dtypes: Sequence[str], samples: int) -> Iterator[Group]:
    """Yield the programs of this folder."""
    del dtypes, samples
    for name, run in programs().items():
        yield Group(f"program/{name}", partial(_one_pass, f"program/{name}", run))


def _strangers(dtypes: Sequence[str], samples: int) -> Iterator[Group]:
    """Yield the programs of ``strangers``, each in those of its ways that are asked for."""
    del samples
    import strangers

    for program in strangers.programs():
        name = f"stranger/{program.name}"
        ways = [way for way in program.ways if way in dtypes]
        cases = partial(_in_ways, name, program, ways)
        yield Group(name, cases, program.world, has_values=program.has_values)


def _random(folder: Path) -> Iterator[Group]:
    """Yield the programs that were written to ``folder``."""
    import truth_random

    for path in sorted(folder.glob("*.py")):
        name = f"random/{path.stem}"
        program = path.read_text(encoding="utf-8")
        head = json.loads(program.partition("\n")[0][2:]) if program.startswith("#:") else {}
        size, rank = head.get("world", (0, 0))
        world = world_of(size, rank, per_machine=min(size, 4)) if size else None
        run = partial(truth_random.run, program)
        if "torch.compile" in program:
            # A whole one in its file: compilers read the source of functions.
            run = partial(_execute, compile(program, str(path), "exec"))
        yield Group(name, partial(_one_pass, name, run), world, head.get("conf", ""))


def _execute(code: CodeType) -> None:
    exec(code, {"__name__": "__main__"})


def _in_ways(name: str, program: Program, ways: Sequence[str]) -> Iterator[Case]:
    """Yield a program as a case of one pass for each way."""
    from strangers import set_way

    def passes(way: str, record: Record) -> None:
        with set_way(way):
            if program.is_compiled:
                program.run()
                _forget_compiled()
            _seed()
            record("run", program.run)

    for way in ways:
        yield Case(f"{name}/{way}", partial(passes, way))


def _forget_compiled() -> None:
    """Leave nothing on the device of a program that was compiled, nor what holds its tensors."""
    torch._dynamo.reset()
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def _one_pass(name: str, run: Callable[[], Any]) -> Iterator[Case]:
    """Yield a program as one case of one pass."""

    def passes(record: Record) -> None:
        _seed()
        record("run", run)

    yield Case(name, passes)


_CORPORA: dict[str, Callable[[Sequence[str], int], Iterator[Group]]] = {
    "op": _operators,
    "layout": partial(_operators, corpus="layout"),
    "out": partial(_operators, corpus="out"),
    "inplace": partial(_operators, corpus="inplace"),
    "module": _modules,
    "optim": _optimizers,
    "scenario": _scenarios,
    "program": _programs,
    "stranger": _strangers,
}
CORPORA = (*_CORPORA, "random")


def _seed() -> None:
    """Begin all generators anew."""
    torch.manual_seed(0)
    random.seed(0)
    import numpy as np

    np.random.seed(0)


def _autocast(dtype: str) -> contextlib.AbstractContextManager[Any]:
    """Return the autocast that the name of a dtype asks for."""
    if not dtype.startswith("amp"):
        return contextlib.nullcontext()
    return torch.autocast("cuda", dtype=torch.float16 if dtype == "amp16" else torch.bfloat16)


def _moved(given: Any) -> Any:
    """Return ``given`` with its tensors, and devices, on the GPU."""

    def one(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.detach().cuda().requires_grad_(value.requires_grad)
        return torch.device("cuda") if isinstance(value, torch.device) else value

    return tree_map(one, given)


def _shapes(given: Any) -> str:
    """Return the shapes of the tensors in ``given``, and the other arguments, in short."""

    def one(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return f"{str(value.dtype)[6:]}{list(value.shape)}"

    return str(tree_map(one, given)).replace("'", "")[:200]
