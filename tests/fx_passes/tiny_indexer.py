"""An indexer as transformers writes it, small, with a seam at each step for near misses.

The selection is `glm.masked_topk` already, as the Dynamo stage leaves it. Weights are inputs of the
traced function, as AOTAutograd makes them.

Shape legend: B batch, S query tokens, T cached tokens, H index heads, D index head dim, P rope dim,
C hidden, Q width of q_resid.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

import glm_compile.ops  # noqa: F401
from tests.fx_passes.aten_graphs import decompositions

C, Q, H, D, P, TOPK = 48, 24, 16, 32, 16, 5


class TinyIndexer(nn.Module):
    """GlmMoeDsaIndexer.forward in steps; subclasses change one."""

    softmax_scale = D**-0.5
    gate_scale = H**-0.5
    norm_eps = 1e-6

    def __init__(self, dtype: torch.dtype = torch.float32, **dtypes: torch.dtype) -> None:
        super().__init__()
        self.wq_b = nn.Linear(Q, H * D, bias=False, dtype=dtype)
        self.wk = nn.Linear(C, D, bias=False, dtype=dtype)
        self.k_norm = nn.LayerNorm(D, eps=self.norm_eps, dtype=dtypes.get("norm", dtype))
        self.weights_proj = nn.Linear(C, H, bias=False, dtype=dtypes.get("gates", dtype))
        self.requires_grad_(False)
        for parameter in self.parameters():
            parameter.normal_(0.0, 0.3)

    def project_q(self, q_resid: torch.Tensor) -> torch.Tensor:
        return self.wq_b(q_resid).view(*q_resid.shape[:2], H, D)

    def project_k(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.k_norm(self.wk(hidden)).unsqueeze(2)

    def rotate_one(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        cos = cos[..., : P // 2].unsqueeze(2)
        sin = sin[..., : P // 2].unsqueeze(2)
        x1, x2 = x[..., 0::2], x[..., 1::2]
        return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1)

    def rotate(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q_rot, q_pass = torch.split(q, [P, D - P], dim=-1)
        k_rot, k_pass = torch.split(k, [P, D - P], dim=-1)
        q = torch.cat([self.rotate_one(q_rot, cos, sin), q_pass], dim=-1)
        k = torch.cat([self.rotate_one(k_rot, cos, sin), k_pass], dim=-1).squeeze(2)
        return q, k

    def products(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        scores = torch.matmul(q.float(), k.transpose(-1, -2).float().unsqueeze(1))
        return F.relu(scores * self.softmax_scale)

    def head_weights(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden.to(self.weights_proj.weight.dtype)
        return self.weights_proj(hidden).float() * self.gate_scale

    def combine(self, weights: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.matmul(weights.unsqueeze(-2), scores).squeeze(-2)

    def starts(self, lengths: torch.Tensor) -> torch.Tensor | None:
        return None

    def forward(
        self,
        hidden: torch.Tensor,
        q_resid: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        lengths: torch.Tensor,
        store: Callable[[torch.Tensor], torch.Tensor] = lambda k: k,
        key_mask: torch.Tensor | None = None,
    ) -> Any:
        q, k = self.rotate(self.project_q(q_resid), self.project_k(hidden), cos, sin)
        k = store(k)
        scores = self.products(q, k)
        scores = self.combine(self.head_weights(hidden), scores)
        width = min(TOPK, k.shape[1])
        starts = self.starts(lengths)
        selected = torch.ops.glm.masked_topk(scores, lengths, starts, key_mask, width)
        return self.finish(selected, k, scores)

    def finish(self, selected: torch.Tensor, k: torch.Tensor, scores: torch.Tensor) -> Any:
        return selected, k


@dataclass
class Inputs:
    """Inputs of one step of S tokens after `past` cached ones."""

    hidden: torch.Tensor
    q_resid: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    lengths: torch.Tensor

    def args(self) -> tuple[torch.Tensor, ...]:
        return self.hidden, self.q_resid, self.cos, self.sin, self.lengths


def make_inputs(
    batch: int = 2, tokens: int = 6, past: int = 9, dtype: torch.dtype = torch.float32
) -> Inputs:
    """Random inputs, causal lengths, cos and sin of one row for the batch."""
    angles = torch.rand(1, tokens, P // 2) * 6
    angles = torch.cat([angles, angles], dim=-1)
    lengths = past + 1 + torch.arange(tokens, dtype=torch.int32).expand(batch, tokens)
    return Inputs(
        torch.randn(batch, tokens, C, dtype=dtype),
        torch.randn(batch, tokens, Q, dtype=dtype),
        angles.cos().to(dtype),
        angles.sin().to(dtype),
        lengths.contiguous(),
    )


def trace(fn: Callable, *args: Any, level: str = "plain", symbolic: bool = False) -> fx.GraphModule:
    """The functional ATen graph of `fn`, with fake values."""
    gm = make_fx(
        fn,
        decomposition_table=decompositions(level),
        tracing_mode="symbolic" if symbolic else "fake",
    )(*args)
    gm.graph.eliminate_dead_code()
    return gm


def trace_indexer(
    module: TinyIndexer,
    inputs: Inputs,
    *,
    level: str = "plain",
    symbolic: bool = False,
    cache: torch.Tensor | None = None,
    dynamic_cache: bool = False,
    key_mask: torch.Tensor | None = None,
    **options: Any,
) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """(graph, its inputs): the weights, then the inputs, then the cache.

    Args:
        cache: [B, past, D] earlier keys; stored behind by index_copy (its last S rows are free) or,
            with `dynamic_cache`, by cat.
    """
    names = list(dict(module.named_parameters()))
    values = [p.detach() for p in module.parameters()]
    extra = [t for t in (cache, key_mask) if t is not None]
    num_tokens = inputs.hidden.shape[1]

    def run(*flat: torch.Tensor) -> Any:
        weights = dict(zip(names, flat))
        rest = flat[len(names) :]
        store = lambda k: k  # noqa: E731
        if cache is not None:
            keys = rest[5]
            if dynamic_cache:
                store = lambda k: torch.cat([keys, k], dim=1)  # noqa: E731
            else:
                where = torch.arange(keys.shape[1] - num_tokens, keys.shape[1])
                store = lambda k: keys.index_copy(1, where, k)  # noqa: E731
        mask = None if key_mask is None else rest[-1]
        return functional_call(module, weights, (*rest[:5], store, mask), options)

    flat = [*values, *inputs.args(), *extra]
    return trace(run, *flat, level=level, symbolic=symbolic), flat
