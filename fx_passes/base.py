"""What every rewrite shares: the record it returns and the way it says no.

A pass is a callable `(graph_module) -> PassResult` that edits the graph in place. It never raises for a
candidate that it will not take: each is recorded as a `Declined` with a reason a user can act on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from torch import fx


class No(Exception):
    """Raised inside a walk to decline one candidate; the message is the reason shown to the user."""


@dataclass(frozen=True)
class Declined:
    """A candidate region that was recognised and left alone.

    Attributes:
        where: module path if known (e.g. `model.layers.3.self_attn.indexer`), else the node's name.
        reason: what was found and what was expected.
    """

    where: str
    reason: str


@dataclass
class PassResult:
    """Outcome of one pass over one graph.

    Attributes:
        name: report key: mask, indexer_prologue, indexer_topk, merge_linears, bf16_linear, ...
        num_matches: regions replaced.
        declined: candidates left alone, each with its reason.
        matched: where each match was (module path or node name), for `explain`.
    """

    name: str
    num_matches: int = 0
    declined: list[Declined] = field(default_factory=list)
    matched: list[str] = field(default_factory=list)


class GraphPass(Protocol):
    """A rewrite of one graph."""

    name: str

    def __call__(self, graph_module: fx.GraphModule) -> PassResult: ...


def module_path(node: fx.Node) -> str | None:
    """Path of the innermost module that produced `node` (`model.layers.0.self_attn`), if recorded."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return None
    path, _module_class = list(stack.values())[-1]
    return clean_path(path)


def clean_path(path: str) -> str:
    """`L['self'].model.layers.0` or `L['self']._modules['model']...` -> `model.layers.0`."""
    import re

    path = re.sub(r"_modules\['([^']+)'\]", r"\1", path)
    path = re.sub(r"\['([^']+)'\]|\[(\d+)\]", lambda m: "." + (m[1] or m[2]), path)
    return re.sub(r"^L\.[^.]+\.?", "", path).lstrip(".")
