"""Exceptions of glm_compile. Each message says what was expected, what was found and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from glm_compile.report import CompileReport


class GlmCompileError(Exception):
    """Base of every error that this package raises on its own account."""


class ConfigError(GlmCompileError, ValueError):
    """A model configuration contradicts itself; the message names both values."""


class CheckpointError(GlmCompileError):
    """A checkpoint directory is incomplete or inconsistent; the message lists every fault found."""


class UnsupportedError(GlmCompileError):
    """A device, dtype, format or option that this version cannot serve, with the reasons."""


class MatchError(GlmCompileError):
    """Strict mode: the passes matched fewer or more regions than the model has.

    Attributes:
        report: the CompileReport with matches, expectations and the reason of each decline.
    """

    def __init__(self, message: str, report: CompileReport) -> None:
        super().__init__(message)
        self.report = report


def as_backend_error(error: Exception) -> Exception:
    """The same error, of a class that is also Dynamo's error of backends.

    Dynamo wraps what a backend raises, so that `except MatchError` around a compiled model would
    not catch one. What is a `BackendCompilerFailed` already passes as it is.
    """
    from torch._dynamo.exc import BackendCompilerFailed

    kind = type(error)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    both: Any = type(kind.__name__, (kind, BackendCompilerFailed), names)
    raised: Exception = both.__new__(both)  # its classes disagree about __init__
    raised.__dict__.update(error.__dict__)
    raised.__dict__.update(backend_name="glm", inner_exception=error, first_useful_frame=None)
    raised.args = error.args
    return raised.with_traceback(error.__traceback__)
