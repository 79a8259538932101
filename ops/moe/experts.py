"""Routed experts: SwiGLU MLPs of which each token takes a few.

Shape legend: M tokens, K experts of a token (8 in the release), P = M * K pairs of a token and an
expert, E experts, C hidden size, I intermediate size of an expert.
"""

from __future__ import annotations

from typing import Any

import torch

from glm_compile.ops import _dispatch
from glm_compile.ops._cute import why_no_cute
from glm_compile.ops._library import register_op
from glm_compile.ops.moe.config import (
    BLOCK_TOKENS,
    CUTE_PAIRS,
    MAX_CUTE_PAIRS,
    MAX_CUTE_TOKENS,
    MAX_PAIRS,
    MAX_STAGES,
    stream_config_for,
)
from glm_compile.ops.moe.reference import (
    grouped_products,
    moe_experts_grouped,
    moe_experts_reference,
)

__all__ = ["moe_experts"]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def moe_experts(
    x_MC: torch.Tensor,
    router_weights_ME8: torch.Tensor,
    router_ids_ME8: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """Return sum_k w_k down_k (silu(gate_k x) * (up_k x)) over each token's experts.

    Products are accumulated in fp32. A token's experts are weighted and added up in fp32, in the
    order of its ids (`cute`: of the experts' numbers), and rounded once, as transformers does; the
    kernels round what is between the two products once, the library's path twice more. A row
    depends neither on the other rows nor on their experts, and repeated calls are equal bit for
    bit; `grouped_mm` is as good as torch's grouped product in both. Unforced, the kernel is chosen
    by M and K.

    Args:
        x_MC: fp32, fp16 or bf16 [M, C], any strides; M = 0 is allowed.
        router_weights_ME8: floating point [M, K], any strides.
        router_ids_ME8: int32 or int64 [M, K], any strides. An id that is negative, or E and above,
            is no expert: its pair counts nothing, whatever its weight. Ids of a row may repeat.
        gate_up: x's dtype [E, 2 I, C]: the rows of the gate, then those of `up`.
        down: x's dtype [E, C, I].
        backend: force `cute`, `triton`, `grouped_mm` or `reference`. Unforced, calls of at most 256
            pairs run on kernels that read each chosen expert once, where there is a GPU for them;
            others of bf16 on torch's grouped product.

    Returns:
        x's dtype [M, C], contiguous.
    """
    _check(x_MC, router_weights_ME8, router_ids_ME8, gate_up, down)
    return _moe_experts_op(x_MC, router_weights_ME8, router_ids_ME8, gate_up, down, backend or "")


def _check(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> None:
    check_experts("moe_experts", x, gate_up, down)
    if not weights.is_floating_point():
        raise ValueError(f"moe_experts: router weights must be floats, got {weights.dtype}")
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"moe_experts: router ids must be int32 or int64, got {ids.dtype}")
    if x.dim() != 2 or ids.dim() != 2 or ids.shape[0] != x.shape[0] or weights.shape != ids.shape:
        raise ValueError(
            f"moe_experts: x [M, C], router weights and ids [M, K] expected, got "
            f"{tuple(x.shape)}, {tuple(weights.shape)} and {tuple(ids.shape)}"
        )


def check_experts(op: str, x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> None:
    """Raise ValueError unless experts of these weights can take x."""
    for name, tensor in (("x", x), ("gate_up", gate_up), ("down", down)):
        if tensor.dtype not in DTYPES or tensor.dtype != x.dtype:
            raise ValueError(
                f"{op}: x, gate_up and down must be float32, float16 or bfloat16, all the "
                f"same; {name} is {tensor.dtype}, x {x.dtype}"
            )
    if x.dim() != 2:
        raise ValueError(f"{op}: x [M, C] expected, got {tuple(x.shape)}")
    if (
        gate_up.dim() != 3
        or down.dim() != 3
        or gate_up.shape != (down.shape[0], 2 * down.shape[2], x.shape[1])
        or down.shape[1] != x.shape[1]
    ):
        raise ValueError(
            f"{op}: gate_up [E, 2 I, {x.shape[1]}] and down [E, {x.shape[1]}, I] expected, "
            f"got {tuple(gate_up.shape)} and {tuple(down.shape)}"
        )


def _why_no_kernel(num_pairs: int, gate_up: torch.Tensor, down: torch.Tensor) -> str | None:
    if gate_up.stride(2) != 1 or down.stride(2) != 1:
        return "rows of the experts' weights must be dense"
    if not gate_up.numel():
        return "there are no experts or no features"
    if not num_pairs:
        return "a token has no experts"
    return None


def _why_no_rows_of_16_bytes(name: str, weight: torch.Tensor) -> str | None:
    if weight.stride(0) % 8 or weight.stride(1) % 8 or weight.data_ptr() % 16:
        return f"rows of {name} must start at multiples of 16 bytes"
    return None


def _why_not_triton(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> str | None:
    if (reason := _why_no_kernel(ids.numel(), gate_up, down)) is not None:
        return reason
    if x.shape[0] > BLOCK_TOKENS or ids.numel() > MAX_PAIRS:
        return (
            f"at most {BLOCK_TOKENS} tokens and {MAX_PAIRS} pairs, got {x.shape[0]} and "
            f"{ids.numel()}"
        )
    return _dispatch.why_no_triton(x, weights, ids, gate_up, down)


# It compiles for sm_100a as well, but was measured on an H200.
CUTE_ARCHS = ("sm_90a",)


def why_not_cute(
    x: torch.Tensor,
    num_pairs: int,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *others: torch.Tensor | None,
) -> str | None:
    """Reason why the streaming kernels cannot take these experts, or None."""
    if x.dtype != torch.bfloat16:
        return f"the kernel takes bfloat16, got {x.dtype}"
    if (reason := _why_no_kernel(num_pairs, gate_up, down)) is not None:
        return reason
    if x.shape[0] > MAX_CUTE_TOKENS or num_pairs > MAX_CUTE_PAIRS:
        return (
            f"at most {MAX_CUTE_TOKENS} tokens and {MAX_CUTE_PAIRS} pairs of a token and an "
            f"expert, got {x.shape[0]} and {num_pairs}"
        )
    for name, weight in (("gate_up", gate_up), ("down", down)):
        num_columns = weight.shape[2]
        stage_columns = stream_config_for(num_columns, is_gated=weight is gate_up).stage_columns
        if num_columns % 8 or -(-num_columns // stage_columns) > MAX_STAGES:
            return f"in features of {name} must be a multiple of 8 and not too many: {num_columns}"
        if (reason := _why_no_rows_of_16_bytes(name, weight)) is not None:
            return reason
    return why_no_cute(x, gate_up, down, *others, archs=CUTE_ARCHS)


def _why_not_cute(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> str | None:
    return why_not_cute(x, ids.numel(), gate_up, down, weights, ids)


def _why_not_grouped_mm(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> str | None:
    if x.dtype != torch.bfloat16:
        return f"torch's grouped product takes bfloat16, got {x.dtype}"
    if x.device.type != "cuda":
        return f"torch's grouped product is used on CUDA, got {x.device}"
    if torch.cuda.get_device_capability(x.device) < (8, 0):
        return "torch's grouped product needs compute capability 8.0"
    for name, weight in (("gate_up", gate_up), ("down", down)):
        if weight.stride(2) != 1 or weight.shape[2] % 8:
            return f"rows of {name} must be dense, and multiples of 16 bytes"
        if (reason := _why_no_rows_of_16_bytes(name, weight)) is not None:
            return reason
    return None


def _run_cute(*args: torch.Tensor) -> torch.Tensor:
    from glm_compile.ops.moe.cute_kernel import moe_experts_cute

    return moe_experts_cute(*args)


def _run_triton(*args: torch.Tensor) -> torch.Tensor:
    from glm_compile.ops.moe.triton_kernel import moe_experts_triton

    return moe_experts_triton(*args)


def _run_grouped_mm(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    if _dispatch.why_no_triton(x) is not None:
        return moe_experts_grouped(x, weights, ids, gate_up, down)
    from glm_compile.ops.moe.triton_kernel import sum_pairs

    # One pass over the products instead of five, with fp32 copies among them.
    products, places = grouped_products(x, ids, gate_up, down)
    return sum_pairs(products, weights, ids, gate_up.shape[0], x.dtype, places)


_CUTE = _dispatch.Backend("cute", _why_not_cute, _run_cute)
_TRITON = _dispatch.Backend("triton", _why_not_triton, _run_triton)
_OTHERS = (
    _dispatch.Backend("grouped_mm", _why_not_grouped_mm, _run_grouped_mm),
    _dispatch.Backend("reference", _dispatch.always, moe_experts_reference),
)


def _run_moe_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    backend: str,
) -> torch.Tensor:
    if not x.numel() or not ids.numel():
        return x.new_zeros(x.shape)
    kernels = (_CUTE, _TRITON) if ids.numel() <= CUTE_PAIRS else (_TRITON, _CUTE)
    return _dispatch.run(
        "moe_experts", (*kernels, *_OTHERS), backend, x, weights, ids, gate_up, down
    )


def _moe_experts_fake(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    backend: str,
) -> torch.Tensor:
    return x.new_empty(x.shape)


_moe_experts_op: Any = register_op(
    "moe_experts(Tensor x, Tensor router_weights, Tensor router_ids, Tensor gate_up, Tensor down, "
    "str backend) -> Tensor",
    _run_moe_experts,
    _moe_experts_fake,
)
