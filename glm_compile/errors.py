"""Exceptions of glm_compile. Each message says what was expected, what was found and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
