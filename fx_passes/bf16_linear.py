"""Bf16Linear: see the class."""

from __future__ import annotations

from torch import fx

from glm_compile.fx_passes.base import PassOptions, PassResult


class Bf16Linear:
    """The `bf16_linear` rewrite."""

    name = "bf16_linear"

    def __init__(self, options: PassOptions) -> None:
        self.options = options

    def __call__(self, graph_module: fx.GraphModule) -> PassResult:
        return PassResult(self.name)
