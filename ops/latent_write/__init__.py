"""From kv_a's output to the cache of latents, in one launch: RMSNorm, RoPE, store in pages.

Multi-head latent attention caches one row a token: the normed latent, and behind it the rotated key
that all heads share (DeepSeek-V2, arXiv 2405.04434, section 2.1).

Shape legend: B batch, S tokens of the step, L rank of the latent, P rope dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from glm_compile.ops import _dispatch
from glm_compile.ops._bounds import INDEX_DTYPES
from glm_compile.ops._library import register_op
from glm_compile.ops.latent_write.reference import latent_write_reference
from glm_compile.ops.paged_cache import PAGE_SIZE

__all__ = ["latent_write"]


def latent_write(
    latents_BSL: torch.Tensor,
    ropes_BSP: torch.Tensor,
    norm_weight_L: torch.Tensor,
    norm_eps: float,
    cos_BSP: torch.Tensor,
    sin_BSP: torch.Tensor,
    *,
    interleaved: bool = True,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    lengths_B: torch.Tensor,
    backend: str | None = None,
) -> None:
    """Norm the step's latents, rotate its keys, and store both at the positions `lengths_B[b] + s`.

    The norm is the model's own, with its roundings: x in fp32 times rsqrt(mean(x^2) + eps), rounded
    to x's dtype, times the weight, rounded again. The rotation rounds every product and sum as
    torch rounds them in that dtype; see `rope_reference` for the order of the result.

    Args:
        latents_BSL, ropes_BSP: floating, one dtype, any strides; any of B, S may be 0.
        norm_weight_L: in their dtype.
        norm_eps: of the module's own norm, not the model's `rms_norm_eps`.
        cos_BSP, sin_BSP: [B or 1, S, P], P even, both halves alike.
        interleaved: pairs are (2i, 2i + 1) and come out evens first; else (i, i + P/2).
        pages: [pages, 64, L + P] in the latents' dtype, written in place.
        block_table: int32 or int64 [B, pages of a sequence]; a token whose entry is negative or
            missing is not stored.
        lengths_B: int32 or int64, tokens already cached; a negative position is not stored.
        backend: force `triton` or `reference`.

    Raises:
        ValueError: a dtype or shape outside the above, or a forced backend that cannot run.
    """
    op = "latent_write"
    check_latents(
        op, latents_BSL, ropes_BSP, norm_weight_L, cos_BSP, sin_BSP, pages, block_table, lengths_B
    )
    _latent_write_op(
        latents_BSL,
        ropes_BSP,
        norm_weight_L,
        norm_eps,
        cos_BSP,
        sin_BSP,
        interleaved,
        pages,
        block_table,
        lengths_B,
        backend or "",
    )


def check_latents(
    op: str,
    latents: torch.Tensor,
    ropes: torch.Tensor,
    norm_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
) -> None:
    """Raise ValueError unless these are a step's latents and a cache for them."""
    if latents.dim() != 3 or ropes.dim() != 3 or ropes.shape[:2] != latents.shape[:2]:
        raise ValueError(
            f"{op}: latents [B, S, L] and ropes [B, S, P] expected, got {tuple(latents.shape)} and "
            f"{tuple(ropes.shape)}"
        )
    batch_size, num_steps, rank = latents.shape
    dtypes = {tensor.dtype for tensor in (latents, ropes, norm_weight, pages)}
    if len(dtypes) > 1 or not latents.is_floating_point():
        raise ValueError(
            f"{op}: latents, ropes, norm weight and pages must have one floating dtype, got "
            f"{latents.dtype}, {ropes.dtype}, {norm_weight.dtype} and {pages.dtype}"
        )
    if norm_weight.shape != (rank,):
        raise ValueError(f"{op}: norm weight must be [{rank}], got {tuple(norm_weight.shape)}")
    rope_dim = ropes.shape[2]
    is_table = cos.shape == sin.shape and cos.shape[1:] == (num_steps, rope_dim)
    if rope_dim % 2 or cos.dim() != 3 or not is_table or cos.shape[0] not in (1, batch_size):
        raise ValueError(
            f"{op}: cos and sin must be [{batch_size} or 1, {num_steps}, {rope_dim}] with an even "
            f"last axis, got {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    if pages.dim() != 3 or pages.shape[1:] != (PAGE_SIZE, rank + rope_dim):
        raise ValueError(
            f"{op}: pages [pages, {PAGE_SIZE}, {rank + rope_dim}] expected, got "
            f"{tuple(pages.shape)}"
        )
    if block_table.dim() != 2 or (block_table.shape[0], *lengths.shape) != (batch_size,) * 2:
        raise ValueError(
            f"{op}: block table [{batch_size}, P] and lengths [{batch_size}] expected, got "
            f"{tuple(block_table.shape)} and {tuple(lengths.shape)}"
        )
    for name, tensor in (("block_table", block_table), ("lengths", lengths)):
        if tensor.dtype not in INDEX_DTYPES:
            raise ValueError(f"{op}: {name} must be int32 or int64, got {tensor.dtype}")


_TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# A program holds a whole row.
_MAX_TRITON_RANK = 4096


def why_not_triton(latents: torch.Tensor, *others: Any) -> str | None:
    """Reason why the kernel cannot store such latents, or None."""
    if not 0 < latents.shape[2] <= _MAX_TRITON_RANK:
        return f"the kernel takes a rank of 1 to {_MAX_TRITON_RANK}, got {latents.shape[2]}"
    tensors = [other for other in others if isinstance(other, torch.Tensor)]
    for tensor in (latents, *tensors):
        if tensor.is_floating_point() and tensor.dtype not in _TRITON_DTYPES:
            return f"the kernel takes float32, bfloat16 and float16, got {tensor.dtype}"
    return _dispatch.why_no_triton(latents, *tensors)


def _run_triton(*args: Any) -> None:
    from glm_compile.ops.latent_write.triton_kernel import latent_write_triton

    latent_write_triton(*args)


_BACKENDS: tuple[_dispatch.Backend, ...] = (
    _dispatch.Backend("triton", why_not_triton, _run_triton),
    _dispatch.Backend("reference", _dispatch.always, latent_write_reference),
)


def _latent_write(*args: Any) -> None:
    *call, backend = args
    _dispatch.run("latent_write", _BACKENDS, backend, *call)


def _latent_write_fake(*_args: Any) -> None:
    return None


_latent_write_op: Callable[..., None] = register_op(
    "latent_write(Tensor latents_BSL, Tensor ropes_BSP, Tensor norm_weight_L, float norm_eps, "
    "Tensor cos_BSP, Tensor sin_BSP, bool interleaved, Tensor(a!) pages, Tensor block_table, "
    "Tensor lengths_B, str backend) -> ()",
    _latent_write,
    _latent_write_fake,
)
