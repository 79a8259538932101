"""Probabilities behind temperature, top-k and top-p. Shape legend: R rows, V vocabulary."""

from __future__ import annotations

import torch

from glm_compile.ops import _dispatch
from glm_compile.ops._library import register_op
from glm_compile.ops.filtered_softmax.reference import filtered_softmax_reference

__all__ = ["filtered_softmax"]

# Rows are on the second axis of a grid.
MAX_GRID = 65535
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def filtered_softmax(
    scores_RV: torch.Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """Softmax of what transformers' TemperatureLogitsWarper, TopKLogitsWarper and TopPLogitsWarper
    keep, in this order.

    - Scores are divided by the temperature.
    - top-k keeps what is not below the k-th largest score: of equal ones all.
    - top-p keeps the smallest set of the largest scores whose probability, among what top-k keeps,
      is at least p; of equal scores at its edge those of the highest ids. At least one is kept.
    - What is not kept has the probability 0. A row with NaN or +inf, or with nothing above -inf, is
      NaN.

    The reference adds probabilities up in float32, as transformers does; the kernel exactly but for
    the exponential. So they may differ by a token at the edge whose probability is within that
    rounding. Each is deterministic. Nothing is read on the host.

    Args:
        scores_RV: float32, bfloat16 or float16, any strides.
        temperature: above 0.
        top_k: 0 for no such filter.
        top_p: 0..1; 1 for no such filter.
        backend: `reference` or `triton` to force one; None takes the first that can.

    Returns:
        float32 [R,V], contiguous.

    Raises:
        ValueError: values, dtypes or shapes outside the above, or a forced backend that cannot run.
    """
    if scores_RV.dim() != 2 or scores_RV.dtype not in _DTYPES:
        raise ValueError(
            "filtered_softmax: scores must be float32, bfloat16 or float16 [R, V], got "
            f"{scores_RV.dtype} {tuple(scores_RV.shape)}"
        )
    if not temperature > 0 or top_k < 0 or not 0 <= top_p <= 1:
        raise ValueError(
            "filtered_softmax: temperature must be above 0, top_k not negative, top_p in 0..1, got "
            f"{temperature}, {top_k} and {top_p}"
        )
    arguments = (scores_RV, float(temperature), int(top_k), float(top_p))
    if not backend:
        return _op(*arguments)
    return _dispatch.run("filtered_softmax", _BACKENDS, backend, *arguments)


def _why_not_triton(
    scores_RV: torch.Tensor, temperature: float, top_k: int, top_p: float
) -> str | None:
    num_rows, vocab_size = scores_RV.shape
    if num_rows > MAX_GRID or vocab_size == 0:
        return f"a grid has 1 to {MAX_GRID} rows of a value or more, got {tuple(scores_RV.shape)}"
    return _dispatch.why_no_triton(scores_RV)


def _run_triton(
    scores_RV: torch.Tensor, temperature: float, top_k: int, top_p: float
) -> torch.Tensor:
    from glm_compile.ops.filtered_softmax.triton_kernel import filtered_softmax_triton

    return filtered_softmax_triton(scores_RV, temperature, top_k, top_p)


_BACKENDS = (
    _dispatch.Backend("triton", _why_not_triton, _run_triton),
    _dispatch.Backend("reference", _dispatch.always, filtered_softmax_reference),
)


def _filtered_softmax(
    scores_RV: torch.Tensor, temperature: float, top_k: int, top_p: float
) -> torch.Tensor:
    arguments = (scores_RV, temperature, top_k, top_p)
    return _dispatch.run("filtered_softmax", _BACKENDS, None, *arguments)


def _filtered_softmax_fake(
    scores_RV: torch.Tensor, temperature: float, top_k: int, top_p: float
) -> torch.Tensor:
    return scores_RV.new_empty(scores_RV.shape, dtype=torch.float32)


_op = register_op(
    "filtered_softmax(Tensor scores_RV, float temperature, int top_k, float top_p) -> Tensor",
    _filtered_softmax,
    _filtered_softmax_fake,
)
