"""Attention over latents as transformers writes it, small, with a seam at each step.

The attention call is `glm.indexed_attention` already, as the Dynamo stage leaves it. The numbers of
heads and of cached tokens are primes that divide nothing else, so that a tensor that holds both is
told by its number of elements.

Shape legend: B batch, S query tokens, T cached tokens, H heads, N nope dim, P rope dim,
V value dim, L rank of the latents, K selected tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

import glm_compile.ops  # noqa: F401
from tests.fx_passes.tiny_indexer import trace

H, N, P, V, L, K, T = 5, 16, 8, 24, 32, 7, 37
SCALE, EPS = 0.3, 1e-3


class TinyAttention:
    """GlmMoeDsaAttention.forward from the projections to the input of o_proj; subclasses change
    one step.
    """

    eager = False

    def linear(self, latents: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(latents, weight)

    def heads(self, expanded: torch.Tensor) -> torch.Tensor:
        shape = (expanded.shape[0], expanded.shape[2], H, -1)
        return expanded.view(shape).transpose(1, 2)

    def split(self, expanded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k_nope, values = expanded.split([N, V], dim=-1)
        return k_nope, values

    def repeat(self, k_rot: torch.Tensor) -> torch.Tensor:
        return k_rot.expand(-1, H, -1, -1)

    def join(self, k_nope: torch.Tensor, k_rot: torch.Tensor) -> torch.Tensor:
        # As functionalization leaves two copies into an empty tensor.
        copy = torch.ops.aten.copy.default
        keys = k_nope.new_empty((*k_nope.shape[:-1], N + P))
        keys = keys.slice_scatter(copy(keys[..., :N], k_nope), -1, 0, N)
        return keys.slice_scatter(copy(keys[..., N:], k_rot), -1, N)

    def expand(
        self, latents: torch.Tensor, k_rot: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k_nope, values = self.split(self.heads(self.linear(latents, weight)))
        return self.join(k_nope, self.repeat(k_rot)), values

    def norm(self, latents: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = latents.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
        return weight * x.to(latents.dtype)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        cos, sin = cos[..., : P // 2].unsqueeze(1), sin[..., : P // 2].unsqueeze(1)
        x1, x2 = x[..., 0::2], x[..., 1::2]
        return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1)

    def latents(
        self, new: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A step's latents and rotated keys [B, 1, S, *] from kv_a's output."""
        latents, k_rot = torch.split(new, [L, P], dim=-1)
        latents = self.norm(latents, weight).view(new.shape[0], 1, new.shape[1], L)
        return latents, self.rotate(k_rot.view(new.shape[0], 1, new.shape[1], P), cos, sin)

    def query(self, q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q_nope, q_rot = q.view(*q.shape[:2], H, N + P).transpose(1, 2).split([N, P], dim=-1)
        return torch.cat([q_nope, self.rotate(q_rot, cos, sin)], dim=-1)

    def attend(self, q: Any, k: Any, v: Any, selection: Any, bounds: list[Any]) -> torch.Tensor:
        return torch.ops.glm.indexed_attention(q, k, v, selection, *bounds, SCALE, self.eager)

    def forward(
        self,
        q: torch.Tensor,
        latents: torch.Tensor,
        k_rot: torch.Tensor,
        weight: torch.Tensor,
        selection: torch.Tensor,
        bounds: list[Any],
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        k, v = self.expand(latents, k_rot, weight)
        attended = self.attend(self.query(q, cos, sin), k, v, selection, bounds)
        return attended.transpose(1, 2).contiguous().reshape(*q.shape[:2], -1).contiguous()


@dataclass
class Inputs:
    """One step of S tokens at the end of a cache of T; `new` is kv_a's output."""

    q: torch.Tensor
    new: torch.Tensor
    norm_weight: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    weight: torch.Tensor
    selection: torch.Tensor
    cache: list[torch.Tensor]
    bounds: list[torch.Tensor | None] = field(default_factory=lambda: [None] * 3)

    def to(self, dtype: torch.dtype) -> Inputs:
        """The same in another dtype."""

        def cast(tensor: Any) -> Any:
            is_float = tensor is not None and tensor.is_floating_point()
            return tensor.to(dtype) if is_float else tensor

        return Inputs(*map(cast, self.step()), [cast(tensor) for tensor in self.cache], self.bounds)

    def step(self) -> tuple[torch.Tensor, ...]:
        """What is no part of the cache and no bound."""
        new = (self.new, self.norm_weight, self.cos, self.sin)
        return (self.q, *new, self.weight, self.selection)


def make_inputs(
    cache: str = "static", batch: int = 2, tokens: int = 6, dtype: torch.dtype = torch.float32
) -> Inputs:
    """Random inputs; the selection is what an indexer makes: ascending, short rows end in -1."""
    num_keys = tokens if cache == "none" else T
    selection = torch.full((batch, tokens, K), -1, dtype=torch.int32)
    for b in range(batch):
        for s in range(tokens):
            seen = num_keys - tokens + s + 1
            count = min(K, seen, 1 + (b * tokens + s) % (K + 1))
            selection[b, s, :count] = torch.randperm(seen)[:count].sort().values.int()
    selection[-1, 0] = -1  # a row without any key
    made: list[torch.Tensor] = []
    past = num_keys - tokens
    if cache == "static":
        made = [torch.randn(batch, 1, T, L), torch.randn(batch, 1, T, P), torch.tensor(past)]
    elif cache == "dynamic":
        made = [torch.randn(batch, 1, past, L), torch.randn(batch, 1, past, P)]
    elif cache == "paged":
        table = torch.randperm(batch + 1)[:batch].int()[:, None]
        lengths = torch.full((batch,), past, dtype=torch.int32)
        made = [torch.randn(batch + 1, 64, L + P), table, lengths]
    # One row of positions for all sequences, as without padding.
    angles = torch.randn(1, tokens, P // 2).repeat(1, 1, 2)
    return Inputs(
        torch.randn(batch, tokens, H * (N + P)),
        torch.randn(batch, tokens, L + P),
        torch.rand(L) + 0.5,
        angles.cos(),
        angles.sin(),
        torch.randn(H * (N + V), L) * L**-0.5,
        selection,
        made,
    ).to(dtype)


def store(
    cache: str, new: torch.Tensor, new_rot: torch.Tensor, made: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write a step's rows into a cache and read all of it, as its transformers class does."""
    if cache == "static":
        latents, ropes, past = made
        where = torch.arange(new.shape[2]) + past
        return latents.index_copy(2, where, new), ropes.index_copy(2, where, new_rot)
    if cache == "dynamic":
        return torch.cat([made[0], new], dim=-2), torch.cat([made[1], new_rot], dim=-2)
    if cache == "paged":
        pages, table, lengths = made
        rows = torch.cat([new, new_rot], dim=-1).squeeze(1)
        torch.ops.glm.paged_write(pages, rows, table, lengths)
        gathered = torch.ops.glm.paged_gather(pages, table, T).unsqueeze(1)
        return gathered[..., :L], gathered[..., L:]
    return new, new_rot


def attention_step(
    module: TinyAttention,
    inputs: Inputs,
    cache: str = "static",
    select: Callable[[torch.Tensor], torch.Tensor] = lambda selection: selection,
) -> tuple[Callable[..., torch.Tensor], list[torch.Tensor]]:
    """(function of a step, its arguments); it writes a paged cache in place."""
    given = [bound for bound in inputs.bounds if bound is not None]

    def run(
        q: torch.Tensor,
        new: torch.Tensor,
        norm_weight: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        weight: torch.Tensor,
        selection: torch.Tensor,
        *rest: torch.Tensor,
    ) -> torch.Tensor:
        made, bounds = list(rest[: len(inputs.cache)]), iter(rest[len(inputs.cache) :])
        latents, ropes = store(cache, *module.latents(new, norm_weight, cos, sin), made)
        filled = [None if bound is None else next(bounds) for bound in inputs.bounds]
        return module.forward(q, latents, ropes, weight, select(selection), filled, cos, sin)

    return run, [*inputs.step(), *inputs.cache, *given]


def trace_attention(
    module: TinyAttention,
    inputs: Inputs,
    cache: str = "static",
    *,
    level: str = "plain",
    symbolic: bool = False,
    select: Callable[[torch.Tensor], torch.Tensor] = lambda selection: selection,
) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """(graph, its inputs). The graph writes a paged cache in place, as it is."""
    run, flat = attention_step(module, inputs, cache, select)
    return trace(run, *flat, level=level, symbolic=symbolic), flat
