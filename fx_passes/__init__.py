"""Graph rewrites of glm_compile: one file a rewrite, see `base` for what all of them share."""

from __future__ import annotations

if __name__ != "glm_compile.fx_passes":
    raise ImportError(
        "import glm_compile.fx_passes instead of 'fx_passes': the folder installs below "
        "glm_compile (pip install -e .)"
    )

from glm_compile.fx_passes.base import GraphPass, PassOptions

# Passes without a key in reports and options, as they go on from what others have matched, and the
# key of those others: they are disabled with them, and note under it what they decline.
PARTS = {"moe_layer": "moe_experts"}


def make_passes(options: PassOptions) -> tuple[GraphPass, ...]:
    """Return the passes of an ATen graph for these options, in order.

    `options.disable` may also name passes of other stages (`mask`); these are not looked at here.
    """
    from glm_compile.fx_passes.bf16_linear import Bf16Linear
    from glm_compile.fx_passes.indexer_prologue import IndexerPrologue
    from glm_compile.fx_passes.indexer_topk import IndexerTopk
    from glm_compile.fx_passes.merge_linears import MergeLinears
    from glm_compile.fx_passes.moe_layer import MoeLayer
    from glm_compile.fx_passes.rms_norm_linear import RmsNormLinear
    from glm_compile.fx_passes.sparse_mla import SparseMla

    # Each is correct alone, so any key may be disabled: indexer_topk turns the scores into ops,
    # indexer_prologue looks for those ops' producers, sparse_mla leaves kv_b no linear of its own,
    # merge_linears takes what shares an input, bf16_linear what is left, moe_layer what both made
    # of an MoE layer, rms_norm_linear the norms before either.
    passes: tuple[GraphPass, ...] = (
        IndexerTopk(options),
        IndexerPrologue(options),
        SparseMla(options),
        MergeLinears(options),
        Bf16Linear(options),
        MoeLayer(options),
        RmsNormLinear(options),
    )
    return tuple(p for p in passes if PARTS.get(p.name, p.name) not in options.disable)
