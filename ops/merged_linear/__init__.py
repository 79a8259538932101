"""Several linears of one input as one: a single product if their weights are neighbours in memory.

Weights become neighbours when they are laid out as views of one block. Whether they (still) are is
looked up at each call, since casts, device moves and copies of a model give every parameter a
storage of its own; the result is the same either way.

Shape legend: K in features, N out features.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from glm_compile.ops._library import register_op
from glm_compile.ops.bf16_linear import run_bf16_linear

__all__ = ["adjacent_block", "merged_linear"]

logger = logging.getLogger(__name__)


def merged_linear(
    x: torch.Tensor, weights: Sequence[torch.Tensor], *, deterministic: bool = False
) -> torch.Tensor:
    """Return [x W0^T, x W1^T, ...] side by side.

    If the weights are adjacent rows of one storage the product is one, over a view of all of them;
    otherwise there is one a weight, and no weight is ever copied. bf16 products go through
    `bf16_linear`. Both ways give the same numbers up to rounding.

    Args:
        x: [..., K], any strides.
        weights: each [N, K]. Each product is taken in its weight's dtype, x being cast to it first.
        deterministic: see `bf16_linear`; concerns bf16 weights.

    Returns:
        [..., sum of N], contiguous, in the dtype that the weights' dtypes promote to: fp32 rows
        among bf16 rows stay fp32.
    """
    weights = list(weights)
    if not weights:
        raise ValueError("merged_linear: at least one weight is needed")
    if not x.dim():
        raise ValueError("merged_linear: x must be [..., K], got a number")
    for weight in weights:
        if weight.dim() != 2 or not weight.is_floating_point() or weight.shape[1] != x.shape[-1]:
            raise ValueError(
                f"merged_linear: weights must be floating [N, {x.shape[-1]}], got "
                f"{tuple(weight.shape)} {weight.dtype}"
            )
    return _merged_linear_op(x, weights, deterministic)


def adjacent_block(weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return one [sum N, K] view of weights that follow each other in one storage, or None.

    Adjacent means: same device, dtype and K, dense rows, one storage that holds them all, each
    weight beginning where the one before ends.
    """
    first = weights[0]
    if len(weights) == 1:
        return first
    if not first.is_contiguous():
        return None
    num_columns = first.shape[1]
    storage = first.untyped_storage()
    storage_ptr = storage.data_ptr()
    expected_ptr = first.data_ptr()
    num_rows = 0
    for weight in weights:
        if (
            weight.dtype != first.dtype
            or weight.device != first.device
            or weight.shape[1] != num_columns
            or not weight.is_contiguous()
            or weight.data_ptr() != expected_ptr
            or weight.untyped_storage().data_ptr() != storage_ptr
        ):
            return None
        expected_ptr += weight.shape[0] * num_columns * weight.element_size()
        num_rows += weight.shape[0]
    if expected_ptr > storage_ptr + storage.nbytes():
        return None
    return torch.as_strided(first, (num_rows, num_columns), (num_columns, 1))


def _note_apart(weights: Sequence[torch.Tensor]) -> None:
    """Say once a process that weights on a GPU are multiplied one by one, and what helps."""
    if weights[0].is_cuda:
        _warn_apart(", ".join(str(tuple(weight.shape)) for weight in weights))


@functools.cache
def _warn_apart(shapes: str) -> None:
    logger.warning(
        "weights of one input lie apart in memory and are multiplied one by one, which is slower: "
        "%s. A model that was copied, moved or cast after it was compiled, or that runs code "
        "compiled for another one, is laid out by glm_compile.merge_weights(model)",
        shapes,
    )


def _linear(x: torch.Tensor, weight: torch.Tensor, deterministic: bool) -> torch.Tensor:
    x = x.to(weight.dtype)
    if weight.dtype == torch.bfloat16:
        return run_bf16_linear(x, weight, None, None, deterministic, "")
    return F.linear(x, weight).contiguous()


def _merged_linear(
    x: torch.Tensor, weights: Sequence[torch.Tensor], deterministic: bool
) -> torch.Tensor:
    if (block := adjacent_block(weights)) is not None:
        return _linear(x, block, deterministic)
    _note_apart(weights)
    return torch.cat([_linear(x, weight, deterministic) for weight in weights], dim=-1)


def _merged_linear_fake(
    x: torch.Tensor, weights: Sequence[torch.Tensor], deterministic: bool
) -> torch.Tensor:
    dtype = weights[0].dtype
    num_rows = weights[0].shape[0]
    for weight in weights[1:]:
        dtype = torch.promote_types(dtype, weight.dtype)
        num_rows = num_rows + weight.shape[0]
    return x.new_empty((*x.shape[:-1], num_rows), dtype=dtype)


_merged_linear_op = register_op(
    "merged_linear(Tensor x, Tensor[] weights, bool deterministic) -> Tensor",
    _merged_linear,
    _merged_linear_fake,
)
