"""Published faults of caches and paging, by case id."""

from __future__ import annotations

import pytest
import torch

from glm_compile.cache import FP8, PagedCache
from tests.checkpoints import release_config
from tests.tiny_models import CACHE_ARGUMENT, tiny_config, tiny_model

TOLERANCE = {"rtol": 0, "atol": 1e-4}


def generate(model, ids, cache=None, **kwargs):
    if cache is not None:
        kwargs[CACHE_ARGUMENT] = cache
    kwargs = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None} | kwargs
    return model.generate(ids, **kwargs)


def test_cache_1_tokens_go_through_the_block_table():
    """A sequence whose pages are neither first nor in order reads and writes its own rows."""
    model = tiny_model()
    ids = torch.randint(0, 500, (2, 150))
    cache = PagedCache(model.config, 2, 192)
    cache.block_table.copy_(torch.tensor([[3, 0, 5], [4, 2, 1]]))
    for layer in cache.layers:  # whatever lies elsewhere must not be seen
        layer.latent_pages.fill_(50.0)
    logits = model(ids, **{CACHE_ARGUMENT: cache}).logits
    torch.testing.assert_close(logits, model(ids, use_cache=False).logits, **TOLERANCE)
    plain = PagedCache(model.config, 2, 192)
    model(ids, **{CACHE_ARGUMENT: plain})
    for own, expected in zip(cache.layers, plain.layers):
        for token in (0, 63, 64, 127, 128, 149):
            page, row = token // 64, token % 64
            for sequence in range(2):
                found = own.latent_pages[cache.block_table[sequence, page], row]
                assert torch.equal(found, expected.latent_pages[sequence * 3 + page, row])


@pytest.mark.parametrize("num_mtp_layers", [0, 1])
def test_cache_2_only_full_layers_own_index_keys(num_mtp_layers):
    cache = PagedCache(
        release_config(), 1, 64, index_dtype=FP8, device="meta", num_mtp_layers=num_mtp_layers
    )
    latents = [layer for layer in cache.layers if layer.latent_pages is not None]
    keys = [number for number, layer in enumerate(cache.layers) if layer.key_pages is not None]
    assert len(latents) == 78 + num_mtp_layers
    assert len(keys) == 21 + num_mtp_layers
    assert keys[:21] == [0, 1, 2, *range(6, 78, 4)]
    assert keys[21:] == [78] * num_mtp_layers


def test_cache_4_assisted_generation_rolls_a_fixed_size_cache_back():
    model = tiny_model()
    ids = torch.randint(0, 500, (1, 8)).repeat(1, 4)
    cache = PagedCache(model.config, 1, 64)
    drafted = generate(model, ids, cache, prompt_lookup_num_tokens=4)
    assert torch.equal(drafted, generate(model, ids))
    assert cache.lengths.tolist() == [drafted.shape[1] - 1]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_cache_5_left_padded_rows_equal_their_own_runs(attention):
    config = tiny_config(index_topk=4)
    model = tiny_model(config, attention=attention)
    prompts = [torch.randint(0, 500, (1, length)) for length in (3, 11)]
    ids = torch.full((2, 11), 509)
    mask = torch.zeros(2, 11, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, 11 - prompt.shape[1] :] = prompt
        mask[row, 11 - prompt.shape[1] :] = 1
    settings = {"output_logits": True, "return_dict_in_generate": True}
    cache = PagedCache(config, 2, 64)
    batch = generate(model, ids, cache, attention_mask=mask, **settings)
    for row, prompt in enumerate(prompts):
        alone = generate(model, prompt, **settings)
        for found, expected in zip(batch.logits, alone.logits):
            torch.testing.assert_close(found[row], expected[0], **TOLERANCE)


def test_cache_6_a_padded_rows_positions_start_at_its_first_token():
    model = tiny_model()
    prompt = torch.randint(0, 500, (1, 5))
    ids = torch.cat([torch.full((1, 7), 509), prompt], 1)
    mask = torch.cat([torch.zeros(1, 7), torch.ones(1, 5)], 1).long()
    padded, plain = PagedCache(model.config, 1, 64), PagedCache(model.config, 1, 64)
    generate(model, ids, padded, attention_mask=mask, max_new_tokens=1)
    generate(model, prompt, plain, max_new_tokens=1)
    for own, expected in zip(padded.layers, plain.layers):
        rotated = own.latent_pages[0, 7:12, 64:]
        torch.testing.assert_close(rotated, expected.latent_pages[0, :5, 64:], **TOLERANCE)


def test_cache_8_a_second_generate_on_device_lengths_works():
    model = tiny_model()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    ids = torch.randint(0, 500, (1, 20))
    cache = PagedCache(model.config, 1, 64)
    expected = generate(model, ids, max_new_tokens=3)
    tokens = ids
    for _ in range(3):
        tokens = generate(model, tokens, cache, max_new_tokens=1)
        assert isinstance(cache.get_seq_length(), torch.Tensor)
    assert torch.equal(tokens, expected)
    cache.crop(-1)
    logits = compiled(tokens[:, 21:], **{CACHE_ARGUMENT: cache}).logits
    assert logits[0, -1].isfinite().all()
    torch.testing.assert_close(logits, model(tokens, use_cache=False).logits[:, 21:], **TOLERANCE)
