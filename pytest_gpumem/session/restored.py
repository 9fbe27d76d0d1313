"""Process-wide settings that memory depends on, restored after a test's body has changed them.

A test's numbers must not depend on other tests. Settings made by fixtures stay.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from pytest_gpumem.garbage import settings_restored

_MEASURES_WITH = (
    *("current_device", "device_count", "empty_cache", "get_device_properties", "is_available"),
    *("is_initialized", "memory_allocated", "memory_reserved", "memory_snapshot", "memory_stats"),
    *("max_memory_allocated", "reset_peak_memory_stats", "synchronize"),
)
"""Functions of torch.cuda that measurements call: a body's replacement of them is undone."""


@contextmanager
def process_restored() -> Iterator[None]:
    """Restore settings that code inside changes: collector, ``sys.path``, torch's defaults."""
    torch = sys.modules.get("torch")
    is_loaded = hasattr(torch, "set_default_device")
    path, before = sys.path, list(sys.path)
    with settings_restored(), _torch_restored(torch) if is_loaded else nullcontext():
        try:
            yield
        finally:
            sys.path = path  # entries that the code has added stay
            path += [entry for entry in before if entry not in path]


@contextmanager
def _torch_restored(torch: Any) -> Iterator[None]:
    # Looked up before the body, which may replace them.
    set_grad_enabled, set_default_dtype = torch._C._set_grad_enabled, torch.set_default_dtype
    set_default_device = torch.set_default_device
    grad, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    device = _default_device(torch)
    autocast = {kind: torch.is_autocast_enabled(kind) for kind in ("cuda", "cpu")}
    set_autocast_enabled, nesting = torch.set_autocast_enabled, torch.autocast_increment_nesting
    depth = nesting() - 1
    leave = torch.autocast_decrement_nesting
    leave()
    cuda, functions = torch.cuda, {name: getattr(torch.cuda, name) for name in _MEASURES_WITH}
    set_device, current = cuda.set_device, cuda.current_device() if cuda.is_initialized() else None
    try:
        yield
    finally:
        vars(cuda).update(functions)
        if current is not None:
            set_device(current)
        if _default_device(torch) != device:
            set_default_device(device)
        set_default_dtype(dtype)
        set_grad_enabled(grad)
        for kind, enabled in autocast.items():
            set_autocast_enabled(kind, enabled)
        nesting()
        while leave() > depth:
            pass
        if not depth:
            torch.clear_autocast_cache()


def memory_fractions_kept() -> Callable[[], None]:
    """Return a function that restores the fractions that the process may now reserve of devices.

    It is called after a failure was explained, which names the fraction that a body has set.
    """
    cuda = sys.modules["torch"].cuda
    fraction_of, set_fraction = (
        cuda.get_per_process_memory_fraction,
        cuda.set_per_process_memory_fraction,
    )
    devices = range(cuda.device_count()) if cuda.is_initialized() else ()
    kept = {index: fraction_of(index) for index in devices}

    def restore() -> None:
        for index, fraction in kept.items():
            if fraction_of(index) != fraction:  # the allocator's errors name one that was ever set
                set_fraction(fraction, index)

    return restore


def _default_device(torch: Any) -> Any:
    """Return ``set_default_device``'s argument, ``None`` without a call; contexts do not count."""
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device
