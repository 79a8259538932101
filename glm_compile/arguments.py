"""Checks of what callers pass: each message says what was expected and what was found."""

from __future__ import annotations

import difflib
import numbers
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from glm_compile.errors import UnsupportedError

if TYPE_CHECKING:
    import torch


def is_integer(value: Any) -> bool:
    """Whether it is an integer, NumPy's included; True and False are none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_integer(
    where: str, name: str, value: Any, least: int, *, is_optional: bool = False
) -> None:
    """Raise ValueError unless the argument is an integer of at least `least` (or None)."""
    if is_optional and value is None:
        return
    if not is_integer(value):
        or_none = " or None" if is_optional else ""
        raise ValueError(
            f"{where}: {name} must be an integer of at least {least}{or_none}, got {value!r}"
        )
    if value < least:
        raise ValueError(f"{where}: {name} must be at least {least}, got {value}")


def check_flag(where: str, name: str, value: Any, *, is_optional: bool = False) -> None:
    """Raise ValueError unless the argument is True or False, NumPy's included (or None)."""
    if type(value).__name__ in ("bool", "bool_") or (is_optional and value is None):
        return
    expected = "True, False or None" if is_optional else "True or False"
    raise ValueError(f"{where}: {name} must be {expected}, got {value!r}")


def check_device(device: torch.device | str | int | None, where: str) -> None:
    """Raise UnsupportedError for a device that this machine lacks, before any work."""
    import torch

    if device is None:
        return
    try:
        torch.empty(0, device=device)
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise UnsupportedError(f"{where}: device={device!r} cannot be used: {reason}") from error


def describe(value: Any) -> str:
    """What a wrong object is, for a message: its class, and its text where that is short."""
    if isinstance(value, type):
        return f"the class {value.__name__} itself"
    kind = type(value).__name__
    return f"{kind} {value!r}" if isinstance(value, str) and len(value) < 60 else kind


def name_of(value: Any) -> str:
    """A function's or class's own name, else that of the object's class."""
    return getattr(value, "__name__", type(value).__name__)


def closest(name: Any, known: Iterable[str], cutoff: float = 0.6) -> str:
    """A question after the nearest of the known names, to follow a wrong one; or nothing.

    Args:
        cutoff: the least likeness, 1 for the same name.
    """
    close = difflib.get_close_matches(str(name), list(known), n=1, cutoff=cutoff)
    return f" (did you mean {close[0]!r}?)" if close else ""
