"""Read lengths, starts and key masks off the formula of a mask, or say what stands against it."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from glm_compile.fx_passes._dynamo_graph import op_name, shape_of, source_name
from glm_compile.fx_passes.base import No
from glm_compile.fx_passes.index_algebra import Bool, Leaf, Lin


@dataclass
class MaskReading:
    """A mask as conditions: p < lengths, p >= starts, key masks."""

    lengths: list[Lin] = field(default_factory=list)
    starts: list[Lin] = field(default_factory=list)
    masks: list[tuple[Leaf, bool]] = field(default_factory=list)


def read_off(condition: Bool, rank: int) -> MaskReading:
    """Lengths, starts and key masks of a condition over [batch, head, query, key]."""
    if condition.is_false:
        raise No("the mask is empty")
    if rank not in (2, 3, 4):
        raise No(f"a mask of {rank} axes")
    key, query = rank - 1, rank - 2
    reading = MaskReading()
    problems: list[str] = []
    window: Lin | None = None
    for atom in condition.atoms:
        if rank == 4 and _moves_along(atom.lin, atom.leaf, 1):
            problems.append("the mask differs between heads")
        elif atom.kind == "leaf":
            assert atom.leaf is not None
            node, entries = atom.leaf
            along_key = [entry for entry in entries if entry.axis == key]
            if any(entry.offset for entry in along_key):
                problems.append("key mask is read at an offset")
            elif along_key and any(entry.axis == query for entry in entries):
                problems.append(_opaque_mask(node))
            else:
                reading.masks.append((atom.leaf, atom.positive))
        elif atom.kind == "eq":
            problems.append(_equality(atom.lin))
        elif leaves := atom.lin.leaves_along(key):
            problems.append(_key_side(leaves[0][0]))
        else:
            factor, rest = atom.lin.factor(key), atom.lin.without(key)
            moves = rest.factor(query) or rest.leaves_along(query)
            if factor == -1:
                reading.lengths.append(rest + Lin(1))
            elif factor == 1 and not moves:
                reading.starts.append(rest * -1)
            elif factor == 1 and rest.factor(query) > 0:
                # p + s >= c: satisfied further down with every row, no bound of the keys.
                problems.append("nothing bounds the key position by the query")
            elif factor == 1:
                window = rest * -1
                problems.append("lower bound moves with the query")
            elif factor == 0:
                problems.append("a condition on the query alone")
            else:
                problems.append(f"key side depends on mul (by {abs(factor)})")
    if window is not None and len(reading.lengths) == 1:
        width = reading.lengths[0] - window
        if width.is_const:
            at = problems.index("lower bound moves with the query")
            problems[at] = f"sliding window ({width.const} keys): {problems[at]}"
    if problems:
        raise No(problems[0])
    if not reading.lengths:
        raise No("nothing bounds the key position by the query")
    return reading


def _moves_along(lin: Lin, leaf: Leaf | None, axis: int) -> bool:
    own = leaf is not None and any(entry.axis == axis for entry in leaf[1])
    return bool(own or lin.factor(axis) or lin.leaves_along(axis))


def _key_side(leaf: fx.Node) -> str:
    if leaf.op == "placeholder":
        return f"packed sequences: {readable(leaf)} is an input, its steps are unknown"
    return f"key side depends on {op_name(leaf)}"


def _equality(lin: Lin) -> str:
    for (leaf, _entries), _factor in lin.leaves:
        source = leaf
        while source.op != "placeholder" and op_name(source) in ("cumsum", "ne", "diff"):
            if not isinstance(source.args[0], fx.Node):
                break
            source = source.args[0]
        while op_name(source) in ("expand", "to", "long", "view") and source.op != "placeholder":
            source = source.args[0]  # type: ignore[assignment]
        if source.op == "placeholder" and op_name(leaf) == "cumsum":
            return f"packed sequences: {readable(source)} is an input, its steps are unknown"
    return "equality of per-token ids (packed sequences, chunks)"


def _opaque_mask(node: fx.Node) -> str:
    shape = tuple(shape_of(node) or ())
    made_by = f"placeholder {readable(node)}" if node.op == "placeholder" else op_name(node)
    return f"opaque mask {shape} from {made_by}"


def opaque_float(node: fx.Node) -> str:
    if node.op == "placeholder":
        return (
            f"additive mask from an input ({readable(node)}): values unknown, may hold biases; "
            "give a bool mask, or build it with glm_compile.ops.causal_mask inside the compiled "
            "function"
        )
    return f"additive mask made by {op_name(node)} ({node}): values unknown, may hold biases"


def readable(node: fx.Node) -> str:
    """Name of an input as the user wrote it, else the node's name."""
    source = source_name(node)
    if source is None:
        return node.name
    return (
        source.replace("']", "").replace("'", "").replace('"', "").rsplit("[", 1)[-1].split(".")[-1]
    )
