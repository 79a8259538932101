"""Device functions that several kernels share. Imported by kernel files only: needs Triton."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


@functools.cache
def supports_pdl(device: torch.device) -> bool:
    """Whether a kernel on the device may start before the one before it has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def inverse_of(value: float) -> float:
    """1 / value in fp32, as torch takes it on a GPU for a tensor over a number."""
    return float(1 / torch.tensor(value, dtype=torch.float32))


def is_in_order(*tensors: torch.Tensor) -> bool:
    """Whether the sequences of [B, S, *] tensors follow each other like steps."""
    return all(t.shape[0] == 1 or t.stride(0) == t.shape[1] * t.stride(1) for t in tensors)


def rope_arguments(
    cos: torch.Tensor, sin: torch.Tensor, batch_size: int
) -> tuple[torch.Tensor | int, ...]:
    """cos and sin with their strides; one batch row serves all by stride 0."""
    cos, sin = cos.expand(batch_size, -1, -1), sin.expand(batch_size, -1, -1)
    return cos, *cos.stride(), sin, *sin.stride()


@triton.jit
def token_of(program, num_steps):
    """(sequence, step) of a program's token, int64."""
    sequence = program // num_steps
    step = (program - sequence * num_steps).to(tl.int64)
    return sequence.to(tl.int64), step


@triton.jit
def row_of(x, stride_b, stride_s, sequence, step, num_steps, IN_ORDER: tl.constexpr):
    """A token's row. Sequences that follow each other like steps need no stride of their own,
    of which nothing is known when the kernel is compiled.
    """
    if IN_ORDER:
        return x + (sequence * num_steps + step) * stride_s
    else:
        return x + sequence * stride_b + step * stride_s


FP8_MAX = tl.constexpr(448.0)
AMAX_FLOOR = tl.constexpr(1e-4)


@triton.jit
def finite_amax(x, axis: tl.constexpr):
    """Largest finite |x| along `axis` in fp32: infinities and NaN do not set a scale."""
    magnitude = tl.abs(x)
    return tl.max(tl.where(magnitude < float("inf"), magnitude, 0.0), axis)


@triton.jit
def fp8_scale(amax, POWER_OF_TWO: tl.constexpr):
    """Scale of a row from its finite amax, as `fp8_quant_reference` takes it, bit for bit."""
    scale = tl.div_rn(tl.maximum(amax, AMAX_FLOOR), tl.full(amax.shape, FP8_MAX, tl.float32))
    if POWER_OF_TWO:
        bits = scale.to(tl.int32, bitcast=True)
        scale = ((bits + 0x7FFFFF) & -0x800000).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def to_fp8(x, scale):
    """x / scale as e4m3: rounded to nearest even, saturated at 448, NaN kept.

    `x` and `scale` are fp32 blocks of one shape.
    """
    scaled = tl.div_rn(x, scale)
    # Comparisons, unlike min and max, let NaN through.
    scaled = tl.where(scaled > FP8_MAX, FP8_MAX, tl.where(scaled < -FP8_MAX, -FP8_MAX, scaled))
    return scaled.to(tl.float8e4nv)


@triton.jit
def rope_columns(column, P: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Where an output column reads: (own, partner, angle, is in the second half, is rotated)."""
    HALF: tl.constexpr = P // 2
    is_rotated = column < P
    is_second = column >= HALF
    pair = tl.where(is_second, column - HALF, column)
    if INTERLEAVED:
        own = tl.where(is_second, 2 * pair + 1, 2 * pair)
        partner = tl.where(is_second, 2 * pair, 2 * pair + 1)
        angle = pair
    else:
        own = column
        partner = tl.where(is_second, pair, pair + HALF)
        angle = column
    own = tl.where(is_rotated, own, column)
    partner = tl.where(is_rotated, partner, column)
    return own, partner, angle, is_second, is_rotated


@triton.jit
def load_rope(cos, stride_cos, sin, stride_sin, angle, mask):
    """cos and sin of angles in fp32; pointers are a token's own."""
    cos_value = tl.load(cos + angle * stride_cos, mask=mask, other=0.0).to(tl.float32)
    sin_value = tl.load(sin + angle * stride_sin, mask=mask, other=0.0).to(tl.float32)
    return cos_value, sin_value


@triton.jit
def rotate(own, partner, cos, sin, is_second, is_rotated, ROUND_TO: tl.constexpr):
    """own * cos -+ partner * sin, each step rounded; all blocks fp32, result in fp32."""
    first = (own * cos).to(ROUND_TO).to(tl.float32)
    second = (partner * sin).to(ROUND_TO).to(tl.float32)
    turned = tl.where(is_second, first + second, first - second).to(ROUND_TO).to(tl.float32)
    return tl.where(is_rotated, turned, own)
