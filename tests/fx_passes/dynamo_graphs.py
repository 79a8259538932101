"""Recorder for the passes on Dynamo graphs: rewrite, then run the graph as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from transformers import DynamicCache, StaticCache

from glm_compile.fx_passes.base import No, PassResult
from glm_compile.fx_passes.layer_kinds import LayerKinds, split_layer_kinds
from glm_compile.fx_passes.mark_attention import mark_attention
from glm_compile.fx_passes.mask import MaskResult, prove_mask
from tests.tiny_models import CACHE_ARGUMENT, tiny_config, tiny_model

PROMPT = 20


@dataclass
class Recorder:
    """Backend that keeps what the passes said of each graph. `rewrite=False` only records."""

    rewrite: bool = True
    kinds: bool = False
    marked: list[PassResult] = field(default_factory=list)
    masks: list[MaskResult] = field(default_factory=list)
    graphs: list[fx.GraphModule] = field(default_factory=list)
    splits: list[LayerKinds] = field(default_factory=list)
    unsplit: list[str] = field(default_factory=list)

    def __call__(
        self, graph_module: fx.GraphModule, example_inputs: list[Any], **_options: Any
    ) -> Callable[..., Any]:
        self.graphs.append(graph_module)
        if self.rewrite:
            self.marked.append(mark_attention(graph_module))
            self.masks.append(prove_mask(graph_module))
        if not self.kinds:
            return graph_module.forward
        try:
            split = split_layer_kinds(graph_module, example_inputs)
        except No as no:
            self.unsplit.append(str(no))
            return graph_module.forward
        self.splits.append(split)
        return split.make_runner([kind.graph_module for kind in split.kinds])

    @property
    def mask(self) -> MaskResult:
        """Result of the last graph."""
        return self.masks[-1]

    @property
    def reasons(self) -> list[str]:
        """Why the last graph's mask was not proven, then why candidates were declined."""
        declined = [*self.marked[-1].declined, *self.mask.declined]
        return [*self.mask.notes, *(d.reason for d in declined)]


def small_model(attention: str = "sdpa", **overrides: Any) -> torch.nn.Module:
    """Two layers, full and shared, dense and MoE; contexts of the tests exceed its index_topk."""
    values = {
        "num_hidden_layers": 2,
        "first_k_dense_replace": 1,
        "indexer_types": ["full", "shared"],
        **overrides,
    }
    return tiny_model(tiny_config(**values), attention=attention)


def tokens(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    """Random token ids [batch, length]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 500, (batch, length), generator=generator)


def filled_cache(
    model: torch.nn.Module, kind: str, batch: int, mask: torch.Tensor | None = None, **kwargs: Any
) -> dict[str, Any]:
    """Keyword arguments of a forward with a cache that holds PROMPT tokens; {} for no cache."""
    if kind == "none":
        return {"use_cache": False}
    cache = (
        StaticCache(model.config, max_cache_len=96)
        if kind == "static"
        else DynamicCache(config=model.config)
    )
    prompt_mask = None if mask is None else mask[:, :PROMPT]
    model(tokens(batch, PROMPT), attention_mask=prompt_mask, **{CACHE_ARGUMENT: cache})
    return {CACHE_ARGUMENT: cache, **kwargs}


def compare(
    model: torch.nn.Module,
    input_ids: torch.Tensor,
    make_kwargs: Callable[[], dict[str, Any]],
    *,
    recorder: Recorder | None = None,
    dynamic: bool | None = None,
    valid: torch.Tensor | None = None,
) -> tuple[float, Recorder]:
    """Largest logit difference between the eager model and the rewritten graph, on valid rows."""
    recorder = recorder or Recorder()
    compiled = torch.compile(model, backend=recorder, fullgraph=True, dynamic=dynamic)
    found = compiled(input_ids, **make_kwargs()).logits
    expected = model(input_ids, **make_kwargs()).logits
    assert found.shape == expected.shape
    difference = (found - expected).abs().amax(-1)
    if valid is not None:
        difference = difference[valid.bool()]
    return difference.max().item(), recorder


def calls(graph_module: fx.GraphModule, op: Any) -> list[fx.Node]:
    """Nodes that call `op`."""
    return [node for node in graph_module.graph.nodes if node.target is op]


def score_shaped_bools(graph_module: fx.GraphModule, queries: int) -> list[fx.Node]:
    """Bool tensors with a query axis and a key axis: what is left of a mask."""
    found = []
    for node in graph_module.graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor) and value.dtype == torch.bool and value.dim() >= 3:
            is_key_mask = queries == 1 and value.dim() == 3
            if value.shape[-2] == queries and not is_key_mask:
                found.append(node)
    return found
