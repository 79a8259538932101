"""Choice between the backends of an op: predicates that give reasons, first that can runs.

A backend is `reference` (plain torch, always last, always able), `triton`, `cute`, or the name of a
library call. Forcing one that cannot run a call is an error with its reason; nothing falls back in
silence after a backend was forced.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Backend:
    """One implementation of an op.

    Attributes:
        name: `reference`, `triton`, `cute` or the name of a library call.
        why_not: takes the call's arguments, returns None if the backend can run it, else why not.
        run: the implementation, same arguments.
    """

    name: str
    why_not: Callable[..., str | None]
    run: Callable[..., Any]


def always(*_args: Any, **_kwargs: Any) -> str | None:
    """The predicate of reference backends."""
    return None


@functools.cache
def is_installed(module: str) -> bool:
    """Whether `module` can be imported, without importing it."""
    return importlib.util.find_spec(module) is not None


def why_no_triton(*tensors: torch.Tensor | None) -> str | None:
    """Reason why Triton cannot take these tensors, or None. Its interpreter takes CPU tensors."""
    if not is_installed("triton"):
        return "Triton is not installed"
    import triton

    for tensor in tensors:
        if tensor is not None and not tensor.is_cuda and not triton.knobs.runtime.interpret:
            return f"Triton kernels need CUDA tensors, got {tensor.device}"
    return None


def why_no_fp8(tensor: torch.Tensor) -> str | None:
    """Reason why Triton kernels on the tensor's device cannot convert to and from e4m3, or None."""
    if tensor.is_cuda:
        major, minor = torch.cuda.get_device_capability(tensor.device)
        if (major, minor) < (8, 9):
            return f"FP8 needs compute capability 8.9, got {major}.{minor}"
    return None


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device, or of the slice of one that it is; 1 for any other."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


_observers: list[Callable[..., None]] = []


@contextlib.contextmanager
def observed(callback: Callable[..., None]) -> Iterator[None]:
    """Call `callback(op, *args)` before each call inside, those of compiled graphs too.

    Replays of CUDA graphs call nothing. Any thread's calls are seen.
    """
    _observers.append(callback)
    try:
        yield
    finally:
        _observers.remove(callback)


def show(op: str, make_args: Callable[[], tuple[Any, ...]]) -> None:
    """Tell observers of a call that a kernel makes within another op's; arguments are for them."""
    if _observers:
        args = make_args()
        for observer in _observers:
            observer(op, *args)


def run(op: str, backends: Sequence[Backend], forced: str | None, *args: Any, **kwargs: Any) -> Any:
    """Run the first backend that can, or the forced one.

    Raises:
        ValueError: `forced` names no backend of this op, or one that cannot run this call.
    """
    for observer in _observers:
        observer(op, *args)
    if not forced:
        for backend in backends:
            if backend.why_not(*args, **kwargs) is None:
                return backend.run(*args, **kwargs)
        raise AssertionError(f"{op}: no reference backend")
    for backend in backends:
        if backend.name == forced:
            if (reason := backend.why_not(*args, **kwargs)) is not None:
                raise ValueError(f"{op}: backend {forced!r} cannot run this call: {reason}")
            return backend.run(*args, **kwargs)
    known = ", ".join(repr(b.name) for b in backends)
    raise ValueError(f"{op}: unknown backend {forced!r}; this op has {known}")
