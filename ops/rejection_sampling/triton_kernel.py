"""Rejection sampling in Triton: noise is made where it is used, and never stored.

One launch races the vocabulary in pieces, a second one takes the best of the pieces. Both decide
themselves how many drafts are accepted, from k numbers.

Floats are made by single rounded operations (no fused multiply-add, quotients rounded once), so
that a token is the same as the reference's for equal probabilities.

Shape legend: B batch, k drafts of a block, V vocabulary, N pieces of it.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from glm_compile.ops.rejection_sampling.random_numbers import NUM_PURPOSES, Purpose

_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_FACTOR_0 = tl.constexpr(0xBF58476D1CE4E5B9)
_FACTOR_1 = tl.constexpr(0x94D049BB133111EB)
_NUM_PURPOSES = tl.constexpr(NUM_PURPOSES)
_COIN = tl.constexpr(int(Purpose.COIN))
_LOG_2 = tl.constexpr(math.log(2))
# Values of a piece; 8 a thread.
_BLOCK_V = 1024


@triton.jit
def mix(state):
    """SplitMix64's output function on uint64."""
    state = (state ^ (state >> 30)) * tl.full(state.shape, _FACTOR_0, tl.uint64)
    state = (state ^ (state >> 27)) * tl.full(state.shape, _FACTOR_1, tl.uint64)
    return state ^ (state >> 31)


@triton.jit
def stream(key, counter):
    """Outputs of a key's stream; both uint64 blocks of one shape."""
    return mix(key + counter * tl.full(counter.shape, _GAMMA, tl.uint64))


@triton.jit
def position_key(row_key, position, purpose):
    """Keys of positions, int64 blocks of one shape."""
    counter = position * _NUM_PURPOSES + purpose + 1
    return stream(row_key.to(tl.uint64, bitcast=True), counter.to(tl.uint64, bitcast=True))


@triton.jit
def exponential_of(bits):
    """As `random_numbers.exponential_of`, bit for bit."""
    n = (bits >> 11).to(tl.int64)
    is_small = n < 4503599627370496
    u = (n.to(tl.float32) + 0.5) * 1.1102230246251565e-16
    rest = (9007199254740992 - n).to(tl.float32) - 0.5
    rest_bits = rest.to(tl.int32, bitcast=True)
    f = ((rest_bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    exponent = (180 - (rest_bits >> 23)).to(tl.float32)
    s = tl.div_rn(tl.where(is_small, u, f - 1.0), tl.where(is_small, 2.0 - u, f + 1.0))
    z = s * s
    series = tl.full(z.shape, 1 / 15, tl.float32)
    series = series * z + 1 / 13
    series = series * z + 1 / 11
    series = series * z + 1 / 9
    series = series * z + 1 / 7
    series = series * z + 1 / 5
    series = series * z + 1 / 3
    series = series * z + 1.0
    double_atanh = (s + s) * series
    return tl.where(is_small, double_atanh, exponent * _LOG_2 - double_atanh)


@triton.jit
def count_accepted(
    p,
    stride_p_row,
    q,
    stride_q,
    stride_q_row,
    drafts,
    stride_drafts,
    stride_draft,
    row_key,
    position,
    sequence,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """(drafts of a sequence that are accepted, int64, its q, its drafts); `p` is its own already.

    Without drafts 0, and nothing is read.
    """
    if K == 0:
        return tl.zeros((), tl.int64), q, drafts
    q += sequence * stride_q
    drafts += sequence * stride_drafts
    i = tl.arange(0, BLOCK_K).to(tl.int64)
    inside = i < K
    draft = tl.load(drafts + i * stride_draft, mask=inside, other=0)
    p_draft = tl.load(p + i * stride_p_row + draft, mask=inside, other=0.0)
    q_draft = tl.load(q + i * stride_q_row + draft, mask=inside, other=0.0)
    bits = position_key(row_key + tl.zeros_like(i), position + i, _COIN)
    coin = (bits >> 40).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08
    is_rejected = inside & ((coin * q_draft < p_draft) == 0)
    return tl.min(tl.where(is_rejected, i, K), 0), q, drafts


@triton.jit
def race(weight, noise, inside):
    """The largest quotient and its place, the first of several; NaN never wins."""
    quotient = tl.div_rn(weight, noise)
    quotient = tl.where(inside & (quotient >= 0), quotient, -1.0)
    return tl.max(quotient, 0, return_indices=True)


@triton.jit(do_not_specialize=["stride_p", "stride_q", "stride_drafts", "offset", "purpose"])
def race_kernel(
    p,
    stride_p,
    stride_p_row,
    q,
    stride_q,
    stride_q_row,
    drafts,
    stride_drafts,
    stride_draft,
    row_keys,
    positions,
    offset,
    purpose,
    quotients,
    ids,
    vocab_size,
    num_pieces,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    piece = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    row_key = tl.load(row_keys + sequence)
    position = tl.load(positions + sequence) + offset
    p += sequence * stride_p
    v = piece * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = v < vocab_size
    v_64 = v.to(tl.int64)
    accepted, q, _ = count_accepted(
        p, stride_p_row, q, stride_q, stride_q_row, drafts, stride_drafts, stride_draft,
        row_key, position, sequence, K, BLOCK_K,
    )  # fmt: skip
    key = position_key(row_key + tl.zeros_like(v_64), position + tl.zeros_like(v_64), purpose)
    noise = exponential_of(stream(key, (v_64 + 1).to(tl.uint64, bitcast=True)))
    weight = tl.load(p + accepted * stride_p_row + v_64, mask=inside, other=0.0)
    best, winner = race(weight, noise, inside)
    place = sequence * num_pieces + piece
    tl.store(quotients + place, best)
    tl.store(ids + place, piece * BLOCK_V + winner)
    if K > 0:
        is_proposed = inside & (accepted < K)
        proposed = tl.load(q + accepted * stride_q_row + v_64, mask=is_proposed, other=0.0)
        best, winner = race(tl.maximum(weight - proposed, 0.0), noise, inside)
        place += tl.num_programs(1).to(tl.int64) * num_pieces
        tl.store(quotients + place, best)
        tl.store(ids + place, piece * BLOCK_V + winner)


@triton.jit
def best_piece(quotients, ids, num_pieces, BLOCK_N: tl.constexpr):
    """The winner of a race and its quotient; the first of several."""
    n = tl.arange(0, BLOCK_N)
    quotient = tl.load(quotients + n, mask=n < num_pieces, other=-2.0)
    best, winner = tl.max(quotient, 0, return_indices=True)
    return best, tl.load(ids + winner).to(tl.int64)


@triton.jit(do_not_specialize=["stride_p", "stride_q", "stride_drafts", "offset"])
def decide_kernel(
    p,
    stride_p,
    stride_p_row,
    q,
    stride_q,
    stride_q_row,
    drafts,
    stride_drafts,
    stride_draft,
    row_keys,
    positions,
    offset,
    quotients,
    ids,
    num_pieces,
    tokens,
    num_tokens,
    has_weight,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    p += sequence * stride_p
    place = sequence * num_pieces
    _, token = best_piece(quotients + place, ids + place, num_pieces, BLOCK_N)
    accepted, _, drafts = count_accepted(
        p, stride_p_row, q, stride_q, stride_q_row, drafts, stride_drafts, stride_draft,
        tl.load(row_keys + sequence), tl.load(positions + sequence) + offset, sequence, K, BLOCK_K,
    )  # fmt: skip
    if K > 0:
        place += tl.num_programs(0).to(tl.int64) * num_pieces
        best, corrected = best_piece(quotients + place, ids + place, num_pieces, BLOCK_N)
        token = tl.where(best > 0, corrected, token)
        i = tl.arange(0, BLOCK_K)
        draft = tl.load(drafts + i * stride_draft, mask=i < K, other=0)
        value = tl.where((i == accepted) | (i == K), token, draft)
        tl.store(tokens + sequence * (K + 1) + i, value, mask=i <= K)
    else:
        tl.store(tokens + sequence, token)
    tl.store(num_tokens + sequence, accepted + 1)
    tl.store(has_weight + sequence, tl.load(p + accepted * stride_p_row + token) > 0)


def rejection_sample_triton(
    p_BSV: torch.Tensor,
    q_BkV: torch.Tensor | None,
    drafts_Bk: torch.Tensor | None,
    row_keys_B: torch.Tensor,
    positions_B: torch.Tensor,
    offset: int,
    purpose: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch both kernels. A row of probabilities must be contiguous, else it is copied."""
    batch_size, num_rows, vocab_size = p_BSV.shape
    num_drafts = num_rows - 1 if drafts_Bk is not None else 0
    device = p_BSV.device
    tokens_BS = torch.empty(batch_size, num_rows, dtype=torch.int64, device=device)
    num_tokens_B = torch.empty(batch_size, dtype=torch.int64, device=device)
    has_weight_B = torch.empty(batch_size, dtype=torch.bool, device=device)
    if not batch_size:
        return tokens_BS, num_tokens_B, has_weight_B
    p_BSV = p_BSV if p_BSV.stride(2) == 1 else p_BSV.contiguous()
    row_keys_B, positions_B = row_keys_B.contiguous(), positions_B.contiguous()
    num_pieces = triton.cdiv(vocab_size, _BLOCK_V)
    num_races = 2 if num_drafts else 1
    quotients = torch.empty(num_races * batch_size * num_pieces, dtype=torch.float32, device=device)
    ids = torch.empty(num_races * batch_size * num_pieces, dtype=torch.int32, device=device)
    strides_p = p_BSV.stride(0), p_BSV.stride(1)
    strides_q, strides_drafts = (0, 0), (0, 0)
    if num_drafts:
        assert q_BkV is not None and drafts_Bk is not None
        q_BkV = q_BkV if q_BkV.stride(2) == 1 else q_BkV.contiguous()
        strides_q = q_BkV.stride(0), q_BkV.stride(1)
        strides_drafts = drafts_Bk.stride(0), drafts_Bk.stride(1)
    else:
        q_BkV, drafts_Bk = p_BSV, row_keys_B
    inputs = (p_BSV, *strides_p, q_BkV, *strides_q, drafts_Bk, *strides_drafts)
    sizes = {"K": num_drafts, "BLOCK_K": max(2, triton.next_power_of_2(num_drafts + 1))}
    race_kernel[(num_pieces, batch_size)](
        *inputs,
        row_keys_B,
        positions_B,
        offset,
        purpose,
        quotients,
        ids,
        vocab_size,
        num_pieces,
        **sizes,
        BLOCK_V=_BLOCK_V,
        num_warps=4,
        enable_fp_fusion=False,
    )
    decide_kernel[(batch_size,)](
        *inputs,
        row_keys_B,
        positions_B,
        offset,
        quotients,
        ids,
        num_pieces,
        tokens_BS,
        num_tokens_B,
        has_weight_B,
        **sizes,
        BLOCK_N=triton.next_power_of_2(num_pieces),
        num_warps=1,
        enable_fp_fusion=False,
    )
    return tokens_BS, num_tokens_B, has_weight_B
