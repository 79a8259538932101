"""The MTP layer: one decoder layer behind the model that predicts one token further.

transformers ignores it on load and has no class for it. It is built here from transformers' own
decoder layer, so that a compiled MTP step is rewritten by the same passes as the model.

    hidden' = shared_head.norm(layer(eh_proj(cat(enorm(embed(token t+1)), hnorm(hidden t)))))

`hidden t` is the model's last hidden state (after its final norm) in `extend`, and the hidden state
that the previous draft step returned in `draft`. The cache row at position t comes from token t+1.

With IndexShare (`index_share_for_mtp_iteration`) the layer's indexer runs in `extend` only; later
draft steps take the selection of the last accepted row: they write nothing and attend to the
latents of the selected positions, which `gather_seed` reads once for all of them. Without it each
draft step is an `extend` of one token, for which the caller advances the cache.

Shape letters: B batch, S query tokens, C hidden, K selected tokens, T cached tokens, V vocab.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as modeling

from glm_compile.arguments import describe
from glm_compile.cache import DraftSeed, PagedCache, SeedCache
from glm_compile.errors import CheckpointError, UnsupportedError
from glm_compile.model_facts import FULL, SHARED, GlmDsaConfig, cache_argument, mask_dtype
from glm_compile.ops.mtp_input import mtp_input

if TYPE_CHECKING:
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM


# Tensors that a checkpoint may carry and that are the model's own when it does not.
_EMBEDDING = "embed_tokens.weight"
_HEAD = "shared_head.head.weight"

_GATE_UP = "mlp.experts.gate_up_proj"
_DOWN = "mlp.experts.down_proj"


class SharedHead(nn.Module):
    """Final norm of the MTP layer, and its output projection if it has one of its own."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.head: nn.Linear | None = None


class GlmMoeDsaMtp(nn.Module):
    """MTP layer that shares the embedding, the output projection and the rotary table of `model`.

    Its own parameters have the checkpoint's names without `model.layers.N.`, except that those of
    the decoder layer are below `layer.`. Its index in a cache is `config.num_hidden_layers`.

    Args:
        model: an unmodified GlmMoeDsaForCausalLM. Parameters are made with its dtype and device.
        device: where to make the parameters instead (`meta` to load them later).
    """

    _model: GlmMoeDsaForCausalLM
    _draft_layer: modeling.GlmMoeDsaDecoderLayer

    def __init__(self, model: GlmMoeDsaForCausalLM, *, device: torch.device | None = None) -> None:
        super().__init__()
        model = getattr(model, "_orig_mod", model)  # a compiled model's own
        if not hasattr(model, "lm_head") or not hasattr(model, "config"):
            raise ValueError(
                f"GlmMoeDsaMtp: model must be a GlmMoeDsaForCausalLM, got {describe(model)}"
            )
        facts = GlmDsaConfig.from_transformers(model.config)
        if facts.num_mtp_layers > 1:
            raise UnsupportedError(
                f"the config declares {facts.num_mtp_layers} MTP layers "
                "(num_nextn_predict_layers); one layer that is applied repeatedly is supported"
            )
        self.is_index_shared = facts.is_mtp_index_shared
        self.layer_idx = facts.num_hidden_layers
        self.vocab_size: int = model.config.vocab_size
        self._cache_argument = cache_argument()
        # Not a submodule: its parameters are the model's, to be moved and saved there.
        self.__dict__["_model"] = model
        final_norm = model.model.norm.weight
        size, eps = model.config.hidden_size, model.config.rms_norm_eps
        with _making(final_norm.dtype, device or final_norm.device):
            self.enorm = modeling.GlmMoeDsaRMSNorm(size, eps)
            self.hnorm = modeling.GlmMoeDsaRMSNorm(size, eps)
            self.eh_proj = nn.Linear(2 * size, size, bias=False)
            self.layer = modeling.GlmMoeDsaDecoderLayer(
                layer_config(model.config, FULL), self.layer_idx
            )
            self.shared_head = SharedHead(modeling.GlmMoeDsaRMSNorm(size, eps))
        self.embed_tokens: nn.Embedding | None = None
        _follow_dtypes(self.layer, model)
        with _making(final_norm.dtype, torch.device("meta")):
            draft_layer = modeling.GlmMoeDsaDecoderLayer(
                layer_config(model.config, SHARED), self.layer_idx
            )
        _share_modules(draft_layer, self.layer)
        # Nor this: each of its parameters is already counted as one of `layer`.
        self.__dict__["_draft_layer"] = draft_layer.eval()
        self.eval().requires_grad_(False)

    def extend(
        self,
        input_ids_BS: torch.Tensor,
        hidden_BSC: torch.Tensor,
        position_ids_BS: torch.Tensor,
        attention_mask: torch.Tensor | None,
        cache: PagedCache,
        *,
        row_B: torch.Tensor | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layer on S tokens: write its cache rows at `cache.lengths`, select keys, predict.

        Args:
            input_ids_BS: token t+1 for each position t.
            hidden_BSC: the model's last hidden state at each position t.
            position_ids_BS: t.
            attention_mask: [B,1,S,T] as `cache.causal_mask` makes it; None makes it.
            cache: made with `num_mtp_layers`; its lengths are not advanced here, and must not have
                been advanced past these tokens.
            row_B: the only row of each sequence whose prediction is asked for; None: all are. The
                cache and the selection get all rows all the same, but no other meets experts.
            position_embeddings: of `embed_positions`; None makes them.

        Returns:
            Hidden states after `shared_head.norm` [B,S,C], or with `row_B` [B,1,C], and the
            selected positions int32 [B,S,K].
        """
        if not isinstance(cache, PagedCache):
            raise ValueError(
                "GlmMoeDsaMtp: cache must be a PagedCache made with num_mtp_layers=1, got "
                f"{describe(cache)}"
            )
        cache.begin_mtp_step()
        if attention_mask is None:
            attention_mask = cache.causal_mask(input_ids_BS.shape[1], self._mask_dtype(hidden_BSC))
        return self._step(
            self.layer,
            self._join(input_ids_BS, hidden_BSC),
            position_ids_BS,
            position_embeddings,
            attention_mask,
            cache,
            None,
            row_B,
        )

    def embed_positions(
        self, position_ids_BS: torch.Tensor, like: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [B,S,P] of the rotary embedding, in the dtype of `like`."""
        return self._model.model.rotary_emb(like, position_ids=position_ids_BS)

    def gather_seed(
        self,
        topk_BSK: torch.Tensor,
        cache: PagedCache,
        lengths_B: torch.Tensor | None = None,
        row_B: torch.Tensor | None = None,
    ) -> DraftSeed:
        """Read the latents that the draft steps behind an `extend` attend to.

        Args:
            topk_BSK: selections; that of the last accepted row counts. Entries outside [0, length),
                such as -1, and those equal to the one before are ignored.
            cache: the one that `extend` wrote.
            lengths_B: accepted tokens that it holds; None = its lengths, which cover them already.
            row_B: the last accepted row, where the lengths end before the block; None: the first.
        """
        return cache.gather_rows(self.layer_idx, topk_BSK, lengths_B, row_B)

    def draft(
        self,
        input_ids_B1: torch.Tensor,
        hidden_B1C: torch.Tensor,
        position_ids_B1: torch.Tensor,
        seed: DraftSeed,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Run one IndexShare draft step: nothing is written, the seed's latents are attended.

        Args:
            input_ids_B1: the previously drafted token.
            hidden_B1C: what `extend` or `draft` returned for it.
            position_ids_B1: position of the rotary embedding of this step.
            seed: of `gather_seed`.
            position_embeddings: of `embed_positions`; None makes them.

        Returns:
            Hidden states after `shared_head.norm` [B,1,C].
        """
        cache = SeedCache(seed, self._model.config.kv_lora_rank)
        hidden, _ = self._step(
            self._draft_layer,
            self._join(input_ids_B1, hidden_B1C),
            position_ids_B1,
            position_embeddings,
            cache.mask(self._mask_dtype(hidden_B1C)),
            cache,
            cache.selection(),
        )
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] of hidden states that `extend` or `draft` returned."""
        head = self.shared_head.head
        return (self._model.lm_head if head is None else head)(hidden)

    def forward(
        self,
        input_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        cache: PagedCache,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same as `extend`."""
        return self.extend(input_ids, hidden_states, position_ids, attention_mask, cache)

    def _step(
        self,
        layer: modeling.GlmMoeDsaDecoderLayer,
        joined: torch.Tensor,
        position_ids: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None,
        attention_mask: torch.Tensor,
        cache: PagedCache | SeedCache,
        topk: torch.Tensor | None,
        row_B: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.eh_proj(joined)
        if position_embeddings is None:
            position_embeddings = self.embed_positions(position_ids, hidden)
        arguments = {
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "position_embeddings": position_embeddings,
            "prev_topk_indices": topk,
            self._cache_argument: cache,
        }
        if row_B is not None and _is_untouched(layer, modeling.GlmMoeDsaDecoderLayer):
            # The layer's own forward, with one row left behind its attention.
            normed = layer.input_layernorm(hidden)
            attended, _, topk = layer.self_attn(hidden_states=normed, **arguments)
            hidden = select_row(hidden + attended, row_B)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        else:
            hidden, topk = layer(hidden, **arguments)
            if row_B is not None:
                hidden = select_row(hidden, row_B)
        return self.shared_head.norm(hidden), topk

    def _join(self, ids_BS: torch.Tensor, hidden_BSC: torch.Tensor) -> torch.Tensor:
        """What `eh_proj` reads [B,S,2C]: one op, unless a module is not what it was made as."""
        embedding = (
            self._model.model.embed_tokens if self.embed_tokens is None else self.embed_tokens
        )
        enorm, hnorm = self.enorm, self.hnorm
        is_untouched = _is_untouched(embedding, nn.Embedding) and all(
            _is_untouched(norm, modeling.GlmMoeDsaRMSNorm) for norm in (enorm, hnorm)
        )
        if (
            is_untouched
            and embedding.max_norm is None
            and enorm.variance_epsilon == hnorm.variance_epsilon
            and {module.weight.dtype for module in (embedding, enorm, hnorm)} == {hidden_BSC.dtype}
        ):
            return mtp_input(
                ids_BS,
                hidden_BSC,
                embedding.weight,
                enorm.weight,
                hnorm.weight,
                eps=enorm.variance_epsilon,
            )
        return torch.cat((enorm(embedding(ids_BS)), hnorm(hidden_BSC)), dim=-1)

    def _mask_dtype(self, hidden: torch.Tensor) -> torch.dtype:
        return mask_dtype(self.layer.self_attn.config, hidden.dtype)

    def find_faults(
        self, shapes: Mapping[str, Sequence[int]], *, unknown: Collection[str] = ()
    ) -> list[str]:
        """What is wrong with a checkpoint of these names and shapes; empty if nothing is.

        Args:
            shapes: by name without `model.layers.N.`.
            unknown: names that exist and whose shapes cannot be read.
        """
        expected = self._expected_shapes([*shapes, *unknown])
        size = self._model.config.vocab_size, self._model.config.hidden_size
        allowed = expected | {_EMBEDDING: size, _HEAD: size}
        faults = [
            f"missing tensor {name}"
            for name in expected
            if name not in shapes and name not in unknown
        ]
        for name, shape in shapes.items():
            if name not in allowed:
                faults.append(f"unexpected tensor {name}")
            elif tuple(shape) != allowed[name]:
                faults.append(
                    f"tensor {name} has shape {list(shape)}, "
                    f"the config makes it {list(allowed[name])}"
                )
        return faults

    def load_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy a checkpoint's tensors, named without `model.layers.N.`, into the layer, strictly.

        Experts may come one by one, as the release has them, or merged.

        Raises:
            CheckpointError: missing, unexpected or misshapen tensors, all of them listed.
        """
        if faults := self.find_faults({name: tensor.shape for name, tensor in tensors.items()}):
            raise CheckpointError("MTP layer: " + "; ".join(faults))
        self.copy_tensors(tensors)

    def copy_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy tensors that `find_faults` has passed, one at a time; `tensors` may load on access.

        Parameters still on `meta` are made on the model's device first. An embedding or output
        projection of the layer's own is kept only if its values are not the model's.
        """
        if self.enorm.weight.is_meta:
            self.to_empty(device=self._model.model.norm.weight.device)
        own = dict(self.named_parameters()) | dict(self.named_buffers())
        with torch.no_grad():
            for name in self._expected_shapes(tensors):
                _own_memory(own, name).copy_(tensors[name])
            self._adopt(tensors)

    def _adopt(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Keep an own embedding or head if the checkpoint has one that differs from the model's."""
        model = self._model
        for name, shared in ((_EMBEDDING, model.model.embed_tokens), (_HEAD, model.lm_head)):
            if name not in tensors:
                continue
            weight = tensors[name].to(shared.weight.device, shared.weight.dtype)
            if torch.equal(weight, shared.weight):
                continue
            rows, columns = weight.shape
            with _making(weight.dtype, torch.device("meta")):
                own: Any = (
                    nn.Embedding(rows, columns, shared.padding_idx)
                    if isinstance(shared, nn.Embedding)
                    else nn.Linear(columns, rows, bias=False)
                )
            own.weight = nn.Parameter(weight, requires_grad=False)
            if name == _EMBEDDING:
                self.embed_tokens = own
            else:
                self.shared_head.head = own

    def _expected_shapes(self, names: Collection[str]) -> dict[str, tuple[int, ...]]:
        own = {
            name.removeprefix("layer."): tuple(tensor.shape)
            for name, tensor in [*self.named_parameters(), *self.named_buffers()]
            if name not in (_EMBEDDING, _HEAD)
        }
        return checkpoint_shapes(own, names)


def select_row(values_BSX: torch.Tensor, row_B: torch.Tensor) -> torch.Tensor:
    """One row of each sequence [B,1,X], contiguous."""
    index_B1X = row_B[:, None, None].expand(-1, 1, values_BSX.shape[-1])
    return values_BSX.gather(1, index_B1X)


def _is_untouched(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether calling it does what its class does: no hook, no adapter, no other forward."""
    return (
        type(module) is kind
        and "forward" not in vars(module)
        and not module._forward_hooks
        and not module._forward_pre_hooks
    )


def checkpoint_shapes(
    shapes: Mapping[str, tuple[int, ...]], names: Collection[str]
) -> dict[str, tuple[int, ...]]:
    """Names and shapes that a checkpoint has for these parameters.

    The release has one tensor per expert and projection where the module has merged ones; a merged
    tensor that is among the checkpoint's `names` stays.
    """
    expected: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        merged = next((end for end in (_GATE_UP, _DOWN) if name.endswith(end)), None)
        if merged is None or name in names:
            expected[name] = shape
            continue
        prefix = name.removesuffix(merged)
        num_experts, rows, columns = shape
        parts = ("gate_proj", "up_proj") if merged == _GATE_UP else ("down_proj",)
        for expert in range(num_experts):
            for part in parts:
                key = f"{prefix}mlp.experts.{expert}.{part}.weight"
                expected[key] = (rows // len(parts), columns)
    return expected


def layer_config(config: GlmMoeDsaConfig, indexer_type: str) -> GlmMoeDsaConfig:
    """Copy of the config that describes one more layer, behind the decoder layers."""
    num_layers = config.num_hidden_layers
    longer = copy.deepcopy(config)
    indexer_types, mlp_types = config.indexer_types or [], config.mlp_layer_types or []
    longer.indexer_types = [*indexer_types[:num_layers], indexer_type]
    longer.mlp_layer_types = [*mlp_types[:num_layers], "sparse"]
    return longer


def _own_memory(own: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """Where a checkpoint tensor goes: a parameter, or one expert's part of a merged one."""
    parts = name.split(".")
    if parts[:2] != ["mlp", "experts"] or len(parts) < 5:
        return own[name] if name in own else own[f"layer.{name}"]
    expert, part = int(parts[2]), parts[3]
    if part == "down_proj":
        return own[f"layer.{_DOWN}"][expert]
    gate, up = own[f"layer.{_GATE_UP}"][expert].chunk(2)
    return gate if part == "gate_proj" else up


def _share_modules(draft: nn.Module, full: nn.Module) -> None:
    """Give the draft layer the full layer's modules, so that moves and casts reach both."""
    for name, module in full.named_children():
        if name == "self_attn":
            for inner_name, inner in module.named_children():
                if inner_name != "indexer":
                    setattr(draft.self_attn, inner_name, inner)
        else:
            setattr(draft, name, module)


def _follow_dtypes(layer: nn.Module, model: GlmMoeDsaForCausalLM) -> None:
    """Keep in float32 what the model's own layers keep so (the router, by transformers' rule)."""
    dtypes: dict[str, torch.dtype] = {}
    for own in model.model.layers:
        dtypes.update((name, parameter.dtype) for name, parameter in own.named_parameters())
    for name, parameter in layer.named_parameters():
        parameter.data = parameter.data.to(dtypes.get(name, parameter.dtype))


@contextlib.contextmanager
def _making(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Make parameters with this dtype on this device."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(previous)
