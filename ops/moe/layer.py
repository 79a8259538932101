"""A whole MoE layer's MLP: norm, router, routed experts, shared expert, their sum, the residual.

Shape legend: M tokens, K experts of a token (8 in the release), P = M * K pairs of a token and an
expert, E experts, C hidden size, I intermediate size of an expert, J of the shared expert.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from glm_compile.ops import _dispatch
from glm_compile.ops._cute import rows_to_load
from glm_compile.ops._library import register_op
from glm_compile.ops._swiglu import swiglu_reference
from glm_compile.ops.bf16_linear import run_bf16_linear
from glm_compile.ops.merged_linear import merged_linear
from glm_compile.ops.moe import router as _router
from glm_compile.ops.moe.config import (
    MAX_CHOSEN_FROM,
    MAX_LOGITS_COLUMNS,
    draws_tiles,
)
from glm_compile.ops.moe.experts import check_experts, moe_experts, why_not_cute
from glm_compile.ops.moe.reference import moe_experts_reference
from glm_compile.ops.rms_norm import rms_norm
from glm_compile.ops.rms_norm.reference import rms_norm_reference

__all__ = ["moe_layer"]

# Experts of a token that a warp chooses.
WARP = 32


def moe_layer(
    x_MC: torch.Tensor,
    router_weight_EC: torch.Tensor,
    router_bias_E: torch.Tensor,
    top_k: int,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    shared_gate_JC: torch.Tensor,
    shared_up_JC: torch.Tensor,
    shared_down_CJ: torch.Tensor,
    *,
    norm_weight_C: torch.Tensor | None = None,
    eps: float = 0.0,
    residual_MC: torch.Tensor | None = None,
    normalize: bool = True,
    scale: float = 1.0,
    backend: str | None = None,
) -> torch.Tensor:
    """Return residual + (routed experts of x + shared expert of x), each sum rounded to x's dtype.

    With a norm's weight, x is normed first, by the model's RMSNorm as `rms_norm` does it. The
    routed experts are those of `moe_router` and `moe_experts`, with their contracts; the shared
    expert is shared_down (silu(shared_gate x) * (shared_up x)), of every token. For few tokens the
    shared expert is one more expert of the kernels that stream the others, and its weights are on
    their way while the router is still at work.

    Args:
        x_MC: fp32, fp16 or bf16 [M, C], any strides; M = 0 is allowed.
        router_weight_EC, router_bias_E, top_k, normalize, scale: see `moe_router`.
        gate_up, down: see `moe_experts`.
        shared_gate_JC, shared_up_JC, shared_down_CJ: x's dtype.
        norm_weight_C: x's dtype [C], or None: x is multiplied as it is.
        eps: of the norm.
        residual_MC: x's dtype [M, C], any strides, or None.
        backend: force `cute`, `separate` (each step by its own op) or `reference`. Unforced, up to
            8 tokens go to `cute` where it runs.

    Returns:
        x's dtype [M, C], contiguous.
    """
    check_experts("moe_layer", x_MC, gate_up, down)
    num_columns = x_MC.shape[1]
    shared = (shared_gate_JC, shared_up_JC, shared_down_CJ)
    if any(w.dim() != 2 for w in shared) or (
        shared_gate_JC.shape != (shared_down_CJ.shape[1], num_columns)
        or shared_up_JC.shape != shared_gate_JC.shape
        or shared_down_CJ.shape[0] != num_columns
    ):
        raise ValueError(
            f"moe_layer: shared_gate and shared_up [J, {num_columns}] and shared_down "
            f"[{num_columns}, J] expected, got {', '.join(str(tuple(w.shape)) for w in shared)}"
        )
    for tensor in (*shared, norm_weight_C):
        if tensor is not None and tensor.dtype != x_MC.dtype:
            raise ValueError(
                f"moe_layer: the shared expert and the norm's weight must be {x_MC.dtype} as x is, "
                f"got {tensor.dtype}"
            )
    if norm_weight_C is not None and norm_weight_C.shape != x_MC.shape[1:]:
        raise ValueError(
            f"moe_layer: norm weight [{num_columns}] expected, got {tuple(norm_weight_C.shape)}"
        )
    if residual_MC is not None and (
        residual_MC.shape != x_MC.shape or residual_MC.dtype != x_MC.dtype
    ):
        raise ValueError(
            f"moe_layer: residual like x expected, {tuple(x_MC.shape)} {x_MC.dtype}, got "
            f"{tuple(residual_MC.shape)} {residual_MC.dtype}"
        )
    _router.check_router(x_MC, router_weight_EC, router_bias_E, top_k)
    return _moe_layer_op(
        x_MC,
        router_weight_EC,
        router_bias_E,
        top_k,
        normalize,
        scale,
        gate_up,
        down,
        *shared,
        norm_weight_C,
        eps,
        residual_MC,
        backend or "",
    )


class _Call(NamedTuple):
    """Arguments of one call, in the op's order; see `moe_layer`."""

    x_MC: torch.Tensor
    router_weight_EC: torch.Tensor
    router_bias_E: torch.Tensor
    top_k: int
    normalize: bool
    scale: float
    gate_up: torch.Tensor
    down: torch.Tensor
    shared_gate_JC: torch.Tensor
    shared_up_JC: torch.Tensor
    shared_down_CJ: torch.Tensor
    norm_weight_C: torch.Tensor | None
    eps: float
    residual_MC: torch.Tensor | None


def moe_layer_reference(call: _Call) -> torch.Tensor:
    """The same in plain torch."""
    x_MC = call.x_MC
    if call.norm_weight_C is not None:
        x_MC = rms_norm_reference(x_MC, call.norm_weight_C, call.eps)
    weights_MK, ids_MK = _router.moe_router_reference(
        x_MC, call.router_weight_EC, call.router_bias_E, call.top_k, call.normalize, call.scale
    )
    routed_MC = moe_experts_reference(x_MC, weights_MK, ids_MK, call.gate_up, call.down)
    hidden_MJ = F.silu(F.linear(x_MC, call.shared_gate_JC)) * F.linear(x_MC, call.shared_up_JC)
    sum_MC = routed_MC + F.linear(hidden_MJ, call.shared_down_CJ)
    return sum_MC if call.residual_MC is None else call.residual_MC + sum_MC


def _choose(call: _Call, x_MC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The router's weights and ids [M, K] for tokens that are normed."""
    return _router.moe_router(
        x_MC,
        call.router_weight_EC,
        call.router_bias_E,
        call.top_k,
        normalize=call.normalize,
        scale=call.scale,
    )


def _run_separate(call: _Call) -> torch.Tensor:
    x = call.x_MC
    if call.norm_weight_C is not None:
        x = rms_norm(x, call.norm_weight_C, eps=call.eps)
    weights, ids = _choose(call, x)
    routed = moe_experts(x, weights, ids, call.gate_up, call.down)
    product = merged_linear(x, [call.shared_gate_JC, call.shared_up_JC])
    if x.is_cuda and _dispatch.why_no_triton(x) is None:
        from glm_compile.ops._swiglu_triton import swiglu_triton

        hidden = swiglu_triton(product)
    else:
        hidden = swiglu_reference(product)
    if x.dtype == torch.bfloat16:
        total = run_bf16_linear(hidden, call.shared_down_CJ, None, routed, False, "")
    else:
        total = routed + F.linear(hidden, call.shared_down_CJ)
    return total if call.residual_MC is None else call.residual_MC + total


def _why_not_cute(call: _Call) -> str | None:
    num_columns, num_experts = call.x_MC.shape[1], call.router_weight_EC.shape[0]
    shared_gate, shared_up, norm_weight = call.shared_gate_JC, call.shared_up_JC, call.norm_weight_C
    if shared_gate.shape[0] != call.down.shape[2]:
        return (
            f"the shared expert must be as wide as the others, {call.down.shape[2]}, got "
            f"{shared_gate.shape[0]}"
        )
    for name, weight in (
        ("shared_gate", shared_gate),
        ("shared_up", shared_up),
        ("shared_down", call.shared_down_CJ),
        ("the router's weight", call.router_weight_EC),
    ):
        if weight.stride(1) != 1 or weight.stride(0) % 8 or weight.data_ptr() % 16:
            return f"rows of {name} must be dense, and start at multiples of 16 bytes"
    if shared_gate.stride(0) != shared_up.stride(0):
        return "rows of shared_gate and shared_up must lie equally far apart"
    if call.router_weight_EC.dtype not in (torch.float32, torch.bfloat16):
        return f"the router's weight must be float32 or bfloat16, got {call.router_weight_EC.dtype}"
    if num_experts > MAX_CHOSEN_FROM or call.top_k > WARP or num_columns > MAX_LOGITS_COLUMNS:
        return (
            f"at most {WARP} of {MAX_CHOSEN_FROM} experts and {MAX_LOGITS_COLUMNS} features, got "
            f"{call.top_k} of {num_experts} and {num_columns}"
        )
    if norm_weight is not None and (norm_weight.stride(0) != 1 or norm_weight.data_ptr() % 16):
        # A copy made just ahead of a kernel that reads it early would come too late.
        return "the norm's weight must be contiguous and start at a multiple of 16 bytes"
    return why_not_cute(
        call.x_MC,
        call.x_MC.shape[0] * call.top_k,
        call.gate_up,
        call.down,
        shared_gate,
        shared_up,
        call.shared_down_CJ,
        call.router_weight_EC,
        call.router_bias_E,
        norm_weight,
        call.residual_MC,
    )


def _run_cute(call: _Call) -> torch.Tensor:
    from glm_compile.ops.moe.cute_kernel import Choice, run_down, run_gate_up
    from glm_compile.ops.moe.logits_kernel import run_logits
    from glm_compile.ops.moe.sum_kernel import run_sum

    num_tokens, top_k = call.x_MC.shape[0], call.top_k
    is_dynamic = draws_tiles(num_tokens * top_k)
    # Copies of inputs, if any, come before the first kernel: none of those here waits for others.
    x, bias = rows_to_load(call.x_MC), call.router_bias_E.float()
    normed = x if call.norm_weight_C is None else torch.empty_like(x)
    logits = x.new_empty((num_tokens, call.router_weight_EC.shape[0]), dtype=torch.float32)
    counters = torch.empty(2, dtype=torch.int32, device=x.device)
    hidden = x.new_empty((num_tokens * (top_k + 1), call.down.shape[2]))
    output = x.new_empty(x.shape)
    run_logits(x, call.norm_weight_C, call.eps, call.router_weight_EC, normed, logits, counters)
    choice = Choice(
        logits,
        bias.view(1, -1),
        top_k,
        call.scale,
        call.normalize,
        counters if is_dynamic else None,
    )
    shared = (call.shared_gate_JC, call.shared_up_JC)
    if is_dynamic:
        chosen = logits.new_empty((2, num_tokens * top_k))
        products = logits.new_empty((hidden.shape[0], x.shape[1]))
        run_gate_up(normed, choice, call.gate_up, shared, chosen, hidden)
        run_down(hidden, choice, call.down, call.shared_down_CJ, None, products)
        run_sum(products, chosen, top_k, call.residual_MC, output)
    else:
        run_gate_up(normed, choice, call.gate_up, shared, None, hidden)
        run_down(hidden, choice, call.down, call.shared_down_CJ, call.residual_MC, output)
    _dispatch.show("moe_experts", lambda: (normed, *_choose(call, normed), call.gate_up, call.down))
    return output


_BACKENDS = (
    _dispatch.Backend("cute", _why_not_cute, _run_cute),
    _dispatch.Backend("separate", _dispatch.always, _run_separate),
    _dispatch.Backend("reference", _dispatch.always, moe_layer_reference),
)


def _run_moe_layer(x: torch.Tensor, *args: Any) -> torch.Tensor:
    if not x.numel():
        return x.new_empty(x.shape)
    *arguments, backend = args
    result: torch.Tensor = _dispatch.run("moe_layer", _BACKENDS, backend, _Call(x, *arguments))
    return result


def _moe_layer_fake(x: torch.Tensor, *args: Any) -> torch.Tensor:
    return x.new_empty(x.shape)


_moe_layer_op: Any = register_op(
    "moe_layer(Tensor x, Tensor router_weight, Tensor router_bias, int top_k, bool normalize, "
    "float scale, Tensor gate_up, Tensor down, Tensor shared_gate, Tensor shared_up, "
    "Tensor shared_down, Tensor? norm_weight, float eps, Tensor? residual, str backend) -> Tensor",
    _run_moe_layer,
    _moe_layer_fake,
)
