"""Shape-only execution: CUDA tensors are served by ``meta`` tensors whose storages hold blocks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_gpumem.simulated import operators, raw
from pytest_gpumem.simulated.callsite import user_line
from pytest_gpumem.simulated.errors import UnknownValueError, UnsupportedOperatorError
from pytest_gpumem.simulated.shapes import META, Shapes

if TYPE_CHECKING:
    from pytest_gpumem.simulated.simulation import Simulation

Handler = Callable[[tuple[Any, ...], dict[str, Any]], Any]
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


class ShapeExecution(TorchDispatchMode):
    """Runs every operator on ``meta`` and gives each new storage a block on the simulated GPU.

    It takes the place of a fake mode (``_mode_key``): factory calls with ``device="cuda"`` then
    reach it without initialising CUDA, and dispatch modes of the user's own stay above it.
    """

    _mode_key = torch._C._TorchDispatchModeKey.FAKE

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # unannotated in torch
        self._simulation = simulation
        self._storages = simulation.storages
        self._handlers: dict[Any, Handler] = {}
        self._shapes = Shapes()
        self.inside = False
        """True while a meta kernel runs: tensors then report the device they really have."""

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
        handler = self._handlers.get(func)
        if handler is None:
            handler = self._handlers[func] = self._bind(func)
        return handler(args, kwargs or {})

    def _bind(self, func: Any) -> Handler:
        schema = func._schema
        name = schema.name
        if _is_composite(func):
            return self._composite(operators.COMPOSITES.get(str(func), func.decompose))
        in_view = operators.IN_VIEW.get(str(func))
        if in_view is not None:
            return self._composite(in_view)
        if name in _READS:
            return self._read(func)
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
        in_place = operators.IN_PLACE.get(str(func))
        return handler if in_place is None else self._in_place(handler, in_place)

    # One handler per kind of operator.

    def _run_checked(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not func._schema.name.startswith(_MIXES_DEVICES):
            self._refuse_mixed_devices(args, kwargs)
        return self._run(func, args, kwargs)

    def _refuse_mixed_devices(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Meta kernels do not look; on CUDA only a CPU scalar may stand beside CUDA tensors.
        large = [t for t in _tensors((args, kwargs)) if t.dim() or raw.is_meta(t)]
        on_cpu = [not raw.is_meta(t) or self._storages.is_on_host(t) for t in large]
        if any(on_cpu) and not all(on_cpu):
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, "
                f"{self._simulation.current.torch_device} and cpu! (at {user_line()})"
            )

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.inside = True
        try:
            return func(*args, **kwargs)
        except NotImplementedError as error:
            if _DATA_DEPENDENT & set(func.tags):
                raise UnknownValueError(_unknown(func)) from error
            raise UnsupportedOperatorError(_no_shapes(func)) from error
        except RuntimeError as error:
            text = str(error)
            if "no fake impl" in text:
                raise UnsupportedOperatorError(_no_shapes(func)) from error
            if "meta tensor" in text:
                raise UnknownValueError(_unknown(func)) from error
            raise
        finally:
            self.inside = False

    def _plain(self, func: Any) -> Handler:
        run = self._run
        return lambda args, kwargs: run(func, args, kwargs)

    def _composite(self, implementation: Callable[..., Any]) -> Handler:
        def handle(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            # Under inference_mode composite operators arrive whole: take them apart in view.
            with self:
                return implementation(*args, **kwargs)

        return handle

    def _computing(self, func: Any, rule: operators.Rule | None, resizes: bool) -> Handler:
        simulation = self._simulation
        adopt = self._adopt
        run = self._run
        shapes = self._shapes
        storages = self._storages
        fresh = not any(r.alias_info is not None for r in func._schema.returns)
        placed = None if rule is None else rule.placed
        writes = func._schema.is_mutable

        def handle(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            device = simulation.current
            if writes:
                storages.written(_tensors((args, kwargs)))
            if simulation.has_real_meta or storages.on_host or rule is not None:
                owner = self._owner(args, kwargs)
                if owner is None:
                    return run(func, args, kwargs)
                if owner == HOST:
                    return self._on_host(func, args, kwargs)
            scratch = None
            if rule is not None and rule.before is not None:
                scratch = rule.before(device, args, kwargs)
            if resizes:
                result = run(func, args, kwargs)
            else:
                result = shapes.run(func, args, kwargs, self._run_checked)
            if fresh or resizes:
                if placed is None:
                    adopt(result, device)
                else:
                    adopt(list(placed(device, args, kwargs, result)), device)
            if resizes:
                for tensor in _tensors((args, kwargs)):
                    storages.resized(tensor)
            if rule is not None and rule.after is not None:
                rule.after(device, args, kwargs, result)
            if scratch is not None:
                scratch.free()
            return result

        return handle

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

        def handle(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            target = kwargs.get("device")
            if kwargs.get("pin_memory"):
                # Host memory is pageable here: pinning it needs a driver.
                kwargs = {**kwargs, "pin_memory": False}
            owner = self._owner(args, kwargs)
            if target is None:
                if owner is None:
                    return self._run(func, args, kwargs)
                kind = "cpu" if owner == HOST else "meta"
            else:
                kind = simulation.destination or target.type
            if kind == "cpu":
                if owner is None:
                    return self._run(func, args, kwargs)
                return self._on_host(func, args, {**kwargs, "device": META})
            if kind == "cuda":
                device = simulation.device(target.index if target is not None else None)
                kwargs = {**kwargs, "device": META}
            elif kind == "meta" and not simulation.making_real_meta:
                device = simulation.current
            else:
                return self._run(func, args, kwargs)
            if kwargs.get("generator") is not None:
                kwargs = {**kwargs, "generator": None}
            result = self._run(func, args, kwargs)
            self._adopt(result, device)
            if copies and not raw.is_meta(args[0]):
                self._storages.know(result, args[0])
            return result

        return handle

    def _scalar(self, func: Any) -> Handler:
        factory = self._factory(func)

        def handle(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            target = kwargs.get("device")
            if target is not None and target.type == "meta":
                # x[i] = 1.0: on CUDA the number becomes a CPU scalar and nothing is allocated
                # (torch/csrc/autograd/python_variable_indexing.cpp, THPVariable_setitem).
                return self._run(func, args, kwargs)
            return factory(args, kwargs)

        return handle

    def _copy(self, func: Any) -> Handler:
        def handle(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            target, source = args[0], args[1]
            if not raw.is_meta(target) and self._owner((source,), {}) is not None:
                raise UnknownValueError(_unknown(func))
            self._storages.written((target,))
            return self._run(func, args, kwargs)

        return handle

    def _read(self, func: Any) -> Handler:
        simulation = self._simulation

        def handle(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            tensor = args[0]
            if self._owner(args, kwargs) is None:
                return self._run(func, args, kwargs)
            known = self._storages.known(tensor) if func in _NEUTRAL else None
            if known is not None:
                return known.item()
            neutral = simulation.neutral_value(tensor) if func in _NEUTRAL else None
            if neutral is None:
                raise UnknownValueError(_unknown(func))
            return neutral

        return handle

    def _adopt(self, result: Any, device: Any) -> None:
        if isinstance(result, torch.Tensor):
            if raw.is_meta(result):
                self._storages.adopt(result, device)
        elif isinstance(result, (tuple, list)):
            for item in result:
                self._adopt(item, device)

    def _on_host(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func._schema.is_mutable and not raw.is_meta(args[0]):
            raise UnknownValueError(_unknown(func))
        result = self._run(func, _shapes_only(args), _shapes_only(kwargs))
        for tensor in _tensors(result):
            if raw.is_meta(tensor) and not self._storages.is_on_host(tensor):
                self._storages.adopt_on_host(tensor)
        return result

    def _owner(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Whose memory the tensors among the arguments stand for."""
        owner = None
        for tensor in _tensors((args, kwargs)):
            if self._storages.of(tensor) is not None:
                return CUDA
            if self._storages.is_on_host(tensor):
                owner = HOST
        return owner


CUDA = "cuda"
HOST = "cpu"
_DATA_DEPENDENT = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
_MIXES_DEVICES = (
    "aten::index",
    "aten::_index_put",
    "aten::_unsafe_index",
    "aten::_foreach_copy",
    "aten::_pack_padded_sequence",
    "aten::_ctc_loss",
    "aten::ctc_loss",
)
_NEUTRAL = frozenset({torch.ops.aten._local_scalar_dense.default})
_READS = frozenset(
    {"aten::_local_scalar_dense", "aten::equal", "aten::allclose", "aten::is_nonzero"}
)


def _is_composite(func: Any) -> bool:
    return bool(func.has_kernel_for_dispatch_key(_COMPOSITE))


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for item in value:
            yield from _tensors(item)


def _shapes_only(value: Any) -> Any:
    """``value`` with real CPU tensors replaced by meta tensors of the same shape."""
    if isinstance(value, torch.Tensor):
        if raw.is_meta(value) or not value.dim():
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)
    if isinstance(value, dict):
        return {name: _shapes_only(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_shapes_only(item) for item in value)
    return value


def _no_shapes(func: Any) -> str:
    return (
        f"{func} at {user_line()} has no shape-only implementation, so it cannot run on a "
        f"simulated GPU"
    )


def _unknown(func: Any) -> str:
    return (
        f"{func} at {user_line()} reads a value of a CUDA tensor, which a simulated GPU does not "
        f"have: only shapes are computed"
    )
