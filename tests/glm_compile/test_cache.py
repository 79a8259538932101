from __future__ import annotations

import warnings

import pytest
import torch

from glm_compile.cache import FP8, PagedCache, SeedCache
from glm_compile.capacity import held_tokens
from glm_compile.errors import ConfigError, UnsupportedError
from glm_compile.model_facts import GlmDsaConfig
from tests.checkpoints import release_config
from tests.compiling import compile_model
from tests.tiny_models import CACHE_ARGUMENT, tiny_config, tiny_model

# Rounding of two paths of a 4-layer float32 model; logits are of order 5.
TOLERANCE = {"rtol": 0, "atol": 1e-4}


def step(model, ids, cache, **kwargs):
    return model(ids, **{CACHE_ARGUMENT: cache}, **kwargs).logits


def no_cache(model, ids):
    return model(ids, use_cache=False).logits


def random_ids(batch_size, length):
    return torch.randint(0, 500, (batch_size, length))


def generate(model, ids, cache=None, **kwargs):
    if cache is not None:
        kwargs[CACHE_ARGUMENT] = cache
    kwargs = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None} | kwargs
    return model.generate(ids, **kwargs)


def ragged_step(model, ids, cache, dtype):
    num_tokens = ids.shape[1]
    positions = cache.lengths[:, None] + torch.arange(num_tokens)
    mask = cache.causal_mask(num_tokens, dtype)
    return step(
        model, ids, cache, attention_mask={"indexed_attention": mask}, position_ids=positions
    )


class TestForward:
    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    @pytest.mark.parametrize("batch_size", [1, 2])
    def test_chunks_equal_a_forward_without_cache(self, attention, batch_size):
        model = tiny_model(attention=attention)
        ids = random_ids(batch_size, 75)
        cache = PagedCache(model.config, batch_size, 90)
        chunks = [step(model, part, cache) for part in ids.split([63, 1, 1, 10], dim=1)]
        torch.testing.assert_close(torch.cat(chunks, 1), no_cache(model, ids), **TOLERANCE)
        assert cache.lengths.tolist() == [75] * batch_size

    @pytest.mark.parametrize("last", ["full", "shared"])
    def test_the_last_write_of_a_forward_advances(self, last):
        config = tiny_config(indexer_types=["full", "full", "shared", last])
        model = tiny_model(config)
        ids = random_ids(1, 30)
        cache = PagedCache(config, 1, 64)
        logits = torch.cat([step(model, part, cache) for part in ids.split(10, dim=1)], 1)
        assert cache.lengths.tolist() == [30]
        torch.testing.assert_close(logits, no_cache(model, ids), **TOLERANCE)

    def test_without_auto_advance_the_caller_counts(self):
        model = tiny_model()
        ids = random_ids(2, 30)
        cache = PagedCache(model.config, 2, 64)
        cache.auto_advance = False
        step(model, ids[:, :20], cache)
        assert cache.lengths.tolist() == [0, 0]
        cache.advance(20)
        logits = step(model, ids[:, 20:], cache)
        torch.testing.assert_close(logits, no_cache(model, ids)[:, 20:], **TOLERANCE)

    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    @pytest.mark.parametrize("num_new", [1, 6])
    def test_sequences_of_different_length_equal_their_own_runs(self, attention, num_new):
        model = tiny_model(attention=attention)
        dtype = torch.bool if attention == "sdpa" else torch.float32
        ids = random_ids(2, 40 + num_new)
        lengths = [40, 23]
        cache = PagedCache(model.config, 2, 100)
        cache.auto_advance = False
        ragged_step(model, ids[:, :40], cache, dtype)
        cache.advance(torch.tensor(lengths))
        new = random_ids(2, num_new)
        logits = ragged_step(model, new, cache, dtype)
        for row, length in enumerate(lengths):
            alone = torch.cat([ids[row : row + 1, :length], new[row : row + 1]], 1)
            expected = no_cache(model, alone)[0, length:]
            torch.testing.assert_close(logits[row], expected, **TOLERANCE)

    def test_fp8_index_keys_are_close_and_generate_finite_logits(self):
        model = tiny_model()
        ids = random_ids(1, 40)
        exact = PagedCache(model.config, 1, 64)
        fp8 = PagedCache(model.config, 1, 64, index_dtype=FP8)
        step(model, ids, exact)
        assert step(model, ids, fp8).isfinite().all()
        fp8.auto_advance = exact.auto_advance = False
        fp8.set_lengths(40), exact.set_lengths(40)
        new_BSD = torch.randn(1, 1, 128)
        close = fp8.update_indexer(new_BSD, 0)[:, :41]
        reference = exact.update_indexer(new_BSD, 0)[:, :41]
        # e4m3 keeps 3 bits behind the leading one; below 2^-6 of the scale the step is absolute.
        limit = reference.abs() * 2**-4 + reference.abs().amax(-1, keepdim=True) * 2**-17
        assert ((close - reference).abs() <= limit).all()


class TestTransformersGenerate:
    def test_greedy_tokens_are_the_same(self):
        model = tiny_model()
        ids = random_ids(1, 20)
        cache = PagedCache(model.config, 1, 64)
        assert torch.equal(generate(model, ids, cache), generate(model, ids))
        assert cache.lengths.tolist() == [35]

    def test_left_padded_rows_equal_their_own_runs(self):
        model = tiny_model()
        ids = random_ids(2, 20)
        mask = torch.ones_like(ids)
        mask[1, :9] = 0
        cache = PagedCache(model.config, 2, 64)
        out = generate(model, ids, cache, attention_mask=mask)
        assert torch.equal(out[:1], generate(model, ids[:1]))
        assert torch.equal(out[1:, 9:], generate(model, ids[1:, 9:]))

    def test_beam_search_is_the_same(self):
        model = tiny_model()
        ids = random_ids(2, 20)
        cache = PagedCache(model.config, 6, 64)
        expected = generate(model, ids, num_beams=3)
        assert torch.equal(generate(model, ids, cache, num_beams=3), expected)

    def test_beams_on_a_cache_of_one_are_refused_with_the_reason(self):
        model = tiny_model()
        with pytest.raises(ValueError, match=r"batch_size=1.*3 sequences .beam search"):
            generate(model, random_ids(1, 20), PagedCache(model.config, 1, 64), num_beams=3)

    def test_a_conversation_goes_on_in_the_same_cache(self):
        model = tiny_model()
        ids = random_ids(1, 20)
        cache = PagedCache(model.config, 1, 100)
        first = generate(model, ids, cache)
        longer = torch.cat([first, random_ids(1, 5)], 1)
        assert torch.equal(generate(model, longer, cache), generate(model, longer))

    def test_chunked_prefill_is_the_same(self):
        model = tiny_model()
        ids = random_ids(1, 40)
        cache = PagedCache(model.config, 1, 64)
        out = generate(model, ids, cache, prefill_chunk_size=16)
        assert torch.equal(out, generate(model, ids))

    def test_generate_does_not_compile_by_itself(self):
        assert not PagedCache(tiny_config(), 1, 64).is_compileable


class TestCompiled:
    def compiled(self, model):
        self.num_compilations = 0

        def backend(graph_module, example_inputs):
            self.num_compilations += 1
            from torch._dynamo.backends.debugging import aot_eager

            return aot_eager(graph_module, example_inputs)

        return torch.compile(model, backend=backend, fullgraph=True)

    def test_no_position_recompiles_and_addresses_stay(self):
        model = tiny_model()
        ids = random_ids(1, 90)
        cache = PagedCache(model.config, 1, 128)
        compiled = self.compiled(model)
        tensors = [cache.lengths, cache.block_table]
        for layer in cache.layers:
            tensors += [t for t in (layer.latent_pages, layer.key_pages) if t is not None]
        addresses = [tensor.data_ptr() for tensor in tensors]
        for prompt_len in (26, 31):
            cache.reset()
            step(model, ids[:, :prompt_len], cache)
            logits = [
                step(compiled, ids[:, t : t + 1], cache) for t in range(prompt_len, prompt_len + 32)
            ]
            expected = no_cache(model, ids[:, : prompt_len + 32])[:, prompt_len:]
            torch.testing.assert_close(torch.cat(logits, 1), expected, **TOLERANCE)
        assert self.num_compilations == 1
        assert addresses == [tensor.data_ptr() for tensor in tensors]

    def test_own_masks_and_row_counts_compile_once(self):
        model = tiny_model()
        cache = PagedCache(model.config, 2, 100)
        cache.auto_advance = False

        def verify(ids, kept):
            logits = ragged_step(model, ids, cache, torch.bool)
            cache.advance(kept)
            return logits

        eager_cache = PagedCache(model.config, 2, 100)
        eager_cache.auto_advance = False
        compiled = self.compiled(verify)
        for kept in ([6, 2], [1, 4], [3, 3]):
            ids = random_ids(2, 6)
            logits = compiled(ids, torch.tensor(kept))
            expected = ragged_step(model, ids, eager_cache, torch.bool)
            eager_cache.advance(torch.tensor(kept))
            torch.testing.assert_close(logits, expected, **TOLERANCE)
        assert self.num_compilations == 1
        assert cache.lengths.tolist() == [10, 9]

    def test_transformers_mask_of_different_lengths_is_refused_in_traced_code_too(self):
        model = tiny_model()
        cache = PagedCache(model.config, 2, 64)
        cache.set_lengths([3, 5])
        with pytest.raises(Exception, match="causal_mask"):
            step(
                self.compiled(model), random_ids(2, 1), cache, position_ids=torch.ones(2, 1).long()
            )

    def test_a_full_cache_is_noticed_by_the_next_eager_step(self):
        model = tiny_model()
        cache = PagedCache(model.config, 1, 12)
        compiled = self.compiled(model)
        for _ in range(3):
            step(compiled, random_ids(1, 4), cache)
        with pytest.raises(
            ValueError, match="12 tokens held and 1 new ones, but max_cache_len is 12"
        ):
            step(model, random_ids(1, 1), cache)


class TestLengths:
    def test_transformers_mask_of_different_lengths_is_refused(self):
        model = tiny_model()
        cache = PagedCache(model.config, 2, 64)
        step(model, random_ids(2, 20), cache)
        cache.advance(torch.tensor([1, 0]))
        with pytest.raises(ValueError, match=r"cache\.causal_mask"):
            step(model, random_ids(2, 1), cache, position_ids=torch.tensor([[21], [20]]))
        with pytest.raises(ValueError, match="position_ids"):
            step(model, random_ids(2, 1), cache)
        with pytest.raises(ValueError, match="position_ids"):
            cache.get_seq_length()

    def test_equal_lengths_make_it_usable_again(self):
        cache = PagedCache(tiny_config(), 2, 64)
        cache.set_lengths([3, 5])
        cache.set_lengths([5, 5])
        assert int(cache.get_seq_length()) == 5
        cache.set_lengths([3, 5])
        cache.reset()
        assert int(cache.get_seq_length()) == 0

    def test_one_sequence_is_never_ragged(self):
        cache = PagedCache(tiny_config(), 1, 64)
        cache.advance(torch.tensor([3]))
        assert int(cache.get_seq_length()) == 3

    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    def test_a_reset_cache_forgets_nan(self, attention):
        model = tiny_model(attention=attention)
        ids = random_ids(1, 30)
        cache, fresh = (PagedCache(model.config, 1, 64) for _ in range(2))
        step(model, ids, cache)
        for layer in cache.layers:
            layer.latent_pages.fill_(float("nan"))
        cache.reset()
        torch.testing.assert_close(step(model, ids, cache), step(model, ids, fresh))

    def test_rolled_back_tokens_leave_no_trace(self):
        model = tiny_model()
        ids = random_ids(1, 40)
        cache = PagedCache(model.config, 1, 64)
        step(model, ids[:, :30], cache)
        step(model, random_ids(1, 8) + 7, cache)
        for layer in cache.layers:  # keys that would win every selection
            if layer.key_pages is not None:
                layer.key_pages.view(1, -1, 128)[:, 33:] *= 1e3
        cache.crop(-8)
        logits = torch.cat([step(model, ids[:, t : t + 1], cache) for t in range(30, 40)], 1)
        torch.testing.assert_close(logits, no_cache(model, ids)[:, 30:], **TOLERANCE)

    def test_crop_follows_transformers(self):
        cache = PagedCache(tiny_config(), 2, 64)
        cache.set_lengths([10, 3])
        cache.crop(0)
        assert cache.lengths.tolist() == [10, 3]
        cache.crop(-4)
        assert cache.lengths.tolist() == [6, 0]
        with pytest.raises(ValueError, match=r"negative number.*got 4"):
            cache.crop(4)
        assert cache.is_croppable

    @pytest.mark.parametrize("lengths", [-1, [3, -1], [3, 65], torch.tensor([65, 1])])
    def test_impossible_lengths_are_refused(self, lengths):
        cache = PagedCache(tiny_config(), 2, 64)
        with pytest.raises(ValueError, match="within 0 and 64"):
            cache.set_lengths(lengths)
        assert cache.lengths.tolist() == [0, 0]

    def test_counts_need_one_value_a_sequence(self):
        cache = PagedCache(tiny_config(), 2, 64)
        with pytest.raises(ValueError, match=r"2 sequences, got shape \(3,\)"):
            cache.advance(torch.tensor([1, 2, 3]))

    def test_capacity_is_checked_before_writing(self):
        model = tiny_model()
        cache = PagedCache(model.config, 1, 20)
        step(model, random_ids(1, 18), cache)
        pages = cache.layers[0].latent_pages.clone()
        with pytest.raises(
            ValueError, match="18 tokens held and 3 new ones, but max_cache_len is 20"
        ):
            step(model, random_ids(1, 3), cache)
        assert torch.equal(cache.layers[0].latent_pages, pages)
        step(model, random_ids(1, 2), cache)
        assert cache.get_max_length() == 20 and cache.get_mask_sizes(1, 0) == (20, 0)


def longer_config(num_layers, **overrides):
    """`tiny_config` with other layers behind the first ones, so that both fit one model."""
    types = ["full", "full", "shared", "full", "shared", "full"][:num_layers]
    return tiny_config(**{"num_hidden_layers": num_layers, "indexer_types": types, **overrides})


def eager(model):
    return model


def through_aot(model):
    return torch.compile(model, backend="aot_eager", fullgraph=True)


def through_glm(model):
    return compile_model(model)


class TestNumberOfLayers:
    """A cache made from another config than the model's."""

    @pytest.mark.parametrize("way", [eager, through_aot, through_glm])
    def test_more_layers_than_the_model_runs_are_an_error_of_the_next_step(self, way):
        model = tiny_model()
        cache = PagedCache(longer_config(6), 1, 64)
        ids = random_ids(1, 30)
        called = way(model)
        step(called, ids[:, :20], cache)
        pages = [layer.latent_pages.clone() for layer in cache.layers]
        with pytest.raises(Exception, match="the first 4 of 6 decoder layers"):
            step(called, ids[:, 20:], cache)
        assert all(torch.equal(a, b.latent_pages) for a, b in zip(pages, cache.layers))
        assert cache.lengths.tolist() == [0]

    @pytest.mark.parametrize(
        "use",
        [
            lambda cache: cache.get_seq_length(),
            lambda cache: cache.crop(-1),
            lambda cache: cache.advance(1),
        ],
    )
    def test_nothing_counts_from_where_it_did_not_end(self, use):
        model = tiny_model()
        cache = PagedCache(longer_config(5), 1, 64)
        step(model, random_ids(1, 20), cache)
        with pytest.raises(ConfigError, match="the first 4 of 5 decoder layers"):
            use(cache)
        cache.reset()
        step(model, random_ids(1, 20), cache)

    def test_upstream_generate_says_so_behind_its_first_step(self):
        model = tiny_model()
        with pytest.raises(ConfigError, match="the first 4 of 5 decoder layers"):
            generate(model, random_ids(1, 9), PagedCache(longer_config(5), 1, 64))

    @pytest.mark.parametrize("way", [eager, through_aot])
    def test_a_last_layer_without_its_indexer_is_an_error_of_the_next_step(self, way):
        types = ["full", "full", "shared", "shared"]
        model = tiny_model(tiny_config(indexer_types=types))
        cache = PagedCache(tiny_config(), 1, 64)
        called = way(model)
        step(called, random_ids(1, 9), cache)
        with pytest.raises(Exception, match="all 4 decoder layers, but no index keys of the last"):
            step(called, random_ids(1, 1), cache)

    def test_a_last_layer_with_an_indexer_too_many_is_not_counted(self):
        cache = PagedCache(tiny_config(indexer_types=["full", "full", "shared", "shared"]), 1, 64)
        with pytest.raises(ConfigError, match="layer 3 is 'shared'"):
            step(tiny_model(), random_ids(1, 9), cache)
        assert cache.lengths.tolist() == [0]

    @pytest.mark.parametrize("way", [eager, through_aot, through_glm])
    @pytest.mark.parametrize("num_mtp_layers", [0, 1, 2])
    @pytest.mark.parametrize("num_layers", [2, 3])
    def test_fewer_layers_than_the_model_runs_are_an_error(self, way, num_mtp_layers, num_layers):
        model = tiny_model()
        cache = PagedCache(longer_config(num_layers), 1, 64, num_mtp_layers=num_mtp_layers)
        cache.set_lengths(5)
        with pytest.raises(
            Exception, match=f"made for {num_layers} decoder layers and {num_mtp_layers} MTP layers"
        ):
            step(way(model), random_ids(1, 20), cache)
        assert cache.lengths.tolist() == [5]

    def test_the_caller_who_counts_may_leave_layers_out(self):
        model = tiny_model()
        ids = random_ids(1, 30)
        cache = PagedCache(longer_config(6), 1, 64)
        cache.auto_advance = False
        step(model, ids[:, :20], cache)
        cache.advance(20)
        logits = step(model, ids[:, 20:], cache)
        torch.testing.assert_close(logits, no_cache(model, ids)[:, 20:], **TOLERANCE)

    def test_a_step_that_was_interrupted_is_said_and_can_be_run_again(self):
        model = tiny_model()
        ids = random_ids(1, 30)
        cache = PagedCache(model.config, 1, 64)
        step(model, ids[:, :20], cache)

        def interrupt(*_):
            raise KeyboardInterrupt

        handle = model.model.layers[2].mlp.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            step(model, ids[:, 20:], cache)
        handle.remove()
        with pytest.raises(ConfigError, match=r"interrupted, cache.set_lengths.cache.lengths"):
            step(model, ids[:, 20:], cache)
        cache.set_lengths(cache.lengths)
        logits = step(model, ids[:, 20:], cache)
        torch.testing.assert_close(logits, no_cache(model, ids)[:, 20:], **TOLERANCE)
        assert cache.lengths.tolist() == [30]


class TestBatch:
    def test_reorder_copies_sequences(self):
        model = tiny_model()
        ids = random_ids(3, 70)
        cache = PagedCache(model.config, 3, 128)
        step(model, ids[:, :69], cache)
        addresses = [layer.latent_pages.data_ptr() for layer in cache.layers]
        cache.reorder_cache(torch.tensor([2, 0, 2]))
        logits = step(model, ids[[2, 0, 2], 69:], cache)
        expected = no_cache(model, ids)[[2, 0, 2], 69:]
        torch.testing.assert_close(logits, expected, **TOLERANCE)
        assert addresses == [layer.latent_pages.data_ptr() for layer in cache.layers]
        with pytest.raises(ValueError, match="expected 3 indices"):
            cache.reorder_cache(torch.tensor([0]))

    def test_reorder_leaves_missing_pages_alone(self):
        cache = PagedCache(tiny_config(), 2, 128)
        pages = cache.layers[0].latent_pages
        pages[:] = torch.arange(4.0)[:, None, None]
        cache.block_table.copy_(torch.tensor([[0, -1], [1, 2]]))
        cache.reorder_cache(torch.tensor([1, 1]))
        assert pages[:, 0, 0].tolist() == [1, 1, 2, 3]

    def test_the_number_of_sequences_is_fixed(self):
        cache = PagedCache(tiny_config(), 2, 64)
        assert cache.batch_size == 2
        with pytest.raises(UnsupportedError, match="batch_size=6"):
            cache.batch_repeat_interleave(3)
        with pytest.raises(UnsupportedError, match="cannot drop"):
            cache.batch_select_indices(torch.tensor([0]))

    def test_another_batch_is_refused_with_the_reason(self):
        model = tiny_model()
        with pytest.raises(ValueError, match="batch_size=1, but this step has 2 sequences"):
            step(model, random_ids(2, 5), PagedCache(model.config, 1, 64))

    def test_another_batch_is_refused_where_sizes_are_symbols(self):
        cache = PagedCache(tiny_config(), 2, 8)
        layer = cache.layers[0]
        keys = torch.zeros(3, 1, 1, layer.latent_pages.shape[-1])
        torch._dynamo.mark_dynamic(keys, 0)

        def step(keys):
            cache._check_step(keys, 0)
            return keys + 1

        with pytest.raises(torch._dynamo.exc.Unsupported, match="for another batch_size than this"):
            torch.compile(step, backend="eager", fullgraph=True, dynamic=True)(keys)


class TestTensors:
    @pytest.mark.parametrize("index_dtype", [None, FP8])
    def test_bytes_of_the_release_follow_the_formula(self, index_dtype):
        cache = PagedCache(
            release_config(), 2, 1000, index_dtype=index_dtype, device="meta", num_mtp_layers=1
        )
        key_bytes = 132 if index_dtype == FP8 else 256
        assert cache.bytes_per_token() == 22 * key_bytes + 79 * 576 * 2
        tensors = [cache.lengths, cache.block_table]
        for layer in cache.layers:
            tensors += [t for t in (layer.latent_pages, layer.key_pages) if t is not None]
        assert cache.num_bytes() == sum(tensor.nbytes for tensor in tensors)
        pages = 2 * 16
        assert cache.num_bytes() == cache.bytes_per_token() * pages * 64 + 2 * 4 + pages * 4

    def test_fp8_index_keys_of_the_release_take_2772_bytes_a_token(self):
        cache = PagedCache(release_config(), 1, 64, index_dtype=FP8, device="meta")
        keys = sum(layer.key_pages.nbytes for layer in cache.layers if layer.key_pages is not None)
        assert keys == 64 * 2772

    def test_each_layer_owns_its_memory(self):
        cache = PagedCache(tiny_config(), 2, 64, num_mtp_layers=1)
        storages = set()
        count = 0
        for layer in cache.layers:
            for tensor in (layer.latent_pages, layer.key_pages):
                if tensor is not None:
                    storages.add(tensor.untyped_storage().data_ptr())
                    assert tensor.untyped_storage().nbytes() == tensor.nbytes
                    count += 1
        assert len(storages) == count == 5 + 4

    def test_dtype_is_the_configs_and_can_be_given(self):
        assert PagedCache(release_config(), 1, 1, device="meta").dtype == torch.bfloat16
        assert PagedCache(tiny_config(), 1, 1).dtype == torch.get_default_dtype()
        cache = PagedCache(tiny_config(), 1, 1, dtype=torch.float16)
        assert (
            cache.layers[0].latent_pages.dtype == cache.layers[0].key_pages.dtype == torch.float16
        )
        facts = GlmDsaConfig.from_transformers(tiny_config())
        assert len(PagedCache(facts, 1, 1)) == 4

    def test_the_models_dtype_is_checked(self):
        model = tiny_model(dtype=torch.bfloat16)
        cache = PagedCache(model.config, 1, 64, dtype=torch.float32)
        with pytest.raises(ValueError, match=r"holds torch.float32 .*dtype=torch.bfloat16"):
            step(model, random_ids(1, 4), cache)
        cache = PagedCache(model.config, 1, 64, dtype=torch.bfloat16)
        assert step(model, random_ids(1, 4), cache).isfinite().all()

    def test_the_models_device_is_checked(self):
        cache = PagedCache(tiny_config(), 1, 64, dtype=torch.float32, device="meta")
        with pytest.raises(ValueError, match=r'is on meta .* computes on cpu; .* device="cpu"'):
            cache.update(torch.zeros(1, 1, 2, 64), torch.zeros(1, 1, 2, 64), 0)

    @pytest.mark.gpu
    @pytest.mark.parametrize("devices", [("cpu", "cuda:0"), ("cuda:0", "cpu")])
    def test_a_step_on_another_device_names_both(self, devices):
        model = tiny_model().to(devices[0])
        cache = PagedCache(model.config, 1, 64, device=devices[1])
        with pytest.raises((ValueError, RuntimeError), match="cuda:0") as raised:
            step(model, random_ids(1, 4).to(devices[0]), cache)
        assert "cpu" in str(raised.value)

    @pytest.mark.parametrize("name", ["batch_size", "max_cache_len"])
    def test_sizes_are_positive(self, name):
        sizes = {"batch_size": 1, "max_cache_len": 1} | {name: 0}
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            PagedCache(tiny_config(), **sizes)

    def test_a_shared_layer_refuses_index_keys(self):
        cache = PagedCache(tiny_config(), 1, 64)
        assert cache.layers[2].key_pages is None
        with pytest.raises(ValueError, match="layer 2 is 'shared'"):
            cache.update_indexer(torch.zeros(1, 1, 128), 2)


class TestSeed:
    def test_rows_are_read_where_the_table_says_and_never_written(self):
        model = tiny_model()
        cache = PagedCache(model.config, 2, 100)
        cache.block_table.copy_(torch.tensor([[3, 1], [2, 0]]))
        step(model, random_ids(2, 90), cache)
        pages = cache.layers[3].latent_pages.clone()
        topk = torch.tensor([[0, 63, 64, 89], [5, 70, 70, -1]], dtype=torch.int32)
        seed = cache.gather_rows(3, topk[:, None])
        slots = [[3 * 64, 3 * 64 + 63, 64, 64 + 25], [2 * 64 + 5, 6]]
        assert torch.equal(seed.latents_BKX[0], pages.view(-1, 128)[slots[0]])
        assert torch.equal(seed.latents_BKX[1, :2], pages.view(-1, 128)[slots[1]])
        assert seed.rows_BK.tolist() == [[0, 1, 2, 3], [0, 1, 1, 1]]

        view = SeedCache(seed, 64)
        latents, rotated = view.update(torch.ones(2, 1, 1, 64), torch.ones(2, 1, 1, 64), 3)
        assert torch.equal(torch.cat([latents, rotated], -1)[:, 0], seed.latents_BKX)
        assert torch.equal(cache.layers[3].latent_pages, pages)
        with pytest.raises(ValueError, match="draft step"):
            view.update_indexer(torch.ones(2, 1, 128), 3)

    def test_what_lies_beyond_the_lengths_does_not_count(self):
        cache = PagedCache(tiny_config(), 3, 8)
        cache.set_lengths([3, 0, 8])
        topk = torch.arange(8, dtype=torch.int32).expand(3, 8)
        for lengths, expected in ((None, [3, 0, 8]), (torch.tensor([4, 1, 0]), [4, 1, 0])):
            seed = cache.gather_rows(0, topk[:, None], lengths)
            ends = [min(n, 8) for n in expected]
            assert seed.rows_BK.tolist() == [
                [min(k, max(end - 1, 0)) for k in range(8)] for end in ends
            ]
            assert torch.equal(SeedCache(seed, 64).selection()[:, 0], seed.rows_BK)
            assert SeedCache(seed, 64).mask().all()
        assert cache.causal_mask(2).sum(-1).tolist() == [[[4, 5]], [[1, 2]], [[8, 8]]]


def test_transformers_gives_no_warning():
    model = tiny_model()
    cache = PagedCache(model.config, 1, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(model, random_ids(1, 8), cache)


@pytest.mark.gpu
@pytest.mark.parametrize("index_dtype", [None, FP8])
def test_steps_of_different_lengths_never_wait_for_the_device(index_dtype):
    cache = PagedCache(tiny_config(), 2, 128, index_dtype=index_dtype, device="cuda")
    cache.auto_advance = False
    latents = torch.randn(2, 1, 6, 64, device="cuda")
    keys_BSD = torch.randn(2, 6, 128, device="cuda")
    topk = torch.arange(8, dtype=torch.int32, device="cuda").expand(2, 8)
    kept = torch.tensor([6, 2], device="cuda")
    lengths = torch.tensor([3, 4], device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            cache.causal_mask(6)
            cache.update(latents, latents, 0)
            cache.update_indexer(keys_BSD, 0)
            cache.advance(kept)
            seed = cache.gather_rows(0, topk[:, None])
            SeedCache(seed, 64).mask()
        cache.set_lengths(lengths)
        cache.crop(-1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert cache.lengths.tolist() == [2, 3]


@pytest.mark.parametrize("lengths", [5.7, [5.5, 6], True, [1, 2, 3], [5], [[5, 6]], [2**33, 1]])
def test_lengths_of_the_wrong_kind_are_refused(lengths):
    cache = PagedCache(tiny_config(), 2, 64)
    with pytest.raises(ValueError, match=r"PagedCache\.set_lengths"):
        cache.set_lengths(lengths)
    with pytest.raises(ValueError, match=r"PagedCache\.set_lengths"):
        cache.set_lengths(torch.tensor(lengths))
    assert cache.lengths.tolist() == [0, 0]


@pytest.mark.parametrize(
    "count", [-21, 45, torch.tensor([1.5, 2.0]), torch.tensor(1.0), 1.5, True, "1", None]
)
def test_counts_that_leave_the_cache_are_refused(count):
    cache = PagedCache(tiny_config(), 2, 64)
    cache.set_lengths(20)
    with pytest.raises(ValueError, match=r"PagedCache\.advance"):
        cache.advance(count)
    assert cache.lengths.tolist() == [20, 20]
    cache.advance(44)
    cache.crop(torch.tensor(-2))
    assert cache.lengths.tolist() == [62, 62]
    assert held_tokens(cache.lengths) == 62
