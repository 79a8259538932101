"""MoE layers: routed experts, the router that chooses them, and both with the shared expert."""

from __future__ import annotations

from glm_compile.ops.moe.experts import DTYPES, moe_experts
from glm_compile.ops.moe.layer import moe_layer
from glm_compile.ops.moe.router import moe_router

__all__ = ["DTYPES", "moe_experts", "moe_layer", "moe_router"]
