"""Top-k in Triton: radix select of the threshold, then an ordered compaction.

Scores become 32-bit keys that order as they do. Four rounds of 8 bits find the k-th largest key and
how many keys equal to it belong to the selection; a last pass writes every key above it and the
first of the equal ones at `greater before it + min(equal before it, equal wanted)`. No atomics and
no sort: the result depends on nothing but the scores.

A row is ranked by one program in one launch, or by several slices in five: a histogram launch a
round and the compaction. There every program sums the slices' histograms of the round before.

Shape legend: R rows, T keys of a row, K selected, Z slices of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from glm_compile.ops._dispatch import num_multiprocessors
from glm_compile.ops.topk.config import TopkConfig, default_config

_SIGN = tl.constexpr(-(2**31))
# Keys of -inf and +inf; NaN of either sign lies outside.
_KEY_OF_MINUS_INF = tl.constexpr(-2139095041)
_KEY_OF_INF = tl.constexpr(2139095040)
_NUM_BINS = tl.constexpr(256)
_NUM_ROUNDS = 4


@triton.jit
def _order_key(score):
    """int32 that orders as the float does, with -0.0 equal to +0.0. Integer only: no flushing."""
    bits = score.to(tl.float32).to(tl.int32, bitcast=True)
    bits = tl.where((bits & 0x7FFFFFFF) == 0, 0, bits)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _window(
    row,
    lengths,
    stride_length,
    starts,
    stride_start,
    plan,
    rows_per_sequence,
    T,
    IS_CAUSAL: tl.constexpr,
):
    """Window [first, stop) of a row within [0, T)."""
    if plan is not None:
        first = tl.load(plan + row * 2)
        stop = tl.load(plan + row * 2 + 1)
    else:
        if IS_CAUSAL:
            sequence = row // rows_per_sequence
            stop = tl.minimum(tl.load(lengths + sequence * stride_length), T)
            stop += row - sequence * rows_per_sequence + 1
        else:
            stop = tl.load(lengths + row * stride_length)
        first = stop * 0
        if starts is not None:
            first = tl.load(starts + row * stride_start)
    # Clamped before it is narrowed: lengths may be 64-bit and beyond T.
    stop = tl.minimum(tl.maximum(stop, 0), T).to(tl.int32)
    first = tl.minimum(tl.maximum(first, 0), stop).to(tl.int32)
    return first, stop


@triton.jit
def _load_keys(row_scores, stride_key, base, stop, BLOCK: tl.constexpr):
    """(positions, keys, which of them may be selected) of one block."""
    position = base + tl.arange(0, BLOCK)
    inside = position < stop
    score = tl.load(
        row_scores + position.to(tl.int64) * stride_key, mask=inside, other=float("-inf")
    )
    key = _order_key(score)
    return position, key, inside & (key > _KEY_OF_MINUS_INF) & (key <= _KEY_OF_INF)


@triton.jit
def _histogram(
    row_scores, stride_key, first, stop, prefix, ROUND: tl.constexpr, BLOCK: tl.constexpr
):
    """Counts of digit ROUND among the keys whose higher digits equal `prefix`'s, and how many keys
    lie above the prefix altogether."""
    shift: tl.constexpr = 24 - 8 * ROUND
    counts = tl.zeros([_NUM_BINS], tl.int32)
    num_above = tl.zeros([BLOCK], tl.int32)
    for base in range(first, stop, BLOCK):
        _, key, is_valid = _load_keys(row_scores, stride_key, base, stop, BLOCK)
        is_counted = is_valid
        if ROUND > 0:
            is_counted = is_valid & (((key ^ _SIGN ^ prefix) >> (shift + 8)) == 0)
            above = is_valid & ((key >> (shift + 8)) > ((prefix ^ _SIGN) >> (shift + 8)))
            num_above += above.to(tl.int32)
        digit = ((key ^ _SIGN) >> shift) & 0xFF
        counts += tl.histogram(digit, _NUM_BINS, mask=is_counted)
    return counts, tl.sum(num_above, 0)


@triton.jit
def _next_digit(counts, num_wanted):
    """(digit of the num_wanted-th largest key, how many keys with this digit are wanted)."""
    at_or_above = tl.cumsum(counts, 0, reverse=True)
    digit = tl.sum((at_or_above >= num_wanted).to(tl.int32), 0) - 1
    above = tl.sum(tl.where(tl.arange(0, _NUM_BINS) > digit, counts, 0), 0)
    return digit, num_wanted - above


@triton.jit
def _slots(position, table_row, stride_page, num_pages, PAGE_SIZE: tl.constexpr, mask):
    """Physical slots through one row of the block table; -1 where it has no page."""
    column = position // PAGE_SIZE
    has_page = mask & (column < num_pages)
    page = tl.load(table_row + column.to(tl.int64) * stride_page, mask=has_page, other=-1)
    return tl.where(page >= 0, page.to(tl.int32) * PAGE_SIZE + position % PAGE_SIZE, -1)


@triton.jit
def _compact(
    row_scores,
    stride_key,
    first,
    stop,
    threshold,
    num_equal,
    greater,
    equal,
    num_found,
    selected_row,
    table_row,
    stride_page,
    num_pages,
    PAGE_SIZE: tl.constexpr,
    REPEAT_LAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the selected positions of [first, stop) in ascending order.

    `greater` and `equal` count the keys above and at the threshold before `first`. Returns the last
    of the row's `num_found` selected positions if it is here and asked for, else -1.
    """
    last = tl.full([], -1, tl.int32)
    for base in range(first, stop, BLOCK):
        position, key, is_valid = _load_keys(row_scores, stride_key, base, stop, BLOCK)
        is_greater = is_valid & (key > threshold)
        is_equal = is_valid & (key == threshold)
        # Two counts of at most BLOCK in one scan.
        packed = is_greater.to(tl.int32) + (is_equal.to(tl.int32) << 16)
        before = tl.cumsum(packed, 0) - packed
        equal_before = equal + (before >> 16)
        place = greater + (before & 0xFFFF) + tl.minimum(equal_before, num_equal)
        is_taken = is_greater | (is_equal & (equal_before < num_equal))
        value = position
        if table_row is not None:
            value = _slots(position, table_row, stride_page, num_pages, PAGE_SIZE, is_taken)
        tl.store(selected_row + place, value, mask=is_taken)
        if REPEAT_LAST:
            is_last = is_taken & (place == num_found - 1)
            last = tl.maximum(last, tl.max(tl.where(is_last, position, -1), 0))
        total = tl.sum(packed, 0)
        greater += total & 0xFFFF
        equal += total >> 16
    return last


@triton.jit
def _fill_tail(
    selected_row,
    num_found,
    k,
    last,
    is_first,
    REPEAT_LAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Fill up the row, by the program that has its last selected position, or by the first one."""
    if REPEAT_LAST:
        is_mine = (last >= 0) | (is_first & (num_found == 0))
        value = tl.maximum(last, 0)
    else:
        is_mine = is_first
        value = tl.full([], -1, tl.int32)
    if is_mine:
        for base in range(num_found, k, BLOCK):
            place = base + tl.arange(0, BLOCK)
            tl.store(selected_row + place, tl.zeros([BLOCK], tl.int32) + value, mask=place < k)


@triton.jit(do_not_specialize=["stride_row", "T", "k", "num_pages", "rows_per_sequence"])
def topk_row_kernel(
    scores,
    stride_row,
    stride_key,
    lengths,
    stride_length,
    starts,
    stride_start,
    plan,
    rows_per_sequence,
    table,
    stride_sequence,
    stride_page,
    num_pages,
    selected,
    T,
    k,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_CAUSAL: tl.constexpr = False,
    REPEAT_LAST: tl.constexpr = False,
):
    """One program a row, every round in one launch."""
    row = tl.program_id(0).to(tl.int64)
    first, stop = _window(
        row,
        lengths,
        stride_length,
        starts,
        stride_start,
        plan,
        rows_per_sequence,
        T,
        IS_CAUSAL,
    )
    row_scores = scores + row * stride_row
    selected_row = selected + row * k
    table_row = table
    if table is not None:
        table_row = table + (row // rows_per_sequence) * stride_sequence

    counts, _ = _histogram(row_scores, stride_key, first, stop, 0, 0, BLOCK)
    num_found = tl.minimum(tl.sum(counts, 0), k)
    digit, num_wanted = _next_digit(counts, num_found)
    prefix = digit << 24
    for step in tl.static_range(1, 4):
        counts, _ = _histogram(row_scores, stride_key, first, stop, prefix, step, BLOCK)
        digit, num_wanted = _next_digit(counts, num_wanted)
        prefix = prefix | (digit << (24 - 8 * step))
    last = _compact(
        row_scores,
        stride_key,
        first,
        stop,
        prefix ^ _SIGN,
        num_wanted,
        tl.full([], 0, tl.int32),
        tl.full([], 0, tl.int32),
        num_found,
        selected_row,
        table_row,
        stride_page,
        num_pages,
        PAGE_SIZE,
        REPEAT_LAST,
        BLOCK,
    )
    _fill_tail(selected_row, num_found, k, last, row >= 0, REPEAT_LAST, BLOCK)


@triton.jit
def _slice_of(first, stop, piece, NUM_SLICES: tl.constexpr):
    """Contiguous share of a row: slices in order are positions in order."""
    share = tl.cdiv(stop - first, NUM_SLICES)
    begin = tl.minimum(first + piece * share, stop)
    return begin, tl.minimum(begin + share, stop)


@triton.jit
def _resolve(histograms, states, k, ROUND: tl.constexpr, NUM_SLICES: tl.constexpr):
    """Threshold digits before round ROUND: (prefix, keys wanted at it, keys found in all).

    `histograms` and `states` point at this row: [rounds, Z, bins] and [rounds, 3].
    """
    bins = tl.arange(0, _NUM_BINS)
    slices = tl.arange(0, NUM_SLICES)
    previous = histograms + (ROUND - 1) * NUM_SLICES * _NUM_BINS
    counts = tl.sum(tl.load(previous + slices[:, None] * _NUM_BINS + bins[None, :]), 0)
    if ROUND == 1:
        num_found = tl.minimum(tl.sum(counts, 0), k)
        num_wanted = num_found
        prefix = 0
    else:
        prefix = tl.load(states + (ROUND - 1) * 3)
        num_wanted = tl.load(states + (ROUND - 1) * 3 + 1)
        num_found = tl.load(states + (ROUND - 1) * 3 + 2)
    digit, num_wanted = _next_digit(counts, num_wanted)
    return prefix | (digit << (32 - 8 * ROUND)), num_wanted, num_found


@triton.jit(do_not_specialize=["stride_row", "T", "k", "rows_per_sequence"])
def topk_histogram_kernel(
    scores,
    stride_row,
    stride_key,
    lengths,
    stride_length,
    starts,
    stride_start,
    plan,
    rows_per_sequence,
    histograms,
    states,
    above,
    T,
    k,
    ROUND: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_CAUSAL: tl.constexpr = False,
):
    """Round ROUND of a sliced row: resolve the round before, count the next digit of one slice."""
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    first, stop = _window(
        row,
        lengths,
        stride_length,
        starts,
        stride_start,
        plan,
        rows_per_sequence,
        T,
        IS_CAUSAL,
    )
    begin, end = _slice_of(first, stop, piece, NUM_SLICES)
    row_histograms = histograms + row * (4 * NUM_SLICES * _NUM_BINS)
    prefix = 0
    if ROUND > 0:
        row_states = states + row * 12
        prefix, num_wanted, num_found = _resolve(row_histograms, row_states, k, ROUND, NUM_SLICES)
        if piece == 0:
            tl.store(row_states + ROUND * 3, prefix)
            tl.store(row_states + ROUND * 3 + 1, num_wanted)
            tl.store(row_states + ROUND * 3 + 2, num_found)
    counts, num_above = _histogram(
        scores + row * stride_row, stride_key, begin, end, prefix, ROUND, BLOCK
    )
    own = row_histograms + (ROUND * NUM_SLICES + piece) * _NUM_BINS
    tl.store(own + tl.arange(0, _NUM_BINS), counts)
    if ROUND == 3:
        tl.store(above + row * NUM_SLICES + piece, num_above)


@triton.jit(do_not_specialize=["stride_row", "T", "k", "num_pages", "rows_per_sequence"])
def topk_compact_kernel(
    scores,
    stride_row,
    stride_key,
    lengths,
    stride_length,
    starts,
    stride_start,
    plan,
    rows_per_sequence,
    histograms,
    states,
    above,
    table,
    stride_sequence,
    stride_page,
    num_pages,
    selected,
    T,
    k,
    PAGE_SIZE: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_CAUSAL: tl.constexpr = False,
    REPEAT_LAST: tl.constexpr = False,
):
    """Last launch of a sliced row: find the threshold, write one slice's share in order."""
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    first, stop = _window(
        row,
        lengths,
        stride_length,
        starts,
        stride_start,
        plan,
        rows_per_sequence,
        T,
        IS_CAUSAL,
    )
    begin, end = _slice_of(first, stop, piece, NUM_SLICES)
    row_histograms = histograms + row * (4 * NUM_SLICES * _NUM_BINS)
    prefix, num_wanted, num_found = _resolve(row_histograms, states + row * 12, k, 4, NUM_SLICES)
    # What the slices before this one hold above and at the threshold, from the last round's counts.
    bins = tl.arange(0, _NUM_BINS)
    slices = tl.arange(0, NUM_SLICES)
    is_before = slices < piece
    last_round = row_histograms + 3 * NUM_SLICES * _NUM_BINS
    counts = tl.load(
        last_round + slices[:, None] * _NUM_BINS + bins[None, :],
        mask=is_before[:, None],
        other=0,
    )
    digit = prefix & 0xFF
    greater = tl.sum(tl.load(above + row * NUM_SLICES + slices, mask=is_before, other=0), 0)
    greater += tl.sum(tl.sum(tl.where(bins[None, :] > digit, counts, 0), 1), 0)
    equal = tl.sum(tl.sum(tl.where(bins[None, :] == digit, counts, 0), 1), 0)

    selected_row = selected + row * k
    table_row = table
    if table is not None:
        table_row = table + (row // rows_per_sequence) * stride_sequence
    last = _compact(
        scores + row * stride_row,
        stride_key,
        begin,
        end,
        prefix ^ _SIGN,
        num_wanted,
        greater,
        equal,
        num_found,
        selected_row,
        table_row,
        stride_page,
        num_pages,
        PAGE_SIZE,
        REPEAT_LAST,
        BLOCK,
    )
    _fill_tail(selected_row, num_found, k, last, piece == 0, REPEAT_LAST, BLOCK)


def topk_select_triton(
    scores_RT: torch.Tensor,
    lengths_R: torch.Tensor,
    k: int,
    starts_R: torch.Tensor | None = None,
    plan: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    rows_per_sequence: int = 1,
    page_size: int = 64,
    is_causal: bool = False,
    repeat_last: bool = False,
    config: TopkConfig | None = None,
) -> torch.Tensor:
    """Launch the kernels on the current stream; see `topk_select` for the contract."""
    num_rows, num_keys = scores_RT.shape
    device = scores_RT.device
    selected_RK = torch.empty((num_rows, k), dtype=torch.int32, device=device)
    if not num_rows:
        return selected_RK
    config = config or default_config(num_rows, num_keys, num_multiprocessors(device))
    # The stride of an axis of one key is arbitrary; keep it from selecting another kernel.
    stride_key = scores_RT.stride(1) if num_keys > 1 else 1
    rows = (
        scores_RT,
        scores_RT.stride(0),
        stride_key,
        lengths_R,
        lengths_R.stride(0),
        starts_R,
        0 if starts_R is None else starts_R.stride(0),
        plan,
        rows_per_sequence,
    )
    table = (
        block_table,
        0 if block_table is None else block_table.stride(0),
        0 if block_table is None else block_table.stride(1),
        0 if block_table is None else block_table.shape[1],
    )
    block = {"BLOCK": config.block, "num_warps": config.num_warps, "IS_CAUSAL": is_causal}
    output = {"PAGE_SIZE": page_size, "REPEAT_LAST": repeat_last}
    if config.num_slices == 1:
        topk_row_kernel[(num_rows,)](*rows, *table, selected_RK, num_keys, k, **output, **block)
        return selected_RK

    num_slices = config.num_slices
    histograms = torch.empty(
        (num_rows, _NUM_ROUNDS, num_slices, 256), dtype=torch.int32, device=device
    )
    states = torch.empty((num_rows, _NUM_ROUNDS, 3), dtype=torch.int32, device=device)
    above = torch.empty((num_rows, num_slices), dtype=torch.int32, device=device)
    scratch = (histograms, states, above)
    grid = (num_rows, num_slices)
    for step in range(_NUM_ROUNDS):
        topk_histogram_kernel[grid](
            *rows, *scratch, num_keys, k, ROUND=step, NUM_SLICES=num_slices, **block
        )
    topk_compact_kernel[grid](
        *rows,
        *scratch,
        *table,
        selected_RK,
        num_keys,
        k,
        NUM_SLICES=num_slices,
        **output,
        **block,
    )
    return selected_RK
