"""Find out what a model's attention mask means, and hand the meaning to the ops. Exact tier.

Targets the mask that `create_causal_mask` (transformers/masking_utils.py, 5.20 and 5.24) builds
once in the head of the graph, or that the caller gives, and its users in
models/glm_moe_dsa/modeling_glm_moe_dsa.py:

    GlmMoeDsaIndexer    scores.masked_fill(~mask, -inf) or scores + mask -> topk -> int32
                        -> glm.masked_topk(scores, lengths, starts, key_mask, k, repeat_last)
    GlmMoeDsaAttention  mask & ~scatter(ones, topk, False), or masked_fill with the minimum
                        -> glm.attention
                        -> glm.indexed_attention(q, k, v, topk, lengths, starts, key_mask)

A selection that was made with the attention's own bounds holds nothing beyond them, so they are
left out there: attention takes exactly what is selected. Whoever else reads a selection (a scatter
that was not replaced, the caller) gets it without the -1 of short rows: the op repeats the last
position, unless attention reads the same and a row may have no key at all. A selection that counts
up is made anew beside its attention, so that this can still be seen once the layers are split.

A key p of query token s is valid iff starts[b, s] <= p < lengths[b, s] and key_mask[b, s, p].
Routes:

    proven  the mask's nodes are evaluated to a formula (`index_evaluation`) and read off as
            lengths, starts and key masks of the inputs (`mask_reading`); the mask itself dies
    bounds  any other bool mask: lengths are bounds taken from its data, and it is the key mask
    kept    a float mask of which it cannot be shown that it is 0 or the minimum everywhere

Lengths are made where the mask was, because a cache advances the counters that they come from
inside the layers; those of an indexer over pages beside it, where that is seen not to happen before
(`indexer_topk` hands the counter to the kernels then). Consumers of a mask that is kept, and
consumers that are declined themselves, keep their nodes and stay right.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

import glm_compile.ops  # noqa: F401  (registers the ops)
from glm_compile.fx_passes._dynamo_graph import (
    WriteLog,
    argument,
    dtype_of,
    eliminate_dead_code,
    example_value,
    insert_call,
    is_one,
    known_shape,
    op_name,
    shape_of,
    storage_key,
)
from glm_compile.fx_passes.base import Declined, No, PassResult, where
from glm_compile.fx_passes.index_algebra import Bool, Entry, Lin, Opaque, Two, is_mask_pair
from glm_compile.fx_passes.index_evaluation import Evaluator
from glm_compile.fx_passes.mask_consumers import (
    condition_of,
    constant_k,
    first_head,
    is_indexer_topk,
    is_int32_cast,
    reads_pages,
    split_scores,
    split_selection,
    takes_short_rows,
)
from glm_compile.fx_passes.mask_reading import MaskReading, opaque_float, read_off, readable

PROVEN, BOUNDS, KEPT, NONE = "proven", "bounds", "kept", "none"


@dataclass
class MaskResult(PassResult):
    """Outcome of `prove_mask`: `num_matches` counts the attention calls and indexers rewritten.

    Attributes:
        route: `proven`, `bounds` or `kept`, the worst over the graph's masks; `none` without one.
        notes: for each mask that was not proven, why.
        num_attention: attention calls rewritten.
        num_indexers: indexers rewritten.
    """

    route: str = NONE
    notes: list[str] = field(default_factory=list)
    num_attention: int = 0
    num_indexers: int = 0


@dataclass(frozen=True)
class Bounds:
    """What stands for a mask.

    Attributes:
        lengths, starts: int32 [B, S].
        key_mask: bool, rank 3.
        has_keys: whether every row has a valid key.
        is_open: whether no key is excluded, so that attention needs none of the above.
        counted: where the lengths are the tokens cached before the step, plus the row and one:
            the formula, and which of its axes are (batch, query).
    """

    lengths: fx.Node
    starts: fx.Node | None
    key_mask: fx.Node | None
    has_keys: bool = False
    is_open: bool = False
    counted: tuple[Lin, dict[int, int]] | None = None


def prove_mask(graph_module: fx.GraphModule) -> MaskResult:
    """Replace masked top-k and masked attention by ops that take bounds, in place.

    Run `mark_attention` first. Shapes and dtypes are those that Dynamo left in the graph.
    """
    return _Prover(graph_module).run()


@dataclass
class _Consumer:
    """A user of a mask that is to be replaced."""

    node: fx.Node
    where: str
    base: fx.Node
    selection: fx.Node
    scores: fx.Node | None
    batch: Any
    queries: Any


class _Prover:
    def __init__(self, graph_module: fx.GraphModule) -> None:
        self.graph_module = graph_module
        self.graph = graph_module.graph
        self.writes = WriteLog(self.graph)
        self.evaluator = Evaluator()
        self.result = MaskResult("mask")
        self.first_call = next(n for n in self.graph.nodes if n.op != "placeholder")
        self.counting: list[tuple[fx.Node, _Consumer, Bounds]] = []

    def run(self) -> MaskResult:
        attention, indexers = self._find()
        groups: dict[tuple[fx.Node, str, str], list[_Consumer]] = {}
        for consumer in (*attention, *indexers):
            key = (consumer.base, str(consumer.batch), str(consumer.queries))
            groups.setdefault(key, []).append(consumer)
        bounds: dict[int, Bounds] = {}
        for group in groups.values():
            try:
                found = self._bounds(group)
            except No as no:
                self._set_route(KEPT, str(no))
                self.result.declined.extend(Declined(c.where, str(no)) for c in group)
                continue
            bounds.update({id(consumer): found for consumer in group})
        for consumer in attention:
            if id(consumer) in bounds:
                self._replace_attention(consumer, bounds[id(consumer)])
        # Scatters of the replaced calls go before the indexers ask who still reads a selection.
        kept = {n for b in bounds.values() for n in (b.lengths, b.starts, b.key_mask)}
        eliminate_dead_code(self.graph, kept)
        for consumer in indexers:
            if id(consumer) in bounds:
                self._replace_indexer(consumer, bounds[id(consumer)])
        self._drop_implied_bounds()
        self._count_where_it_is_read()
        if self.result.num_matches:
            eliminate_dead_code(self.graph)
            self.graph.lint()
            self.graph_module.recompile()
        return self.result

    def _set_route(self, route: str, note: str | None = None) -> None:
        order = (NONE, PROVEN, BOUNDS, KEPT)
        self.result.route = max(self.result.route, route, key=order.index)
        if note is not None and note not in self.result.notes:
            self.result.notes.append(note)

    def _find(self) -> tuple[list[_Consumer], list[_Consumer]]:
        attention: list[_Consumer] = []
        indexers: list[_Consumer] = []
        for node in self.graph.nodes:
            found, match = attention, self._match_attention
            if node.target is not torch.ops.glm.attention.default:
                if not is_indexer_topk(node):
                    continue
                found, match = indexers, self._match_indexer
            try:
                found.append(match(node))
            except No as no:
                self._set_route(KEPT)
                self.result.declined.append(Declined(where(node), str(no)))
        return attention, indexers

    def _match_attention(self, node: fx.Node) -> _Consumer:
        q, _k, _v, mask, _scale, eager = node.args
        if not isinstance(mask, fx.Node) or not isinstance(q, fx.Node):
            raise No("attention without a mask")
        if eager and dtype_of(mask) == torch.bool:
            raise No(
                "a bool mask with eager attention is added as 0 and 1 by transformers: give a mask "
                "of the model's dtype (0 or the minimum), or use sdpa"
            )
        base, selection = split_selection(self.evaluator, mask)
        order = self.writes.order
        if writer := self.writes.writer_between(selection, order[selection], order[node]):
            raise No(f"{selection} is written in place by {op_name(writer)}")
        batch, _heads, queries, _dim = shape_of(q) or (None,) * 4
        return _Consumer(node, where(node), base, selection, None, batch, queries)

    def _match_indexer(self, node: fx.Node) -> _Consumer:
        masked = node.args[0]
        assert isinstance(masked, fx.Node)
        if argument(node, 2, "dim", -1) not in (-1, 2):
            raise No(f"top-k over axis {argument(node, 2, 'dim')} instead of the keys")
        if argument(node, 3, "largest", True) is not True:
            raise No("top-k of the smallest scores")
        scores, mask = split_scores(self.evaluator, masked)
        base = first_head(mask)
        batch, queries, _keys = shape_of(node.args[0]) or (None,) * 3
        return _Consumer(node, where(node), base, node, scores, batch, queries)

    def _bounds(self, group: list[_Consumer]) -> Bounds:
        """Bounds for one mask and the consumers that share it; `No` if it has to be kept."""
        base = group[0].base
        uses = [self.writes.order[consumer.node] for consumer in group]
        value = self.evaluator.value(base)
        if isinstance(value, Opaque):
            raise No(opaque_float(value.node))
        if isinstance(value, Two):
            if not is_mask_pair(value, dtype_of(base) or torch.float32):
                raise No(
                    f"where(mask, a, b): not 0 / minimum but {value.yes:g} / {value.no:g} "
                    f"({readable(base)})"
                )
            for node in self.evaluator.used(base):
                if (dtype_of(node) or torch.bool).is_floating_point and (
                    writer := self.writes.writer_between(node, self.writes.order[node], max(uses))
                ):
                    raise No(f"{node} is written in place by {op_name(writer)}")
            condition = value.cond
        elif isinstance(value, Bool):
            condition = value
        else:
            raise No(f"{readable(base)} is a mask of {dtype_of(base)}: expected bool or float")

        try:
            reading = read_off(condition, len(known_shape(base)))
            self._check_fresh(base, reading, max(uses))
        except No as no:
            built = self._build_bounds(group[0], uses, isinstance(value, Two))
            self._set_route(BOUNDS, str(no))
            return built
        self._set_route(PROVEN)
        return self._build_proven(group[0], reading)

    def _check_fresh(self, base: fx.Node, reading: MaskReading, last_use: int) -> None:
        """Nobody writes the mask, or what it was made of, between the read and the use."""
        order, writes = self.writes.order, self.writes
        if writer := writes.writer_between(base, order[base], last_use):
            raise No(f"{base} is written in place by {op_name(writer)}")
        leaves = [
            leaf[0] for lin in (*reading.lengths, *reading.starts) for leaf, _factor in lin.leaves
        ]
        leaves += [leaf[0] for leaf, _positive in reading.masks]
        memory = {storage_key(leaf) for leaf in leaves}
        used = self.evaluator.used(base)
        for node in used:
            first = order[node]
            key = storage_key(node)
            if key in memory:
                readers = [
                    order[user] for user in node.users if user in used and storage_key(user) != key
                ]
                first = min(readers, default=order[base])
            if writer := writes.writer_between(node, first, order[base]):
                raise No(f"{node} is written in place by {op_name(writer)}")

    def _build_proven(self, consumer: _Consumer, reading: MaskReading) -> Bounds:
        base = consumer.base
        builder = _Builder(self, base, self._place_after(base))
        rank = len(known_shape(base))
        to_rows = {rank - 2: 1} if rank == 2 else {0: 0, rank - 2: 1}
        sizes = (consumer.batch, consumer.queries)
        lengths = builder.rows(reading.lengths, torch.minimum, to_rows, sizes)
        starts = None
        if reading.starts:
            starts = builder.rows(reading.starts, torch.maximum, to_rows, sizes)
        masks = []
        for (node, entries), positive in reading.masks:
            mask = builder.read(node, entries, {**to_rows, rank - 1: 2}, 3, (*sizes, None))
            if not positive:
                mask = builder.call(torch.logical_not, mask)
            elif self.writes.writer_between(node, self.writes.order[base], len(self.writes.order)):
                mask = builder.call("clone", mask)
            masks.append(mask)
        key_mask = None
        for mask in masks:
            key_mask = mask if key_mask is None else builder.call(operator.and_, key_mask, mask)
        has_keys = (
            starts is None and key_mask is None and all(map(_is_one_or_more, reading.lengths))
        )
        num_keys = known_shape(base)[rank - 1]
        is_open = (
            starts is None
            and key_mask is None
            and isinstance(num_keys, int)
            and all(form.is_const and form.const >= num_keys for form in reading.lengths)
        )
        counted = None
        if has_keys and len(reading.lengths) == 1:
            (form,) = reading.lengths
            is_step = set(form.axes) <= {(rank - 2, 1)} and form.const == 1
            if is_step and [factor for _, factor in form.leaves] == [1]:
                counted = form, to_rows
        return Bounds(lengths, starts, key_mask, has_keys, is_open, counted)

    def _build_bounds(self, consumer: _Consumer, uses: list[int], is_float: bool) -> Bounds:
        """Lengths from the mask's data; the mask itself is the key mask."""
        base, order = consumer.base, self.writes.order
        rank = len(known_shape(base))
        if rank == 4 and not is_one(known_shape(base)[1]):
            raise No(f"{readable(base)} differs between heads")
        if writer := self.writes.writer_between(base, min(uses), max(uses)):
            raise No(f"{base} is written in place by {op_name(writer)} between its uses")
        place = self._place_after(base)
        for writer in self.writes.writers_between(base, order[base], min(uses)):
            place = writer.next
        builder = _Builder(self, base, place)
        mask = base
        if is_float:
            condition = condition_of(base)
            if condition is None or self.writes.writer_between(condition, -1, max(uses)):
                condition = builder.call(torch.eq, base, 0)
            mask = condition
        if rank == 4:
            mask = builder.call("select", mask, 1, 0)
        elif rank == 2:
            mask = builder.call("unsqueeze", mask, 0)
        num_keys = known_shape(mask)[2]
        end: Any = num_keys + 1
        if not isinstance(num_keys, int):
            end = builder.call(operator.add, builder.call("size", mask, 2), 1)
        device = example_value(base).device
        positions = builder.call(torch.arange, 1, end, dtype=torch.int32, device=device)
        last = builder.call(torch.amax, builder.call(torch.mul, mask, positions), -1)
        lengths = builder.expand(last, (consumer.batch, consumer.queries))
        if self.writes.writer_between(base, max(uses), len(order)):
            mask = builder.call("clone", mask)
        return Bounds(lengths, None, mask)

    def _place_after(self, node: fx.Node) -> fx.Node:
        return self.first_call if node.op == "placeholder" else node.next

    def _replace_attention(self, consumer: _Consumer, bounds: Bounds) -> None:
        node = consumer.node
        q, k, v, _mask, scale, eager = node.args
        with self.graph.inserting_before(node):
            call = insert_call(
                self.graph,
                torch.ops.glm.indexed_attention.default,
                (
                    *(q, k, v, self._range_of(consumer) or consumer.selection),
                    *(
                        (None, None, None)
                        if bounds.is_open
                        else (bounds.lengths, bounds.starts, bounds.key_mask)
                    ),
                    *(scale, eager),
                ),
                node,
            )
        node.replace_all_uses_with(call)
        self.graph.erase_node(node)
        self.result.num_attention += 1
        self._count(consumer)

    def _range_of(self, consumer: _Consumer) -> fx.Node | None:
        """The selection made anew if each of its rows is first, first + 1, ...; inserted."""
        selection, shape = consumer.selection, known_shape(consumer.selection)
        value = self.evaluator.value(selection)
        if not isinstance(value, Lin) or value.leaves or value.axes != ((2, 1),):
            return None
        if not all(isinstance(size, int) for size in shape):
            return None
        order = self.writes.order
        for node in self.evaluator.used(selection):
            if self.writes.writer_between(node, order[node], order[consumer.node]):
                return None
        options = {"dtype": dtype_of(selection), "device": example_value(selection).device}
        ends = (value.const, value.const + shape[2])
        row = insert_call(self.graph, torch.arange, ends, consumer.node, **options)
        return insert_call(self.graph, "expand", (row, *shape), consumer.node)

    def _replace_indexer(self, consumer: _Consumer, bounds: Bounds) -> None:
        topk = consumer.node
        try:
            k = constant_k(argument(topk, 1, "k"))
        except No as no:
            self.result.declined.append(Declined(consumer.where, str(no)))
            return
        indices = list(topk.users)
        outputs = [user for index in indices for user in index.users if is_int32_cast(user)]
        like = outputs[0] if outputs else indices[0]
        with self.graph.inserting_before(topk):
            call = insert_call(
                self.graph,
                torch.ops.glm.masked_topk.default,
                (consumer.scores, bounds.lengths, bounds.starts, bounds.key_mask, k, False),
                like,
            )
        for output in outputs:
            output.replace_all_uses_with(call)
            self.graph.erase_node(output)
        for index in indices:
            if index.users:
                with self.graph.inserting_before(index):
                    wide = insert_call(self.graph, "to", (call, torch.int64), like)
                index.replace_all_uses_with(wide)
            self.graph.erase_node(index)
        self._fill_short_rows(call, bounds)
        if bounds.counted is not None and reads_pages(consumer.scores):
            self.counting.append((call, consumer, bounds))
        self.graph.erase_node(topk)
        self.result.num_indexers += 1
        self._count(consumer)

    def _fill_short_rows(self, selection: fx.Node, bounds: Bounds) -> None:
        """Give those who would scatter with a row's -1 its last position instead (0 if none)."""
        users = [user for user in selection.users if not takes_short_rows(user, selection)]
        if not users:
            return
        if bounds.has_keys or len(users) == len(selection.users):
            # Attention counts a repeated position once, so it may read the same.
            selection.update_arg(5, True)
            return

        def call(target: Any, *args: Any) -> fx.Node:
            return insert_call(self.graph, target, args, selection)

        with self.graph.inserting_before(selection.next):
            last = call("clamp_min", call("amax", selection, -1, True), 0)
            filled = call(torch.where, call(torch.lt, selection, 0), last, selection)
        for user in users:
            user.replace_input_with(selection, filled)

    def _drop_implied_bounds(self) -> None:
        """Leave out bounds that the selection was made with."""
        for node in self.graph.nodes:
            if node.target is not torch.ops.glm.indexed_attention.default:
                continue
            selection = node.args[3]
            if selection.target is torch.ops.glm.masked_topk.default:
                _scores, *bounds, _k, _repeats_last = selection.args
                if bounds == list(node.args[4:7]):
                    node.args = (*node.args[:4], None, None, None, *node.args[7:])

    def _count_where_it_is_read(self) -> None:
        """Make the lengths of an indexer over pages beside it, where nobody has advanced what they
        are made of: there they go into its kernels, and no launch is left that makes them."""
        order = self.writes.order
        for call, consumer, bounds in self.counting:
            assert bounds.counted is not None
            form, to_rows = bounds.counted
            ((counter, _entries), _factor), *_ = form.leaves
            if self.writes.writer_between(counter, order[consumer.base], order[consumer.node]):
                continue
            builder = _Builder(self, consumer.base, call)
            builder.like = call
            sizes = (consumer.batch, consumer.queries)
            call.update_arg(1, builder.rows([form], torch.minimum, to_rows, sizes))

    def _count(self, consumer: _Consumer) -> None:
        self.result.num_matches += 1
        self.result.matched.append(consumer.where)


def _is_one_or_more(length: Lin) -> bool:
    """Whether a length is at least 1, given that what it is read from counts tokens."""
    factors = (factor for _, factor in (*length.axes, *length.leaves))
    return length.const >= 1 and all(factor >= 0 for factor in factors)


class _Builder:
    """Inserts the nodes that make bounds, before one place, with one module stack."""

    def __init__(self, prover: _Prover, base: fx.Node, place: fx.Node) -> None:
        self.graph = prover.graph
        self.base = base
        self.place = place
        # A mask that is an input belongs to the head, whatever layer reads it first.
        self.like = None if base.op == "placeholder" else base

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with self.graph.inserting_before(self.place):
            return insert_call(self.graph, target, args, self.like, **kwargs)

    def size(self, size: Any, axis: int) -> Any:
        """An int, or a node that holds a symbolic size."""
        if isinstance(size, int):
            return size
        for node in self.graph.nodes:
            if node is self.place:
                break
            value = example_value(node)
            if isinstance(value, torch.SymInt) and value.node.expr == size.node.expr:
                return node
        return self.call("size", self.base, axis)

    def expand(self, rows: fx.Node, sizes: tuple[Any, Any]) -> fx.Node:
        """int32 [B, S], contiguous, in memory of its own."""
        rank = len(known_shape(self.base))
        batch, queries = self.size(sizes[0], 0), self.size(sizes[1], rank - 2)
        wide = self.call("expand", rows, batch, queries)
        return self.call("contiguous", self.call("to", wide, torch.int32))

    def rows(
        self, forms: list[Lin], combine: Any, axes: dict[int, int], sizes: tuple[Any, Any]
    ) -> fx.Node:
        """Values of linear forms over (batch, query), combined, as int32 [B, S]."""
        result = None
        for form in forms:
            value = self._evaluate(form, axes, sizes)
            result = value if result is None else self.call(combine, result, value)
        assert result is not None
        return self.expand(result, sizes)

    def _evaluate(self, form: Lin, axes: dict[int, int], sizes: tuple[Any, Any]) -> fx.Node:
        device = example_value(self.base).device
        rank = len(known_shape(self.base))
        # Row numbers come first, so that the sum is a tensor even if everything else is a number.
        total: fx.Node | None = None
        for axis, factor in form.axes:
            target = axes[axis]
            size = self.size(sizes[target], 0 if target == 0 else rank - 2)
            row = self.call(torch.arange, size, dtype=torch.int64, device=device)
            row = self.call("unsqueeze", row, 1 - target)
            if factor != 1:
                row = self.call(torch.mul, row, factor)
            total = row if total is None else self.call(torch.add, total, row)
        if total is None:
            total = self.call(torch.zeros, (1, 1), dtype=torch.int64, device=device)
        for (leaf, entries), factor in form.leaves:
            value = self.read(leaf, entries, axes, 2, sizes)
            if factor != 1:
                value = self.call(operator.mul, value, factor)
            total = self.call(torch.add, total, value)
        return self.call(torch.add, total, form.const) if form.const else total

    def read(
        self,
        leaf: fx.Node,
        entries: tuple[Entry, ...],
        axes: dict[int, int],
        rank: int,
        sizes: tuple[Any, ...],
    ) -> fx.Node:
        """`leaf[entries]` as a tensor of `rank` axes that broadcasts; axis a goes to axes[a]."""
        if not entries:
            return leaf
        shape = shape_of(leaf) or ()
        node = leaf
        targets: list[int] = []
        for dim in reversed(range(len(entries))):
            entry = entries[dim]
            if entry.axis is None:
                node = self.call("select", node, dim, entry.offset)
                continue
            target = axes[entry.axis]
            size = sizes[target]
            if size is not None and (entry.offset or str(size) != str(shape[dim])):
                # A leaf may be longer than what is read of it.
                length = self.size(size, 0 if target == 0 else len(known_shape(self.base)) - 2)
                node = self.call("narrow", node, dim, entry.offset, length)
            targets.insert(0, target)
        if len(set(targets)) != len(targets):
            raise No(f"{leaf} is read along a diagonal")
        if targets != sorted(targets):
            node = self.call("permute", node, [targets.index(t) for t in sorted(targets)])
        for target in range(rank):
            if target not in targets:
                node = self.call("unsqueeze", node, target)
        return node
