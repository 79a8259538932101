"""torch.compile backend and MTP generation for GLM-5.2 as published in transformers.

Importing this package is cheap: the public names load on first use.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

__version__ = "0.1.0"

# Public name -> module that defines it.
_PUBLIC = {
    "CompileOptions": "glm_compile.options",
    "CompileReport": "glm_compile.report",
    "PagedCache": "glm_compile.cache",
    "explain": "glm_compile.explanation",
    "generate": "glm_compile.generation",
    "load": "glm_compile.checkpoint",
    "merge_weights": "glm_compile.weights",
    "warmup": "glm_compile.generation",
    "GlmCompileError": "glm_compile.errors",
    "ConfigError": "glm_compile.errors",
    "CheckpointError": "glm_compile.errors",
    "MatchError": "glm_compile.errors",
    "UnsupportedError": "glm_compile.errors",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        value = getattr(importlib.import_module(_PUBLIC[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(
        f"module 'glm_compile' has no attribute {name!r}", name=name, obj=sys.modules[__name__]
    )


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
