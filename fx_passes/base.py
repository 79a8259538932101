"""What every rewrite shares: the record it returns and the way it says no.

A pass is a callable `(graph_module) -> PassResult` that edits the graph in place. It never raises
for a candidate that it will not take: each is recorded as a `Declined` with a reason a user can act
on.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Protocol

from torch import fx


class No(Exception):
    """Raised inside a walk to decline one candidate; the message is the reason that is shown."""


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


@dataclass
class MergeResult(PassResult):
    """Outcome of `merge_linears`: also which weights are read as one.

    Attributes:
        groups: names of the weight placeholders of each merged linear, in the order in which their
            rows must lie in memory. The pipeline lays the real parameters out adjacently by it.
    """

    groups: list[tuple[str, ...]] = field(default_factory=list)


INDEXER_DTYPES = ("auto", "fp8", "bf16", "fp32")


@dataclass(frozen=True)
class PassOptions:
    """What the passes need to know of the user's options.

    Attributes:
        indexer_dtype: `auto` is the exact tier in whatever dtype the model has; `bf16` and `fp32`
            are the exact tier and insist on that dtype; `fp8` is the numerics-changing tier.
        deterministic: ask linears for bitwise equal results whatever else is in the batch.
        disable: report keys of passes that must not run.
    """

    indexer_dtype: str = "auto"
    deterministic: bool = False
    disable: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.indexer_dtype not in INDEXER_DTYPES:
            known = ", ".join(repr(d) for d in INDEXER_DTYPES)
            raise ValueError(f"indexer_dtype: expected one of {known}, got {self.indexer_dtype!r}")


class GraphPass(Protocol):
    """A rewrite of one graph."""

    name: str

    def __call__(self, graph_module: fx.GraphModule) -> PassResult: ...


def module_path(node: fx.Node) -> str | None:
    """Path of the innermost module that made `node` (`model.layers.0.self_attn`), if recorded."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return None
    path, _module_class = list(stack.values())[-1]
    return clean_path(path)


def where(node: fx.Node) -> str:
    """Place of a candidate for people: its module's path if recorded, else the node's name."""
    return module_path(node) or node.name


def clean_path(path: str) -> str:
    """`L['self'].model.layers.0` or `L['self']._modules['model']...` -> `model.layers.0`."""
    path = re.sub(r"_modules\['([^']+)'\]", r"\1", path)
    path = re.sub(r"\['([^']+)'\]|\[(\d+)\]", lambda m: "." + (m[1] or m[2]), path)
    return re.sub(r"^L\.[^.]+\.?", "", path).lstrip(".")
