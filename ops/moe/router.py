"""The router: which experts a token takes, and with what weights.

Shape legend: M tokens, C hidden size, E experts, K experts of a token, L parts of C.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from glm_compile.ops import _dispatch
from glm_compile.ops._library import register_op

__all__ = ["moe_router"]

# More tokens than this are a job for the library's product.
MAX_TOKENS = 32
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def moe_router(
    x_MC: torch.Tensor,
    weight_EC: torch.Tensor,
    bias_E: torch.Tensor,
    top_k: int,
    *,
    normalize: bool = True,
    scale: float = 1.0,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose each token's experts by sigmoid(x W^T) + bias; weigh them by the sigmoid alone.

    Everything is fp32, products included. Experts come in descending order of their biased score,
    of equal ones the lowest id first; NaN counts as the largest. The router of DeepSeek-V3 with one
    group, as transformers' `GlmMoeDsaTopkRouter` computes it, up to fp32 rounding and the order of
    a token's experts. A row does not depend on the other rows, and repeated calls are equal bit for
    bit; the product of the library's path is as good as torch's in both.

    Args:
        x_MC: fp32, fp16 or bf16 [M, C], any strides; M = 0 is allowed.
        weight_EC: fp32, fp16 or bf16 [E, C], any strides.
        bias_E: fp32, fp16 or bf16 [E].
        top_k: K, from 1 to E.
        normalize: divide a token's weights by their sum (plus 1e-20).
        scale: factor of the weights, after that.
        backend: force `triton` or `reference`.

    Returns:
        weights float32 [M, K] and ids int64 [M, K], contiguous.
    """
    check_router(x_MC, weight_EC, bias_E, top_k)
    return _moe_router_op(x_MC, weight_EC, bias_E, top_k, normalize, scale, backend or "")


def check_router(
    x_MC: torch.Tensor, weight_EC: torch.Tensor, bias_E: torch.Tensor, top_k: int
) -> None:
    """Raise ValueError unless the router can take these."""
    for name, tensor in (("x", x_MC), ("weight", weight_EC), ("bias", bias_E)):
        if tensor.dtype not in _DTYPES:
            raise ValueError(
                f"moe_router: {name} must be float32, float16 or bfloat16, got {tensor.dtype}"
            )
    if (
        x_MC.dim() != 2
        or weight_EC.dim() != 2
        or x_MC.shape[1] != weight_EC.shape[1]
        or bias_E.shape != weight_EC.shape[:1]
    ):
        raise ValueError(
            f"moe_router: x [M, C], weight [E, C] and bias [E] expected, got {tuple(x_MC.shape)}, "
            f"{tuple(weight_EC.shape)} and {tuple(bias_E.shape)}"
        )
    if not 1 <= top_k <= weight_EC.shape[0]:
        raise ValueError(f"moe_router: top_k must be from 1 to {weight_EC.shape[0]}, got {top_k}")


def moe_router_reference(
    x_MC: torch.Tensor,
    weight_EC: torch.Tensor,
    bias_E: torch.Tensor,
    top_k: int,
    normalize: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in plain torch."""
    scores_ME = F.linear(x_MC.float(), weight_EC.float()).sigmoid()
    order_ME = (scores_ME + bias_E.float()).sort(dim=-1, descending=True, stable=True).indices
    ids_MK = order_ME[:, :top_k].contiguous()
    weights_MK = scores_ME.gather(1, ids_MK)
    if normalize:
        weights_MK = weights_MK / (weights_MK.sum(-1, keepdim=True) + 1e-20)
    return weights_MK * scale, ids_MK


def _why_not_triton(
    x_MC: torch.Tensor,
    weight_EC: torch.Tensor,
    bias_E: torch.Tensor,
    top_k: int,
    normalize: bool,
    scale: float,
) -> str | None:
    if x_MC.shape[0] > MAX_TOKENS:
        return f"at most {MAX_TOKENS} tokens, got {x_MC.shape[0]}"
    if not weight_EC.numel():
        return "there are no features"
    if weight_EC.stride(1) != 1:
        return "rows of the weight must be dense"
    if weight_EC.shape[0] > 1024:
        return f"at most 1024 experts, got {weight_EC.shape[0]}"
    return _dispatch.why_no_triton(x_MC, weight_EC, bias_E)


def _run_triton(
    x_MC: torch.Tensor,
    weight_EC: torch.Tensor,
    bias_E: torch.Tensor,
    top_k: int,
    normalize: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    from glm_compile.ops.moe.router_kernel import moe_router_triton

    return moe_router_triton(x_MC, weight_EC, bias_E, top_k, normalize, scale)


_BACKENDS = (
    _dispatch.Backend("triton", _why_not_triton, _run_triton),
    _dispatch.Backend("reference", _dispatch.always, moe_router_reference),
)


def _run_moe_router(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    normalize: bool,
    scale: float,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    if not x.shape[0]:
        return _moe_router_fake(x, weight, bias, top_k, normalize, scale, backend)
    result: tuple[torch.Tensor, torch.Tensor] = _dispatch.run(
        "moe_router", _BACKENDS, backend, x, weight, bias, top_k, normalize, scale
    )
    return result


def _moe_router_fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    normalize: bool,
    scale: float,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (x.shape[0], top_k)
    return x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.int64)


_moe_router_op = register_op(
    "moe_router(Tensor x, Tensor weight, Tensor bias, int top_k, bool normalize, float scale, "
    "str backend) -> (Tensor, Tensor)",
    _run_moe_router,
    _moe_router_fake,
)
