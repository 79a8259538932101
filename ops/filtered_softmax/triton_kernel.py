"""Temperature, top-k, top-p and softmax in Triton, without a sort.

Scores become 32-bit integers in the same order, their keys. Both filters ask for the largest
threshold such that the scores from there on weigh enough: top-k by their number, top-p by their
probability. A threshold is found digit by digit: a launch weighs the values of the digit among the
scores that agree in the digits before, and the next launch begins with the choice of the digit.
Probabilities are added as integers, in units of 2^-40, so sums do not depend on their order.

Of scores that equal top-p's threshold, transformers' sort removes those of the lowest ids first,
and keeps as many as are needed: one launch counts them by piece, the last one ranks them.

Shape legend: R rows, V vocabulary, N pieces of it. Workspace of a row, int64: the largest key, then
for each launch its state (lowest key that top-k keeps, whole mass, threshold so far, weight above
what is weighed) and its bins.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from glm_compile.ops._triton import inverse_of

# Values of a piece; 8 a thread.
_BLOCK_V = 1024
_STATE_SIZE = 4
_NONE, _COUNT, _MASS = (tl.constexpr(i) for i in range(3))
_SIGN = tl.constexpr(1 << 31)
_ALL_BITS = tl.constexpr((1 << 32) - 1)
# Keys of -inf and +inf; that of NaN is above.
_LOWEST = tl.constexpr(0x007FFFFF)
_HIGHEST = tl.constexpr(0xFF800000)
_MASS_ONE = tl.constexpr(float(1 << 40))
_MASS_UNIT = tl.constexpr(2.0**-40)


@dataclass(frozen=True)
class _Step:
    """A launch that weighs a digit: kind of weight, shift and number of values of the digit."""

    kind: int
    shift: int
    num_bins: int
    finds_largest: bool = False


def _digits(kind: int, widths: tuple[int, ...]) -> list[_Step]:
    steps, shift = [], 32
    for width in widths:
        shift -= width
        steps.append(_Step(kind, shift, 1 << width))
    return steps


def _steps(has_top_k: bool, has_top_p: bool) -> list[_Step]:
    """The launches before the last ones. A bin for all keys gives the whole mass."""
    steps = _digits(1, (8, 8, 8, 8)) if has_top_k else [_Step(0, 0, 2)]
    steps[0] = _Step(steps[0].kind, steps[0].shift, steps[0].num_bins, finds_largest=True)
    return steps + (_digits(2, (5, 5, 5, 5, 5, 5, 2)) if has_top_p else [_Step(2, 32, 1)])


@triton.jit
def load_piece(
    scores, stride_row, stride_value, temperature, inverse, workspace, row_size, vocab_size,
    BY_INVERSE: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """A program's piece: (row, the row's workspace, ids, are they inside, x, keys).

    x is scores over temperature in fp32, its keys are uint32.
    """
    row = tl.program_id(1).to(tl.int64)
    workspace += row * row_size
    v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = v < vocab_size
    at = row * stride_row + v.to(tl.int64) * stride_value
    score = tl.load(scores + at, mask=inside, other=0.0).to(tl.float32)
    if BY_INVERSE:  # noqa: SIM108
        x = score * inverse
    else:
        x = tl.div_rn(score, tl.zeros_like(score) + temperature)
    # -0.0 equals 0.0, and the sign of a NaN does not count.
    x = tl.where(x == 0, 0.0, x)
    bits = tl.where(x == x, x.to(tl.int32, bitcast=True), 0x7FC00000)
    flip = (bits >> 31) | -2147483648
    return row, workspace, v, inside, x, (bits ^ flip).to(tl.uint32, bitcast=True)


@triton.jit
def to_score(key):
    """The score of a key, int64 0-d."""
    bits = tl.where(key >= _SIGN, key - _SIGN, _ALL_BITS - key)
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def mass_of(x, largest):
    """exp(x - largest) in units of 2^-40, int64."""
    return (tl.exp(x - largest) * _MASS_ONE).to(tl.int64)


@triton.jit
def target_mass(total, top_p):
    """Mass that top-p keeps at least; never nothing, nor more than there is."""
    target = tl.ceil(total.to(tl.float64) * top_p).to(tl.int64)
    return tl.maximum(tl.minimum(target, total), 1)


@triton.jit
def load_state(state, k, top_p, KIND: tl.constexpr, SHIFT: tl.constexpr, NUM_BINS: tl.constexpr):
    """State behind a launch: one more digit of its threshold is known."""
    lowest = tl.load(state)
    total = tl.load(state + 1)
    threshold = tl.load(state + 2)
    above = tl.load(state + 3)
    if KIND != _NONE:
        digit = tl.arange(0, NUM_BINS)
        weight = tl.load(state + 4 + digit)
        weighed = tl.sum(weight, 0)
        target = k.to(tl.int64)
        if KIND == _MASS:
            # The first digit's bins hold all.
            total = tl.where(total == 0, weighed, total)
            target = target_mass(total, top_p)
        from_digit = above + weighed - tl.cumsum(weight, 0) + weight
        chosen = tl.maximum(tl.sum((from_digit >= target).to(tl.int32), 0) - 1, 0)
        above += tl.sum(tl.where(digit > chosen, weight, 0), 0)
        threshold += chosen.to(tl.int64) << SHIFT
    return lowest, total, threshold, above


@triton.jit(do_not_specialize=["stride_row", "k", "row_size"])
def weigh_kernel(
    scores,
    stride_row,
    stride_value,
    temperature,
    inverse,
    workspace,
    row_size,
    k,
    top_p,
    vocab_size,
    BEFORE: tl.constexpr,
    KIND_BEFORE: tl.constexpr,
    SHIFT_BEFORE: tl.constexpr,
    BINS_BEFORE: tl.constexpr,
    STATE: tl.constexpr,
    KIND: tl.constexpr,
    SHIFT: tl.constexpr,
    NUM_BINS: tl.constexpr,
    FINDS_LARGEST: tl.constexpr,
    BY_INVERSE: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Weigh the values of a digit. `BEFORE` and `STATE` are places in the workspace."""
    _, workspace, _, inside, x, key = load_piece(
        scores, stride_row, stride_value, temperature, inverse, workspace, row_size, vocab_size,
        BY_INVERSE, BLOCK_V,
    )  # fmt: skip
    if FINDS_LARGEST:
        tl.atomic_max(workspace, tl.max(tl.where(inside, key, 0), 0).to(tl.int64))
    if KIND != _NONE:
        state = workspace + STATE
        lowest, total, threshold, above = load_state(
            workspace + BEFORE, k, top_p, KIND_BEFORE, SHIFT_BEFORE, BINS_BEFORE
        )
        if KIND != KIND_BEFORE:
            # The other filter is through; its threshold holds from now on.
            lowest, total, threshold, above = threshold, total * 0, threshold * 0, above * 0
        if tl.program_id(0) == 0:
            tl.store(state, lowest)
            tl.store(state + 1, total)
            tl.store(state + 2, threshold)
            tl.store(state + 3, above)
        least = tl.maximum(lowest, threshold).to(tl.uint32)
        offset = tl.zeros((BLOCK_V,), tl.int32)
        is_weighed = inside & (key >= least)
        if NUM_BINS > 1:
            offset = ((key - threshold.to(tl.uint32)) >> SHIFT).to(tl.int32)
            is_weighed &= (offset >= 0) & (offset < NUM_BINS)
        # Behind the first digits most pieces have nothing to weigh.
        last = tl.max(tl.where(is_weighed, offset, -1), 0)
        if last >= 0:
            if KIND == _COUNT:
                digit = tl.arange(0, NUM_BINS)
                weight = tl.histogram(tl.where(is_weighed, offset, 0), NUM_BINS, is_weighed)
                tl.atomic_add(state + 4 + digit, weight.to(tl.int64), mask=weight > 0)
            else:
                mass = tl.where(is_weighed, mass_of(x, to_score(tl.load(workspace))), 0)
                first = tl.min(tl.where(is_weighed, offset, NUM_BINS), 0)
                for i in range(first, last + 1):
                    tl.atomic_add(state + 4 + i, tl.sum(tl.where(offset == i, mass, 0), 0))


@triton.jit(do_not_specialize=["stride_row", "k", "row_size"])
def tie_kernel(
    scores,
    stride_row,
    stride_value,
    temperature,
    inverse,
    workspace,
    row_size,
    k,
    top_p,
    vocab_size,
    ties,
    BEFORE: tl.constexpr,
    KIND_BEFORE: tl.constexpr,
    SHIFT_BEFORE: tl.constexpr,
    BINS_BEFORE: tl.constexpr,
    BY_INVERSE: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Count the scores of each piece that equal top-p's threshold."""
    row, workspace, _, inside, _, key = load_piece(
        scores, stride_row, stride_value, temperature, inverse, workspace, row_size, vocab_size,
        BY_INVERSE, BLOCK_V,
    )  # fmt: skip
    _, _, threshold, _ = load_state(
        workspace + BEFORE, k, top_p, KIND_BEFORE, SHIFT_BEFORE, BINS_BEFORE
    )
    count = tl.sum((inside & (key == threshold.to(tl.uint32))).to(tl.int32), 0)
    tl.store(ties + row * tl.num_programs(0) + tl.program_id(0), count)


@triton.jit(do_not_specialize=["stride_row", "k", "row_size"])
def write_kernel(
    scores,
    stride_row,
    stride_value,
    temperature,
    inverse,
    workspace,
    row_size,
    k,
    top_p,
    vocab_size,
    ties,
    probs,
    BEFORE: tl.constexpr,
    KIND_BEFORE: tl.constexpr,
    SHIFT_BEFORE: tl.constexpr,
    BINS_BEFORE: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    BY_INVERSE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Probabilities of what is kept; NaN in a row that has none."""
    piece = tl.program_id(0)
    row, workspace, v, inside, x, key = load_piece(
        scores, stride_row, stride_value, temperature, inverse, workspace, row_size, vocab_size,
        BY_INVERSE, BLOCK_V,
    )  # fmt: skip
    largest_key = tl.load(workspace)
    largest = to_score(largest_key)
    lowest, total, threshold, above = load_state(
        workspace + BEFORE, k, top_p, KIND_BEFORE, SHIFT_BEFORE, BINS_BEFORE
    )
    is_kept = key >= lowest.to(tl.uint32)
    if HAS_TOP_P:
        n = tl.arange(0, BLOCK_N)
        count = tl.load(ties + row * tl.num_programs(0) + n, mask=n < tl.num_programs(0), other=0)
        num_ties = tl.sum(count, 0).to(tl.int64)
        mass = tl.maximum(mass_of(to_score(threshold), largest), 1)
        spare = above + num_ties * mass - target_mass(total, top_p)
        removed = tl.minimum(tl.maximum(spare, 0) // mass, num_ties - 1)
        total = above + (num_ties - removed) * mass
        edge = threshold.to(tl.uint32)
        is_tie = inside & (key == edge)
        rank = tl.sum(tl.where(n < piece, count, 0), 0) + tl.cumsum(is_tie.to(tl.int32), 0) - 1
        is_kept &= (key > edge) | (is_tie & (rank >= removed))
    whole = total.to(tl.float32) * _MASS_UNIT
    prob = tl.where(is_kept, tl.div_rn(tl.exp(x - largest), tl.zeros_like(x) + whole), 0.0)
    has_none = (largest_key >= _HIGHEST) | (largest_key <= _LOWEST)
    prob = tl.where(has_none, float("nan"), prob)
    tl.store(probs + row * vocab_size + v, prob, mask=inside)


def filtered_softmax_triton(
    scores_RV: torch.Tensor, temperature: float, top_k: int, top_p: float
) -> torch.Tensor:
    """Launch the kernels: 3 for a softmax, 6 with top-k, 10 with top-p, 13 with both."""
    num_rows, vocab_size = scores_RV.shape
    device = scores_RV.device
    probs_RV = torch.empty(num_rows, vocab_size, dtype=torch.float32, device=device)
    if not num_rows:
        return probs_RV
    has_top_p = top_p < 1.0
    steps = _steps(top_k > 0, has_top_p)
    places, row_size = [], 1
    for step in steps:
        places.append(row_size)
        row_size += _STATE_SIZE + step.num_bins
    workspace = torch.zeros(num_rows, row_size, dtype=torch.int64, device=device)
    num_pieces = triton.cdiv(vocab_size, _BLOCK_V)
    grid = (num_pieces, num_rows)
    arguments = (
        scores_RV, *scores_RV.stride(), temperature, inverse_of(temperature), workspace, row_size,
        top_k, top_p, vocab_size,
    )  # fmt: skip
    # On a GPU torch divides by a number through its inverse.
    options = {"BY_INVERSE": scores_RV.is_cuda, "BLOCK_V": _BLOCK_V, "num_warps": 4}
    before = {"BEFORE": 1, "KIND_BEFORE": 0, "SHIFT_BEFORE": 0, "BINS_BEFORE": 2}
    for place, step in zip(places, steps):
        weigh_kernel[grid](
            *arguments,
            **before,
            STATE=place,
            KIND=step.kind,
            SHIFT=step.shift,
            NUM_BINS=step.num_bins,
            FINDS_LARGEST=step.finds_largest,
            **options,
        )
        before = {
            "BEFORE": place,
            "KIND_BEFORE": step.kind,
            "SHIFT_BEFORE": step.shift,
            "BINS_BEFORE": step.num_bins,
        }
    ties = workspace
    if has_top_p:
        ties = torch.empty(num_rows, num_pieces, dtype=torch.int32, device=device)
        tie_kernel[grid](*arguments, ties, **before, **options)
    write_kernel[grid](
        *arguments,
        ties,
        probs_RV,
        **before,
        HAS_TOP_P=has_top_p,
        BLOCK_N=triton.next_power_of_2(num_pieces),
        **options,
    )
    return probs_RV
