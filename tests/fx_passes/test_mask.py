"""prove_mask: routes, reasons, numbers of the rewritten Dynamo graph against the eager model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from glm_compile.fx_passes.mark_attention import mark_attention
from glm_compile.fx_passes.mask import prove_mask
from glm_compile.ops.causal_mask import causal_mask
from tests.fx_passes.dynamo_graphs import (
    PROMPT,
    Recorder,
    calls,
    compare,
    filled_cache,
    score_shaped_bools,
    small_model,
    tokens,
)
from tests.tiny_models import CACHE_ARGUMENT

GLM = torch.ops.glm
_GENERATOR = torch.Generator().manual_seed(0)
SCORES = torch.rand(2, 26, 40, generator=_GENERATOR)
QUERIES = torch.randn(2, 2, 26, 16, generator=_GENERATOR)
KEYS = torch.randn(2, 2, 40, 16, generator=_GENERATOR)
TOLERANCE = {"sdpa": 0.0, "eager": 1e-5}


def context(cache: str, queries: int) -> tuple[int, int]:
    """(tokens passed in, keys they see) of a step."""
    return (PROMPT + queries, PROMPT + queries) if cache == "none" else (queries, PROMPT + queries)


def padding(name: str, length: int) -> torch.Tensor | None:
    """2D attention mask for a batch of two."""
    if name == "all":
        return None
    mask = torch.ones(2, length, dtype=torch.long)
    if name == "left":
        mask[0, :3] = 0
    elif name == "right":
        mask[1, -2:] = 0
    else:
        mask[0, 4:9] = 0
        mask[1, 15] = 0
    return mask


def attention_bounds(graph: Any) -> list[list[Any]]:
    """Lengths, starts and key mask of each attention call."""
    return [list(node.args[4:7]) for node in calls(graph, GLM.indexed_attention.default)]


def assert_rewritten(recorder: Recorder, route: str, queries: int, num_attention: int = 2) -> None:
    result = recorder.mask
    assert recorder.marked[-1].declined == [] and result.declined == []
    assert (result.route, result.num_attention, result.num_indexers) == (route, num_attention, 1)
    assert result.num_matches == len(result.matched) == num_attention + 1
    graph = recorder.graphs[-1]
    # What was selected within the same bounds is attended as it is.
    assert attention_bounds(graph) == [[None] * 3] * num_attention
    assert len(calls(graph, GLM.masked_topk.default)) == 1
    assert not calls(graph, GLM.attention.default)
    if route == "proven":
        assert score_shaped_bools(graph, queries) == []


def in_pairs(caches: Sequence[str], others: Sequence[Any]) -> list[tuple[str, str, Any]]:
    """Each cache with each other value, the attentions by turns: each two values meet once."""
    return [
        (("sdpa", "eager")[(i + j) % 2], cache, other)
        for i, cache in enumerate(caches)
        for j, other in enumerate(others)
    ]


@pytest.mark.parametrize(
    "attention, cache, shape",
    in_pairs(["static", "dynamic", "none"], [(2, 1), (1, 6), (2, 48)]),
    ids=str,
)
def test_plain(attention: str, cache: str, shape: tuple[int, int]) -> None:
    batch, queries = shape
    model = small_model(attention, num_hidden_layers=1, indexer_types=["full"])
    length, _keys = context(cache, queries)
    difference, recorder = compare(
        model, tokens(batch, length), lambda: filled_cache(model, cache, batch)
    )
    assert_rewritten(recorder, "proven", length, num_attention=1)
    assert recorder.mask.notes == []
    assert difference <= TOLERANCE[attention]


@pytest.mark.parametrize(
    "attention, cache, pad", in_pairs(["static", "dynamic", "none"], ["left", "right", "holes"])
)
def test_padding(attention: str, cache: str, pad: str) -> None:
    model = small_model(attention)
    length, keys = context(cache, 6)
    mask = padding(pad, keys)
    difference, recorder = compare(
        model,
        tokens(2, length),
        lambda: (
            filled_cache(model, cache, 2, mask, attention_mask=mask)
            if cache != "none"
            else {"use_cache": False, "attention_mask": mask}
        ),
        valid=mask[:, -length:],
    )
    assert_rewritten(recorder, "proven", length)
    assert difference <= TOLERANCE[attention]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mask_of_a_low_precision_model_is_proven(dtype: torch.dtype) -> None:
    """The minimum of a float mask is the one of the model's dtype."""
    model = small_model("eager").to(dtype)
    difference, recorder = compare(model, tokens(2, 6), lambda: filled_cache(model, "static", 2))
    assert_rewritten(recorder, "proven", 6)
    assert difference <= 5e-2


def test_automatic_dynamic_lengths() -> None:
    """From the second compilation on, a DynamicCache's length is a SymInt."""
    model = small_model()
    recorder = Recorder()
    compiled = torch.compile(model, backend=recorder, fullgraph=True)
    ours, theirs = (filled_cache(model, "dynamic", 2) for _ in range(2))
    for step in range(4):
        ids = tokens(2, 1, seed=step)
        assert torch.equal(compiled(ids, **ours).logits, model(ids, **theirs).logits)
    assert len(recorder.graphs) == 2
    for mask in recorder.masks:
        assert (mask.route, mask.num_matches, mask.declined) == ("proven", 3, [])
    assert any(
        isinstance(n.meta.get("example_value"), torch.SymInt)
        for n in recorder.graphs[1].graph.nodes
    )


def test_marked_dynamic_prefill() -> None:
    model = small_model()
    recorder = Recorder()
    compiled = torch.compile(model, backend=recorder, fullgraph=True)
    for length in (24, 40):
        ids = tokens(2, length)
        torch._dynamo.mark_dynamic(ids, 1)
        assert torch.equal(
            compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits
        )
    assert len(recorder.graphs) == 1
    assert (recorder.mask.route, recorder.mask.num_matches) == ("proven", 3)


@pytest.mark.parametrize("attention, cache", [("sdpa", "static"), ("eager", "none")])
def test_everything_dynamic(attention: str, cache: str) -> None:
    """`dynamic=True` also makes inputs of module floats; they are guarded constants again."""
    model = small_model(attention)
    recorder = Recorder()
    compiled = torch.compile(model, backend=recorder, fullgraph=True, dynamic=True)
    for batch, length in ((2, 26), (3, 30)):
        ids = tokens(batch, length)
        found = compiled(ids, **filled_cache(model, cache, batch)).logits
        expected = model(ids, **filled_cache(model, cache, batch)).logits
        assert (found - expected).abs().max() <= TOLERANCE[attention]
    assert len(recorder.graphs) == 1
    assert (recorder.mask.route, recorder.mask.num_matches) == ("proven", 3)
    assert not [n for n in recorder.graphs[0].graph.nodes if n.target == "item"]


def test_short_context_with_dynamic_sizes() -> None:
    """Fewer keys than index_topk: the number of selected keys is symbolic."""
    model = small_model()
    recorder = Recorder()
    compiled = torch.compile(model, backend=recorder, fullgraph=True, dynamic=True)
    for length in (5, 6):
        ids = tokens(2, length)
        assert torch.equal(
            compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits
        )
    assert recorder.mask.num_matches == 3


# --- masks of the caller -------------------------------------------------------------------------


def bool_mask(form: str, batch: int, queries: int, keys: int) -> torch.Tensor:
    """[batch, 1, queries, keys] over PROMPT + queries filled keys; each row sees one at least."""
    filled = min(keys, PROMPT + queries)
    q = torch.arange(queries)[:, None] + filled - queries
    k = torch.arange(keys)[None, :]
    mask = k <= q
    if form == "window":
        mask = mask & (k > q - 12)
    elif form == "packed":
        mask = mask & (k // 13 == q // 13)
    elif form == "bidirectional":
        mask = (k < filled).expand(queries, keys)
    elif form == "random":
        mask = torch.rand(batch, 1, queries, keys, generator=torch.Generator().manual_seed(3)) < 0.6
        mask[..., 0] = True
        mask = mask & (k < filled)
    return mask.expand(batch, 1, queries, keys).contiguous()


@pytest.mark.parametrize(
    "form, as_dict",
    [
        ("causal", False),
        ("window", True),
        ("packed", False),
        ("bidirectional", True),
        ("random", False),
        ("random", True),
    ],
)
def test_bool_mask_of_the_caller(form: str, as_dict: bool) -> None:
    model = small_model()
    mask = bool_mask(form, 2, 6, 96)
    given: Any = {"indexed_attention": mask} if as_dict else mask
    positions = torch.arange(PROMPT, PROMPT + 6)[None]
    difference, recorder = compare(
        model,
        tokens(2, 6),
        lambda: filled_cache(model, "static", 2, attention_mask=given, position_ids=positions),
    )
    assert_rewritten(recorder, "bounds", 6)
    assert recorder.reasons[0].startswith("opaque mask (2, 1, 6, 96) from placeholder")
    assert difference == 0.0


def test_bool_mask_with_an_empty_row_and_a_broadcast_batch() -> None:
    model = small_model()
    mask = bool_mask("causal", 1, 6, 26)
    mask[0, 0, 2] = False
    valid = torch.ones(2, 6)
    valid[:, 2] = 0
    difference, recorder = compare(
        model,
        tokens(2, 6),
        lambda: filled_cache(
            model,
            "dynamic",
            2,
            attention_mask=mask,
            position_ids=torch.arange(PROMPT, PROMPT + 6)[None],
        ),
        valid=valid,
    )
    assert_rewritten(recorder, "bounds", 6)
    assert difference == 0.0


def test_bool_mask_with_dynamic_sizes() -> None:
    model = small_model()
    recorder = Recorder()
    compiled = torch.compile(model, backend=recorder, fullgraph=True, dynamic=True)
    for length in (26, 33):
        kwargs = {"attention_mask": bool_mask("random", 2, length, length), "use_cache": False}
        ids = tokens(2, length)
        found = compiled(ids, **kwargs).logits
        assert torch.equal(found, model(ids, **kwargs).logits)
    assert len(recorder.graphs) == 1
    assert_rewritten(recorder, "bounds", 0)


def test_float_mask_of_the_caller_is_kept() -> None:
    model = small_model("eager")
    mask = torch.zeros(2, 1, 6, 96).masked_fill(~bool_mask("causal", 2, 6, 96), -3.4e38)
    mask[..., 3] = -0.5
    difference, recorder = compare(
        model, tokens(2, 6), lambda: filled_cache(model, "static", 2, attention_mask=mask)
    )
    assert (recorder.mask.route, recorder.mask.num_matches) == ("kept", 0)
    assert len(recorder.mask.declined) == 3
    assert all("attention_mask): values unknown, may hold biases" in r for r in recorder.reasons)
    assert len(calls(recorder.graphs[-1], GLM.attention.default)) == 2
    assert difference <= TOLERANCE["eager"]


def test_bool_mask_with_eager_attention_is_kept() -> None:
    """transformers adds it as 0 and 1; a different result without a word would be worse."""
    model = small_model("eager")
    mask = bool_mask("causal", 2, 6, 96)
    difference, recorder = compare(
        model, tokens(2, 6), lambda: filled_cache(model, "static", 2, attention_mask=mask)
    )
    assert recorder.mask.num_attention == 0
    assert any("bool mask with eager attention" in reason for reason in recorder.reasons)
    assert difference <= TOLERANCE["eager"]


def test_generate_of_transformers_with_a_static_cache() -> None:
    """Its masks are built outside of the forward: a dict of bool masks, route `bounds`."""
    model = small_model()
    prompt = tokens(2, PROMPT)
    mask = padding("left", PROMPT)
    options: dict[str, Any] = {
        "attention_mask": mask,
        "max_new_tokens": 6,
        "do_sample": False,
        "cache_implementation": "static",
        "eos_token_id": None,
        "disable_compile": True,
    }
    expected = model.generate(prompt, **options)
    recorder = Recorder()
    model.forward = torch.compile(model.forward, backend=recorder, fullgraph=True)
    found = model.generate(prompt, **options)
    assert torch.equal(found, expected)
    assert recorder.masks and all(m.num_matches == 3 and not m.declined for m in recorder.masks)
    assert recorder.mask.route == "bounds"


# --- masks built in the compiled function --------------------------------------------------------


def sparse_attention(mask: torch.Tensor, attention: str = "sdpa") -> torch.Tensor:
    """An indexer and two attention calls as transformers writes them, without a model around."""
    batch, _one, queries, keys = mask.shape
    scores = SCORES[:batch, :queries, :keys]
    q, k, v = QUERIES[:batch, :, :queries], KEYS[:batch, :, :keys], KEYS[:batch, :, :keys] * 2
    mask_bst = mask[:, 0, :, :]
    if mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask_bst, float("-inf"))
    else:
        scores = scores + mask_bst
    topk = scores.topk(8, dim=-1).indices.to(torch.int32)
    outputs = []
    for _layer in range(2):
        index_mask = (
            topk.new_ones((batch, queries, keys), dtype=torch.bool)
            .scatter(-1, topk.long(), False)
            .unsqueeze(1)
        )
        if mask.dtype == torch.bool:
            combined = mask & ~index_mask
        else:
            combined = mask.masked_fill(index_mask, torch.finfo(q.dtype).min)
        if attention == "sdpa":
            q = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=combined, dropout_p=0.0, scale=0.25, is_causal=False
            )
        else:
            weights = torch.matmul(q, k.transpose(2, 3)) * 0.25 + combined
            weights = torch.nn.functional.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
            weights = torch.nn.functional.dropout(weights, p=0.0, training=False)
            q = torch.matmul(weights, v)
        outputs.append(q)
    return torch.stack(outputs)


def run_with_mask(
    build: Callable[..., torch.Tensor], attention: str = "sdpa", **extra: Any
) -> tuple[float, Recorder]:
    """A compiled function that builds its own mask [2, 1, 26, 26] and attends with it."""
    recorder = Recorder()

    def step(**given: torch.Tensor) -> torch.Tensor:
        q = torch.arange(26)[None, None, :, None]
        k = torch.arange(26)[None, None, None, :]
        return sparse_attention(build(q, k, **given).expand(2, 1, 26, 26), attention)

    compiled = torch.compile(step, backend=recorder, fullgraph=True)
    copies = [{n: t.clone() for n, t in extra.items()} for _ in range(2)]
    found, expected = compiled(**copies[0]), step(**copies[1])
    return (found - expected).abs().max().item(), recorder


@pytest.mark.parametrize(
    "build",
    [
        lambda q, k: k <= q,
        lambda q, k: k < q + 1,
        lambda q, k: ~(k > q),
        lambda q, k: (q - k) >= 0,
        lambda q, k: torch.logical_not(torch.gt(k, q)),
        lambda q, k: torch.where(k <= q, True, False),
        lambda q, k: torch.zeros_like(k <= q).masked_fill(k <= q, True),
        lambda q, k: (k <= q) & (k >= 0) & torch.ones((), dtype=torch.bool),
        lambda q, k: (k <= q).transpose(2, 3).transpose(-1, -2).squeeze(1).unsqueeze(1),
    ],
)
def test_spellings(build: Callable[..., torch.Tensor]) -> None:
    difference, recorder = run_with_mask(build)
    assert_rewritten(recorder, "proven", 26)
    assert difference == 0.0


def test_offset_start_and_positions_per_sequence() -> None:
    difference, recorder = run_with_mask(
        lambda q, k, offset, start: (
            (k <= q + offset[:, None, None, None]) & (k >= start[:, None, None, None])
        ),
        offset=torch.tensor([0, -2]),
        start=torch.tensor([0, 0], dtype=torch.int32),
    )
    assert_rewritten(recorder, "proven", 26)
    (topk,) = calls(recorder.graphs[-1], GLM.masked_topk.default)
    assert topk.args[2] is not None
    assert difference <= 1e-6

    difference, recorder = run_with_mask(
        lambda q, k, positions: k <= positions[:, None, :, None],
        positions=torch.arange(26).expand(2, 26),
    )
    assert_rewritten(recorder, "proven", 26)
    assert difference == 0.0


def test_float_mask_spelled_by_arithmetic() -> None:
    lowest = torch.finfo(torch.float32).min
    difference, recorder = run_with_mask(lambda q, k: (1.0 - (k <= q).float()) * lowest, "eager")
    assert_rewritten(recorder, "proven", 26)
    assert difference <= TOLERANCE["eager"]


def sliding(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return (k <= q) & (k > q - 8)


def setitem(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    mask = k <= q
    mask[..., 3] = False
    return mask


def advanced(q: torch.Tensor, k: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    rows = q + offset
    offset.add_(3)
    return k <= rows


@pytest.mark.parametrize(
    "build, extra, reason",
    [
        (sliding, {}, "sliding window (8 keys): lower bound moves with the query"),
        (
            lambda q, k: (k <= q) & (k // 8 == q // 8),
            {},
            "equality of per-token ids (packed sequences, chunks)",
        ),
        (lambda q, k: (k <= q) | (k < 4), {}, "opaque mask (1, 1, 26, 26) from or_"),
        (lambda q, k: (q + k) >= 0, {}, "nothing bounds the key position by the query"),
        (lambda q, k: k >= q, {}, "lower bound moves with the query"),
        (lambda q, k: 2 * k <= q, {}, "key side depends on mul"),
        (
            lambda q, k, pad: (k <= q) & pad[:, 1:27][:, None, None, :],
            {"pad": torch.ones(2, 32, dtype=torch.bool)},
            "key mask is read at an offset",
        ),
        (
            lambda q, k: torch.ones(26, 26, dtype=torch.bool).tril()[None, None],
            {},
            "opaque mask (26, 26) from tril",
        ),
        (setitem, {}, "is written in place by setitem"),
        (advanced, {"offset": torch.tensor(0)}, "is written in place by add_"),
    ],
)
def test_near_misses_go_by_their_data(
    build: Callable[..., torch.Tensor], extra: dict[str, torch.Tensor], reason: str
) -> None:
    difference, recorder = run_with_mask(build, **extra)
    assert_rewritten(recorder, "bounds", 26)
    assert len(recorder.reasons) == 1 and reason in recorder.reasons[0]
    assert difference == 0.0


def test_near_misses_of_eager_attention_go_by_their_data() -> None:
    lowest = torch.finfo(torch.float32).min
    difference, recorder = run_with_mask(
        lambda q, k: torch.where(sliding(q, k), torch.zeros(()), lowest), "eager"
    )
    assert_rewritten(recorder, "bounds", 26)
    assert "sliding window (8 keys)" in recorder.reasons[0]
    assert difference <= TOLERANCE["eager"]


@pytest.mark.parametrize(
    "build, reason",
    [
        (lambda q, k: torch.where(k <= q, 0.0, -0.1), "where(mask, a, b): not 0 / minimum"),
        (lambda q, k: (k - q).float() * 0.01, "additive mask made by"),
        (
            lambda q, k: _write(torch.where(k <= q, 0.0, torch.finfo(torch.float32).min)),
            "is written in place by setitem",
        ),
    ],
)
def test_float_masks_that_are_kept(build: Callable[..., torch.Tensor], reason: str) -> None:
    difference, recorder = run_with_mask(build, "eager")
    assert (recorder.mask.route, recorder.mask.num_matches) == ("kept", 0)
    assert reason in recorder.reasons[-1]
    assert difference <= TOLERANCE["eager"]


def _write(mask: torch.Tensor) -> torch.Tensor:
    mask[..., 3] = -5.0
    return mask


@pytest.mark.parametrize("cached", [False, True])
def test_positions_of_the_caller(cached: bool) -> None:
    """Without a cache transformers takes them for packed sequences."""
    model = small_model()
    positions = torch.arange(26)[None].expand(2, 26) if not cached else torch.arange(20, 26)[None]
    difference, recorder = compare(
        model,
        tokens(2, 6 if cached else 26),
        lambda: (
            filled_cache(model, "static", 2, position_ids=positions)
            if cached
            else {"use_cache": False, "position_ids": positions}
        ),
    )
    assert_rewritten(recorder, "proven" if cached else "bounds", 6)
    if not cached:
        assert recorder.reasons == [
            "packed sequences: position_ids is an input, its steps are unknown"
        ]
    assert difference == 0.0


def test_sliding_window_of_transformers() -> None:
    from transformers.masking_utils import create_sliding_window_causal_mask

    model = small_model()
    model.config.sliding_window = 9
    ids = tokens(2, 26)
    recorder = Recorder()

    def step(ids: torch.Tensor) -> torch.Tensor:
        embedded = model.model.embed_tokens(ids)
        mask = create_sliding_window_causal_mask(
            config=model.config,
            inputs_embeds=embedded,
            attention_mask=None,
            **{CACHE_ARGUMENT: None},
        )
        return model(ids, attention_mask=mask, use_cache=False).logits

    found = torch.compile(step, backend=recorder, fullgraph=True)(ids)
    assert torch.equal(found, step(ids))
    assert recorder.reasons == ["sliding window (9 keys): lower bound moves with the query"]
    assert_rewritten(recorder, "bounds", 26)


# --- the marker ----------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("queries", [1, 6])
def test_causal_mask_marker_with_unequal_lengths(attention: str, queries: int) -> None:
    """Lengths are read where the marker stands: the step advances them afterwards."""
    dtype = torch.bool if attention == "sdpa" else torch.float32
    starts = torch.tensor([2, 0], dtype=torch.int32)
    key_mask = torch.ones(2, 1, 40, dtype=torch.bool)
    key_mask[1, 0, 3] = False
    recorder = Recorder()

    def step(lengths: torch.Tensor) -> torch.Tensor:
        mask = causal_mask(lengths, queries, 40, dtype, starts_B=starts, key_mask=key_mask)
        lengths.add_(queries)
        return sparse_attention(mask, attention)

    compiled = torch.compile(step, backend=recorder, fullgraph=True)
    ours, theirs = (torch.tensor([20, 15], dtype=torch.int32) for _ in range(2))
    for _ in range(2):
        assert (compiled(ours) - step(theirs)).abs().max() <= TOLERANCE[attention]
    assert torch.equal(ours, theirs)
    assert len(recorder.graphs) == 1
    assert_rewritten(recorder, "proven", queries)
    assert not calls(recorder.graphs[0], GLM.causal_mask.default)


def test_two_steps_in_one_graph() -> None:
    """Each mask has bounds of its own; the lengths move in between."""
    recorder = Recorder()

    def steps(lengths: torch.Tensor) -> torch.Tensor:
        out = []
        for _ in range(2):
            out.append(sparse_attention(causal_mask(lengths, 6, 40, torch.bool)))
            lengths.sub_(3)
        return torch.cat(out)

    compiled = torch.compile(steps, backend=recorder, fullgraph=True)
    lengths = [torch.tensor([20, 15]) for _ in range(2)]
    assert torch.equal(compiled(lengths[0]), steps(lengths[1]))
    assert (recorder.mask.route, recorder.mask.num_matches) == ("proven", 6)


def test_mask_written_between_its_users_is_kept() -> None:
    recorder = Recorder()

    def step(given: torch.Tensor) -> torch.Tensor:
        mask = given.clone()
        first = sparse_attention(mask)
        mask[..., 0] = False
        return first + sparse_attention(mask)

    mask = torch.ones(2, 1, 26, 26, dtype=torch.bool).tril()
    mask[:, :, 0, 0] = True
    compiled = torch.compile(step, backend=recorder, fullgraph=True)
    found, expected = compiled(mask)[:, :, :, 1:], step(mask)[:, :, :, 1:]
    assert torch.equal(found[:, :, :, 1:], expected[:, :, :, 1:])
    assert recorder.mask.route == "kept"
    assert "is written in place by setitem between its uses" in recorder.reasons[-1]


# --- parts of a model ----------------------------------------------------------------------------


def run_layer(index: int, **given: Any) -> tuple[torch.Tensor, torch.Tensor, Recorder]:
    model = small_model()
    layer, rotary = model.model.layers[index], model.model.rotary_emb
    hidden = torch.randn(2, 26, 128)
    recorder = Recorder()

    def step(hidden: torch.Tensor, **given: Any) -> Any:
        positions = torch.arange(26)[None]
        lengths = torch.zeros(2, dtype=torch.int32)
        return layer(
            hidden,
            attention_mask=causal_mask(lengths, 26, 26, torch.bool),
            position_ids=positions,
            position_embeddings=rotary(hidden, position_ids=positions),
            **given,
        )

    found = torch.compile(step, backend=recorder, fullgraph=True)(hidden, **given)
    return found, step(hidden, **given), recorder


def test_full_layer_whose_selection_leaves_the_graph() -> None:
    found, expected, recorder = run_layer(0)
    assert torch.equal(found[0], expected[0])
    assert (recorder.mask.num_attention, recorder.mask.num_indexers) == (1, 1)
    assert attention_bounds(recorder.graphs[0]) == [[None] * 3]
    # Whoever gets the selection may scatter with it, and a repeat beside the position is harmless.
    assert found[1].dtype == torch.int32 and found[1].min() >= 0
    slots = torch.arange(8, dtype=torch.int32)
    assert torch.equal(found[1][:, :8], slots.minimum(slots[:, None]).expand(2, 8, 8))
    full = torch.arange(26) >= 8
    assert torch.equal(found[1][:, full], expected[1][:, full].sort(-1).values)


def test_shared_layer_whose_selection_is_an_input() -> None:
    selection = torch.arange(26)[None, :, None] - torch.arange(8)
    selection = selection.clamp(min=0).expand(2, 26, 8).to(torch.int32).contiguous()
    found, expected, recorder = run_layer(1, prev_topk_indices=selection)
    assert torch.equal(found[0], expected[0])
    assert (recorder.mask.num_attention, recorder.mask.num_indexers) == (1, 0)
    ((lengths, starts, key_mask),) = attention_bounds(recorder.graphs[0])
    assert lengths is not None and starts is key_mask is None


@pytest.mark.parametrize("is_written", [False, True])
def test_a_selection_that_counts_up_is_made_beside_its_attention(is_written: bool) -> None:
    """Unless it was written to on the way: then only its values say what it holds."""
    model = small_model()
    layer, rotary = model.model.layers[1], model.model.rotary_emb
    recorder = Recorder()

    def step(hidden: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(3, 11, dtype=torch.int32)
        if is_written:
            rows[0] = 0
        positions = torch.arange(26)[None]
        return layer(
            hidden,
            attention_mask=causal_mask(torch.zeros(2, dtype=torch.int32), 26, 26, torch.bool),
            position_ids=positions,
            position_embeddings=rotary(hidden, position_ids=positions),
            prev_topk_indices=rows.expand(2, 26, 8),
        )[0]

    hidden = torch.randn(2, 26, 128)
    found = torch.compile(step, backend=recorder, fullgraph=True)(hidden)
    assert torch.equal(found, step(hidden))
    (attention,) = calls(recorder.graphs[0], GLM.indexed_attention.default)
    path = str(attention.args[3].meta.get("nn_module_stack", ""))
    assert ("GlmMoeDsaAttention" in path) is not is_written


@pytest.mark.parametrize("has_starts", [False, True])
def test_declined_consumer_keeps_the_mask_and_gets_valid_positions(has_starts: bool) -> None:
    """One attention call shows its weights: it keeps mask and scatter, the rest is rewritten."""
    model = small_model("eager")
    ids = tokens(2, 26)
    recorder = Recorder()
    starts = torch.tensor([0, 3]) if has_starts else None

    def step(ids: torch.Tensor) -> Any:
        hidden = model.model.embed_tokens(ids)
        positions = torch.arange(26)[None]
        options: dict[str, Any] = {
            "position_embeddings": model.model.rotary_emb(hidden, position_ids=positions),
            "attention_mask": causal_mask(
                torch.zeros(2, dtype=torch.int32), 26, 26, hidden.dtype, starts_B=starts
            ),
        }
        first, second = (layer.self_attn for layer in model.model.layers)
        hidden, _weights, selection = first(hidden, **options)
        return second(hidden, prev_topk_indices=selection, **options)[:2]

    found, expected = torch.compile(step, backend=recorder, fullgraph=True)(ids), step(ids)
    for ours, theirs in zip(found, expected):
        # Rows of padding see nothing, and are nobody's.
        assert (ours - theirs)[:, 3 * has_starts :].abs().max() <= 1e-5
    assert [d.reason for d in recorder.marked[0].declined] == [
        "the attention weights have another user (output_attentions=True)"
    ]
    assert (recorder.mask.num_attention, recorder.mask.num_indexers) == (1, 1)
    # The scatter of the first call gets no -1. The second call reads the same unless a row may have
    # nothing: what is repeated there would count.
    (topk,) = calls(recorder.graphs[0], GLM.masked_topk.default)
    assert attention_bounds(recorder.graphs[0]) == [[None] * 3]
    (attention,) = calls(recorder.graphs[0], GLM.indexed_attention.default)
    assert attention.args[3] is topk
    assert topk.args[5] is not has_starts
    functions = {user.target.__name__ for user in topk.users if user.op == "call_function"}
    assert ("where" in functions) is has_starts


def test_running_the_passes_again_changes_nothing() -> None:
    model = small_model()
    _difference, recorder = compare(model, tokens(2, 6), lambda: filled_cache(model, "static", 2))
    (graph,) = recorder.graphs
    before = str(graph.graph)
    assert mark_attention(graph).num_matches == 0
    result = prove_mask(graph)
    assert (result.num_matches, result.declined, result.route) == (0, [], "none")
    assert str(graph.graph) == before


def test_cache_writes_survive() -> None:
    """FX takes in-place methods for pure; the passes must not."""
    model = small_model()
    plain, rewritten = Recorder(rewrite=False), Recorder()
    for recorder in (plain, rewritten):
        torch._dynamo.reset()
        kwargs = filled_cache(model, "static", 2)
        torch.compile(model, backend=recorder, fullgraph=True)(tokens(2, 6), **kwargs)
    writes = [
        [str(n.target) for n in r.graphs[0].graph.nodes if str(n.target) in ("add_", "index_copy_")]
        for r in (plain, rewritten)
    ]
    assert writes[0] == writes[1] and len(writes[0]) == 8


def test_graph_without_attention() -> None:
    recorder = Recorder()
    torch.compile(lambda x: x.softmax(-1) + 1, backend=recorder)(torch.randn(2, 3))
    assert (recorder.mask.route, recorder.mask.num_matches) == ("none", 0)


def test_paged_cache_with_unequal_lengths() -> None:
    from glm_compile.cache import PagedCache

    model = small_model()
    recorder = Recorder()
    ids = tokens(2, 6)

    def make() -> PagedCache:
        cache = PagedCache(model.config, 2, 128)
        model(tokens(2, PROMPT), **{CACHE_ARGUMENT: cache})
        cache.set_lengths(torch.tensor([20, 13]))
        return cache

    def step(ids: torch.Tensor, cache: PagedCache) -> torch.Tensor:
        mask = cache.causal_mask(6)
        positions = cache.lengths[:, None] + torch.arange(6)
        return model(
            ids,
            attention_mask={"indexed_attention": mask},
            position_ids=positions,
            **{CACHE_ARGUMENT: cache},
        ).logits

    ours, theirs = make(), make()
    found = torch.compile(step, backend=recorder, fullgraph=True)(ids, ours)
    expected = step(ids, theirs)
    assert (found - expected).abs().max() <= 1e-5
    assert torch.equal(ours.lengths, theirs.lengths)
    assert_rewritten(recorder, "proven", 6)
    (topk,) = calls(recorder.graphs[0], GLM.masked_topk.default)
    assert is_made_in_an_indexer(topk.args[1])
    for row, length in enumerate((20, 13)):
        cache = DynamicCache(config=model.config)
        model(tokens(2, PROMPT)[row : row + 1, :length], **{CACHE_ARGUMENT: cache})
        alone = model(ids[row : row + 1], **{CACHE_ARGUMENT: cache}).logits
        assert (found[row : row + 1] - alone).abs().max() <= 1e-5


def is_made_in_an_indexer(lengths: torch.fx.Node) -> bool:
    """Whether a selection's lengths are made beside it, not in the head of the graph."""
    stack = lengths.meta.get("nn_module_stack") or {}
    return any("Indexer" in str(kind) for _path, kind in stack.values())


@pytest.mark.parametrize("is_advanced", [False, True])
def test_lengths_are_made_beside_the_indexer_unless_the_counter_has_moved(
    is_advanced: bool,
) -> None:
    """A counter that is advanced between the mask and the indexer no longer says what it saw."""
    from glm_compile.cache import PagedCache

    model = small_model()
    recorder = Recorder()
    hidden = torch.randn(2, 3, model.config.hidden_size)

    def make() -> PagedCache:
        cache = PagedCache(model.config, 2, 128)
        cache.auto_advance = False
        model(tokens(2, PROMPT), **{CACHE_ARGUMENT: cache})
        cache.set_lengths(torch.tensor([20, 13]))
        return cache

    def step(hidden: torch.Tensor, cache: PagedCache) -> torch.Tensor:
        mask = cache.causal_mask(3)
        positions = cache.lengths[:, None] + torch.arange(3)
        if is_advanced:
            cache.lengths.add_(2)
        indexer = model.model.layers[0].self_attn.indexer
        tables = model.model.rotary_emb(hidden, position_ids=positions)
        q_resid = hidden[..., : model.config.q_lora_rank]
        return indexer(hidden, q_resid, tables, mask[:, 0], None, **{CACHE_ARGUMENT: cache})

    found = torch.compile(step, backend=recorder, fullgraph=True)(hidden, make())
    assert torch.equal(found.sort(-1).values, step(hidden, make()).sort(-1).values)
    (topk,) = calls(recorder.graphs[0], GLM.masked_topk.default)
    assert is_made_in_an_indexer(topk.args[1]) is not is_advanced
