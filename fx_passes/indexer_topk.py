"""IndexerTopk: see the class."""

from __future__ import annotations

from torch import fx

from glm_compile.fx_passes.base import PassOptions, PassResult


class IndexerTopk:
    """The `indexer_topk` rewrite."""

    name = "indexer_topk"

    def __init__(self, options: PassOptions) -> None:
        self.options = options

    def __call__(self, graph_module: fx.GraphModule) -> PassResult:
        return PassResult(self.name)
