"""MergeLinears: see the class."""

from __future__ import annotations

from torch import fx

from glm_compile.fx_passes.base import MergeResult, PassOptions


class MergeLinears:
    """The `merge_linears` rewrite."""

    name = "merge_linears"

    def __init__(self, options: PassOptions) -> None:
        self.options = options

    def __call__(self, graph_module: fx.GraphModule) -> MergeResult:
        return MergeResult(self.name)
