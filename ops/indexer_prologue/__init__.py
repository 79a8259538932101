"""Everything between the indexer's projections and its scores, in one launch.

LayerNorm of the key, RoPE of query and key, the head weights' fp32 scaling, the store of the key
into a cache; in the FP8 tier also the quantisation of both. On request what the layer's attention
caches of the same tokens, see `latent_write`. And the projection to the head weights where it is
kept in fp32, which can be part of no other.

Shape legend: B batch, S tokens of the step, T cached tokens, H index heads, D index head dim, P
rope dim, C hidden, L rank of attention's latent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from glm_compile.ops import _dispatch
from glm_compile.ops._bounds import INDEX_DTYPES
from glm_compile.ops._library import register_op
from glm_compile.ops.indexer_prologue.reference import (
    attention_prologue_fp8_reference,
    attention_prologue_paged_reference,
    indexer_gates_reference,
    indexer_prologue_fp8_reference,
    indexer_prologue_paged_reference,
    indexer_prologue_reference,
    indexer_prologue_rows_reference,
)
from glm_compile.ops.latent_write import check_latents
from glm_compile.ops.latent_write import why_not_triton as why_not_triton_latents
from glm_compile.ops.paged_cache import PAGE_SIZE, check_key_pages

__all__ = [
    "Latents",
    "indexer_gates",
    "indexer_prologue",
    "indexer_prologue_fp8",
    "indexer_prologue_paged",
    "indexer_prologue_rows",
]


class Latents(NamedTuple):
    """What a layer's attention caches of the step; rotated by the prologue's own cos and sin.

    Attributes:
        latents_BSL, ropes_BSP, norm_weight_L, norm_eps, pages: see `latent_write`.
        interleaved: of the ropes.
    """

    latents_BSL: torch.Tensor
    ropes_BSP: torch.Tensor
    norm_weight_L: torch.Tensor
    norm_eps: float
    interleaved: bool
    pages: torch.Tensor


def indexer_prologue(
    q_BSHD: torch.Tensor,
    k_BSD: torch.Tensor,
    gates_BSH: torch.Tensor,
    norm_weight_D: torch.Tensor,
    norm_bias_D: torch.Tensor,
    norm_eps: float,
    cos_BSP: torch.Tensor,
    sin_BSP: torch.Tensor,
    *,
    interleaved: bool = True,
    gate_scale: float,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Prepare queries, keys and head weights of the exact tier.

    The key is LayerNorm(k), mean removed and bias added, rounded to k's dtype. RoPE turns the
    first P dims of query and key with every product and sum rounded as torch rounds them in that
    dtype. Interleaved pairs (2i, 2i + 1) come out de-interleaved, evens before odds; half split
    pairs (i, i + P/2) keep their places. Head weights are gates in fp32 times `gate_scale`.

    Args:
        q_BSHD, k_BSD, gates_BSH: floating, any strides; any of B, S may be 0. q and k share a
        dtype. norm_weight_D, norm_bias_D: in k's dtype or fp32.
        norm_eps: of the module's own norm (1e-6), not the model's `rms_norm_eps`.
        cos_BSP, sin_BSP: [B or 1, S, P], P even and at most D, both halves alike.
        gate_scale: H^-0.5.
        backend: force `triton` or `reference`.

    Returns:
        (q [B, S, H, D] and k [B, S, D] in their dtypes, weights fp32 [B, S, H]), all contiguous.
    """
    _check(
        "indexer_prologue", q_BSHD, k_BSD, gates_BSH, norm_weight_D, norm_bias_D, cos_BSP, sin_BSP
    )
    return _indexer_prologue_op(
        q_BSHD,
        k_BSD,
        gates_BSH,
        norm_weight_D,
        norm_bias_D,
        norm_eps,
        cos_BSP,
        sin_BSP,
        interleaved,
        gate_scale,
        backend or "",
    )


def indexer_prologue_rows(
    q_BSHD: torch.Tensor,
    k_BSD: torch.Tensor,
    gates_BSH: torch.Tensor,
    norm_weight_D: torch.Tensor,
    norm_bias_D: torch.Tensor,
    norm_eps: float,
    cos_BSP: torch.Tensor,
    sin_BSP: torch.Tensor,
    *,
    interleaved: bool = True,
    gate_scale: float,
    keys_BTD: torch.Tensor,
    first: torch.Tensor,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`indexer_prologue`, with the keys stored in a contiguous cache.

    Args:
        keys_BTD: in k's dtype, written in place at `[:, first + s]`.
        first: int32 or int64, one element; a token whose position is negative or beyond T is not
            stored.
        (others): see `indexer_prologue`.

    Returns:
        (q [B, S, H, D] in its dtype, weights fp32 [B, S, H]), both contiguous.
    """
    op = "indexer_prologue_rows"
    _check(op, q_BSHD, k_BSD, gates_BSH, norm_weight_D, norm_bias_D, cos_BSP, sin_BSP)
    batch_size, _, head_dim = k_BSD.shape
    if keys_BTD.dim() != 3 or keys_BTD.shape[::2] != (batch_size, head_dim):
        raise ValueError(
            f"{op}: keys [{batch_size}, T, {head_dim}] expected, got {tuple(keys_BTD.shape)}"
        )
    if first.numel() != 1:
        raise ValueError(f"{op}: first must be one number, got shape {tuple(first.shape)}")
    _check_index(op, "first", first)
    _check_key_dtype(op, keys_BTD, k_BSD)
    return _indexer_prologue_rows_op(
        q_BSHD,
        k_BSD,
        gates_BSH,
        norm_weight_D,
        norm_bias_D,
        norm_eps,
        cos_BSP,
        sin_BSP,
        interleaved,
        gate_scale,
        keys_BTD,
        first,
        backend or "",
    )


def indexer_prologue_paged(
    q_BSHD: torch.Tensor,
    k_BSD: torch.Tensor,
    gates_BSH: torch.Tensor,
    norm_weight_D: torch.Tensor,
    norm_bias_D: torch.Tensor,
    norm_eps: float,
    cos_BSP: torch.Tensor,
    sin_BSP: torch.Tensor,
    *,
    interleaved: bool = True,
    gate_scale: float,
    key_pages: torch.Tensor,
    block_table: torch.Tensor,
    lengths_B: torch.Tensor,
    latents: Latents | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`indexer_prologue`, with the keys stored in pages as `paged_write` stores them.

    Args:
        key_pages: [pages, 64, D] in k's dtype, written in place at the positions `lengths_B[b] +
            s`.
        block_table, lengths_B: see `indexer_prologue_fp8`.
        latents: stored at the same positions of pages of their own, through the same table.
        (others): see `indexer_prologue`.

    Returns:
        (q [B, S, H, D] in its dtype, weights fp32 [B, S, H]), both contiguous.
    """
    op = "indexer_prologue_paged"
    _check(op, q_BSHD, k_BSD, gates_BSH, norm_weight_D, norm_bias_D, cos_BSP, sin_BSP)
    if key_pages.dim() != 3 or key_pages.shape[1:] != (PAGE_SIZE, k_BSD.shape[2]):
        raise ValueError(
            f"{op}: pages [pages, {PAGE_SIZE}, {k_BSD.shape[2]}] expected, got "
            f"{tuple(key_pages.shape)}"
        )
    _check_key_dtype(op, key_pages, k_BSD)
    _check_table(op, block_table, lengths_B, k_BSD.shape[0])
    step = (
        q_BSHD,
        k_BSD,
        gates_BSH,
        norm_weight_D,
        norm_bias_D,
        norm_eps,
        cos_BSP,
        sin_BSP,
        interleaved,
        gate_scale,
        key_pages,
        block_table,
        lengths_B,
    )
    if latents is None:
        return _indexer_prologue_paged_op(*step, backend or "")
    _check_latents(op, latents, cos_BSP, sin_BSP, block_table, lengths_B, k_BSD)
    return _attention_prologue_paged_op(*step, *latents, backend or "")


def indexer_prologue_fp8(
    q_BSHD: torch.Tensor,
    k_BSD: torch.Tensor,
    gates_BSH: torch.Tensor,
    norm_weight_D: torch.Tensor,
    norm_bias_D: torch.Tensor,
    norm_eps: float,
    cos_BSP: torch.Tensor,
    sin_BSP: torch.Tensor,
    *,
    interleaved: bool = True,
    gate_scale: float,
    key_pages: torch.Tensor,
    block_table: torch.Tensor,
    lengths_B: torch.Tensor,
    latents: Latents | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prepare queries and head weights of the FP8 tier, and store the keys.

    The stored key is the exact tier's key, quantised with one scale: the same bytes that
    `paged_write_fp8` stores for it. The query is rotated in fp32 and quantised without a rounding
    between, one scale a token and head. Head weights carry every scale but the keys' own, in fp32:
    gate * (gate_scale * D^-0.5) * q scale. No Hadamard rotation on either side.

    Args:
        key_pages: uint8 [pages, 64 * (D + 4)], written in place at the positions `lengths_B[b] +
            s`.
        block_table: int32 or int64 [B, P]; a token whose entry is negative or missing is not
            stored.
        lengths_B: int32 or int64, tokens already cached.
        latents: stored at the same positions of pages of their own, through the same table.
        (others): see `indexer_prologue`.

    Returns:
        (q float8_e4m3fn [B, S, H, D], weights fp32 [B, S, H]), both contiguous.
    """
    op = "indexer_prologue_fp8"
    _check(op, q_BSHD, k_BSD, gates_BSH, norm_weight_D, norm_bias_D, cos_BSP, sin_BSP)
    check_key_pages(op, key_pages, k_BSD.shape[2])
    _check_table(op, block_table, lengths_B, k_BSD.shape[0])
    step = (
        q_BSHD,
        k_BSD,
        gates_BSH,
        norm_weight_D,
        norm_bias_D,
        norm_eps,
        cos_BSP,
        sin_BSP,
        interleaved,
        gate_scale,
        key_pages,
        block_table,
        lengths_B,
    )
    if latents is None:
        return _indexer_prologue_fp8_op(*step, backend or "")
    _check_latents(op, latents, cos_BSP, sin_BSP, block_table, lengths_B, k_BSD)
    return _attention_prologue_fp8_op(*step, *latents, backend or "")


def indexer_gates(
    x: torch.Tensor, weight_HC: torch.Tensor, *, backend: str | None = None
) -> torch.Tensor:
    """Head gates of a layer whose weights_proj is in fp32: x W^T in fp32, x in any dtype.

    One launch for few rows, where the library takes a cast and a product in two parts. The sum
    over C is in fp32 and in one order.

    Args:
        x: floating [..., C], any strides.
        weight_HC: fp32, any strides.
        backend: force `triton` or `reference`.

    Returns:
        fp32 [..., H], contiguous.
    """
    if weight_HC.dim() != 2 or weight_HC.dtype != torch.float32:
        raise ValueError(
            f"indexer_gates: weight must be float32 [H, C], got {weight_HC.dtype} "
            f"{tuple(weight_HC.shape)}"
        )
    if not x.dim() or x.shape[-1] != weight_HC.shape[1] or not x.is_floating_point():
        raise ValueError(
            f"indexer_gates: x must be floating [..., {weight_HC.shape[1]}], got {x.dtype} "
            f"{tuple(x.shape)}"
        )
    return _indexer_gates_op(x, weight_HC, backend or "")


def _check(
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    gates: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> None:
    if q.dim() != 4 or k.shape != (*q.shape[:2], q.shape[3]) or gates.shape != q.shape[:3]:
        raise ValueError(
            f"{op}: q [B, S, H, D], k [B, S, D] and gates [B, S, H] expected, got "
            f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(gates.shape)}"
        )
    if q.dtype != k.dtype or not q.is_floating_point():
        raise ValueError(f"{op}: q and k must have one floating dtype, got {q.dtype} and {k.dtype}")
    if norm_weight.shape != k.shape[2:] or norm_bias.shape != k.shape[2:]:
        raise ValueError(
            f"{op}: norm weight and bias must be [{k.shape[2]}], got "
            f"{tuple(norm_weight.shape)} and {tuple(norm_bias.shape)}"
        )
    rope_dim = cos.shape[-1]
    if rope_dim % 2 or rope_dim > q.shape[3]:
        raise ValueError(f"{op}: rope dim must be even and at most {q.shape[3]}, got {rope_dim}")
    if cos.shape != sin.shape or cos.dim() != 3 or cos.shape[1] != q.shape[1]:
        raise ValueError(
            f"{op}: cos and sin must be [{q.shape[0]} or 1, {q.shape[1]}, P], got "
            f"{tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    if cos.shape[0] not in (1, q.shape[0]):
        raise ValueError(f"{op}: cos has batch {cos.shape[0]}, expected {q.shape[0]} or 1")


def _check_latents(
    op: str,
    latents: Latents,
    cos: torch.Tensor,
    sin: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    k: torch.Tensor,
) -> None:
    latents_BSL, ropes_BSP, norm_weight, _eps, _interleaved, pages = latents
    check_latents(op, latents_BSL, ropes_BSP, norm_weight, cos, sin, pages, block_table, lengths)
    if latents_BSL.shape[:2] != k.shape[:2] or latents_BSL.dtype != k.dtype:
        raise ValueError(
            f"{op}: latents of {tuple(k.shape[:2])} tokens in {k.dtype} expected, as k has, got "
            f"{tuple(latents_BSL.shape[:2])} in {latents_BSL.dtype}"
        )


def _check_table(
    op: str, block_table: torch.Tensor, lengths: torch.Tensor, batch_size: int
) -> None:
    if block_table.dim() != 2 or (block_table.shape[0], *lengths.shape) != (batch_size,) * 2:
        raise ValueError(
            f"{op}: block table [{batch_size}, P] and lengths [{batch_size}] expected, got "
            f"{tuple(block_table.shape)} and {tuple(lengths.shape)}"
        )
    for name, tensor in (("block_table", block_table), ("lengths", lengths)):
        _check_index(op, name, tensor)


def _check_index(op: str, name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in INDEX_DTYPES:
        raise ValueError(f"{op}: {name} must be int32 or int64, got {tensor.dtype}")


def _check_key_dtype(op: str, keys: torch.Tensor, k: torch.Tensor) -> None:
    if keys.dtype != k.dtype:
        raise ValueError(f"{op}: keys are stored in {k.dtype}, got a cache of {keys.dtype}")


_TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# A program holds a whole head.
_MAX_TRITON_HEAD_DIM = 1024
# The loop over the columns is unrolled.
_MAX_TRITON_HIDDEN = 16_384


def _why_not_triton(
    q_BSHD: torch.Tensor,
    k_BSD: torch.Tensor,
    gates_BSH: torch.Tensor,
    norm_weight_D: torch.Tensor,
    norm_bias_D: torch.Tensor,
    norm_eps: float,
    cos_BSP: torch.Tensor,
    sin_BSP: torch.Tensor,
    interleaved: bool,
    gate_scale: float,
    *pages: torch.Tensor,
) -> str | None:
    if q_BSHD.shape[3] > _MAX_TRITON_HEAD_DIM:
        return f"head dim over {_MAX_TRITON_HEAD_DIM}: {q_BSHD.shape[3]}"
    tensors = (q_BSHD, k_BSD, gates_BSH, norm_weight_D, norm_bias_D, cos_BSP, sin_BSP)
    for tensor in tensors:
        if tensor.dtype not in _TRITON_DTYPES:
            return f"the kernel takes float32, bfloat16 and float16, got {tensor.dtype}"
    return _dispatch.why_no_triton(*tensors, *pages)


def _why_not_triton_fp8(q_BSHD: torch.Tensor, *rest: Any) -> str | None:
    return _dispatch.why_no_fp8(q_BSHD) or _why_not_triton(q_BSHD, *rest)


def _with_latents(why_not: Callable[..., str | None]) -> Callable[..., str | None]:
    def why_not_both(*args: Any) -> str | None:
        return why_not(*args[:13]) or why_not_triton_latents(*args[13:])

    return why_not_both


# Rows up to which the kernel was written: it has no tensor core's work to do.
_MAX_GATE_ROWS = 64


def _why_not_triton_gates(x: torch.Tensor, weight_HC: torch.Tensor) -> str | None:
    if x.dtype not in _TRITON_DTYPES:
        return f"the kernel takes float32, bfloat16 and float16, got {x.dtype}"
    if x.numel() > _MAX_GATE_ROWS * x.shape[-1]:
        return f"written for at most {_MAX_GATE_ROWS} rows, got {x.numel() // x.shape[-1]}"
    if not 0 < x.shape[-1] <= _MAX_TRITON_HIDDEN:
        return f"the kernel takes 1 to {_MAX_TRITON_HIDDEN} columns, got {x.shape[-1]}"
    return _dispatch.why_no_triton(x, weight_HC)


def _triton(name: str) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        from glm_compile.ops.indexer_prologue import triton_kernel

        return getattr(triton_kernel, name)(*args)

    return run


def _backends(
    name: str,
    reference: Callable[..., Any],
    why_not_triton: Callable[..., str | None] = _why_not_triton,
) -> tuple[_dispatch.Backend, ...]:
    return (
        _dispatch.Backend("triton", why_not_triton, _triton(f"{name}_triton")),
        _dispatch.Backend("reference", _dispatch.always, reference),
    )


_BACKENDS = {
    "indexer_prologue": _backends("indexer_prologue", indexer_prologue_reference),
    "indexer_prologue_rows": _backends("indexer_prologue_rows", indexer_prologue_rows_reference),
    "indexer_prologue_paged": _backends("indexer_prologue_paged", indexer_prologue_paged_reference),
    "indexer_prologue_fp8": _backends(
        "indexer_prologue_fp8", indexer_prologue_fp8_reference, _why_not_triton_fp8
    ),
    "attention_prologue_paged": _backends(
        "attention_prologue_paged",
        attention_prologue_paged_reference,
        _with_latents(_why_not_triton),
    ),
    "attention_prologue_fp8": _backends(
        "attention_prologue_fp8",
        attention_prologue_fp8_reference,
        _with_latents(_why_not_triton_fp8),
    ),
    "indexer_gates": _backends("indexer_gates", indexer_gates_reference, _why_not_triton_gates),
}


def _implementation(name: str) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        *call, backend = args
        return _dispatch.run(name, _BACKENDS[name], backend, *call)

    return run


def _indexer_prologue_fake(
    q_BSHD: torch.Tensor, k_BSD: torch.Tensor, gates_BSH: torch.Tensor, *_rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        q_BSHD.new_empty(q_BSHD.shape),
        k_BSD.new_empty(k_BSD.shape),
        gates_BSH.new_empty(gates_BSH.shape, dtype=torch.float32),
    )


def _stored_fake(
    q_BSHD: torch.Tensor, k_BSD: torch.Tensor, gates_BSH: torch.Tensor, *_rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        q_BSHD.new_empty(q_BSHD.shape),
        gates_BSH.new_empty(gates_BSH.shape, dtype=torch.float32),
    )


def _indexer_prologue_fp8_fake(
    q_BSHD: torch.Tensor, k_BSD: torch.Tensor, gates_BSH: torch.Tensor, *_rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        q_BSHD.new_empty(q_BSHD.shape, dtype=torch.float8_e4m3fn),
        gates_BSH.new_empty(gates_BSH.shape, dtype=torch.float32),
    )


def _indexer_gates_fake(x: torch.Tensor, weight_HC: torch.Tensor, *_rest: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight_HC.shape[0]), dtype=torch.float32)


_SHARED_SCHEMA = (
    "Tensor q_BSHD, Tensor k_BSD, Tensor gates_BSH, Tensor norm_weight_D, Tensor norm_bias_D, "
    "float norm_eps, Tensor cos_BSP, Tensor sin_BSP, bool interleaved, float gate_scale"
)
_PAGES_SCHEMA = "Tensor(a!) key_pages, Tensor block_table, Tensor lengths_B"

_indexer_prologue_op = register_op(
    f"indexer_prologue({_SHARED_SCHEMA}, str backend) -> (Tensor, Tensor, Tensor)",
    _implementation("indexer_prologue"),
    _indexer_prologue_fake,
)
_indexer_prologue_rows_op = register_op(
    f"indexer_prologue_rows({_SHARED_SCHEMA}, Tensor(a!) keys_BTD, Tensor first, "
    "str backend) -> (Tensor, Tensor)",
    _implementation("indexer_prologue_rows"),
    _stored_fake,
)
_indexer_prologue_paged_op = register_op(
    f"indexer_prologue_paged({_SHARED_SCHEMA}, {_PAGES_SCHEMA}, str backend) -> (Tensor, Tensor)",
    _implementation("indexer_prologue_paged"),
    _stored_fake,
)
_indexer_prologue_fp8_op = register_op(
    f"indexer_prologue_fp8({_SHARED_SCHEMA}, {_PAGES_SCHEMA}, str backend) -> (Tensor, Tensor)",
    _implementation("indexer_prologue_fp8"),
    _indexer_prologue_fp8_fake,
)
_LATENTS_SCHEMA = (
    "Tensor latents_BSL, Tensor ropes_BSP, Tensor latent_weight_L, float latent_eps, "
    "bool latents_interleaved, Tensor(b!) latent_pages"
)
_attention_prologue_paged_op = register_op(
    f"attention_prologue_paged({_SHARED_SCHEMA}, {_PAGES_SCHEMA}, {_LATENTS_SCHEMA}, "
    "str backend) -> (Tensor, Tensor)",
    _implementation("attention_prologue_paged"),
    _stored_fake,
)
_attention_prologue_fp8_op = register_op(
    f"attention_prologue_fp8({_SHARED_SCHEMA}, {_PAGES_SCHEMA}, {_LATENTS_SCHEMA}, "
    "str backend) -> (Tensor, Tensor)",
    _implementation("attention_prologue_fp8"),
    _indexer_prologue_fp8_fake,
)
_indexer_gates_op = register_op(
    "indexer_gates(Tensor x, Tensor weight_HC, str backend) -> Tensor",
    _implementation("indexer_gates"),
    _indexer_gates_fake,
)
