"""Routed experts in plain torch.

Shape legend: M tokens, K experts of a token (8 in the release), P = M * K pairs of a token and an
expert, E experts, C hidden size, I intermediate size of an expert.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from glm_compile.ops._swiglu import swiglu_reference

# Pairs that are multiplied by one copy of an expert's weights, where torch has no grouped product.
_BLOCK = 16
# Copies of weights that are alive at a time.
_CHUNK = 16


def moe_experts_reference(
    x_MC: torch.Tensor,
    weights_MK: torch.Tensor,
    ids_MK: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """Each pair by itself in x's dtype, weighted and summed over a token's experts in fp32.

    On the CPU the experts that were chosen are read from the ids; on other devices nothing waits
    for the host.
    """
    ids_P = ids_MK.reshape(-1)
    num_top = ids_MK.shape[1]
    if x_MC.device.type == "cpu":
        expert_PC = _by_expert(x_MC, ids_P, num_top, gate_up, down)
    else:
        expert_PC = _by_blocks(x_MC, ids_P, num_top, gate_up, down)
    return sum_experts(expert_PC, weights_MK, ids_MK, gate_up.shape[0], x_MC.dtype)


def sum_experts(
    expert_PC: torch.Tensor,
    weights_MK: torch.Tensor,
    ids_MK: torch.Tensor,
    num_experts: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Weighted sum of each token's pairs, accumulated in fp32 at least.

    A pair of no expert counts nothing, whatever its weight: 0 * NaN would be NaN.
    """
    weights_MK = weights_MK.masked_fill((ids_MK < 0) | (ids_MK >= num_experts), 0.0)
    wide = torch.promote_types(torch.promote_types(dtype, weights_MK.dtype), torch.float32)
    weighted = expert_PC.to(wide) * weights_MK.reshape(-1, 1).to(wide)
    return weighted.view(*weights_MK.shape, expert_PC.shape[1]).sum(1).to(dtype)


def _by_expert(
    x_MC: torch.Tensor,
    ids_P: torch.Tensor,
    num_top: int,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    expert_PC = x_MC.new_zeros((ids_P.shape[0], down.shape[1]))
    for expert in ids_P.unique().tolist():
        if 0 <= expert < gate_up.shape[0]:
            pairs = (ids_P == expert).nonzero()[:, 0]
            hidden = swiglu_reference(F.linear(x_MC[pairs // num_top], gate_up[expert]))
            expert_PC[pairs] = F.linear(hidden, down[expert])
    return expert_PC


def _by_blocks(
    x_MC: torch.Tensor,
    ids_P: torch.Tensor,
    num_top: int,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """Pairs of one expert in blocks, with copies of its weights; how many is bounded by shapes."""
    num_experts, num_pairs = gate_up.shape[0], ids_P.shape[0]
    num_hidden = down.shape[1]
    _, order_P, starts_E, counts_E = sort_pairs(ids_P, num_experts)
    blocks_E = (counts_E + _BLOCK - 1) // _BLOCK
    ends_E = blocks_E.cumsum(0)
    num_blocks = min(num_pairs, num_pairs // _BLOCK + num_experts)
    block = torch.arange(num_blocks, device=ids_P.device)
    expert = torch.searchsorted(ends_E, block, right=True).clamp_max(num_experts - 1)
    first = (block - (ends_E - blocks_E)[expert]) * _BLOCK
    inside = first[:, None] + torch.arange(_BLOCK, device=ids_P.device)
    is_pair = (inside >= 0) & (inside < counts_E[expert][:, None])
    place = (starts_E[expert][:, None] + inside).clamp(0, max(num_pairs - 1, 0))
    # Whatever is no pair goes to a row behind the last.
    pair = torch.where(is_pair, order_P[place], num_pairs)
    expert_PC = x_MC.new_zeros((num_pairs + 1, num_hidden))
    for chunk in range(0, num_blocks, _CHUNK):
        some = slice(chunk, chunk + _CHUNK)
        token = pair[some].clamp_max(num_pairs - 1) // num_top
        hidden = swiglu_reference(x_MC[token] @ gate_up[expert[some]].transpose(1, 2))
        product = hidden @ down[expert[some]].transpose(1, 2)
        expert_PC[pair[some].reshape(-1)] = product.reshape(-1, num_hidden)
    return expert_PC[:num_pairs]


def sort_pairs(
    ids_P: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(sorted ids, their pairs, first place and number of pairs of each expert).

    Ids of no expert come last, as `num_experts`, and are counted nowhere.
    """
    is_expert = (ids_P >= 0) & (ids_P < num_experts)
    sorted_P, order_P = torch.where(is_expert, ids_P, num_experts).sort(stable=True)
    experts = torch.arange(num_experts, device=ids_P.device, dtype=sorted_P.dtype)
    starts_E = torch.searchsorted(sorted_P, experts)
    counts_E = torch.searchsorted(sorted_P, experts, right=True) - starts_E
    return sorted_P, order_P, starts_E, counts_E


def grouped_products(
    x_MC: torch.Tensor, ids_MK: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (products [P, C] sorted by expert, place of each pair among them).

    By torch's grouped product. Rows of no expert come last and hold anything.
    """
    num_experts = gate_up.shape[0]
    _, order_P, starts_E, counts_E = sort_pairs(ids_MK.reshape(-1), num_experts)
    ends_E = (starts_E + counts_E).to(torch.int32)
    rows_PC = x_MC[order_P // ids_MK.shape[1]]
    hidden_PI = swiglu_reference(F.grouped_mm(rows_PC, gate_up.transpose(1, 2), offs=ends_E))
    products_PC = F.grouped_mm(hidden_PI, down.transpose(1, 2), offs=ends_E)
    places_P = torch.empty_like(order_P)
    places_P[order_P] = torch.arange(order_P.shape[0], device=order_P.device)
    return products_PC, places_P


def moe_experts_grouped(
    x_MC: torch.Tensor,
    weights_MK: torch.Tensor,
    ids_MK: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """The same through torch's grouped product, as transformers computes it."""
    products_PC, places_P = grouped_products(x_MC, ids_MK, gate_up, down)
    is_expert = (ids_MK >= 0) & (ids_MK < gate_up.shape[0])
    expert_PC = products_PC[places_P].masked_fill(~is_expert.reshape(-1, 1), 0.0)
    return sum_experts(expert_PC, weights_MK, ids_MK, gate_up.shape[0], x_MC.dtype)
