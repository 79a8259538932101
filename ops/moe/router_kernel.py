"""The router for few tokens in Triton: two launches.

The first computes fp32 products of a few experts with a part of C in a program: all of the weight
is asked for at once, and a program's part of it meets each token in registers. The second adds the
parts up in their order and chooses a token's experts, one after the other.

Shape legend: M tokens, C hidden size, E experts, K experts of a token, L parts of C.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Experts, columns of a step and steps of a program of one warp: 8 KiB of weights.
_BLOCK_E = 4
_BLOCK_C = 128
_NUM_STEPS = 4
# Tokens of a program, at most.
_MAX_BLOCK_M = 8


@triton.jit(do_not_specialize=["num_tokens"])
def router_parts_kernel(
    x,
    stride_xm,
    stride_xc,
    weight,
    stride_we,
    parts,
    num_tokens,
    num_experts,
    num_columns,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
    NUM_STEPS: tl.constexpr,
):
    expert = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    part = tl.program_id(1)
    token = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    has_expert = expert < num_experts
    has_token = token < num_tokens
    weight_at = weight + expert.to(tl.int64)[:, None] * stride_we
    x_at = x + token.to(tl.int64)[:, None] * stride_xm
    # Lanes keep their columns apart until the end: one reduction, and loads wait for nothing.
    products = tl.zeros((BLOCK_M, BLOCK_E, BLOCK_C), dtype=tl.float32)
    for step in tl.static_range(NUM_STEPS):
        column = (part * NUM_STEPS + step) * BLOCK_C + tl.arange(0, BLOCK_C)
        has_column = (column < num_columns)[None, :]
        weight_mask, x_mask = has_expert[:, None] & has_column, has_token[:, None] & has_column
        weight_block = tl.load(weight_at + column[None, :], mask=weight_mask, other=0.0)
        x_block = tl.load(x_at + column.to(tl.int64)[None, :] * stride_xc, mask=x_mask, other=0.0)
        products += x_block.to(tl.float32)[:, None, :] * weight_block.to(tl.float32)[None, :, :]
    at = parts + (part * num_tokens + token)[:, None] * num_experts + expert[None, :]
    tl.store(at, tl.sum(products, 2), mask=has_token[:, None] & has_expert[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def router_choice_kernel(
    parts,
    bias,
    stride_b,
    weights,
    ids,
    num_tokens,
    num_experts,
    scale,
    NUM_PARTS: tl.constexpr,
    TOP: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_TOP: tl.constexpr,
):
    token = tl.program_id(0)
    expert = tl.arange(0, BLOCK_E)
    has_expert = expert < num_experts
    logit = tl.zeros((BLOCK_E,), dtype=tl.float32)
    for part in tl.static_range(NUM_PARTS):
        at = parts + (part * num_tokens + token) * num_experts + expert
        logit += tl.load(at, mask=has_expert, other=0.0)
    score = 1.0 / (1.0 + tl.exp(-logit))
    choice = score + tl.load(bias + expert * stride_b, mask=has_expert, other=0.0).to(tl.float32)
    choice = tl.where(choice != choice, float("inf"), choice)
    is_free = has_expert
    slot = tl.arange(0, BLOCK_TOP)
    chosen_score = tl.zeros((BLOCK_TOP,), dtype=tl.float32)
    chosen = tl.zeros((BLOCK_TOP,), dtype=tl.int32)
    total = 0.0
    for k in tl.static_range(TOP):
        best = tl.max(tl.where(is_free, choice, float("-inf")), 0)
        winner = tl.min(tl.where(is_free & (choice == best), expert, BLOCK_E), 0)
        is_winner = expert == winner
        value = tl.sum(tl.where(is_winner, score, 0.0), 0)
        chosen_score = tl.where(slot == k, value, chosen_score)
        chosen = tl.where(slot == k, winner, chosen)
        total += value
        is_free = is_free & (expert != winner)
    if NORMALIZE:
        chosen_score = chosen_score / (total + 1e-20)
    at = token * TOP + slot
    tl.store(weights + at, chosen_score * scale, mask=slot < TOP)
    tl.store(ids + at, chosen.to(tl.int64), mask=slot < TOP)


def moe_router_triton(
    x_MC: torch.Tensor,
    weight_EC: torch.Tensor,
    bias_E: torch.Tensor,
    top_k: int,
    normalize: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the two kernels."""
    num_tokens, num_columns = x_MC.shape
    num_experts = weight_EC.shape[0]
    num_parts = triton.cdiv(num_columns, _BLOCK_C * _NUM_STEPS)
    parts_LME = x_MC.new_empty((num_parts, num_tokens, num_experts), dtype=torch.float32)
    weights_MK = x_MC.new_empty((num_tokens, top_k), dtype=torch.float32)
    ids_MK = x_MC.new_empty((num_tokens, top_k), dtype=torch.int64)
    block_m = min(_MAX_BLOCK_M, triton.next_power_of_2(num_tokens))
    grid = (triton.cdiv(num_experts, _BLOCK_E), num_parts, triton.cdiv(num_tokens, block_m))
    router_parts_kernel[grid](
        x_MC,
        *x_MC.stride(),
        weight_EC,
        weight_EC.stride(0),
        parts_LME,
        num_tokens,
        num_experts,
        num_columns,
        BLOCK_M=block_m,
        BLOCK_E=_BLOCK_E,
        BLOCK_C=_BLOCK_C,
        NUM_STEPS=_NUM_STEPS,
        num_warps=1,
    )
    router_choice_kernel[(num_tokens,)](
        parts_LME,
        bias_E,
        bias_E.stride(0),
        weights_MK,
        ids_MK,
        num_tokens,
        num_experts,
        scale,
        NUM_PARTS=num_parts,
        TOP=top_k,
        NORMALIZE=normalize,
        BLOCK_E=triton.next_power_of_2(num_experts),
        BLOCK_TOP=triton.next_power_of_2(top_k),
        num_warps=1 if num_experts <= 256 else 4,
    )
    return weights_MK, ids_MK
