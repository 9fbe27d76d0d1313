"""Tracing: torch sees its own functions, fake tensors of a GPU, and that GPU's properties.

The functions that answer for the GPU are replaced below ``torch.cuda``
(``torch._C._cuda_getDevice``, ...), so Dynamo finds torch's own functions and recognises them.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._inductor.codegen.cuda_combined_scheduling
import torch._inductor.codegen.triton
import torch._inductor.codegen.triton_combo_kernel
import torch._inductor.cudagraph_trees
import torch._inductor.runtime.triton_heuristics
import torch._inductor.utils
import torch.utils._triton
from torch._dynamo import device_interface, trace_rules
from torch._dynamo.variables import ctx_manager
from torch._dynamo.variables.optimizer import OptimizerVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch._functorch import partitioners
from torch._inductor import async_compile, compile_fx, config, scheduler
from torch._inductor.codecache import CacheBase
from torch._inductor.constant_folding import ConstantFolder
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes import pad_mm
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.select_algorithm import AlgorithmSelectorCache
from torch._ops import OpOverload
from torch.fx import GraphModule
from torch.fx.experimental import proxy_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from pytest_gpumem.garbage import FramesCleared, paused
from pytest_gpumem.late_modules import Context
from pytest_gpumem.simulated.common.callsite import WRAPPERS, is_own
from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.common.raw import CPU
from pytest_gpumem.simulated.compiled import fakes, settings, wrapper
from pytest_gpumem.simulated.compiled.computed import GraphValues
from pytest_gpumem.simulated.compiled.settings import CompiledCodeError, note_at_line
from pytest_gpumem.simulated.compiled.wrapper import standing_in
from pytest_gpumem.simulated.machine.machine import SimulatedMachine
from pytest_gpumem.simulated.operators.layout import HALF_DTYPES
from pytest_gpumem.simulated.operators.rules import on_machine
from pytest_gpumem.simulated.operators.tables import ABOVE_AUTOGRAD

_TO_COPY = torch.ops.aten._to_copy.default
_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
_MEASURES: Any = object()

_WAITS_FOR_MEMORY = 100
"""Highest intensity of a product that waits for memory.

Half of a GPU's multiplications while it reads one number, as Inductor has it: 69 on V100, 100 on
A100, 148 on H100, 140 on B200, by NVIDIA's data sheets.
"""

_COPIES: Mapping[Any, Mapping[str, str]] = {
    device_interface.CudaInterface: {
        "exchange_device": "_cuda_exchangeDevice",
        "maybe_exchange_device": "_cuda_maybeExchangeDevice",
        "get_raw_stream": "_cuda_getCurrentRawStream",
    },
    torch.cuda: {  # where the next one looks up to 2.11
        "_exchange_device": "_cuda_exchangeDevice",
        "_maybe_exchange_device": "_cuda_maybeExchangeDevice",
    },
    ctx_manager.CUDADeviceVariable: {
        "_exchange_fn": "_cuda_exchangeDevice",
        "_maybe_exchange_fn": "_cuda_maybeExchangeDevice",
    },
    getattr(ctx_manager, "AcceleratorDeviceIndexVariable", None): {
        "_exchange_fn": "_accelerator_exchangeDevice",
        "_maybe_exchange_fn": "_accelerator_maybeExchangeDevice",
    },
}
"""Functions of ``torch._C`` that torch copies on import, for Dynamo, by its own names."""

_last: weakref.ref[Tracing] | None = None
"""The object that last answered for the GPU: torch keeps its answers for the process."""


class Tracing:
    """The context in which torch compiles for the GPUs of ``machine``; it can be nested."""

    def __init__(
        self, machine: SimulatedMachine, answering: Context, code: Context, exclusively: Context
    ) -> None:
        self._machine = machine
        self._answering = answering
        self._code = code
        self._exclusively = exclusively
        self._patches = Patches()
        fakes.add_patches(machine, self._patches)
        self._patches.wrap(OpOverload, "decompose", partial(_as_on_cuda, machine))
        wrapper.add_patches(self._patches)
        self._answer_for_gpu()
        self._lasting = Patches()
        """Replacements for compiling that happens while compiled code runs: a graph's backward."""
        self._lasting.wrap(compile_fx, "_compile_fx_inner", self._write)
        self._lasting.add(async_compile, settings.HELPERS, settings.no_helpers)
        # From 2.15 on the compiled frame asks C++, which knows only real GPUs.
        if hasattr(torch._dynamo.utils, "get_current_stream"):
            current = torch.accelerator.current_stream
            self._lasting.add(torch._dynamo.utils, "get_current_stream", current)
        self._make_optimizers_state()
        self.is_entered = False

    def _answer_for_gpu(self) -> None:
        add = self._patches.add
        triton = torch.utils._triton
        add(triton, "triton_hash_with_backend", lambda: "simulated")
        self._patches.wrap(AlgorithmSelectorCache, "__call__", _choose_first)
        for owner in (scheduler, torch._inductor.utils):  # of TFLOPS it has a table, by full name
            add(
                owner, "get_gpu_dram_gbps", lambda: self._machine.current.model.memory_gb_per_second
            )
        unset = vars(proxy_tensor)["unset_fake_temporarily"]

        def fold(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with _OnHost():  # type: ignore[no-untyped-call]  # torch's own
                return run(*args, **kwargs)

        @contextmanager
        def unset_fake_temporarily(*args: Any, **kwargs: Any) -> Iterator[None]:
            with unset(*args, **kwargs), _OnHost():  # type: ignore[no-untyped-call]  # torch's own
                yield

        self._patches.wrap(ConstantFolder, "run", fold)
        add(proxy_tensor, "unset_fake_temporarily", unset_fake_temporarily)
        self._patches.wrap(pad_mm, "_should_pad", self._should_pad)
        self._patches.wrap(partitioners, "estimate_runtime", self._estimate)
        for guard in (torch.cuda.device, torch.cuda._DeviceGuard):
            add(guard, "__enter__", lambda guard: None)
            add(guard, "__exit__", lambda guard, *_: False)
        for owner, name in _MEASURED:
            function = getattr(owner, name)
            while hasattr(function, "__wrapped__") and is_own(function.__code__.co_filename):
                function = function.__wrapped__
            add(owner, name, function)
        for owner, names in _COPIES.items():
            for name, copied in names.items():
                if hasattr(owner, name):
                    add(owner, name, staticmethod(_asking(copied)))

    def _write(
        self, write: Callable[..., Any], graph: GraphModule, *args: Any, **options: Any
    ) -> Any:
        self.note_tuning({})
        with FramesCleared(), self.entered(), standing_in(), config.patch(_first_choices()):
            if not self._machine.values.everything:
                return write(graph, *args, **options)
            computed = GraphValues(self._machine, graph)  # Inductor changes the graph
            if computed.lacks is not None and not options.get("is_backward"):
                raise CompiledCodeError(
                    f"real values are requested, and those of {computed.lacks} cannot be "
                    "computed on the CPU"
                )
            written = write(graph, *args, **options)
            if isinstance(written, CompiledFxGraph):
                assert written.current_callable is not None
                written.current_callable = computed.with_values(written.current_callable)
            return written

    def note_tuning(self, given: Mapping[str, Any]) -> None:
        """Note that Inductor, with these settings of its own, would measure its choices."""
        if any(given.get(name, getattr(config, name)) for name in settings.TUNING):
            note_at_line(
                self._machine,
                "chooses kernels by their speed: it got its first choices, without what measuring "
                "them allocates",
            )

    def _should_pad(
        self, decide: Any, match: Any, one: torch.Tensor, other: torch.Tensor, *args: Any,
        **kwargs: Any,
    ) -> bool:  # fmt: skip
        """Wrap ``decide``, whether a product is padded: Inductor measures it in unclear cases.

        Tensor cores read rows of 16 bytes, so padding pays where they are used, unless the product
        waits for memory anyway: then copying what is padded costs more.
        """
        decide = getattr(decide, "__wrapped__", decide)  # it remembers measurements
        with mock.patch.object(pad_mm, "get_cached_should_pad", return_value=_MEASURES):
            decided = decide(match, one, other, *args, **kwargs)
        if decided is not _MEASURES:
            return bool(decided)
        sizes: tuple[Any, ...] = *one.shape[-2:], other.shape[-1]
        m, k, n = (size if isinstance(size, int) else size.node.hint for size in sizes)
        # Multiplications per number that is read or written (is_mm_compute_bound).
        intensity = m * k * n / (m * k + k * n + m * n)
        pads = one.dtype in HALF_DTYPES or torch.backends.cuda.matmul.allow_tf32
        pads = pads and intensity > _WAITS_FOR_MEMORY
        self._machine.note(
            f"Inductor measures whether a product of {one.dtype} is faster with padded rows; "
            f"it was taken for {'faster' if pads else 'slower'}"
        )
        return pads

    def _estimate(self, estimate: Callable[..., float], node: torch.fx.Node) -> float:
        """Wrap ``estimate``, the cost of computing a node again: one setting would measure it."""
        of_autograd: Any = torch._functorch.config
        if of_autograd.activation_memory_budget_runtime_estimator != "profile":
            return estimate(node)
        self._machine.note(
            "activation_memory_budget_runtime_estimator='profile' measures what computing "
            "activations again costs: it was taken for their FLOPs, as by 'flops'"
        )
        with of_autograd.patch(activation_memory_budget_runtime_estimator="flops"):
            return estimate(node)

    def _make_optimizers_state(self) -> None:
        """Make an optimizer's state on the GPU while its step is traced, before torch reads it.

        It is made as a capturable optimizer's, which counts its steps on the GPU. Up to 2.13 the
        optimizer stays capturable. Source: torch/_dynamo/variables/optimizer.py
        (_set_capturable, _init_group), torch 2.11, 2.13 and 2.15.
        """
        restores = hasattr(OptimizerVariable, "_safe_to_set_capturable")

        def move_steps(move: Callable[..., None], variable: Any) -> None:
            with self._code():
                move(variable)

        def arguments_of_init(arguments: Any, variable: Any, *args: Any, **options: Any) -> Any:
            values, named = arguments(variable, *args, **options)
            with self._code():
                optimizer = variable.value
                fresh = [group for group in optimizer.param_groups if _is_fresh(group, optimizer)]
                before = [group["capturable"] for group in fresh]
                for group in fresh:
                    group["capturable"] = True
                optimizer._init_group(*values, **named)
                if restores:
                    for group, capturable in zip(fresh, before, strict=True):
                        group["capturable"] = capturable
            return arguments(variable, *args, **options)  # it fills the lists that it is given

        self._patches.wrap(OptimizerVariable, "move_step_if_cpu", move_steps)
        self._patches.wrap(OptimizerVariable, "get_python_args", arguments_of_init)

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Keep wrappers by model inside; that of a backward pass may be made when it first runs."""
        model = self._machine.gpus[0].model.name
        folder = Path(cache_dir(), f"{WRAPPERS}{_version()}", model)
        with ExitStack() as inside:
            inside.enter_context(mock.patch.dict(os.environ, {_FOLDER: str(folder)}))
            inside.enter_context(self._lasting.applied())
            # CUDA graphs are the process's for torch, and their pools this machine's.
            inside.callback(torch._inductor.cudagraph_trees.reset_cudagraph_trees)
            yield

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Simulate tracing for the duration of the context."""
        global _last
        with self._exclusively(), ExitStack() as inside:
            if not self.is_entered:
                self.is_entered = True
                inside.callback(setattr, self, "is_entered", False)
                if _last is None or _last() is not self:
                    # Another GPU answers from now on.
                    _clear_caches(
                        *(torch._inductor.utils, torch.utils._triton, DeviceProperties, CacheBase)
                    )
                    device_interface.caching_worker_device_properties.clear()
                    _last = weakref.ref(self)
                self._enter(inside)
            yield

    def _enter(self, inside: ExitStack) -> None:
        copy = select_decomp_table()[_TO_COPY]

        def to_copy(tensor: Any, *, device: torch.device | None = None, **options: Any) -> Any:
            if device is not None:
                device = fakes.place(self._machine, device)
            return copy(tensor, device=device, **options)

        inside.enter_context(self._answering())
        # No name is replaced here. Dynamo may have looked torch's functions up while names were:
        # ``init_process_group``, where a world of processes begins, makes it look again at the
        # next use.
        if torch.zeros not in trace_rules.get_torch_obj_rule_map():
            _clear_caches(trace_rules, TorchInGraphFunctionVariable)
        inside.enter_context(fakes.gradients_kept())
        inside.enter_context(self._patches.applied())
        # User objects that a collection frees here would otherwise depend on cache hits.
        inside.enter_context(paused())
        inside.enter_context(config.patch(compile_threads=1))  # nothing is compiled
        inside.enter_context(settings.apart_by_attention())
        if self._machine.values.everything:
            # Its entries have no graph to compute values by.
            of_autograd: Any = torch._functorch.config
            inside.enter_context(of_autograd.patch(enable_autograd_cache=False))
        inside.enter_context(mock.patch.dict(select_decomp_table(), {_TO_COPY: to_copy}))


class _OnHost(TorchDispatchMode):
    """A mode that makes constants of a GPU on the CPU, because torch reads their values."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map_only(torch.device, lambda _: CPU, (args, kwargs or {}))
        return func(*args, **kwargs)


def _first_choices() -> dict[str, Any]:
    """Return settings of Inductor where it writes a wrapper: libraries' kernels, nothing measured.

    Settings that it tunes by stay: they also decide what is a matrix product. Source:
    torch/_inductor/kernel/conv.py (convert_1x1_conv_to_mm), fx_passes/post_grad.py
    (is_valid_mm_plus_mm), torch 2.11 to 2.15.
    """
    names = ("max_autotune_gemm_backends", "max_autotune_conv_backends")
    kept = [name for name in names if "ATEN" in getattr(config, name, "").upper()]
    return {**dict.fromkeys(kept, "ATEN"), "triton.autotune_at_compile_time": False}


def _choose_first(
    select: Callable[..., Any], cache: Any, name: str, choices: Any, *args: Any, **options: Any
) -> Any:
    """Wrap ``AlgorithmSelectorCache.__call__``, which measures where it has several choices."""
    return select(cache, name, choices[:1], *args, **options)


def _is_fresh(group: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> bool:
    """Return whether all parameters of ``group`` are on the GPU, and none has a state yet."""
    parameters = group["params"]
    return "capturable" in group and all(
        each.is_cuda and each not in optimizer.state for each in parameters
    )


@cache
def _version() -> str:
    """Return a hash of all code that takes part in tracing, and so in wrappers: casts, too."""
    simulated = Path(__file__).parents[1]
    code = b"".join(path.read_bytes() for path in sorted(simulated.rglob("*.py")))
    return hashlib.sha256(code).hexdigest()[:12]


def _asking(name: str) -> Callable[..., Any]:
    """Return a function that looks ``name`` up in ``torch._C`` when called: machines change."""

    def ask(*args: Any) -> Any:
        return getattr(torch._C, name)(*args)

    return ask


_MEASURED: tuple[tuple[Any, str], ...] = (
    *((torch.nn.Module, name) for name in ("__call__", "_apply", "__setstate__")),
    (torch.nn.Parameter, "__new__"),
    *((owner, "_engine_run_backward") for owner in (torch.autograd, torch.autograd.graph)),
)
"""Functions that the meter wraps: torch has to compile the originals."""


def _clear_caches(*owners: Any) -> None:
    for owner in owners:
        for name in vars(owner):
            forget = getattr(getattr(owner, name), "cache_clear", None)
            if forget is not None:
                forget()


def _as_on_cuda(
    machine: SimulatedMachine, decompose: Callable[..., Any], operator: OpOverload, *args: Any,
    **kwargs: Any,
) -> Any:  # fmt: skip
    """Decompose, in inference mode, operators that CUDA decomposes differently from the CPU.

    This happens above autograd, whose key the tensors of inference mode lack. FakeTensorMode and
    FunctionalTensorMode decompose there by ``OpOverload.decompose``, in C++, to which the tensors
    are on ``meta``: attention would be that of the math kernel.
    Source: torch/_ops.py (``OpOverload.decompose``), torch/_subclasses/fake_tensor.py and
    functional_tensor.py, torch 2.11 to 2.15.
    """
    implementation = ABOVE_AUTOGRAD.get(str(operator))
    if implementation is None or not fakes.are_of_gpu((args, kwargs)):
        return decompose(operator, *args, **kwargs)
    return on_machine(implementation, operator, machine)(*args, **kwargs)
