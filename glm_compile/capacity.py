"""How many tokens a cache holds, as far as the host knows it without waiting for a device.

Lengths live on the device, and traced code cannot count on the host: a number in a guard would be a
recompilation a step. So the count lies beside the tensor of lengths, with the version of the
contents that it belongs to. Whoever else writes the tensor makes it void; on the CPU it is then
read anew, elsewhere the length is unknown until somebody sets it. A replayed CUDA graph is the one
writer that goes unseen: who replays graphs over a cache keeps the count itself (`note_held`).

A compiled step is watched from outside: its graph says what it writes behind which lengths, and by
how much it advances them. What does not fit is refused before the first kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils.weak import WeakIdKeyDictionary

from glm_compile.fx_passes._dynamo_graph import argument, example_value, mutated_inputs, op_name

Number = int | torch.SymInt
Read = Callable[[Sequence[Any]], int]

# Tensor of lengths -> (version of its contents, longest length).
_HELD: WeakIdKeyDictionary = WeakIdKeyDictionary()


def held_tokens(lengths: torch.Tensor) -> int | None:
    """Longest length in the tensor; None where only a device knows it."""
    version = _version(lengths)
    known = _HELD.get(lengths)
    if known is not None and known[0] == version:
        return int(known[1])
    if lengths.device.type != "cpu":
        return None
    held = _read(lengths)
    note_held(lengths, held)
    return held


def note_held(lengths: torch.Tensor, held: int | None) -> None:
    """Keep the longest length of the tensor as it is now; None: not known."""
    version = _version(lengths)
    if held is None or version is None:
        _HELD.pop(lengths, None)
    else:
        _HELD[lengths] = (version, held)


def full_message(cache: str, held: int, num_new: int, capacity: int) -> str:
    """What a step that does not fit is refused with."""
    return (
        f"{cache} is full: {held} tokens held and {num_new} new ones, but max_cache_len is "
        f"{capacity}; make it larger"
    )


def watch_capacity(graph_module: fx.GraphModule) -> CapacityWatch | None:
    """Read from a Dynamo graph what it writes into fixed-size caches; None if nothing is known."""
    watch = _Reader(graph_module.graph).read()
    return watch if watch.writes else None


@dataclass(frozen=True)
class Write:
    """Rows that a graph writes into a cache.

    Attributes:
        cache: name of the cache's class, for messages.
        lengths: position of the lengths among the graph's inputs.
        offset: tokens by which the graph has advanced them before.
        num_new: rows.
        capacity: rows that the cache has for a sequence.
    """

    cache: str
    lengths: int
    offset: Read
    num_new: Read
    capacity: Read


@dataclass
class CapacityWatch:
    """Refuses a compiled step that does not fit, and counts what it adds.

    Attributes:
        writes: one for each tensor of lengths and offset.
        advances: by position of the lengths, how far the graph moves them; only sums of numbers.
    """

    writes: list[Write] = field(default_factory=list)
    advances: dict[int, Read] = field(default_factory=dict)

    def around(self, runner: Callable[..., Any]) -> Callable[..., Any]:
        """The runner of the graph, watched."""

        def run(*args: Any) -> Any:
            self.check(args)
            held = {i: held_tokens(args[i]) for i in self.advances}
            results = runner(*args)
            for position, value in held.items():
                if value is not None:
                    note_held(args[position], value + self.advances[position](args))
            return results

        return run

    def check(self, args: Sequence[Any]) -> None:
        """Raise ValueError for a write beyond a cache's capacity, where the host knows of it."""
        for write in self.writes:
            held = held_tokens(args[write.lengths])
            if held is None:
                continue
            held, num_new = held + write.offset(args), write.num_new(args)
            capacity = write.capacity(args)
            if held + num_new > capacity:
                raise ValueError(full_message(write.cache, held, num_new, capacity))


class _Reader:
    """Walks a Dynamo graph once, in its order."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.inputs = {node: i for i, node in enumerate(graph.find_nodes(op="placeholder"))}
        self.symbols = _symbols(self.inputs)
        self.offsets: dict[fx.Node, Number] = {}
        self.lost: set[fx.Node] = set()
        self.positions: dict[fx.Node, tuple[fx.Node, Number]] = {}
        self.capacities = _gathered_lengths(graph)
        self.found: dict[tuple[fx.Node, str], Write] = {}

    def read(self) -> CapacityWatch:
        for node in self.graph.nodes:
            name = op_name(node)
            if name in ("glm::paged_write", "glm::paged_write_fp8"):
                pages, new, _table, lengths = node.args[:4]
                num_new = example_value(new).shape[1]
                self._add_write("PagedCache", lengths, None, num_new, self.capacities.get(pages))
            elif name == "index_copy_" and argument(node, 2, "index") in self.positions:
                buffer, axis = node.args[0], argument(node, 1, "dim")
                index = argument(node, 2, "index")
                lengths, offset = self.positions[index]
                capacity = example_value(buffer).shape[axis]
                num_new = example_value(index).shape[0]
                self._add_write("StaticCache", lengths, offset, num_new, capacity)
            elif name in ("glm::advance", "add_") and self._advance(*node.args[:2]):
                continue
            elif name == "add":
                self._note_positions(node)
            self.lost.update(n for n in mutated_inputs(node) if n in self.inputs)
        advances: dict[int, Read] = {}
        for lengths, offset in self.offsets.items():
            by = self._reader(offset)
            if by is not None and lengths not in self.lost and _is_count(lengths, rank=1):
                advances[self.inputs[lengths]] = by
        return CapacityWatch(list(self.found.values()), advances)

    def _advance(self, lengths: Any, by: Any = None) -> bool:
        """Count a sum; False for what is none."""
        by = example_value(by) if isinstance(by, fx.Node) else by
        if lengths not in self.inputs or not isinstance(by, int | torch.SymInt):
            return False
        self.offsets[lengths] = self.offsets.get(lengths, 0) + by
        return True

    def _note_positions(self, node: fx.Node) -> None:
        """Remember `arange(S) + counter`, where a static cache writes."""
        for counter in node.args:
            if (
                isinstance(counter, fx.Node)
                and counter in self.inputs
                and counter not in self.lost
                and _is_count(counter, rank=0)
            ):
                self.positions[node] = counter, self.offsets.get(counter, 0)

    def _add_write(
        self, cache: str, lengths: Any, offset: Number | None, num_new: Number, capacity: Any
    ) -> None:
        if lengths not in self.inputs or lengths in self.lost or capacity is None:
            return
        if cache == "StaticCache" and any(w.cache == cache for w in self.found.values()):
            return  # each layer has a counter of its own, and all say the same
        offset = self.offsets.get(lengths, 0) if offset is None else offset
        reads = [self._reader(number) for number in (offset, num_new, capacity)]
        if all(read is not None for read in reads):
            key = lengths, f"{offset} {num_new} {capacity}"
            self.found[key] = Write(cache, self.inputs[lengths], *reads)  # type: ignore[arg-type]

    def _reader(self, number: Number) -> Read | None:
        """The number as a function of the graph's arguments; None if they do not tell it."""
        if not isinstance(number, torch.SymInt):
            value = int(number)
            return lambda args: value
        expression = number.node.expr
        reads = {symbol: self.symbols.get(symbol) for symbol in expression.free_symbols}
        if any(read is None for read in reads.values()):
            return None

        def read_expression(args: Sequence[Any]) -> int:
            values = {s: read(args) for s, read in reads.items() if read is not None}
            return int(expression.subs(values))

        return self.symbols.get(expression, read_expression)


def _read(lengths: torch.Tensor) -> int:
    return int(lengths.max())


def _version(tensor: torch.Tensor) -> int | None:
    """Number of writes into the tensor so far; None where nobody counts them."""
    return None if tensor.is_inference() else tensor._version


def _is_count(node: fx.Node, *, rank: int) -> bool:
    value = example_value(node)
    return (
        isinstance(value, torch.Tensor)
        and value.dim() == rank
        and value.dtype in (torch.int32, torch.int64)
    )


def _gathered_lengths(graph: fx.Graph) -> dict[fx.Node, Any]:
    """Rows that are read of each cache's pages: their capacity, which no shape tells."""
    capacities = {}
    for node in graph.nodes:
        if op_name(node) in ("glm::paged_gather", "glm::paged_gather_fp8"):
            length = node.args[2]
            capacities[node.args[0]] = (
                example_value(length) if isinstance(length, fx.Node) else length
            )
    return capacities


def _symbols(inputs: Mapping[fx.Node, int]) -> dict[Any, Read]:
    """How to read each symbolic size from the graph's arguments."""
    reads: dict[Any, Read] = {}

    def add(number: Any, read: Read) -> None:
        if isinstance(number, torch.SymInt) and number.node.expr.is_Symbol:
            reads.setdefault(number.node.expr, read)

    for node, position in inputs.items():
        value = example_value(node)
        add(value, lambda args, i=position: int(args[i]))  # type: ignore[misc]
        if isinstance(value, torch.Tensor):
            for axis, size in enumerate(value.shape):
                add(size, lambda args, i=position, a=axis: int(args[i].shape[a]))  # type: ignore[misc]
    return reads
