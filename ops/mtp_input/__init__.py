"""What the MTP layer's first linear reads: a token's embedding and a hidden state, both normed.

Shape legend: B batch, S query tokens, C hidden, V vocabulary.
"""

from __future__ import annotations

import torch

from glm_compile.ops import _dispatch
from glm_compile.ops._library import register_op
from glm_compile.ops.mtp_input.reference import mtp_input_reference

__all__ = ["mtp_input"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Columns that one program holds.
_MAX_TRITON_COLUMNS = 16384


def mtp_input(
    ids_BS: torch.Tensor,
    hidden_BSC: torch.Tensor,
    embedding_VC: torch.Tensor,
    embedding_norm_C: torch.Tensor,
    hidden_norm_C: torch.Tensor,
    *,
    eps: float,
    backend: str | None = None,
) -> torch.Tensor:
    """Return cat(norm(embedding of the token), norm(hidden)).

    The norm is the model's own, with its roundings: x in fp32 times rsqrt(mean(x^2) + eps), rounded
    to x's dtype, times the norm's weight. Deterministic.

    Args:
        ids_BS: int64, any strides; each within 0 and V - 1.
        hidden_BSC: float32, bfloat16 or float16, any strides.
        embedding_VC: same dtype, contiguous.
        embedding_norm_C, hidden_norm_C: same dtype, contiguous. They may be read before the kernels
            ahead have ended.
        eps: of both norms.
        backend: `reference` or `triton` to force one; None takes the first that can.

    Returns:
        [B, S, 2 C], contiguous.

    Raises:
        ValueError: shapes or dtypes that do not belong together, or a forced backend that cannot
            run.
    """
    weights = (embedding_VC, embedding_norm_C, hidden_norm_C)
    if ids_BS.shape != hidden_BSC.shape[:-1] or ids_BS.dim() != 2:
        raise ValueError(
            f"mtp_input: expected ids [B, S] and hidden [B, S, C], got {tuple(ids_BS.shape)} and "
            f"{tuple(hidden_BSC.shape)}"
        )
    if any(weight.shape[-1] != hidden_BSC.shape[-1] for weight in weights):
        raise ValueError(
            f"mtp_input: the embedding and the norms must have the {hidden_BSC.shape[-1]} columns "
            f"of hidden, got {[tuple(weight.shape) for weight in weights]}"
        )
    dtypes = {hidden_BSC.dtype, *(weight.dtype for weight in weights)}
    if len(dtypes) > 1 or hidden_BSC.dtype not in _DTYPES or ids_BS.dtype != torch.int64:
        raise ValueError(
            "mtp_input: expected int64 ids, and one dtype of float32, bfloat16 and float16, got "
            f"{ids_BS.dtype} and {sorted(map(str, dtypes))}"
        )
    arguments = (ids_BS, hidden_BSC, *weights, eps)
    if not backend:
        return _op(*arguments)
    return _dispatch.run("mtp_input", _BACKENDS, backend, *arguments)


def _why_not_triton(
    ids_BS: torch.Tensor,
    hidden_BSC: torch.Tensor,
    embedding_VC: torch.Tensor,
    embedding_norm_C: torch.Tensor,
    hidden_norm_C: torch.Tensor,
    eps: float,
) -> str | None:
    if (num_columns := hidden_BSC.shape[-1]) > _MAX_TRITON_COLUMNS:
        return f"written for at most {_MAX_TRITON_COLUMNS} columns, got {num_columns}"
    weights = (embedding_VC, embedding_norm_C, hidden_norm_C)
    if not all(weight.is_contiguous() for weight in weights):
        return "the embedding and the norms' weights must be contiguous"
    return _dispatch.why_no_triton(ids_BS, hidden_BSC, *weights)


def _run_triton(*arguments: object) -> torch.Tensor:
    from glm_compile.ops.mtp_input.triton_kernel import mtp_input_triton

    return mtp_input_triton(*arguments)


_BACKENDS = (
    _dispatch.Backend("triton", _why_not_triton, _run_triton),
    _dispatch.Backend("reference", _dispatch.always, mtp_input_reference),
)


def _mtp_input(*arguments: object) -> torch.Tensor:
    return _dispatch.run("mtp_input", _BACKENDS, None, *arguments)


def _mtp_input_fake(ids_BS: torch.Tensor, hidden_BSC: torch.Tensor, *_rest: object) -> torch.Tensor:
    batch_size, num_tokens, num_columns = hidden_BSC.shape
    return hidden_BSC.new_empty(batch_size, num_tokens, 2 * num_columns)


_op = register_op(
    "mtp_input(Tensor ids_BS, Tensor hidden_BSC, Tensor embedding_VC, Tensor embedding_norm_C, "
    "Tensor hidden_norm_C, float eps) -> Tensor",
    _mtp_input,
    _mtp_input_fake,
)
