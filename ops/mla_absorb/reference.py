"""The two absorbed products of multi-head latent attention in plain torch: batched over heads.

Shape legend: B batch, S query tokens, R = B * S rows, H heads, N nope dim of a query, P rope dim,
L rank of the latent, C = L + P, V value dim.
"""

from __future__ import annotations

import torch

from glm_compile.ops._rope import rope_reference


def absorb_query_reference(
    q_nope: torch.Tensor,
    q_rot: torch.Tensor,
    kv_b_weight: torch.Tensor,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    interleaved: bool = True,
) -> torch.Tensor:
    """Return [..., H, C]: q_nope W_UK of each head, and q_rot or its rotation behind; contiguous.

    One batched product of torch's own, over views: neither the weight nor the queries are copied
    where rows are a fixed distance apart, and the product is written to its place.
    """
    rank = kv_b_weight.shape[1]
    output = absorb_nope(q_nope, kv_b_weight, q_rot.shape[-1])
    if cos is not None and sin is not None:
        q_rot = rope_reference(q_rot, cos.unsqueeze(-2), sin.unsqueeze(-2), interleaved)
    output[..., rank:].copy_(q_rot)
    return output


def absorb_nope(q_nope: torch.Tensor, kv_b_weight: torch.Tensor, num_free: int) -> torch.Tensor:
    """[..., H, L + num_free] with the product in the first L columns, the others not written."""
    *rows, num_heads, num_nope = q_nope.shape
    rank = kv_b_weight.shape[1]
    output = q_nope.new_empty((*rows, num_heads, rank + num_free))
    q_nope_HRN = q_nope.flatten(0, -3).transpose(0, 1)
    w_uk_HNL = kv_b_weight.unflatten(0, (num_heads, -1))[:, :num_nope]
    absorbed_HRL = output[..., :rank].flatten(0, -3).transpose(0, 1)
    torch.bmm(q_nope_HRN, w_uk_HNL, out=absorbed_HRL)
    return output


def project_values_reference(
    o: torch.Tensor, kv_b_weight: torch.Tensor, num_values: int
) -> torch.Tensor:
    """Return [..., H, V]: o W_UV^T of each head, contiguous; see `absorb_query_reference`."""
    *rows, num_heads, _ = o.shape
    output = o.new_empty((*rows, num_heads, num_values))
    o_HRL = o.flatten(0, -3).transpose(0, 1)
    w_uv_HVL = kv_b_weight.unflatten(0, (num_heads, -1))[:, -num_values:]
    torch.bmm(o_HRL, w_uv_HVL.transpose(1, 2), out=output.flatten(0, -3).transpose(0, 1))
    return output
