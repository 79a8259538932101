"""Forbidden n-grams in Triton: the scores are copied, then each n-gram that holds strikes a token.

Several may strike the same one, with the same value.

Shape legend: B batch, S rows of a block, V vocabulary, W width of the text buffer, N n-grams of a
sequence, G tokens of an n-gram.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK_N = 1024


@triton.jit(
    do_not_specialize=["stride_gb", "num_ngrams", "stride_tb", "num_drafts", "num_rows", "V"]
)
def forbid_ngrams_kernel(
    scores,
    ngrams,
    stride_gb,
    stride_gn,
    stride_gg,
    num_ngrams,
    text,
    stride_tb,
    starts,
    num_drafts,
    num_rows,
    V,
    SIZE: tl.constexpr,
    IS_TEXT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    sequence = row // num_rows
    end = tl.load(starts + sequence) + num_drafts + row % num_rows
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    holds = (n < num_ngrams) & (end >= SIZE - 1)
    if IS_TEXT:
        holds = holds & (n + SIZE - 1 < end)
    ngram = ngrams + sequence * stride_gb + n.to(tl.int64) * stride_gn
    for i in tl.static_range(SIZE - 1):
        column = tl.maximum(end - (SIZE - 1) + i, 0)
        token = tl.load(text + sequence * stride_tb + column)
        holds = holds & (tl.load(ngram + i * stride_gg, mask=holds, other=0) == token)
    last = tl.load(ngram + (SIZE - 1) * stride_gg, mask=holds, other=-1)
    holds = holds & (last >= 0) & (last < V)
    tl.store(scores + row * V + last, float("-inf"), mask=holds)


def forbid_ngrams_triton(
    scores_BSV: torch.Tensor,
    ngrams_BNG: torch.Tensor,
    text_BW: torch.Tensor,
    starts_B: torch.Tensor,
    num_drafts: int,
    is_text: bool,
) -> torch.Tensor:
    """Copy the scores and launch the kernel."""
    batch_size, num_rows, vocab_size = scores_BSV.shape
    num_ngrams, size = ngrams_BNG.shape[1:]
    out_BSV = scores_BSV.clone(memory_format=torch.contiguous_format)
    if not out_BSV.numel() or not num_ngrams:
        return out_BSV
    if text_BW.stride(1) != 1:
        text_BW = text_BW.contiguous()
    forbid_ngrams_kernel[(triton.cdiv(num_ngrams, _BLOCK_N), batch_size * num_rows)](
        out_BSV,
        ngrams_BNG,
        *ngrams_BNG.stride(),
        num_ngrams,
        text_BW,
        text_BW.stride(0),
        starts_B.contiguous(),
        num_drafts,
        num_rows,
        vocab_size,
        SIZE=size,
        IS_TEXT=is_text,
        BLOCK_N=_BLOCK_N,
        num_warps=4,
    )
    return out_BSV
