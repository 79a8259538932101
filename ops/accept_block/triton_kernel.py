"""Acceptance of a block in Triton: one program a sequence, one launch for some fifty of torch.

Shape legend: B batch, S rows of a block, E ids that end a sequence.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from glm_compile.ops._triton import supports_pdl
from glm_compile.ops.accept_block.reference import FIRST_TOKEN

# Ids that are compared at a time.
_BLOCK_E = 8


@triton.jit(
    do_not_specialize=[
        "stride_predicted", "stride_drafts", "stride_text", "stride_tokens", "stride_bonus",
        "stride_turn", "stride_result",
    ]
)  # fmt: skip
def accept_block_kernel(
    predicted,
    stride_predicted,
    drafts,
    stride_drafts,
    num_tokens,
    has_weight,
    eos_ids,
    num_eos,
    budget,
    prompt_width,
    text,
    stride_text,
    counts,
    finished,
    kept,
    tokens,
    stride_tokens,
    bonus,
    stride_bonus,
    row,
    results,
    stride_turn,
    stride_result,
    turns,
    num_results,
    lengths,
    S: tl.constexpr,
    FIRST: tl.constexpr,
    IS_GREEDY: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    ADVANCES: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    sequence = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, BLOCK_S)
    inside = s < S
    token = tl.load(predicted + sequence * stride_predicted + s, mask=inside, other=0)
    if IS_GREEDY:
        is_draft = s < S - 1
        draft = tl.load(drafts + sequence * stride_drafts + s, mask=is_draft, other=0)
        accepted = tl.min(tl.where(is_draft & (token != draft), s, S - 1), 0) + 1
    else:
        accepted = tl.load(num_tokens + sequence).to(tl.int32)

    count = tl.load(counts + sequence)
    # Compared in 64 bits: what the budget leaves may be any number.
    remaining = tl.load(budget) - count
    number = tl.maximum(tl.minimum(accepted.to(tl.int64), remaining), 0).to(tl.int32)
    is_eos = tl.zeros((BLOCK_S,), tl.int32)
    for first in range(0, num_eos, BLOCK_E):
        e = first + tl.arange(0, BLOCK_E)
        eos = tl.load(eos_ids + e, mask=e < num_eos, other=-1)
        is_eos |= tl.max((token[:, None] == eos[None, :]).to(tl.int32), 1)
    end = tl.min(tl.where((is_eos != 0) & (s < number), s, BLOCK_S), 0)
    is_stopped = end < BLOCK_S
    number = tl.where(is_stopped, end + 1, number)
    was_finished = tl.load(finished + sequence).to(tl.int32) != 0
    number = tl.where(was_finished, 0, number)
    is_finished = was_finished | is_stopped | (number.to(tl.int64) >= remaining)

    at = tl.load(prompt_width) + count
    tl.store(text + sequence * stride_text + at + s, token, mask=s < number)
    tl.store(tokens + sequence * stride_tokens + s, token, mask=inside)
    tl.store(counts + sequence, count + number)
    tl.store(finished + sequence, is_finished)
    tl.store(kept + sequence, number.to(tl.int64))
    last = tl.maximum(number - 1, 0)
    tl.store(row + sequence, last.to(tl.int64))
    tl.store(bonus + sequence * stride_bonus, tl.sum(tl.where(s == last, token, 0), 0))

    is_drawn = number == number
    if HAS_WEIGHT:
        has = tl.load(has_weight + sequence).to(tl.int32) != 0
        is_drawn = has | (number < accepted)
    turn = tl.load(turns + sequence)
    tl.store(turns + sequence, turn + 1)
    if ADVANCES:
        tl.store(lengths + sequence, tl.load(lengths + sequence) + number)
    out = results + turn % num_results * stride_turn + sequence * stride_result
    tl.store(out, number.to(tl.int64))
    tl.store(out + 1, is_finished.to(tl.int64))
    tl.store(out + 2, is_drawn.to(tl.int64))
    tl.store(out + FIRST + s, token, mask=inside)


def accept_block_triton(
    predicted_BS: torch.Tensor,
    drafts_Bk: torch.Tensor,
    num_tokens_B: torch.Tensor | None,
    has_weight_B: torch.Tensor | None,
    eos_ids_E: torch.Tensor,
    budget: torch.Tensor,
    prompt_width: torch.Tensor,
    text_BW: torch.Tensor,
    counts_B: torch.Tensor,
    finished_B: torch.Tensor,
    kept_B: torch.Tensor,
    tokens_BS: torch.Tensor,
    bonus_B: torch.Tensor,
    row_B: torch.Tensor,
    results_NBR: torch.Tensor,
    turns_B: torch.Tensor,
    lengths_B: torch.Tensor | None,
) -> None:
    """Launch the kernel. Rows of the buffers are contiguous; so are vectors but `bonus_B`."""
    batch_size, width = predicted_BS.shape
    if not batch_size:
        return
    predicted_BS = predicted_BS.contiguous()
    has_pdl = supports_pdl(predicted_BS.device)
    drafts_Bk = drafts_Bk if drafts_Bk.stride(1) == 1 else drafts_Bk.contiguous()
    accept_block_kernel[(batch_size,)](
        predicted_BS,
        predicted_BS.stride(0),
        drafts_Bk,
        drafts_Bk.stride(0),
        predicted_BS if num_tokens_B is None else num_tokens_B,
        finished_B if has_weight_B is None else has_weight_B,
        eos_ids_E,
        eos_ids_E.shape[0],
        budget,
        prompt_width,
        text_BW,
        text_BW.stride(0),
        counts_B,
        finished_B,
        kept_B,
        tokens_BS,
        tokens_BS.stride(0),
        bonus_B,
        bonus_B.stride(0),
        row_B,
        results_NBR,
        results_NBR.stride(0),
        results_NBR.stride(1),
        turns_B,
        results_NBR.shape[0],
        turns_B if lengths_B is None else lengths_B,
        S=width,
        FIRST=FIRST_TOKEN,
        IS_GREEDY=num_tokens_B is None,
        HAS_WEIGHT=has_weight_B is not None,
        ADVANCES=lengths_B is not None,
        BLOCK_S=max(2, triton.next_power_of_2(width)),
        BLOCK_E=_BLOCK_E,
        PDL=has_pdl,
        num_warps=1,
        **({"launch_pdl": True} if has_pdl else {}),
    )
