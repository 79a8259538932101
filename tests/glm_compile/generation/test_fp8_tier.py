"""The FP8 tier through compiled `generate`, on the trained model: what it selects, what it writes.

Its numbers are other numbers, so nothing is compared by logits. The model as it is (the exact tier
without a compiler) writes the same text (forced, drafts included), so that each selection of the
one has its partner in the other; the figure is the share of the 96 selected positions that they
have in common.

Measured (2 CPU cores, 2026-11-30; this prompt and three of 426 to 566 tokens, in bf16 and fp32, 64
new tokens): 0.976 to 0.988 on average in each indexer layer, 0.917 in the worst row. What the
thresholds lie above, by the least layer's average and the worst row, on this prompt:

    two bits of mantissa instead of three     0.952   0.844
    one scale for a head's queries            0.940   0.740
    one scale for all keys of a step          0.680   0.302
    each key with its neighbour's scale       0.670   0.365

The first and the third of these have the exact tier's accept lengths: the text does not tell.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaIndexer

import glm_compile
from glm_compile.cache import FP8
from glm_compile.generation.steps import Steps, unwrap_compiled
from glm_compile.ops import _dispatch

EXAMPLES = Path(__file__).parents[3] / "examples"
NEW = 64
INDEX_TOPK = 96
# Own indexers of the layers 0, 1, 2 and 6, in the order in which they run; then the MTP layer's.
INDEXERS = ("0", "1", "2", "6", "MTP")
LEAST_AVERAGE = 0.97
LEAST_ROW = 0.89

pytestmark = pytest.mark.slow


class Tier:
    """One tier: what it writes by itself, and what it selects under a given text.

    The exact tier is the model as it is, not compiled; the other one is compiled.

    Attributes:
        free: result without a given text.
        selections: positions of each call of an indexer while `text` is written (None: while its
            own is), and the lengths of its rows where the tier is compiled.
    """

    def __init__(
        self, indexer_dtype: str | None, ids: torch.Tensor, text: list[int] | None
    ) -> None:
        self.model, self.mtp = glm_compile.load(EXAMPLES / "tiny_glm52", device="cpu")
        self.called = self.model
        if indexer_dtype is not None:
            options = {"inner": "eager", "indexer_dtype": indexer_dtype}
            self.called = torch.compile(self.model, backend="glm", fullgraph=True, options=options)
        self.ids = ids
        self.free = self.generate()
        self.lengths: list[torch.Tensor] = []
        self.selections: list[torch.Tensor] = []
        self.select(text or self.free.sequences[0].tolist())

    def generate(self, **kwargs: Any) -> Any:
        return glm_compile.generate(
            self.called, self.ids, mtp=self.mtp, max_new_tokens=NEW, do_sample=False,
            eos_token_id=None, return_dict_in_generate=True, **kwargs,
        )  # fmt: skip

    def select(self, text: list[int]) -> None:
        run = _dispatch.run

        def record(op: str, backends: Any, forced: Any, *args: Any, **kwargs: Any) -> Any:
            result = run(op, backends, forced, *args, **kwargs)
            if op == "topk":
                lengths = args[1].clone()
                if len(lengths) < len(result):  # those before the step, one for each sequence
                    num_steps = len(result) // len(lengths)
                    lengths = (lengths[:, None] + torch.arange(1, num_steps + 1)).flatten()
                self.lengths.append(lengths)
                self.selections.append(result.clone())
            return result

        def force(_row: int, prefix: torch.Tensor) -> list[int]:
            return [text[len(prefix)] if len(prefix) < len(text) else 0]

        hooks = []
        if self.called is self.model:
            for module in (*self.model.modules(), *self.mtp.modules()):
                if isinstance(module, GlmMoeDsaIndexer):
                    hook = module.register_forward_hook(
                        lambda _module, _inputs, positions: self.selections.append(positions[0])
                    )
                    hooks.append(hook)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_dispatch, "run", record)
            forced = self.generate(prefix_allowed_tokens_fn=force)
        for hook in hooks:
            hook.remove()
        assert len(self.lengths) == (0 if hooks else len(self.selections))
        assert forced.sequences[0].tolist() == text


@pytest.fixture(scope="module")
def tiers() -> tuple[Tier, Tier]:
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLES / "tiny_glm52")
    prompt = (EXAMPLES / "demo_prompt.txt").read_text(encoding="utf-8")
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    assert ids.shape[1] > 3 * INDEX_TOPK
    with torch.no_grad():
        exact = Tier(None, ids, None)
        return exact, Tier("fp8", ids, exact.free.sequences[0].tolist())


def test_its_index_keys_are_fp8(tiers: tuple[Tier, Tier]) -> None:
    with Steps.of(*unwrap_compiled(tiers[1].called)).borrow_cache(1, 1, 1) as cache:
        assert cache.index_dtype == FP8


def test_it_selects_nearly_the_same_positions(tiers: tuple[Tier, Tier]) -> None:
    exact, fp8 = tiers
    # The prompt, and at least ten blocks of six; the MTP layer takes no part in the last one.
    assert len(exact.selections) == len(fp8.selections) > 10 * len(INDEXERS)
    assert len(exact.selections) % len(INDEXERS) == len(INDEXERS) - 1
    shares: dict[str, list[float]] = {name: [] for name in INDEXERS}
    for call, calls in enumerate(zip(fp8.lengths, exact.selections, fp8.selections)):
        rows = zip(*(tensor.tolist() for tensor in calls), strict=True)
        for length, a, b in rows:
            if length <= INDEX_TOPK:  # all of them are selected, and what is behind them ignored
                assert {p for p in a if p < length} == {p for p in b if p >= 0} == {*range(length)}
                continue
            assert max(a) < length and max(b) < length
            share = len(set(a) & set(b)) / INDEX_TOPK
            shares[INDEXERS[call % len(INDEXERS)]].append(share)
    averages = {name: sum(values) / len(values) for name, values in shares.items()}
    assert min(averages.values()) >= LEAST_AVERAGE, averages
    assert min(min(values) for values in shares.values()) >= LEAST_ROW, averages
    # It is another tier: a copy of the exact one would select the same everywhere.
    assert max(averages.values()) < 1


def test_its_greedy_text_stays_sensible(tiers: tuple[Tier, Tier]) -> None:
    """Measured over four prompts: accept lengths at most 0.27 below the exact tier's."""
    exact, fp8 = (tier.free for tier in tiers)
    lengths = [result.accept_lengths.float().mean().item() for result in (exact, fp8)]
    assert lengths[1] > max(lengths[0] - 0.6, 2), lengths
    new = fp8.sequences[0, -NEW:].tolist()
    grams = [tuple(new[i : i + 4]) for i in range(NEW - 3)]
    assert len(set(grams)) / len(grams) > 0.7
