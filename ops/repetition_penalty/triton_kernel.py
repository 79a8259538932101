"""The repetition penalty in Triton: a launch for the scores of a block, one for its kept tokens.

Shape legend: B batch, S rows of a block, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from glm_compile.ops._triton import inverse_of

# Scores of a program; 8 a thread.
_BLOCK_V = 1024


@triton.jit(do_not_specialize=["stride_text", "num_drafts"])
def penalty_kernel(
    scores,
    stride_batch,
    stride_row,
    seen,
    stride_seen,
    text,
    stride_text,
    starts,
    first,
    num_drafts,
    penalty,
    inverse,
    out,
    vocab_size,
    BY_INVERSE: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = v < vocab_size
    score = tl.load(
        scores + sequence * stride_batch + row.to(tl.int64) * stride_row + v, mask=inside, other=0.0
    )
    is_seen = tl.load(seen + sequence * stride_seen + v, mask=inside, other=0) != 0
    start = tl.load(starts + sequence)
    first_column = tl.load(first + sequence)
    text += sequence * stride_text + start
    for i in range(num_drafts + row):
        is_seen |= (tl.load(text + i) == v) & (start + i >= first_column)
    if BY_INVERSE:  # noqa: SIM108
        quotient = score * inverse
    else:
        quotient = tl.div_rn(score, tl.zeros_like(score) + penalty)
    lower = tl.where(score < 0, score * penalty, quotient)
    at = (sequence * tl.num_programs(1) + row) * vocab_size + v
    tl.store(out + at, tl.where(is_seen, lower, score), mask=inside)


@triton.jit
def note_kernel(
    seen,
    stride_seen,
    tokens,
    stride_tokens,
    kept,
    starts,
    first,
    vocab_size,
    S: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, BLOCK_S)
    token = tl.load(tokens + sequence * stride_tokens + s, mask=s < S, other=-1)
    counts = (s < tl.load(kept + sequence)) & (token >= 0) & (token < vocab_size)
    counts &= tl.load(starts + sequence) + s >= tl.load(first + sequence)
    tl.store(seen + sequence * stride_seen + token, tl.full((BLOCK_S,), 1, tl.int1), mask=counts)


def repetition_penalty_triton(
    scores_BSV: torch.Tensor,
    seen_BV: torch.Tensor,
    text_BW: torch.Tensor,
    starts_B: torch.Tensor,
    first_B: torch.Tensor,
    num_drafts: int,
    penalty: float,
) -> torch.Tensor:
    """Launch the kernel; scores whose rows are not contiguous are copied first.

    On a GPU torch divides by a number through its inverse, so the kernel does.
    """
    batch_size, num_rows, vocab_size = scores_BSV.shape
    out_BSV = torch.empty(scores_BSV.shape, dtype=scores_BSV.dtype, device=scores_BSV.device)
    if not out_BSV.numel():
        return out_BSV
    scores_BSV = scores_BSV if scores_BSV.stride(2) == 1 else scores_BSV.contiguous()
    penalty_kernel[(triton.cdiv(vocab_size, _BLOCK_V), num_rows, batch_size)](
        scores_BSV,
        scores_BSV.stride(0),
        scores_BSV.stride(1),
        seen_BV,
        seen_BV.stride(0),
        text_BW,
        text_BW.stride(0),
        starts_B,
        first_B,
        num_drafts,
        penalty,
        inverse_of(penalty),
        out_BSV,
        vocab_size,
        BY_INVERSE=scores_BSV.is_cuda,
        BLOCK_V=_BLOCK_V,
        num_warps=4,
    )
    return out_BSV


def note_tokens_triton(
    seen_BV: torch.Tensor,
    tokens_BS: torch.Tensor,
    kept_B: torch.Tensor,
    starts_B: torch.Tensor,
    first_B: torch.Tensor,
) -> None:
    """Launch the kernel."""
    batch_size, width = tokens_BS.shape
    if not batch_size:
        return
    tokens_BS = tokens_BS if tokens_BS.stride(1) == 1 else tokens_BS.contiguous()
    note_kernel[(batch_size,)](
        seen_BV,
        seen_BV.stride(0),
        tokens_BS,
        tokens_BS.stride(0),
        kept_B,
        starts_B,
        first_B,
        seen_BV.shape[1] - 1,
        S=width,
        BLOCK_S=max(2, triton.next_power_of_2(width)),
        num_warps=1,
    )
