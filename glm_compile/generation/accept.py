"""Which tokens of a verified block are kept: the parts of `ops.accept_block`."""

from __future__ import annotations

from glm_compile.ops.accept_block.reference import (
    accept_greedy,
    append_block,
    clip_block,
    last_kept,
    last_row,
)

__all__ = ["accept_greedy", "append_block", "clip_block", "last_kept", "last_row"]
