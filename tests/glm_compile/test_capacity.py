"""A step that does not fit its cache is refused before it writes, compiled or not."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import StaticCache

import glm_compile
from glm_compile import capacity
from glm_compile.cache import FP8, PagedCache
from glm_compile.capacity import held_tokens, note_held
from glm_compile.report import listening
from tests.compiling import MAX_CACHE_LEN, compile_model, make_cache, short_model, tokens
from tests.glm_compile.generation.drafts import random_mtp
from tests.tiny_models import CACHE_ARGUMENT, tiny_config

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def step(model, num_tokens, cache, batch_size=1):
    device = model.lm_head.weight.device
    return model(tokens(batch_size, num_tokens).to(device), **{CACHE_ARGUMENT: cache}).logits


def tensors(cache):
    found = [cache.lengths] if isinstance(cache, PagedCache) else []
    for layer in cache.layers:
        found += [v for v in vars(layer).values() if isinstance(v, torch.Tensor)]
    return found


def assert_refused(cache, held, num_new, call):
    before = [tensor.clone() for tensor in tensors(cache)]
    name = type(cache).__name__
    message = f"{name} is full: {held} tokens held and {num_new} new ones, but max_cache_len is 64"
    with pytest.raises(ValueError, match=message):
        call()
    for tensor, expected in zip(tensors(cache), before):
        assert torch.equal(tensor, expected)


class TestCompiledSteps:
    # Capacity is watched from outside of what the inner compiler makes.
    @pytest.mark.parametrize(
        ("kind", "inner"),
        [
            ("paged", "eager"),
            ("static", "eager"),
            pytest.param("paged", "inductor", marks=pytest.mark.slow),
        ],
    )
    def test_a_step_that_does_not_fit_writes_nothing(self, kind, inner):
        model = short_model()
        compiled = compile_model(model, inner=inner)
        cache = make_cache(model, kind, 1)
        step(model, MAX_CACHE_LEN - 6, cache)
        for _ in range(3):
            assert step(compiled, 2, cache).isfinite().all()
        assert_refused(cache, 64, 2, lambda: step(compiled, 2, cache))
        assert_refused(cache, 64, 2, lambda: step(compiled, 2, cache))
        cache.reset()
        step(model, 20, cache)
        assert step(compiled, 2, cache).isfinite().all()

    @pytest.mark.newest_transformers
    def test_a_first_step_that_does_not_fit_is_refused_too(self):
        model = short_model()
        for kind in ("paged", "static"):
            cache = make_cache(model, kind, 1)
            step(model, MAX_CACHE_LEN - 1, cache)
            assert_refused(cache, 63, 2, lambda cache=cache: step(compile_model(model), 2, cache))

    @pytest.mark.parametrize("kind", ["paged", "static"])
    def test_a_prompt_of_dynamic_length(self, kind):
        model = short_model()
        compiled = compile_model(model)

        def prompt(num_tokens, cache):
            ids = tokens(1, num_tokens)
            torch._dynamo.mark_dynamic(ids, 1)
            return compiled(ids, **{CACHE_ARGUMENT: cache}).logits

        cache = make_cache(model, kind, 1)
        step(model, 3, cache)
        prompt(40, cache)
        assert_refused(cache, 43, 22, lambda: prompt(22, cache))
        prompt(21, cache)
        assert_refused(cache, 64, 2, lambda: prompt(2, cache))

    @pytest.mark.newest_transformers
    def test_the_longest_sequence_counts(self):
        model = short_model()
        compiled = compile_model(model)
        cache = make_cache(model, "paged", 2)
        cache.auto_advance = False

        def verify(ids, kept):
            positions = cache.lengths[:, None] + torch.arange(ids.shape[1])
            mask = {"indexed_attention": cache.causal_mask(ids.shape[1])}
            kwargs = {"attention_mask": mask, "position_ids": positions, CACHE_ARGUMENT: cache}
            logits = compiled(ids, **kwargs).logits
            cache.advance(kept)
            return logits

        cache.set_lengths([10, 56])
        verify(tokens(2, 4), torch.tensor([4, 3]))
        verify(tokens(2, 4), torch.tensor([4, 2]))
        assert_refused(cache, 61, 4, lambda: verify(tokens(2, 4), torch.tensor([4, 1])))
        assert cache.lengths.tolist() == [18, 61]

    @pytest.mark.newest_transformers
    def test_several_steps_in_one_graph(self):
        model = short_model()
        cache = make_cache(model, "paged", 1)

        def twice(ids):
            return step_with(ids) + step_with(ids)

        def step_with(ids):
            return model(ids, **{CACHE_ARGUMENT: cache}).logits

        compiled = compile_model(twice)
        cache.set_lengths(60)
        compiled(tokens(1, 2))
        cache.set_lengths(61)
        assert_refused(cache, 63, 2, lambda: compiled(tokens(1, 2)))

    @pytest.mark.newest_transformers
    def test_graph_breaks_leave_it_in_force(self):
        model = short_model()

        def hook(module, arguments, output):
            torch._dynamo.graph_break()

        model.model.layers[1].mlp.register_forward_hook(hook)
        compiled = compile_model(model, fullgraph=False, strict=False)
        cache = make_cache(model, "paged", 1)
        step(model, 60, cache)
        step(compiled, 4, cache)
        assert cache.lengths.tolist() == [64]
        assert_refused(cache, 64, 4, lambda: step(compiled, 4, cache))

    @pytest.mark.newest_transformers
    def test_fp8_keys(self):
        model = short_model(dtype=torch.bfloat16)
        compiled = compile_model(model, indexer_dtype="fp8")
        cache = make_cache(model, "paged", 1, index_dtype=FP8)
        step(model, 60, cache)
        step(compiled, 4, cache)
        assert_refused(cache, 64, 4, lambda: step(compiled, 4, cache))

    @pytest.mark.newest_transformers
    def test_the_host_counts_without_reading_and_without_recompiling(self, monkeypatch):
        model = short_model()
        compiled = compile_model(model)
        cache = make_cache(model, "paged", 1)
        monkeypatch.setattr(capacity, "_read", lambda _: pytest.fail("the lengths were read"))
        step(model, 20, cache)
        reports = []
        with listening(reports.append):
            for _ in range(20):
                step(compiled, 2, cache)
            cache.crop(-1)
            step(model, 2, cache)
            assert cache.lengths.tolist() == [61] and held_tokens(cache.lengths) == 61
            step(compiled, 2, cache)
            assert_refused(cache, 63, 2, lambda: step(compiled, 2, cache))
        assert len(reports) == 1

    @pytest.mark.gpu
    @pytest.mark.parametrize("inner", ["eager", "inductor"])
    def test_no_step_waits_for_the_device(self, inner):
        # Compiled in fp32 transformers' experts read their offsets on the host.
        model = short_model(dtype=torch.bfloat16).to("cuda")
        compiled = compile_model(model, inner=inner)
        dtype = model.lm_head.weight.dtype
        cache = PagedCache(model.config, 1, MAX_CACHE_LEN, dtype=dtype, device="cuda")
        ids = tokens(1, 2).to("cuda")
        for _ in range(2):
            compiled(ids, **{CACHE_ARGUMENT: cache})
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(30):
                compiled(ids, **{CACHE_ARGUMENT: cache})
            with pytest.raises(ValueError, match="64 tokens held and 2 new ones"):
                compiled(ids, **{CACHE_ARGUMENT: cache})
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert cache.lengths.tolist() == [64]


@pytest.mark.newest_transformers
class TestUnseenOverrun:
    """Lengths that only the device knows, as where another backend compiled the step."""

    @pytest.mark.parametrize("device", DEVICES)
    def test_nothing_is_written_outside_and_it_can_be_asked(self, device):
        model = short_model().to(device)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        cache = PagedCache(model.config, 2, 64, dtype=torch.float32, device=device)
        for layer in cache.layers:  # the second sequence's page lies behind the first one's
            layer.latent_pages[1] = 7.0
        cache.block_table[1] = -1
        for _ in range(17):
            step(compiled, 4, cache, batch_size=2)
        assert cache.lengths.tolist() == [68, 68]
        for layer in cache.layers:
            assert (layer.latent_pages[1] == 7.0).all()
        with pytest.raises(ValueError, match=r"overrun: 68 tokens .* set_lengths\(64\)"):
            cache.check_capacity()
        cache.set_lengths(64)
        cache.check_capacity()


@pytest.mark.newest_transformers
class TestHeldTokens:
    def test_a_write_from_elsewhere_makes_it_void(self):
        lengths = torch.tensor([3, 5])
        note_held(lengths, 5)
        lengths.add_(1)
        assert held_tokens(lengths) == 6
        torch.ops.glm.advance(lengths, 2)
        assert held_tokens(lengths) == 8

    def test_only_the_device_knows(self):
        lengths = torch.zeros(2, device="meta")
        assert held_tokens(lengths) is None
        note_held(lengths, 3)
        assert held_tokens(lengths) == 3
        lengths.add_(1)
        assert held_tokens(lengths) is None

    def test_a_copy_counts_for_itself(self):
        cache = PagedCache(tiny_config(), 1, 64)
        cache.set_lengths(9)
        other = copy.deepcopy(cache)
        other.lengths.add_(3)
        assert (held_tokens(cache.lengths), held_tokens(other.lengths)) == (9, 12)

    def test_inference_mode_changes_nothing(self):
        model = short_model()
        with torch.inference_mode():
            cache = make_cache(model, "paged", 1)
            step(model, 20, cache)
            assert held_tokens(cache.lengths) == 20
            step(compile_model(model), 4, cache)
        step(model, 4, cache)
        assert cache.lengths.tolist() == [28] and held_tokens(cache.lengths) == 28
        with torch.inference_mode():
            static = StaticCache(model.config, max_cache_len=MAX_CACHE_LEN)
            step(model, 62, static)
            assert_refused(static, 62, 4, lambda: step(compile_model(model), 4, static))


@pytest.mark.newest_transformers
class TestCounts:
    @pytest.mark.parametrize("counts", [[45, 1], [0, -21], [2**40, 0], [-(2**33), 0]])
    def test_counts_for_each_sequence_stay_within_the_cache(self, counts):
        cache = PagedCache(tiny_config(), 2, 64)
        cache.set_lengths(20)
        with pytest.raises(ValueError, match=r"advance: .* behind \[20, 20\] make .*max_cache_len"):
            cache.advance(torch.tensor(counts))
        assert cache.lengths.tolist() == [20, 20]
        cache.advance(torch.tensor([44, -20]))
        assert cache.lengths.tolist() == [64, 0]

    def test_one_count_for_all(self):
        cache = PagedCache(tiny_config(), 2, 64)
        cache.set_lengths([3, 20])
        for count in (45, -4, torch.tensor(45), torch.tensor(-4), 2**70):
            with pytest.raises(ValueError, match=r"PagedCache\.advance"):
                cache.advance(count)
        cache.advance(torch.tensor(44))
        assert cache.lengths.tolist() == [47, 64]


@pytest.mark.newest_transformers
class TestGenerate:
    def test_its_cache_holds_all_that_it_will_write(self):
        """A capacity that is asked for is the least, as in transformers; nothing overruns.

        Compiled: generation/test_steps.py.
        """
        model = short_model()
        kwargs = {"mtp": random_mtp(model), "num_draft_tokens": 4, "eos_token_id": None}
        ids = tokens(1, 60)
        # The last block starts at the last token: its drafts lie behind the text.
        got = glm_compile.generate(model, ids, max_new_tokens=9, max_cache_len=5, **kwargs)
        assert torch.equal(got, model.generate(ids, max_new_tokens=9, eos_token_id=None))

    @pytest.mark.parametrize("kind", ["paged", "static", "dynamic"])
    def test_a_cache_of_the_callers_is_refused_before_any_work(self, kind, monkeypatch):
        model = short_model()
        monkeypatch.setattr(
            type(model.model), "forward", lambda *a, **k: pytest.fail("the model was run")
        )
        for generate in (
            lambda **kwargs: glm_compile.generate(model, tokens(1, 60), **kwargs),
            lambda **kwargs: model.generate(
                tokens(1, 60), custom_generate=glm_compile.generate, **kwargs
            ),
        ):
            cache = make_cache(model, kind, 1)
            with pytest.raises(ValueError, match=f"{CACHE_ARGUMENT} is not supported"):
                generate(max_new_tokens=90, **{CACHE_ARGUMENT: cache})
