"""GLM-5.2's architecture at toy size, in plain torch, laid out for training.

Same parameters and same mathematics as transformers' `GlmMoeDsaForCausalLM` plus the MTP layer, but
with a differentiable indexer, a dense-attention mode, and no data-dependent control flow: every
expert sees every token and its output is weighted by the router (zero where it was not chosen).

Shape letters: B sequences, S positions, N = B * S, C hidden, Q q_lora_rank, H attention heads,
I indexer heads, D head dim, E experts, F expert width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_DRAFTS = 5
_LORA_NORM_EPS = 1e-6  # transformers builds q_a_layernorm and kv_a_layernorm with its default


@dataclass(frozen=True)
class TinyConfig:
    """Sizes, named as in `GlmMoeDsaConfig`. All widths of linears are multiples of 64."""

    vocab_size: int = 1024
    hidden_size: int = 192
    intermediate_size: int = 320
    moe_intermediate_size: int = 64
    num_hidden_layers: int = 10
    first_k_dense_replace: int = 3
    num_attention_heads: int = 4
    q_lora_rank: int = 64
    kv_lora_rank: int = 64
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 64
    v_head_dim: int = 96
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    routed_scaling_factor: float = 2.5
    rms_norm_eps: float = 1e-5
    rope_theta: float = 1e5
    index_n_heads: int = 16
    index_head_dim: int = 128
    index_topk: int = 64
    index_topk_freq: int = 4
    index_skip_topk_offset: int = 3

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def is_full(self, layer: int) -> bool:
        """Whether `layer` has an indexer of its own; the MTP layer follows the same formula."""
        return max(layer - self.index_skip_topk_offset + 1, 0) % self.index_topk_freq == 0

    def is_dense(self, layer: int) -> bool:
        return layer < self.first_k_dense_replace


@dataclass
class Selection:
    """How attention picks keys: `dense` (all), `sparse` (the indexer's top-k), `random` (k random).

    Attributes:
        align_sequences: number of leading sequences whose indexer scores are compared with the
            attention probabilities; 0 computes no alignment loss.
    """

    mode: str = "dense"
    align_sequences: int = 0
    alignment_losses: list[Tensor] = field(default_factory=list)
    captured_mass: list[Tensor] = field(default_factory=list)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


def rotary_tables(positions_S: Tensor, dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, float32 [S, dim / 2] each."""
    exponents = torch.arange(0, dim, 2, device=positions_S.device, dtype=torch.float32) / dim
    angles = positions_S[:, None].float() * (theta**-exponents)
    return angles.cos(), angles.sin()


def rotate_interleaved(x_BSHD: Tensor, cos_SP: Tensor, sin_SP: Tensor) -> Tensor:
    """Rotate the pairs (2i, 2i + 1); results are stored evens first, then odds."""
    even, odd = x_BSHD[..., 0::2], x_BSHD[..., 1::2]
    cos, sin = cos_SP[:, None, :].to(x_BSHD.dtype), sin_SP[:, None, :].to(x_BSHD.dtype)
    return torch.cat([even * cos - odd * sin, odd * cos + even * sin], dim=-1)


class Indexer(nn.Module):
    """DSA's indexer, with gradients."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config = config
        heads, dim = config.index_n_heads, config.index_head_dim
        self.wq_b = nn.Linear(config.q_lora_rank, heads * dim, bias=False)
        self.wk = nn.Linear(config.hidden_size, dim, bias=False)
        self.k_norm = nn.LayerNorm(dim, eps=1e-6)
        self.weights_proj = nn.Linear(config.hidden_size, heads, bias=False)

    def forward(self, x_BSC: Tensor, q_resid_BSQ: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Score every key for every query, float32 [B, S, S], not masked."""
        config = self.config
        rope = config.qk_rope_head_dim
        q = self.wq_b(q_resid_BSQ).unflatten(-1, (config.index_n_heads, config.index_head_dim))
        k = self.k_norm(self.wk(x_BSC)).to(q.dtype).unsqueeze(2)
        q = torch.cat([rotate_interleaved(q[..., :rope], cos, sin), q[..., rope:]], dim=-1)
        k = torch.cat([rotate_interleaved(k[..., :rope], cos, sin), k[..., rope:]], dim=-1)
        scale = (config.index_n_heads * config.index_head_dim) ** -0.5
        gates_BSI = self.weights_proj(x_BSC).float() * scale
        return weighted_relu_scores(q, k.squeeze(2), gates_BSI)


def weighted_relu_scores(q_BSID: Tensor, k_BSD: Tensor, gates_BSI: Tensor) -> Tensor:
    """sum_i gate[s, i] * relu(q[s, i] . k[t]), float32 [B, S, T]."""
    b, s, i, d = q_BSID.shape
    products = torch.bmm(q_BSID.reshape(b, s * i, d), k_BSD.transpose(1, 2)).view(b, s, i, -1)
    return (F.relu(products).float() * gates_BSI.unsqueeze(-1)).sum(dim=2)


class Attention(nn.Module):
    """Multi-head latent attention, expanded form."""

    def __init__(self, config: TinyConfig, is_full: bool) -> None:
        super().__init__()
        self.config = config
        c, heads = config.hidden_size, config.num_attention_heads
        self.q_a_proj = nn.Linear(c, config.q_lora_rank, bias=False)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, _LORA_NORM_EPS)
        self.q_b_proj = nn.Linear(config.q_lora_rank, heads * config.qk_head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(
            c, config.kv_lora_rank + config.qk_rope_head_dim, bias=False
        )
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, _LORA_NORM_EPS)
        self.kv_b_proj = nn.Linear(
            config.kv_lora_rank, heads * (config.qk_nope_head_dim + config.v_head_dim), bias=False
        )
        self.o_proj = nn.Linear(heads * config.v_head_dim, c, bias=False)
        self.indexer = Indexer(config) if is_full else None

    def queries(self, x_BSC: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return the query residual [B, S, Q] and the rotated queries [B, H, S, D]."""
        config = self.config
        q_resid = self.q_a_layernorm(self.q_a_proj(x_BSC))
        q = self.q_b_proj(q_resid).unflatten(-1, (config.num_attention_heads, config.qk_head_dim))
        nope, rope = q.split([config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1)
        q = torch.cat([nope, rotate_interleaved(rope, cos, sin)], dim=-1)
        return q_resid, q.transpose(1, 2)

    def keys_values(self, x_BSC: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values, both [B, H, S, D]."""
        config = self.config
        heads = config.num_attention_heads
        latent, rope = self.kv_a_proj_with_mqa(x_BSC).split(
            [config.kv_lora_rank, config.qk_rope_head_dim], dim=-1
        )
        rope = rotate_interleaved(rope.unsqueeze(2), cos, sin)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (heads, -1))
        k_nope, v = kv.split([config.qk_nope_head_dim, config.v_head_dim], dim=-1)
        k = torch.cat([k_nope, rope.expand(-1, -1, heads, -1).to(k_nope.dtype)], dim=-1)
        return k.transpose(1, 2), v.transpose(1, 2)


class MLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    """Sigmoid scores; the bias takes part in the choice only."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.n_routed_experts))
        self.register_buffer("load_E", torch.zeros(config.n_routed_experts), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the experts' weights for each token, float32 [..., E], zero where not chosen."""
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.float(), self.weight.float()).sigmoid()
        biased = scores.detach() + self.e_score_correction_bias
        chosen = torch.zeros_like(scores).scatter(
            -1, biased.topk(self.config.num_experts_per_tok, dim=-1).indices, 1.0
        )
        if self.training:
            self.load_E.add_(chosen.detach().flatten(0, -2).sum(0))
        weights = scores * chosen
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.config.routed_scaling_factor

    @torch.no_grad()
    def balance(self, step_size: float) -> None:
        """Move the bias of underloaded experts up and that of overloaded ones down."""
        load = self.load_E / self.load_E.sum().clamp_min(1.0)
        self.e_score_correction_bias += step_size * torch.sign(load.mean() - load)
        self.load_E.zero_()


class Experts(nn.Module):
    """All experts as one wide MLP, [E, F, C] up and [E, C, F] down."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        e, f, c = config.n_routed_experts, config.moe_intermediate_size, config.hidden_size
        self.gate_proj = nn.Parameter(torch.empty(e, f, c))
        self.up_proj = nn.Parameter(torch.empty(e, f, c))
        self.down_proj = nn.Parameter(torch.empty(e, c, f))

    def forward(self, x: Tensor, weights_E: Tensor) -> Tensor:
        e, f, c = self.gate_proj.shape
        hidden = F.silu(F.linear(x, self.gate_proj.view(e * f, c)))
        hidden = hidden * F.linear(x, self.up_proj.view(e * f, c))
        hidden = hidden.unflatten(-1, (e, f)) * weights_E.unsqueeze(-1).to(hidden.dtype)
        return F.linear(hidden.flatten(-2), self.down_proj.transpose(0, 1).reshape(c, e * f))


class MoE(nn.Module):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config)
        self.shared_experts = MLP(config.hidden_size, config.moe_intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, self.gate(x)) + self.shared_experts(x)


class DecoderLayer(nn.Module):
    def __init__(self, config: TinyConfig, layer: int) -> None:
        super().__init__()
        eps = config.rms_norm_eps
        self.self_attn = Attention(config, config.is_full(layer))
        if config.is_dense(layer):
            self.mlp: nn.Module = MLP(config.hidden_size, config.intermediate_size)
        else:
            self.mlp = MoE(config)
        self.input_layernorm = RMSNorm(config.hidden_size, eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps)
        self.dropout = 0.0

    def project(self, x_BSC: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """Everything before attention: normed input, query residual, queries, keys, values."""
        normed = self.input_layernorm(x_BSC)
        q_resid, q = self.self_attn.queries(normed, cos, sin)
        k, v = self.self_attn.keys_values(normed, cos, sin)
        return normed, q_resid, q, k, v

    def project_queries(self, x_BSC: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Queries [B, H, S, D] of a draft step, which brings no keys of its own."""
        return self.self_attn.queries(self.input_layernorm(x_BSC), cos, sin)[1]

    def finish(self, x_BSC: Tensor, attended_BHSD: Tensor) -> Tensor:
        """Everything after attention."""
        attended = self.self_attn.o_proj(attended_BHSD.transpose(1, 2).flatten(2))
        x = x_BSC + F.dropout(attended.float(), self.dropout, self.training)
        mixed = self.mlp(self.post_attention_layernorm(x))
        return x + F.dropout(mixed.float(), self.dropout, self.training)


def causal_mask(size: int, device: torch.device) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool, device=device).tril()


def selected_keys(scores_BST: Tensor, causal_ST: Tensor, k: int) -> Tensor:
    """The `k` best-scored visible keys of every row, as a bool mask [B, S, T]."""
    scores = scores_BST.masked_fill(~causal_ST, float("-inf"))
    indices = scores.topk(min(k, scores.shape[-1]), dim=-1, sorted=False).indices
    mask = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
    return mask.scatter_(-1, indices, True) & causal_ST


def as_bias(mask_BST: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive attention bias [B, 1, S, T] of a bool mask."""
    zero = torch.zeros((), dtype=dtype, device=mask_BST.device)
    return torch.where(mask_BST, zero, float("-inf")).unsqueeze(1)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """Attention [B, H, S, D]; without a bias it is causal."""
    if bias is not None:
        bias = bias.expand(-1, q.shape[1], -1, -1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=bias is None)


@torch.no_grad()
def attention_probabilities(q: Tensor, k: Tensor, causal_ST: Tensor) -> Tensor:
    """Dense attention probabilities averaged over heads, float32 [B, S, T]."""
    logits = (q @ k.transpose(2, 3)).float() * q.shape[-1] ** -0.5
    return logits.masked_fill(~causal_ST, float("-inf")).softmax(-1).mean(1)


class _IndexGroup:
    """A full layer with its shared followers: one selection, one alignment target."""

    def __init__(self, scores_BST: Tensor | None) -> None:
        self.scores_BST = scores_BST
        self.probabilities: list[Tensor] = []

    def close(self, selection: Selection, causal_ST: Tensor, k: int) -> None:
        """Add KL(attention || softmax(index scores)) and the mass inside the top `k`."""
        if self.scores_BST is None or not self.probabilities:
            return
        target = torch.stack(self.probabilities).mean(0)
        log_scores = self.scores_BST.masked_fill(~causal_ST, float("-inf")).log_softmax(-1)
        log_scores = log_scores.masked_fill(~causal_ST, 0.0)
        entropy = torch.special.entr(target).sum(-1)
        cross = -(target * log_scores).sum(-1)
        selection.alignment_losses.append((cross - entropy).mean())
        with torch.no_grad():
            inside = target * selected_keys(self.scores_BST, causal_ST, k)
            selection.captured_mass.append(inside[:, k * 2 :].sum(-1).mean())


class TinyGlm(nn.Module):
    """Trunk (layers 0..N-1), head, and the MTP layer N."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config = config
        c = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, c)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(c, config.rms_norm_eps)
        self.lm_head = nn.Linear(c, config.vocab_size, bias=False)
        self.mtp = MTPLayer(config)

    def rotary(self, length: int, start: int = 0) -> tuple[Tensor, Tensor]:
        device = self.lm_head.weight.device
        positions = torch.arange(start, start + length, device=device)
        return rotary_tables(positions, self.config.qk_rope_head_dim, self.config.rope_theta)

    def forward(self, tokens_BS: Tensor, selection: Selection) -> Tensor:
        """Run the trunk; returns the final-norm hidden states, float32 [B, S, C]."""
        config = self.config
        cos, sin = self.rotary(tokens_BS.shape[1])
        causal = causal_mask(tokens_BS.shape[1], tokens_BS.device)
        x = self.embed_tokens(tokens_BS)
        x = F.dropout(x, self.layers[0].dropout, self.training)
        bias, group = None, _IndexGroup(None)
        for layer in self.layers:
            normed, q_resid, q, k, v = layer.project(x, cos, sin)
            if layer.self_attn.indexer is not None:
                group.close(selection, causal, config.index_topk)
                bias, scores = select(
                    layer.self_attn.indexer, normed, q_resid, (cos, sin), causal, selection, q.dtype
                )
                group = _IndexGroup(scores)
            if selection.align_sequences:
                b = selection.align_sequences
                group.probabilities.append(attention_probabilities(q[:b], k[:b], causal))
            x = layer.finish(x, attend(q, k, v, bias))
        group.close(selection, causal, config.index_topk)
        return self.norm(x)

    def draft(self, tokens_BS: Tensor, hidden_BSC: Tensor, selection: Selection) -> list[Tensor]:
        """Teacher-forced drafts of every row, one [B, rows, V] of logits per step.

        `hidden_BSC` are the target's final-norm states of the first S tokens; `tokens_BS` has at
        least one token more. Row t of step j has read the tokens up to t + 1 + j and predicts
        token t + 2 + j; rows whose input token is not there are missing at the end.

        Step 0 joins embed(x[t + 1]) with h[t]; its keys, values and selection are recorded. Step j
        joins embed(x[t + 1 + j]) with the step before's normed output, rotates its query to
        position t + j and attends to what row t recorded; it adds no keys.
        """
        relayed, recorded, logits = hidden_BSC, None, []
        for step in range(NUM_DRAFTS):
            rows = min(hidden_BSC.shape[1], tokens_BS.shape[1] - 1 - step)
            if rows <= 0:
                break
            embedded = self.embed_tokens(tokens_BS[:, 1 + step : 1 + step + rows])
            x = self.mtp.join(embedded, relayed[:, :rows])
            rotary = self.rotary(rows, start=step)
            if recorded is None:
                recorded, attended = self.mtp.record(x, rotary, selection)
            else:
                attended = recorded.attend_rows(self.mtp.layer.project_queries(x, *rotary))
            relayed = self.mtp.norm(self.mtp.layer.finish(x, attended))
            logits.append(self.lm_head(relayed))
        return logits

    def draft_from_seed(
        self,
        tokens_BS: Tensor,
        hidden_BSC: Tensor,
        seed_B: Tensor,
        selection: Selection,
        pick: Callable[[Tensor], Tensor],
    ) -> None:
        """Draft from one row of each sequence, feeding back what `pick` chooses.

        `seed_B` is the row t whose token t + 1 is the newest one; `pick` gets each step's logits
        [B, V] and returns the tokens [B] that the next step reads.
        """
        rows = tokens_BS.shape[1] - 1
        batch = torch.arange(len(seed_B), device=seed_B.device)
        x = self.mtp.join(self.embed_tokens(tokens_BS[:, 1:]), hidden_BSC[:, :rows])
        recorded, attended = self.mtp.record(x, self.rotary(rows), selection)
        relayed = self.mtp.norm(self.mtp.layer.finish(x, attended))[batch, seed_B]
        seed = Recorded(recorded.k, recorded.v, recorded.bias[batch, :, seed_B].unsqueeze(2))
        chosen = pick(self.lm_head(relayed))
        for step in range(1, NUM_DRAFTS):
            x = self.mtp.join(self.embed_tokens(chosen), relayed)
            rotary = rotary_tables(
                seed_B + step, self.config.qk_rope_head_dim, self.config.rope_theta
            )
            # One row a sequence, each at its own position: the sequences stand in for positions.
            q = self.mtp.layer.project_queries(x.unsqueeze(0), *rotary).permute(2, 1, 0, 3)
            x = self.mtp.layer.finish(x.unsqueeze(1), seed.attend_rows(q))
            relayed = self.mtp.norm(x)[:, 0]
            chosen = pick(self.lm_head(relayed))


def select(
    indexer: Indexer,
    normed_BSC: Tensor,
    q_resid_BSQ: Tensor,
    rotary: tuple[Tensor, Tensor],
    causal_ST: Tensor,
    selection: Selection,
    dtype: torch.dtype,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the attention bias of this indexer's selection and the scores to be aligned.

    The indexer learns from its alignment loss alone: its inputs are detached.
    """
    normed, q_resid = normed_BSC.detach(), q_resid_BSQ.detach()
    topk = indexer.config.index_topk
    bias = scores = None
    if selection.mode == "sparse":
        with torch.no_grad():
            mask = selected_keys(indexer(normed, q_resid, *rotary), causal_ST, topk)
        bias = as_bias(mask, dtype)
    elif selection.mode == "random":
        noise = torch.rand(normed.shape[0], *causal_ST.shape, device=normed.device)
        bias = as_bias(selected_keys(noise, causal_ST, topk), dtype)
    if selection.align_sequences:
        b = selection.align_sequences
        scores = indexer(normed[:b], q_resid[:b], *rotary)
    return bias, scores


@dataclass
class Recorded:
    """Keys, values and selection of the MTP layer's first step."""

    k: Tensor
    v: Tensor
    bias: Tensor

    def attend_rows(self, q_BHSD: Tensor) -> Tensor:
        """Attend from the first S rows, each to what it recorded."""
        return attend(q_BHSD, self.k, self.v, self.bias[:, :, : q_BHSD.shape[2]])


class MTPLayer(nn.Module):
    """The next-token-prediction layer; embedding and head belong to the target."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        c, eps = config.hidden_size, config.rms_norm_eps
        self.topk = config.index_topk
        self.enorm = RMSNorm(c, eps)
        self.hnorm = RMSNorm(c, eps)
        self.eh_proj = nn.Linear(2 * c, c, bias=False)
        self.layer = DecoderLayer(config, config.num_hidden_layers)
        self.norm = RMSNorm(c, eps)

    def join(self, embedded_BSC: Tensor, hidden_BSC: Tensor) -> Tensor:
        joined = torch.cat([self.enorm(embedded_BSC), self.hnorm(hidden_BSC)], dim=-1)
        return self.eh_proj(joined).float()

    def record(
        self, x_BSC: Tensor, rotary: tuple[Tensor, Tensor], selection: Selection
    ) -> tuple[Recorded, Tensor]:
        """Run step 0's attention and keep what the later steps reuse."""
        causal = causal_mask(x_BSC.shape[1], x_BSC.device)
        normed, q_resid, q, k, v = self.layer.project(x_BSC, *rotary)
        indexer = self.layer.self_attn.indexer
        bias, scores = select(indexer, normed, q_resid, rotary, causal, selection, q.dtype)
        if selection.align_sequences:
            b = selection.align_sequences
            group = _IndexGroup(scores)
            group.probabilities.append(attention_probabilities(q[:b], k[:b], causal))
            group.close(selection, causal, self.topk)
        if bias is None:
            bias = as_bias(causal.expand(x_BSC.shape[0], -1, -1), q.dtype)
        recorded = Recorded(k, v, bias)
        return recorded, recorded.attend_rows(q)


@torch.no_grad()
def initialize(model: TinyGlm, seed: int) -> None:
    """Draw all matrices anew; wider than the usual 0.02, which is too small at this width."""
    generator = torch.Generator().manual_seed(seed)
    depth_scale = (2 * model.config.num_hidden_layers) ** -0.5
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            continue
        if name == "embed_tokens.weight":
            std = 0.3
        else:
            std = (1.0 if ".indexer." in name else 0.5) / math.sqrt(parameter.shape[-1])
            if name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj")):
                std *= depth_scale
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def set_dropout(model: TinyGlm, probability: float) -> None:
    """Set the dropout on embeddings and residual branches."""
    for module in model.modules():
        if isinstance(module, DecoderLayer):
            module.dropout = probability


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
