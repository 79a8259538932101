"""Ops of glm_compile: one folder an op, each a public function with a reference and its kernels.

Importing this package registers every op under `torch.ops.glm`. Nothing here needs a GPU, Triton or
CuTe DSL to import.
"""

from __future__ import annotations

if __name__ != "glm_compile.ops":
    raise ImportError(
        "import glm_compile.ops instead of 'ops': the folder installs below glm_compile "
        "(pip install -e .)"
    )

from glm_compile.ops import (
    accept_block,
    attention,
    bf16_linear,
    causal_mask,
    draft_seed,
    filtered_softmax,
    forbid_ngrams,
    fp8_quant,
    indexer_prologue,
    indexer_scores,
    latent_write,
    merged_linear,
    mla_absorb,
    moe,
    mtp_input,
    paged_cache,
    rejection_sampling,
    repetition_penalty,
    rms_norm,
    rms_norm_linear,
    row_argmax,
    sparse_mla,
    topk,
)

__all__ = [
    "accept_block",
    "attention",
    "bf16_linear",
    "causal_mask",
    "draft_seed",
    "filtered_softmax",
    "forbid_ngrams",
    "fp8_quant",
    "indexer_prologue",
    "indexer_scores",
    "latent_write",
    "merged_linear",
    "mla_absorb",
    "moe",
    "mtp_input",
    "paged_cache",
    "rejection_sampling",
    "repetition_penalty",
    "rms_norm",
    "rms_norm_linear",
    "row_argmax",
    "sparse_mla",
    "topk",
]
