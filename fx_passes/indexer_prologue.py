"""IndexerPrologue: see the class."""

from __future__ import annotations

from torch import fx

from glm_compile.fx_passes.base import PassOptions, PassResult


class IndexerPrologue:
    """The `indexer_prologue` rewrite."""

    name = "indexer_prologue"

    def __init__(self, options: PassOptions) -> None:
        self.options = options

    def __call__(self, graph_module: fx.GraphModule) -> PassResult:
        return PassResult(self.name)
