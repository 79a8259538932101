"""Linear layers with bf16 weights and few rows, where reading the weight is all the work.

Shape legend: M rows, K in features, N out features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from glm_compile.ops import _dispatch
from glm_compile.ops._cute import why_no_cute
from glm_compile.ops._library import register_op
from glm_compile.ops.bf16_linear.config import (
    MAX_STAGES,
    is_for_stream,
    library_wins,
    stream_config_for,
)
from glm_compile.ops.bf16_linear.reference import bf16_linear_reference

__all__ = ["bf16_linear"]


def bf16_linear(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor | Sequence[torch.Tensor],
    bias_N: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    deterministic: bool = False,
    backend: str | None = None,
) -> torch.Tensor:
    """Return x W^T (+ bias) (+ residual) in bf16.

    Products are accumulated in fp32, the bias is added in fp32, the sum is rounded to bf16 once; a
    residual is added to that in bf16, as a graph would that has the linear and the addition apart.

    Args:
        x_MK: bf16 [..., K], any strides; M = 0 is allowed.
        weight_NK: bf16 [N, K], any strides; or several weights, whose outputs are put side by side:
            `merged_linear`, one product where they lie side by side in memory. A list takes neither
            bias nor residual nor backend. The `cute` kernel reads weights before the kernel ahead
            has ended: that one may write them only if it lets no dependent in before it has.
        bias_N: bf16 [N].
        residual: bf16, the output's shape, any strides.
        deterministic: a row's result depends neither on the number of rows nor on the other rows.
            Repeated calls are equal bit for bit either way.
        backend: force `cute`, `triton` or `reference`.

    Returns:
        bf16 [..., N], contiguous.
    """
    if not isinstance(weight_NK, torch.Tensor):
        from glm_compile.ops.merged_linear import merged_linear

        if bias_N is not None or residual is not None or backend:
            raise ValueError("bf16_linear: several weights take no bias, residual or backend")
        return merged_linear(x_MK, weight_NK, deterministic=deterministic)
    for name, tensor in (
        ("x", x_MK),
        ("weight", weight_NK),
        ("bias", bias_N),
        ("residual", residual),
    ):
        if tensor is not None and tensor.dtype != torch.bfloat16:
            raise ValueError(f"bf16_linear: {name} must be bfloat16, got {tensor.dtype}")
    if weight_NK.dim() != 2 or x_MK.dim() == 0 or x_MK.shape[-1] != weight_NK.shape[1]:
        raise ValueError(
            f"bf16_linear: x [..., K] and weight [N, K] expected, got {tuple(x_MK.shape)} and "
            f"{tuple(weight_NK.shape)}"
        )
    if bias_N is not None and bias_N.shape != weight_NK.shape[:1]:
        raise ValueError(
            f"bf16_linear: bias must be [{weight_NK.shape[0]}], got {tuple(bias_N.shape)}"
        )
    if residual is not None and residual.shape != (*x_MK.shape[:-1], weight_NK.shape[0]):
        raise ValueError(
            f"bf16_linear: residual must have the output's shape, got {tuple(residual.shape)}"
        )
    return _bf16_linear_op(x_MK, weight_NK, bias_N, residual, deterministic, backend or "")


# More rows than this are a job for the library's tiles, which reuse a weight once it is read.
MAX_FEW_ROWS = 16


def _why_not_triton(
    x: torch.Tensor,
    weight_NK: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    deterministic: bool,
) -> str | None:
    for tensor in (x, weight_NK, bias, residual):
        if tensor is not None and tensor.dtype != torch.bfloat16:
            return f"the kernel takes bfloat16, got {tensor.dtype}"
    if weight_NK.shape[1] == 0:
        return "there are no in features"
    return _dispatch.why_no_triton(x, weight_NK, bias, residual)


# It compiles for sm_100a as well, but the measured choices are an H200's.
CUTE_ARCHS = ("sm_90a",)


def why_not_cute(
    x: torch.Tensor,
    weight_NK: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    deterministic: bool,
) -> str | None:
    for tensor in (x, weight_NK, bias, residual):
        if tensor is not None and tensor.dtype != torch.bfloat16:
            return f"the kernel takes bfloat16, got {tensor.dtype}"
    if weight_NK.shape[1] == 0 or weight_NK.shape[1] % 8:
        return f"in features must be a multiple of 8, got {weight_NK.shape[1]}"
    num_rows = 1 if deterministic else x.numel() // weight_NK.shape[1]
    config = stream_config_for(*weight_NK.shape, num_rows)
    if -(-weight_NK.shape[1] // config.stage_columns) > MAX_STAGES:
        return f"there are too many in features: {weight_NK.shape[1]}"
    if weight_NK.stride(1) != 1 or weight_NK.stride(0) % 8 or weight_NK.data_ptr() % 16:
        return "the weight's rows must be dense and start at multiples of 16 bytes"
    return why_no_cute(x, weight_NK, bias, residual, archs=CUTE_ARCHS)


def _run_cute(
    x: torch.Tensor,
    weight_NK: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    deterministic: bool,
) -> torch.Tensor:
    from glm_compile.ops.bf16_linear.cute_kernel import bf16_linear_cute

    num_rows = 1 if deterministic else x.numel() // weight_NK.shape[1]
    config = stream_config_for(*weight_NK.shape, num_rows)
    return bf16_linear_cute(x, weight_NK, bias, residual, config=config)


def _run_triton(*args: Any) -> torch.Tensor:
    from glm_compile.ops.bf16_linear.triton_kernel import bf16_linear_triton

    return bf16_linear_triton(*args)


_TRITON = _dispatch.Backend("triton", _why_not_triton, _run_triton)
_REFERENCE = _dispatch.Backend("reference", _dispatch.always, bf16_linear_reference)
_CUTE = _dispatch.Backend("cute", why_not_cute, _run_cute)
_STREAM = (_CUTE, _TRITON, _REFERENCE)
_FEW_ROWS = (_TRITON, _CUTE, _REFERENCE)
_LIBRARY_FIRST = (_REFERENCE, _CUTE, _TRITON)


def run_bf16_linear(
    x: torch.Tensor,
    weight_NK: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    deterministic: bool,
    backend: str,
) -> torch.Tensor:
    """Choose a backend and run it. The registered op; `merged_linear` calls it from within.

    Rows that must not depend on their number take one kernel whatever that number is.
    """
    num_rows = x.numel() // max(1, x.shape[-1])
    is_for_library = num_rows > MAX_FEW_ROWS or library_wins(*weight_NK.shape, num_rows)
    if is_for_library and not deterministic:
        backends = _LIBRARY_FIRST
    else:
        backends = _STREAM if is_for_stream(*weight_NK.shape) else _FEW_ROWS
    return _dispatch.run(
        "bf16_linear", backends, backend, x, weight_NK, bias, residual, deterministic
    )


def _bf16_linear_fake(
    x: torch.Tensor,
    weight_NK: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    deterministic: bool,
    backend: str,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight_NK.shape[0]))


_bf16_linear_op = register_op(
    "bf16_linear(Tensor x, Tensor weight_NK, Tensor? bias, Tensor? residual, bool deterministic, "
    "str backend) -> Tensor",
    run_bf16_linear,
    _bf16_linear_fake,
)
