"""The two products that multi-head latent attention absorbs kv_b into, a small matrix a head.

Attention over latents needs the query in the latent's space, and gives an output that is still in
it: `absorb_query` multiplies by W_UK ahead of attention and rotates the rest of the query on the
way, `project_values` multiplies by W_UV behind it
(DeepSeek-V2, arXiv 2405.04434, section 2.1.2 and its appendix on low-rank key-value compression).
Both are parts of kv_b's weight and are read in place.

Shape legend: B batch, S query tokens, R = B * S rows, H heads, N nope dim of a query, P rope dim,
L rank of the latent, C = L + P, V value dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from glm_compile.ops import _dispatch
from glm_compile.ops._cute import why_no_cute
from glm_compile.ops._library import register_op
from glm_compile.ops.mla_absorb.config import LINE, MAX_FEW_ROWS, MAX_WARPS, QUERY_ROWS
from glm_compile.ops.mla_absorb.reference import absorb_query_reference, project_values_reference

__all__ = ["absorb_query", "project_values"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def absorb_query(
    q_nope_RHN: torch.Tensor,
    q_rot_RHP: torch.Tensor,
    kv_b_weight: torch.Tensor,
    *,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    interleaved: bool = True,
    after: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Return the query in the latent's space: q_nope W_UK of each head, and q_rot behind it.

    Products are accumulated in fp32 and rounded once; q_rot is copied bit for bit, or rotated with
    every product and sum rounded as torch rounds them in that dtype. Deterministic; the number of
    rows may be symbolic or 0. A NaN stays in its row and head.

    Args:
        q_nope_RHN: float32, bfloat16 or float16 [..., H, N] with one or two axes of rows, any
            strides: a part of [B, S, H, N + P], or [B, H, S, N] transposed, is read in place.
        q_rot_RHP: q_nope's dtype, [..., H, P], the same rows, any strides; P may be 0.
        cos, sin: q_nope's dtype, [R, P], or [B or 1, S, P] where rows have two axes; both halves
            alike. None where q_rot is rotated already.
        interleaved: pairs are (2i, 2i + 1) and come out evens first; else (i, i + P/2).
        after: not read. A compiler that orders calls by what they read runs this one behind the one
            that makes it.
        kv_b_weight: q_nope's dtype, [H * (N + V), L], any strides: the rows of a head are W_UK
            [N, L], then W_UV [V, L]. Never copied. The `cute` kernel reads it before the kernel
            ahead has ended: that one may write it only if it lets no dependent in before it has.
        backend: `reference`, `triton`, `cute` or `library` (its product, and a kernel for the
            rotation) to force one; None takes the first that can.

    Returns:
        q_nope's dtype, [..., H, L + P], contiguous.

    Raises:
        ValueError: a dtype or shape outside the above, or a forced backend that cannot run.
    """
    op = "absorb_query"
    if q_nope_RHN.dim() not in (3, 4) or q_rot_RHP.dim() != q_nope_RHN.dim():
        raise ValueError(
            f"{op}: q_nope [R, H, N] and q_rot [R, H, P] expected, or both [B, S, H, *], got "
            f"{tuple(q_nope_RHN.shape)} and {tuple(q_rot_RHP.shape)}"
        )
    _check_dtypes(op, q_nope=q_nope_RHN, q_rot=q_rot_RHP, kv_b_weight=kv_b_weight)
    if q_rot_RHP.shape[:-1] != q_nope_RHN.shape[:-1]:
        raise ValueError(
            f"{op}: q_nope and q_rot must have the same rows and heads, got "
            f"{tuple(q_nope_RHN.shape)} and {tuple(q_rot_RHP.shape)}"
        )
    num_heads, num_nope = q_nope_RHN.shape[-2:]
    _check_weight(op, kv_b_weight, num_heads, num_nope, "N")
    _check_tables(op, q_rot_RHP, cos, sin)
    return _absorb_query_op(
        q_nope_RHN,
        q_rot_RHP,
        kv_b_weight,
        cos,
        sin,
        interleaved,
        after,
        backend or "",
    )


def project_values(
    o_RHL: torch.Tensor,
    kv_b_weight: torch.Tensor,
    *,
    num_values: int,
    backend: str | None = None,
) -> torch.Tensor:
    """Return the values of each head: o W_UV^T, from an attention output in the latent's space.

    Products are accumulated in fp32 and rounded once. Deterministic; the number of rows may be
    symbolic or 0. A NaN stays in its row and head.

    Args:
        o_RHL: float32, bfloat16 or float16 [..., H, L] with one or two axes of rows, any strides.
        kv_b_weight: o's dtype, [H * (N + V), L]; see `absorb_query`.
        num_values: V.
        backend: `reference`, `triton` or `cute` to force one; None takes the first that can.

    Returns:
        o's dtype, [..., H, V], contiguous.

    Raises:
        ValueError: a dtype or shape outside the above, or a forced backend that cannot run.
    """
    op = "project_values"
    if o_RHL.dim() not in (3, 4):
        raise ValueError(
            f"{op}: o [R, H, L] or [B, S, H, L] expected, got shape {tuple(o_RHL.shape)}"
        )
    _check_dtypes(op, o=o_RHL, kv_b_weight=kv_b_weight)
    if num_values < 1:
        raise ValueError(f"{op}: num_values must be at least 1, got {num_values}")
    num_heads, rank = o_RHL.shape[-2:]
    _check_weight(op, kv_b_weight, num_heads, num_values, "V")
    if kv_b_weight.shape[1] != rank:
        raise ValueError(
            f"{op}: o and kv_b_weight must share the rank L, got {rank} and {kv_b_weight.shape[1]}"
        )
    return _project_values_op(o_RHL, kv_b_weight, num_values, backend or "")


def _check_dtypes(op: str, **tensors: torch.Tensor) -> None:
    dtypes = {tensor.dtype for tensor in tensors.values()}
    if len(dtypes) > 1 or dtypes.pop() not in _DTYPES:
        found = ", ".join(f"{name} {tensor.dtype}" for name, tensor in tensors.items())
        raise ValueError(f"{op}: all must share float32, bfloat16 or float16, got {found}")


def _check_tables(
    op: str, q_rot: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None
) -> None:
    if cos is None and sin is None:
        return
    if cos is None or sin is None:
        raise ValueError(
            f"{op}: cos and sin go together, got only {'sin' if cos is None else 'cos'}"
        )
    _check_dtypes(op, q_rot=q_rot, cos=cos, sin=sin)
    wanted = (*q_rot.shape[:-2], q_rot.shape[-1])
    shapes = (wanted, (1, *wanted[1:])) if q_rot.dim() == 4 else (wanted,)
    if cos.shape != sin.shape or cos.shape not in shapes or cos.shape[-1] % 2:
        raise ValueError(
            f"{op}: cos and sin must be {list(wanted)} with an even last axis"
            f"{', or of one batch row' if q_rot.dim() == 4 else ''}, got {list(cos.shape)} and "
            f"{list(sin.shape)}"
        )


def _check_weight(
    op: str, kv_b_weight: torch.Tensor, num_heads: int, num_used: int, letter: str
) -> None:
    """Raise ValueError unless the weight holds at least `num_used` rows for each head."""
    if kv_b_weight.dim() != 2 or num_heads < 1:
        raise ValueError(
            f"{op}: kv_b_weight [H * (N + V), L] and at least one head expected, got "
            f"{tuple(kv_b_weight.shape)} and {num_heads} heads"
        )
    per_head, rest = divmod(kv_b_weight.shape[0], num_heads)
    if rest or per_head < num_used:
        raise ValueError(
            f"{op}: kv_b_weight must hold N + V rows for each of {num_heads} heads, "
            f"{letter} = {num_used}, got {kv_b_weight.shape[0]} rows"
        )


_MAX_GRID = 65535


def _why_not_triton(x: torch.Tensor, *others: torch.Tensor) -> str | None:
    if x.shape[-1] == 0:
        return "there is nothing to sum over"
    if x.shape[:-2].numel() > _MAX_GRID * 16 or x.shape[-2] > _MAX_GRID:
        return f"more rows or heads than a grid takes: {tuple(x.shape)}"
    return _dispatch.why_no_triton(x, *others)


def _why_not_cute(
    x: torch.Tensor, kv_b_weight: torch.Tensor, alignment: int, *others: torch.Tensor | None
) -> str | None:
    """Reason against the kernel that both products share; `alignment` of x in bytes."""
    if x.dtype != torch.bfloat16:
        return f"the kernel takes bfloat16, got {x.dtype}"
    if kv_b_weight.shape[1] == 0 or kv_b_weight.shape[1] % LINE:
        return f"the rank must be a multiple of {LINE}, got {kv_b_weight.shape[1]}"
    if kv_b_weight.stride(1) != 1 or kv_b_weight.stride(0) % 8 or kv_b_weight.data_ptr() % 16:
        return "the weight's rows must be dense and start at multiples of 16 bytes"
    if x.stride(-1) != 1 or not _is_aligned(x, alignment):
        return (
            f"the rows' last axis must be dense and start at multiples of {alignment} bytes, got "
            f"strides {x.stride()}"
        )
    if x.shape[:-2].numel() > _MAX_GRID * 16 or x.shape[-2] > _MAX_GRID:
        return f"more rows or heads than a grid takes: {tuple(x.shape)}"
    return why_no_cute(x, kv_b_weight, *others)


def _is_aligned(x: torch.Tensor, alignment: int) -> bool:
    strides = [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]
    element_bytes = x.element_size()
    return x.data_ptr() % alignment == 0 and all(
        stride * element_bytes % alignment == 0 for stride in strides[:-1]
    )


def _why_no_query_triton(
    q_nope: torch.Tensor,
    q_rot: torch.Tensor,
    kv_b_weight: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    interleaved: bool,
) -> str | None:
    return _why_not_triton(q_nope, q_rot, kv_b_weight, *(t for t in (cos, sin) if t is not None))


def _why_no_query_library(
    q_nope: torch.Tensor,
    q_rot: torch.Tensor,
    kv_b_weight: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    interleaved: bool,
) -> str | None:
    if cos is None or sin is None or not cos.shape[-1]:
        return "without a rotation the reference is the library's product"
    return _dispatch.why_no_triton(q_nope, q_rot, kv_b_weight, cos, sin)


def _why_no_query_cute(
    q_nope: torch.Tensor,
    q_rot: torch.Tensor,
    kv_b_weight: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    interleaved: bool,
) -> str | None:
    num_nope, num_copied = q_nope.shape[-1], q_rot.shape[-1]
    if num_nope == 0 or num_nope % QUERY_ROWS or num_nope > QUERY_ROWS * MAX_WARPS:
        return (
            f"the nope dim must be a multiple of {QUERY_ROWS} up to {QUERY_ROWS * MAX_WARPS}, got "
            f"{num_nope}"
        )
    if num_copied % 2:
        return f"the rope dim must be even, got {num_copied}"
    return _why_not_cute(q_nope, kv_b_weight, 4, q_rot, cos, sin)


def _why_no_value_cute(o: torch.Tensor, kv_b_weight: torch.Tensor, num_values: int) -> str | None:
    if num_values % 16:
        return f"the value dim must be a multiple of 16, got {num_values}"
    if o.shape[-1] > LINE * MAX_WARPS:
        return f"the rank must be at most {LINE * MAX_WARPS}, got {o.shape[-1]}"
    return _why_not_cute(o, kv_b_weight, 16)


def _run_query_cute(*args: Any) -> torch.Tensor:
    from glm_compile.ops.mla_absorb.cute_kernel import absorb_query_cute

    return absorb_query_cute(*args)


def _run_value_cute(*args: Any) -> torch.Tensor:
    from glm_compile.ops.mla_absorb.cute_kernel import project_values_cute

    return project_values_cute(*args)


def _run_query_triton(*args: Any) -> torch.Tensor:
    from glm_compile.ops.mla_absorb.triton_kernel import absorb_query_triton

    return absorb_query_triton(*args)


def _run_query_library(*args: Any) -> torch.Tensor:
    from glm_compile.ops.mla_absorb.triton_kernel import absorb_query_library

    return absorb_query_library(*args)


def _run_value_triton(*args: Any) -> torch.Tensor:
    from glm_compile.ops.mla_absorb.triton_kernel import project_values_triton

    return project_values_triton(*args)


_QUERY_BACKENDS = (
    _dispatch.Backend("cute", _why_no_query_cute, _run_query_cute),
    _dispatch.Backend("triton", _why_no_query_triton, _run_query_triton),
    _dispatch.Backend("reference", _dispatch.always, absorb_query_reference),
    _dispatch.Backend("library", _why_no_query_library, _run_query_library),
)
_VALUE_BACKENDS = (
    _dispatch.Backend("cute", _why_no_value_cute, _run_value_cute),
    _dispatch.Backend(
        "triton", lambda o, weight, _num_values: _why_not_triton(o, weight), _run_value_triton
    ),
    _dispatch.Backend("reference", _dispatch.always, project_values_reference),
)


def _ordered(backends: Sequence[_dispatch.Backend], x: torch.Tensor) -> Sequence[_dispatch.Backend]:
    """The kernels are for few rows; for more the library's tiles reuse a weight once it is read."""
    return backends if x.shape[:-2].numel() <= MAX_FEW_ROWS else backends[::-1]


def _absorb_query(
    q_nope: torch.Tensor,
    q_rot: torch.Tensor,
    kv_b_weight: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    interleaved: bool,
    after: torch.Tensor | None,
    backend: str,
) -> torch.Tensor:
    backends = _ordered(_QUERY_BACKENDS, q_nope)
    call = (q_nope, q_rot, kv_b_weight, cos, sin, interleaved)
    return _dispatch.run("absorb_query", backends, backend, *call)


def _absorb_query_fake(
    q_nope: torch.Tensor, q_rot: torch.Tensor, kv_b_weight: torch.Tensor, *_rest: Any
) -> torch.Tensor:
    return q_nope.new_empty((*q_nope.shape[:-1], kv_b_weight.shape[1] + q_rot.shape[-1]))


def _project_values(
    o: torch.Tensor, kv_b_weight: torch.Tensor, num_values: int, backend: str
) -> torch.Tensor:
    return _dispatch.run(
        "project_values", _ordered(_VALUE_BACKENDS, o), backend, o, kv_b_weight, num_values
    )


def _project_values_fake(
    o: torch.Tensor, kv_b_weight: torch.Tensor, num_values: int, backend: str
) -> torch.Tensor:
    return o.new_empty((*o.shape[:-1], num_values))


_absorb_query_op = register_op(
    "mla_absorb_query(Tensor q_nope, Tensor q_rot, Tensor kv_b_weight, Tensor? cos, Tensor? sin, "
    "bool interleaved, Tensor? after, str backend) -> Tensor",
    _absorb_query,
    _absorb_query_fake,
)
_project_values_op = register_op(
    "mla_project_values(Tensor o, Tensor kv_b_weight, int num_values, str backend) -> Tensor",
    _project_values,
    _project_values_fake,
)
