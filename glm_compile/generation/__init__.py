"""Decoding with the model's own MTP layer as the draft."""

from __future__ import annotations

from glm_compile.generation.api import generate, warmup
from glm_compile.generation.output import GenerationOutput

__all__ = ["GenerationOutput", "generate", "warmup"]
