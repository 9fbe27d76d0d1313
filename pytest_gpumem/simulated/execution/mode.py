"""Shape-only execution: CUDA tensors are served by ``meta`` tensors whose storages hold blocks."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Sequence
from threading import RLock, get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.common.callsite import FROM_HOST, running, user_line
from pytest_gpumem.simulated.common.errors import UnknownValueError, UnsupportedOperatorError
from pytest_gpumem.simulated.common.nesting import tensors_in
from pytest_gpumem.simulated.common.raw import CPU, META
from pytest_gpumem.simulated.execution.on_host import OnHost
from pytest_gpumem.simulated.execution.shapes import NEW, Shapes
from pytest_gpumem.simulated.execution.words import said_by_aten
from pytest_gpumem.simulated.machine import forks
from pytest_gpumem.simulated.machine.checks import devices
from pytest_gpumem.simulated.machine.checks.devices import NO_DATA
from pytest_gpumem.simulated.machine.checks.dtypes import checks_of, refuse_types
from pytest_gpumem.simulated.machine.placement import source_of_node
from pytest_gpumem.simulated.machine.storages import storage_key
from pytest_gpumem.simulated.machine.values import finite
from pytest_gpumem.simulated.machine.values.known import Operator
from pytest_gpumem.simulated.operators import sparse, transfers
from pytest_gpumem.simulated.operators import tables as operators
from pytest_gpumem.simulated.operators.described import (
    DESCRIPTIONS,
    checked_outputs,
    how_to_describe,
    on_gpu,
)
from pytest_gpumem.simulated.surface import graphs

if TYPE_CHECKING:
    from pytest_gpumem.simulated.gpu.device import SimulatedGPU
    from pytest_gpumem.simulated.machine.checks.given import Check
    from pytest_gpumem.simulated.simulation import Simulation

Handler = Callable[[tuple[Any, ...], dict[str, Any]], Any]
_Execute = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
_empty_strided = torch.empty_strided
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_has_kernel: Callable[[str, str], bool] = torch._C._dispatch_has_kernel_for_dispatch_key


class ShapeExecution(TorchDispatchMode):
    """Runs every operator on ``meta`` and gives each new storage a block on the simulated GPU.

    It takes the place of a fake mode (``_mode_key``): factory calls with ``device="cuda"`` then
    reach it without initialising CUDA, and dispatch modes of the user's own stay above it.
    """

    _mode_key = torch._C._TorchDispatchModeKey.FAKE
    supports_higher_order_operators = True
    shape_env = None
    """Tracing inside an operator (``flex_attention``) asks a fake mode for it."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # unannotated in torch
        self._simulation = simulation
        self._storages = simulation.storages
        self._values = simulation.values
        self._handlers: dict[Any, Handler] = {}
        self._bound = self._handlers
        self._shapes = Shapes(simulation.storages, self._place)
        self._on_host = OnHost(self._storages, self._run, self._unknown)
        self.inside = False
        """True while a meta kernel runs: tensors then report the device they really have."""
        self.lock: RLock | None = None
        """Held while an operator runs, once the code under test has started a thread."""
        self._owner_thread = 0
        self._was_forked = False

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Modes of the user's own run before this one."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The wrapper that keeps dynamo out would cost more than this whole handler.
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one operator."""
        if types and any(kind.__torch_dispatch__ is not _DISABLED for kind in types):
            # A subclass that handles operators itself; what it calls inside comes back here.
            return NotImplemented
        lock = self.lock
        if lock is not None:
            lock.acquire()
            self._owner_thread = get_ident()
        try:
            running.operator = func
            handler = self._handlers.get(func)
            if handler is None:
                handler = self._handlers[func] = self._bind(func)
            return handler(args, kwargs or {})
        finally:
            if lock is not None:
                lock.release()

    def watch(self, ran: Callable[[Any], None] | None) -> None:
        """Tell ``ran`` of every operator from here on; with ``None`` nobody any more."""
        self._handlers = self._bound if ran is None else _Watched(self._bound, ran)

    def share(self) -> None:
        """Let several threads run operators, one at a time."""
        if self.lock is None:
            self.lock = self._storages.lock = RLock()
            self._owner_thread = get_ident()

    def forked(self) -> None:
        """Be without a GPU: this is another process, and locks of other threads stay shut."""
        self._was_forked = True
        self.lock = self._storages.lock = None
        self._handlers = {}

    @property
    def in_child(self) -> bool:
        """Whether this is a worker, forked off the process that simulates; a test may be, too."""
        return self._was_forked and multiprocessing.parent_process() is not None

    @property
    def inside_here(self) -> bool:
        """Whether the kernel that runs was called from this thread."""
        return self.inside and (self.lock is None or self._owner_thread == get_ident())

    def _bind(self, func: Any) -> Handler:
        if self.in_child:
            return self._without_gpu(func)
        if isinstance(func, HigherOrderOperator):
            return self._higher_order(func)
        if func.namespace not in _TORCHS_OWN:
            return self._custom(func)
        handler = self._values.work.counting(func, self._bind_kind(func))
        if torch.Tag.nondeterministic_seeded in func.tags:
            return graphs.noting_randomness(self._simulation, handler)
        return handler

    def _without_gpu(self, func: Any) -> Handler:
        def handle(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            forks.check(self._storages, args, kwargs, self._simulation.here.destination)
            return func(*args, **kwargs)

        return handle

    def _bind_kind(self, func: Any) -> Handler:
        schema = func._schema
        name = schema.name
        if _is_composite(func):
            return self._composite(operators.COMPOSITES.get(str(func), func.decompose))
        in_view = operators.IN_VIEW.get(str(func))
        if in_view is not None:
            elsewhere = self._computing(func, None, resizes=False)
            composite = self._checked(func, self._composite(in_view))
            return self._whole(func, self._on_cuda(composite, elsewhere))
        if name in _READS:
            return self._read(func)
        if name.startswith("aten::quantize_per_"):
            return self._quantize(func)
        if name == "aten::scalar_tensor":
            return self._scalar(func)
        if any(argument.name == "device" for argument in schema.arguments):
            return self._factory(func)
        if name == "aten::copy_":
            return self._copy(func)
        rule = operators.RULES.get(name)
        returns = schema.returns
        aliases = [r.alias_info is not None for r in returns]
        writes = [r.alias_info is not None and r.alias_info.is_write for r in returns]
        resizes = "out" in schema.overload_name or "resize" in name or "set_" in name
        if any(aliases) and not all(writes):
            return self._plain(func)
        handler = self._computing(func, rule, resizes)
        if _DATA_DEPENDENT & set(func.tags):
            handler = self._sized_by_values(func, rule, handler)
        if name in _MASKED:
            handler = self._masked(handler)
        if name == "aten::masked_select" and not resizes:
            handler = self._selected(handler)
        if self._simulation.placement is not None and name.startswith("aten::_foreach_"):
            handler = self._simulation.placement.each(handler)
        in_place = operators.IN_PLACE.get(str(func))
        return handler if in_place is None else self._in_place(handler, in_place)

    # One handler per kind of operator.

    def _run_seeded(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("generator") is not None and any(map(raw.is_meta, tensors_in(args))):
            kwargs = {**kwargs, "generator": None}
        return self._run(func, *self._concealed(args, kwargs))

    def _concealed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._on_host.concealed((args, kwargs)) if self._storages.on_host else (args, kwargs)

    def _checked(self, func: Any, handler: Handler) -> Handler:
        checks = checks_of(func)

        def handle(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self._is_elsewhere(func, checks, args, kwargs)
            return handler(args, kwargs)

        return handle

    def _is_elsewhere(
        self,
        func: Any,
        checks: tuple[Check, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> bool:
        """Look at arguments of a new kind: raise what a GPU raises, which meta kernels do not.

        Returns whether they are on ``meta``, although nobody asked for that in this simulation.
        """
        place = self._place_of_index if func._schema.name in devices.INDEXING else self._place
        tensors = devices.placed(func, args, kwargs, place)
        where = {each.device for each in tensors}
        if "meta" in where and where <= {"meta", "cpu"}:
            self._simulation.has_real_meta = True
            return True
        version = self._simulation.current.version
        devices.refuse_mixed(func, tensors, version)
        if checks:
            refuse_types(checks, func, args, kwargs, version)
        return False

    def _unknown(self, func: Any) -> str:
        return self._values.refusal(f"{func} at {user_line()} reads")

    def _run(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, unknown: bool = False
    ) -> Any:
        """Run a kernel of torch's; ``unknown`` says that it stands for one of unknown values."""
        self.inside = True
        try:
            return func(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            if unknown or kwargs.get("device") == META or self._is_ours(args, kwargs):
                self._explain(error, func, args, kwargs)
            raise
        finally:
            self.inside = False

    def _run_elsewhere(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator that no CUDA tensor has part in, with torch's own errors."""
        self.inside = True
        try:
            result = func(*args, **kwargs)
        finally:
            self.inside = False
        self._storages.adopt_users_own(tensors_in(result))
        return result

    def _is_ours(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether some tensor stands for memory of a GPU; others have errors of their own."""
        if self._simulation.has_real_meta:
            return self._owner(args, kwargs) is not None
        return any(map(raw.is_meta, tensors_in((args, kwargs))))

    def _explain(
        self, error: Exception, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Raise what ``error``, of a kernel without values, means on a simulated GPU."""
        text = str(error)
        if isinstance(error, NotImplementedError):
            if _DATA_DEPENDENT & set(func.tags):
                raise UnknownValueError(self._unknown(func)) from error
            raise UnsupportedOperatorError(_no_shapes(func)) from error
        if any(sign in text for sign in _SIGNS_OF_NO_SHAPES):
            raise UnsupportedOperatorError(_no_shapes(func)) from error
        if "meta tensor" in text:
            raise UnknownValueError(self._unknown(func)) from error
        words = said_by_aten(func, args, kwargs, error)
        if words is not None:
            raise words from None

    def _plain(self, func: Any) -> Handler:
        run = self._run
        return self._followed(lambda args, kwargs: run(func, args, kwargs))

    def _higher_order(self, func: HigherOrderOperator) -> Handler:
        if func.name() == "cond":
            return self._composite(_cond)
        # What it runs where nothing compiles it.
        eagerly = func.py_kernels.get(torch._C.DispatchKey.CompositeExplicitAutograd)
        if eagerly is not None:
            return self._composite(eagerly)

        def refuse(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            raise UnsupportedOperatorError(
                f"{func.name()} at {user_line()} is for compiled code, so it cannot run on a "
                f"simulated GPU"
            )

        return refuse

    def _custom(self, func: Any) -> Handler:
        undescribed = self._bind_kind(func)
        schema = func._schema

        def describe(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            description = DESCRIPTIONS.of(schema.name, schema.overload_name)
            assert description is not None
            with self:
                return checked_outputs(schema, description(*args, **kwargs))

        described = self._whole(func, describe)

        def handle(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            description = DESCRIPTIONS.of(schema.name, schema.overload_name)
            if description is None or not on_gpu(args, kwargs):
                return undescribed(args, kwargs)
            return described(args, kwargs)

        return handle

    def _composite(self, implementation: Callable[..., Any]) -> Handler:
        def handle(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            # Under inference_mode composite operators arrive whole: take them apart in view.
            with self:
                return implementation(*args, **kwargs)

        return self._followed(handle)

    def _followed(self, handler: Handler) -> Handler:
        placement = self._simulation.placement
        return handler if placement is None else placement.following(handler)

    def _whole(self, func: Any, handler: Handler) -> Handler:
        """What is built from other operators has the right shapes; its values are its own."""
        operator = Operator.of(func)
        values = self._values

        def handle(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            with values.ignoring():
                result = handler(args, kwargs)
            values.replace(operator, args, kwargs, result)
            return result

        return handle

    def _on_cuda(self, handler: Handler, elsewhere: Handler) -> Handler:
        owner = self._owner
        return lambda args, kwargs: (handler if owner(args, kwargs) == CUDA else elsewhere)(
            args, kwargs
        )

    def _computing(self, func: Any, rule: operators.Rule | None, resizes: bool) -> Handler:
        simulation = self._simulation
        adopt = self._adopt
        shapes = self._shapes
        storages = self._storages
        fresh = not any(r.alias_info is not None for r in func._schema.returns)
        placed = None if rule is None else rule.placed
        operator = Operator.of(func)
        follow = self._values.follow
        placement = simulation.placement
        name = func._schema.name
        execute: _Execute = self._run_seeded
        if rule is not None and rule.shapes is not None and not resizes:
            execute = _shaped_by(rule.shapes)
        checks = checks_of(func)
        is_checked = not resizes or "out" in func._schema.overload_name
        overload = str(func)
        may_be_sparse = overload in sparse.PARTS

        def handle(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            device = simulation.current if placement is None else placement.of(name, args, kwargs)
            if simulation.has_real_meta or storages.on_host or rule is not None:
                owner = self._owner(args, kwargs)
                if owner is None:
                    return self._run_elsewhere(func, args, kwargs)
                if owner == HOST:
                    return self._run_on_host(operator, args, kwargs)
            key, make = (None, NEW) if resizes else shapes.find(func, args, kwargs)
            if may_be_sparse and make is NEW:
                in_parts = sparse.parts_of(overload, args)
                if in_parts is not None and self._owner(args, kwargs) == CUDA:
                    with self:
                        return in_parts(*args, **kwargs)
            if make is NEW and is_checked and self._is_elsewhere(func, checks, args, kwargs):
                return self._run_elsewhere(func, args, kwargs)
            scratch = None
            if rule is not None and rule.before is not None:
                scratch = rule.before(device, args, kwargs)
            if make is NEW or make is None:
                try:
                    result = execute(func, args, kwargs)
                except BaseException:
                    if scratch is not None:
                        scratch.free()
                    raise
                if make is NEW and key is not None:
                    shapes.learn(key, args, kwargs, result)
            else:
                result = make(args)
            if fresh or resizes:
                if placed is None:
                    adopt(result, device)
                else:
                    adopt(list(placed(device, args, kwargs, result)), device)
                    storages.adopt_numbers(tensors_in(result))
            if resizes:
                for tensor in tensors_in((args, kwargs)):
                    storages.resized(tensor)
            if rule is not None and rule.after is not None:
                rule.after(device, args, kwargs, result)
            if scratch is not None:
                scratch.free()
            follow(operator, args, kwargs, result)
            return result

        return handle

    def _sized_by_values(
        self, func: Any, rule: operators.Rule | None, otherwise: Handler
    ) -> Handler:
        """Operators whose results have as many elements as their arguments' values say."""
        operator = Operator.of(func)
        simulation = self._simulation
        checks = checks_of(func)
        placement = simulation.placement
        name = func._schema.name

        def handle(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            computed = None
            if self._owner(args, kwargs) == CUDA:
                computed = self._values.computed(operator, args, kwargs)
            if computed is None:
                return otherwise(args, kwargs)
            self._is_elsewhere(func, checks, args, kwargs)
            device = simulation.current if placement is None else placement.of(name, args, kwargs)
            scratch = None
            if rule is not None and rule.before is not None:
                scratch = rule.before(device, args, kwargs)
            result = _shaped_as(func, computed)
            placed = result
            if rule is not None and rule.placed is not None:
                placed = list(rule.placed(device, args, kwargs, result))
            self._adopt(placed, device)
            if rule is not None and rule.after is not None:
                rule.after(device, args, kwargs, result)
            if scratch is not None:
                scratch.free()
            for tensor, values in zip(tensors_in(result), tensors_in(computed), strict=True):
                self._values.keep(tensor, values)
            return result

        return handle if "out" not in func._schema.overload_name else otherwise

    def _selected(self, handler: Handler) -> Handler:
        """``masked_select``, where the mask alone is known.

        Source: aten/src/ATen/native/cuda/IndexKernel.cpp (masked_select_out_cuda_impl).
        """

        def handle(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            tensor, mask = args
            if self._owner(args[:1], {}) != CUDA or not self._is_countable(mask):
                return handler(args, kwargs)
            with self:
                pair = [one if one.dim() else one.unsqueeze(0) for one in (mask, tensor)]
                chosen, whole = torch.broadcast_tensors(*pair)
                return torch.ops.aten.index.Tensor(whole, [chosen])

        return handle

    def _masked(self, handler: Handler) -> Handler:
        """Indexing by masks: CUDA makes indices of them first, as many as are set.

        Source: aten/src/ATen/native/IndexingUtils.h (expandTensors).
        """

        def handle(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if (
                any(map(_is_mask, args[1]))
                and self._owner(args[:1], {}) == CUDA
                and all(map(self._is_countable, args[1]))
                and not operators.is_masked_fill(self._storages, args, kwargs)
            ):
                with self:
                    indices = _expanded(args[1], args[0])
                args = (args[0], indices, *args[2:])
            return handler(args, kwargs)

        return handle

    def _is_countable(self, index: torch.Tensor | None) -> bool:
        if index is None or not _is_mask(index) or not raw.is_meta(index):
            return True
        return self._values.of(index) is not None

    def _in_place(self, handler: Handler, in_place: operators.InPlace) -> Handler:
        def handle(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            # Two frames up is whoever called the operator.
            if operators.in_formula(sys._getframe(2)):
                node = torch._C._current_autograd_node()
                operator = in_place(args, node.name())
                if operator is not None:
                    return self.__torch_dispatch__(operator, (), args, kwargs)
            return handler(args, kwargs)

        return handle

    def _factory(self, func: Any) -> Handler:
        simulation = self._simulation
        copies = func._schema.name == "aten::_to_copy"
        checks = checks_of(func)
        rule = operators.RULES.get(func._schema.name)
        after = None if rule is None else rule.after
        operator = Operator.of(func)
        placement = simulation.placement

        def place(args: tuple[Any, ...], kwargs: dict[str, Any]) -> SimulatedGPU:
            assert placement is not None
            source = source_of_node() if copies else None
            return source or placement.of(func._schema.name, args, kwargs)

        def handle(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            target = kwargs.get("device")
            if kwargs.get("pin_memory"):
                # Host memory is pageable here: pinning it needs a driver.
                return simulation.pinned.add(handle(args, {**kwargs, "pin_memory": False}))
            owner = self._owner(args, kwargs)
            if target is None:
                if owner is None:
                    return self._run_elsewhere(func, args, kwargs)
                where = CPU if owner == HOST else None
            else:
                where = self._asked_for(target)
            if where is not None and where.type not in ("cpu", "cuda"):
                simulation.here.on_meta = where.type == "meta"
                return self._run_elsewhere(func, args, kwargs)
            to_host = where is not None and where.type == "cpu"
            if copies and args[0].layout is not torch.strided:
                _refuse_crossing(to_host=to_host, from_host=owner in (None, HOST))
            if to_host:
                if owner is None:
                    return self._run_elsewhere(func, args, kwargs)
                record = self._storages.of(args[0]) if copies else None
                if record is not None and record.nbytes:
                    transfers.stage_move(record.device, args[0], kwargs)
                moved = self._values.on_host(operator, args, {**kwargs, "device": CPU})
                if moved is None:
                    moved = self._run_on_host(operator, args, {**kwargs, "device": META})
                if record is not None and kwargs.get("non_blocking"):
                    # pin_out of _to_copy, aten/src/ATen/native/TensorConversions.cpp
                    simulation.pinned.add(moved)
                    simulation.pinned.used_by(moved, record.device.index)
                return moved
            if where is not None:
                device = simulation.device(where.index)
                kwargs = {**kwargs, "device": META}
            else:
                device = simulation.current if placement is None else place(args, kwargs)
            if copies and self._is_users_own(args[0]):
                raise NotImplementedError(NO_DATA)
            simulation.here.on_meta = False
            if checks:
                refuse_types(checks, func, args, kwargs, device.version)
            shapes_only = kwargs
            if kwargs.get("generator") is not None:
                shapes_only = {**kwargs, "generator": None}
            if copies and not raw.is_meta(args[0]):
                running.operator = FROM_HOST
            result = self._run(func, args, shapes_only)
            self._adopt(result, device)
            if copies and self._storages.of(args[0]) is None:
                non_blocking = bool(kwargs.get("non_blocking"))
                transfers.stage_upload(device, result, args[0], non_blocking)
                if non_blocking:
                    simulation.pinned.used_by(args[0], device.index)
            if after is not None:
                after(device, args, kwargs, result)
            self._values.make(operator, args, kwargs, result)
            return result

        return handle

    def _asked_for(self, target: torch.device) -> torch.device | None:
        """Where the caller wants a tensor; ``None`` where a CUDA tensor's own options say it."""
        if target.type != "meta":
            return target
        here = self._simulation.here
        return here.destination or (META if here.on_meta else None)

    def _scalar(self, func: Any) -> Handler:
        factory = self._factory(func)
        operator = Operator.of(func)

        def handle(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            target = kwargs.get("device")
            if target is not None and target.type == "meta":
                # x[i] = 1.0: on CUDA the number becomes a CPU scalar and nothing is allocated
                # (torch/csrc/autograd/python_variable_indexing.cpp, THPVariable_setitem).
                result = self._run(func, args, kwargs)
                self._storages.adopt_numbers([result])
                self._values.make(operator, args, kwargs, result)
                return result
            return factory(args, kwargs)

        return handle

    def _copy(self, func: Any) -> Handler:
        operator = Operator.of(func)

        def handle(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            target, source = args[0], args[1]
            if not isinstance(source, torch.Tensor):
                # A number is a tensor of the host here too: it was taken out of it on the way.
                source = torch.tensor(source)
                args = (target, source, *args[2:])
            if self._storages.of(target) is None and self._is_users_own(target):
                return self._run_elsewhere(func, args, kwargs)
            if self._storages.of(source) is None and self._is_users_own(source):
                raise NotImplementedError(NO_DATA)
            if sparse.is_sparse(target) and raw.is_meta(target):
                with self:
                    return sparse.copy_(target, source)
            if not raw.is_meta(target) and self._owner((source,), {}) is not None:
                self._stage(target, source, args, kwargs)
                if self._values.everything and self._values.records(operator, args, kwargs, None):
                    return target
                if self._values.computed(operator, args, kwargs) is None:
                    self._on_host.lose(func, target)
                return target
            if self._storages.on_host and self._owner(args, kwargs) == HOST:
                return self._run_on_host(operator, args, kwargs)
            if not raw.is_meta(source):
                self._stage(target, source, args, kwargs)
            result = self._run(func, args, kwargs)
            self._values.follow(operator, args, kwargs, result)
            return result

        return handle

    def _stage(
        self, target: torch.Tensor, source: torch.Tensor, args: Any, kwargs: dict[str, Any]
    ) -> None:
        """What ``copy_`` between the host and a GPU allocates for the time of the call."""
        non_blocking = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        to, of = self._storages.of(target), self._storages.of(source)
        if non_blocking and (of or to):
            for tensor, record in ((target, of), (source, to)):
                if record is not None:
                    self._simulation.pinned.used_by(tensor, record.device.index)
        if to is not None and of is None:
            transfers.stage_upload(to.device, target, source, non_blocking)
        elif of is not None and to is None:
            transfers.stage_download(of.device, target, source, non_blocking)

    def _quantize(self, func: Any) -> Handler:
        def handle(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self._owner(args, kwargs) is None:
                return self._run_elsewhere(func, args, kwargs)
            # The meta kernel returns an ordinary tensor of the input's type.
            raise UnsupportedOperatorError(_no_shapes(func))

        return handle

    def _read(self, func: Any) -> Handler:
        simulation = self._simulation
        operator = Operator.of(func)

        def handle(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self._owner(args, kwargs) is None:
                return self._run_elsewhere(func, args, kwargs)
            simulation.streams.host_waits(simulation.current_index)
            value = self._values.computed(operator, args, kwargs)
            if value is None and func in _NEUTRAL:
                value = simulation.neutral_value(args[0])
            if value is None:
                raise UnknownValueError(self._unknown(func))
            return value

        return handle

    def _adopt(self, result: Any, device: Any) -> None:
        if isinstance(result, torch.Tensor):
            if raw.is_meta(result):
                self._storages.adopt(result, device)
        elif isinstance(result, (tuple, list)):
            for item in result:
                self._adopt(item, device)

    def _run_on_host(
        self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        func = operator.func
        result = self._on_host.run(operator, args, kwargs)
        if func in finite.QUESTIONS and self._storages.is_on_host(args[0]):
            answer = finite.answer(self._values, func, args)
            if answer is not None:
                self._simulation.note_finite()
                return torch.full(result.shape, answer, device=CPU)
        self._values.follow_on_host(func, args, result)
        return result

    def _owner(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Whose memory the tensors among the arguments stand for."""
        owner = None
        simulation = self._simulation
        of = self._storages.of
        first = args[0] if args and not simulation.has_real_meta else None
        if isinstance(first, torch.Tensor) and of(first) is not None:  # nearly always
            return CUDA
        for tensor in tensors_in((args, kwargs)):
            if of(tensor) is not None:
                if simulation.has_real_meta:
                    simulation.here.on_meta = False
                return CUDA
            if self._storages.is_on_host(tensor):
                owner = HOST
            elif simulation.has_real_meta and raw.is_meta(tensor):
                simulation.here.on_meta = True
        return owner

    def _is_users_own(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is on ``meta`` because somebody asked for that."""
        return raw.is_meta(tensor) and self._place(tensor) == "meta"

    def _place(self, tensor: torch.Tensor) -> str:
        """The device on which ``tensor`` would be on a machine with a GPU, or ``NUMBER``."""
        record = self._storages.of(tensor)
        if record is not None:
            return str(record.device.torch_device)
        if not raw.is_meta(tensor):
            return HOST
        return devices.NUMBER if storage_key(tensor) in self._storages.numbers else "meta"

    def _place_of_index(self, tensor: torch.Tensor) -> str:
        """The same of an operand of indexing: of x[:, [0, 1]] C++ makes a tensor out of sight."""
        place = self._place(tensor)
        if place != "meta" or tensor.dtype not in _OF_LISTS:
            return place
        return place if storage_key(tensor) in self._storages.users_own else devices.NUMBER


class _Watched(dict[Any, Handler]):
    """The handlers of operators, telling of each that runs: so nobody pays who does not ask."""

    def __init__(self, handlers: dict[Any, Handler], ran: Callable[[Any], None]) -> None:
        self._handlers, self._ran = handlers, ran

    def get(self, func: Any, default: Any = None) -> Any:
        self._ran(func)
        return self._handlers.get(func, default)

    def __setitem__(self, func: Any, handler: Handler) -> None:
        self._handlers[func] = handler


CUDA = "cuda"
HOST = "cpu"
_OF_LISTS = frozenset({torch.int64, torch.bool, torch.uint8})
"""Types of the tensors that C++ makes of lists of indices."""
_DATA_DEPENDENT = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
_DISABLED = torch._C._disabled_torch_dispatch_impl
_TORCHS_OWN = frozenset({"aten", "prim", "prims"})
_MASKED = frozenset(
    {
        "aten::index",
        "aten::_unsafe_index",
        "aten::index_put",
        "aten::index_put_",
        "aten::_unsafe_index_put",
        "aten::_index_put_impl_",
    }
)
_NEUTRAL = frozenset({torch.ops.aten._local_scalar_dense.default})
_SIGNS_OF_NO_SHAPES = ("no fake impl", "not linked with support for cuda", "INTERNAL ASSERT")
_READS = frozenset(
    {"aten::_local_scalar_dense", "aten::equal", "aten::allclose", "aten::is_nonzero"}
)


def _shaped_by(shapes: operators.ShapesOf) -> _Execute:
    return lambda func, args, kwargs: shapes(args, kwargs)


def _cond(condition: Any, if_true: Any, if_false: Any, operands: Any = ()) -> Any:
    return (if_true if condition else if_false)(*operands)


def _is_composite(func: Any) -> bool:
    # Some have a kernel of their own besides, on CUDA and on meta alike: silu_backward.
    return func.has_kernel_for_dispatch_key(_COMPOSITE) and not _has_kernel(func.name(), "Meta")


def _refuse_crossing(*, to_host: bool, from_host: bool) -> None:
    """Refuse a sparse tensor that moves: shapes do not say how many of its elements there are."""
    if to_host != from_host:
        raise UnsupportedOperatorError(
            f"a sparse tensor moves between host and GPU at {user_line()}, which a simulated GPU "
            "cannot do: make it on the device it is used on, or move a dense one"
        )


def _no_shapes(func: Any) -> str:
    sentence = (
        f"{func} at {user_line()} has no shape-only implementation, so it cannot run on a "
        f"simulated GPU"
    )
    return sentence if func.namespace in _TORCHS_OWN else f"{sentence}: {how_to_describe(func)}"


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def _expanded(indices: Sequence[Any], tensor: torch.Tensor) -> list[Any]:
    expanded: list[Any] = []
    device = tensor.device
    for index in indices:
        if _is_mask(index):
            _check_mask(index, tensor, len(expanded))
            places = index.nonzero()
            columns = [places.select(1, at) for at in range(index.dim())]
            expanded += [column.to(device) for column in columns]
        else:
            expanded.append(index)
    return expanded


def _check_mask(mask: torch.Tensor, tensor: torch.Tensor, first: int) -> None:
    for at, (wanted, found) in enumerate(zip(mask.shape, tensor.shape[first:], strict=False)):
        if wanted != found:
            raise IndexError(
                f"The shape of the mask {list(mask.shape)} at index {at} does not match the shape "
                f"of the indexed tensor {list(tensor.shape)} at index {first + at}"
            )


def _shaped_as(func: Any, computed: Any) -> Any:
    """Meta tensors with the sizes of ``computed`` and the strides CUDA gives them."""
    if isinstance(computed, torch.Tensor):
        strides = computed.stride()
        if func is torch.ops.aten.nonzero.default:
            # aten/src/ATen/native/cuda/Nonzero.cu writes one row for each dimension.
            strides = (1, max(computed.shape[0], 1))
        return _empty_strided(computed.shape, strides, dtype=computed.dtype, device=META)
    return type(computed)(_shaped_as(func, item) for item in computed)
