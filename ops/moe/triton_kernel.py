"""Routed experts for few tokens in Triton: each expert that was chosen is read once.

A program stands for one pair of a token and an expert and a tile of the expert's rows. It goes on
only if no earlier pair has the same expert, and then multiplies all tokens, of which those that did
not choose the expert are thrown away: reading weights is all the work. So nothing has to be sorted
or counted ahead, each sum has one order, and no token depends on another's experts.

Shape legend: M tokens, K experts of a token, P = M * K pairs, E experts, C hidden size, I
intermediate size of an expert.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from glm_compile.ops.moe.config import BLOCK_TOKENS, KernelConfig, triton_config_for


@triton.jit
def _add_dot(total, a, b):
    """`total` + a b, in fp32; of fp32 the negative total, `total` - a b.

    Products of fp32 are summed up one after the other: those of a step by themselves, or rounding
    errors would grow with the number of columns. The compiler fuses a sum with the product into one
    chain, but not a difference.
    """
    if a.dtype == tl.float32:
        return total - tl.dot(a, b, input_precision="ieee")
    return tl.dot(a, b, total)


@triton.jit(do_not_specialize=["num_tokens"])
def expert_kernel(
    x,
    stride_xm,
    ids,
    stride_im,
    stride_ik,
    weight,
    stride_we,
    stride_wn,
    output,
    num_tokens,
    num_experts,
    num_features,
    NUM_COLUMNS: tl.constexpr,
    TOP: tl.constexpr,
    IS_GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_TOP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Products of an expert with tokens, through SwiGLU, or with the pairs that came out of it."""
    pair = tl.program_id(1)
    own = tl.load(ids + (pair // TOP) * stride_im + (pair % TOP) * stride_ik)
    row = tl.arange(0, BLOCK_M)
    slot = tl.arange(0, BLOCK_TOP)
    is_pair = (row < num_tokens)[:, None] & (slot < TOP)[None, :]
    all_ids = tl.load(
        ids + row[:, None] * stride_im + slot[None, :] * stride_ik, mask=is_pair, other=-1
    )
    is_own = is_pair & (all_ids == own)
    # A token that has the expert twice is computed once.
    own_slot = tl.min(tl.where(is_own, slot[None, :], BLOCK_TOP), 1)
    has_expert = own_slot < BLOCK_TOP
    first = tl.min(tl.where(has_expert, row * TOP + own_slot, BLOCK_M * BLOCK_TOP), 0)
    if (own < 0) | (own >= num_experts) | (first != pair):
        return

    feature = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    has_feature = feature < num_features
    column = tl.arange(0, BLOCK_K)
    weight_at = (
        weight
        + own.to(tl.int64) * stride_we
        + feature.to(tl.int64)[:, None] * stride_wn
        + column[None, :]
    )
    pair_of_row = row * TOP + own_slot
    x_row = row if IS_GATED else pair_of_row
    x_at = x + x_row.to(tl.int64)[None, :] * stride_xm + column[:, None]
    # A cast by name: a size of 1 is a constant here, which has no methods.
    up_offset = tl.cast(num_features, tl.int64) * stride_wn

    product = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    up_product = product
    for start in range(0, NUM_COLUMNS, BLOCK_K):
        if NUM_COLUMNS % BLOCK_K == 0:
            weight_mask, x_mask = has_feature[:, None], has_expert[None, :]
        else:
            inside = column < NUM_COLUMNS - start
            weight_mask = has_feature[:, None] & inside[None, :]
            x_mask = has_expert[None, :] & inside[:, None]
        weight_block = tl.load(weight_at, mask=weight_mask, other=0.0)
        x_block = tl.load(x_at, mask=x_mask, other=0.0)
        product = _add_dot(product, weight_block, x_block)
        if IS_GATED:
            up_block = tl.load(weight_at + up_offset, mask=weight_mask, other=0.0)
            up_product = _add_dot(up_product, up_block, x_block)
        weight_at += BLOCK_K
        x_at += BLOCK_K

    if weight.dtype.element_ty == tl.float32:
        product, up_product = 0.0 - product, 0.0 - up_product
    if IS_GATED:
        product = product / (1.0 + tl.exp(-product)) * up_product
    inside = has_feature[:, None] & has_expert[None, :]
    output_at = output + pair_of_row.to(tl.int64)[None, :] * num_features + feature[:, None]
    tl.store(output_at, product.to(output.dtype.element_ty), mask=inside)


@triton.jit
def sum_kernel(
    products,
    weights,
    stride_wm,
    stride_wk,
    ids,
    stride_im,
    stride_ik,
    places,
    output,
    num_experts,
    num_features,
    TOP: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Weighted sum of a token's pairs, in their order.

    Without `places` a pair's product is in its own row, that of equal ones in the first one's.
    """
    token = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    has_feature = feature < num_features
    total = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for slot in tl.static_range(TOP):
        expert = tl.load(ids + token * stride_im + slot * stride_ik)
        weight = tl.load(weights + token * stride_wm + slot * stride_wk).to(tl.float32)
        if places is None:
            row = token * TOP + slot
            for earlier in tl.static_range(slot):
                other = tl.load(ids + token * stride_im + (slot - 1 - earlier) * stride_ik)
                row = tl.where(other == expert, token * TOP + slot - 1 - earlier, row)
        else:
            row = tl.load(places + token * TOP + slot)
        inside = has_feature & (expert >= 0) & (expert < num_experts)
        product = tl.load(products + row * num_features + feature, mask=inside, other=0.0)
        total += tl.where(inside, weight * product.to(tl.float32), 0.0)
    tl.store(
        output + token * num_features + feature,
        total.to(output.dtype.element_ty),
        mask=has_feature,
    )


def run_product(
    source: torch.Tensor,
    ids_MK: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    config: KernelConfig | None = None,
    *,
    is_gated: bool,
) -> None:
    """Launch the kernel over gate_up [E, 2 I, C] or down [E, C, I]; target is [P, features]."""
    num_tokens, num_top = ids_MK.shape
    num_features, num_columns = target.shape[1], weight.shape[2]
    config = config or triton_config_for(num_columns, weight.element_size(), is_gated=is_gated)
    expert_kernel[(triton.cdiv(num_features, config.block_n), num_tokens * num_top)](
        source,
        source.stride(0),
        ids_MK,
        *ids_MK.stride(),
        weight,
        weight.stride(0),
        weight.stride(1),
        target,
        num_tokens,
        weight.shape[0],
        num_features,
        NUM_COLUMNS=num_columns,
        TOP=num_top,
        IS_GATED=is_gated,
        BLOCK_M=BLOCK_TOKENS,
        BLOCK_TOP=triton.next_power_of_2(num_top),
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


# Columns of one program of the sum.
_SUM_BLOCK = 512


def moe_experts_triton(
    x_MC: torch.Tensor,
    weights_MK: torch.Tensor,
    ids_MK: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """Launch the kernels; an x with gaps is made dense first, a weight never."""
    num_tokens, num_top = ids_MK.shape
    num_experts, num_hidden, num_inner = down.shape
    if x_MC.stride(1) != 1:
        x_MC = x_MC.contiguous()
    hidden_PI = x_MC.new_empty((num_tokens * num_top, num_inner))
    product_PC = x_MC.new_empty((num_tokens * num_top, num_hidden), dtype=torch.float32)
    run_product(x_MC, ids_MK, gate_up, hidden_PI, is_gated=True)
    run_product(hidden_PI, ids_MK, down, product_PC, is_gated=False)
    return sum_pairs(product_PC, weights_MK, ids_MK, num_experts, x_MC.dtype)


def sum_pairs(
    product_PC: torch.Tensor,
    weights_MK: torch.Tensor,
    ids_MK: torch.Tensor,
    num_experts: int,
    dtype: torch.dtype,
    places_P: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launch the last kernel: each token's weighted sum [M, C]."""
    num_tokens, num_top = ids_MK.shape
    num_hidden = product_PC.shape[1]
    output_MC = product_PC.new_empty((num_tokens, num_hidden), dtype=dtype)
    # Tokens come first: a grid's first axis is the one without a limit of 65535.
    sum_kernel[(num_tokens, triton.cdiv(num_hidden, _SUM_BLOCK))](
        product_PC,
        weights_MK,
        *weights_MK.stride(),
        ids_MK,
        *ids_MK.stride(),
        places_P,
        output_MC,
        num_experts,
        num_hidden,
        TOP=num_top,
        BLOCK_N=_SUM_BLOCK,
        num_warps=4,
    )
    return output_MC
