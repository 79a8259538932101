"""Batches brought to a few sizes, so that calls share compiled steps and captured iterations.

What is added is rows of one token that are finished from the start: they take part in every step,
in pages of their own, keep nothing, and are cut off the result. They cost their part of the
prompt's work and of the cache, so there are none beside long texts. They need few of their pages,
but the number of pages is a shape of the compiled steps: with fewer of them for seven texts in a
batch of eight than for eight, each number of texts would have steps and graphs of its own again.

B batch, W prompt width, P compacted prompt width.
"""

from __future__ import annotations

import dataclasses

import torch

from glm_compile.generation.device_processors import DeviceProcessors
from glm_compile.generation.loop import needed_cache_len
from glm_compile.generation.prompt import Prompt
from glm_compile.generation.request import Request
from glm_compile.generation.steps import compiled_capacity

# Sizes that calls are brought to; a larger batch stays as it is.
BATCH_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
# Tokens of the cache that all added rows together may take.
MAX_PADDING_TOKENS = 1 << 15


def pad_batch(request: Request) -> Request:
    """The request with the next of `BATCH_SIZES` rows; as it is where they would cost, or be seen.

    A criterion gets the texts of the whole batch, and so may a processor; scores and logits are
    handed out; plain sampling draws numbers for the whole batch at once, as transformers does.
    """
    batch_size = request.batch_size
    size = next((size for size in BATCH_SIZES if size >= batch_size), batch_size)
    draws_as_transformers = request.do_sample and request.num_drafts == 0
    is_seen = (
        bool(request.stop.criteria)
        or request.keeps_scores
        or request.keeps_logits
        or draws_as_transformers
        or not isinstance(request.processor, DeviceProcessors)
    )
    num_padding = size - batch_size
    # They take their part of the prompt's work and of the cache: of one that is made for this call,
    # whose capacity is rounded up where steps are compiled. An earlier one may be larger.
    is_large = num_padding * compiled_capacity(needed_cache_len(request)) > MAX_PADDING_TOKENS
    if num_padding == 0 or is_seen or is_large:
        return request
    assert isinstance(request.processor, DeviceProcessors)
    request.processor.add_rows(num_padding)
    return dataclasses.replace(
        request,
        prompt=_pad_prompt(request.prompt, num_padding),
        num_padding=num_padding,
    )


def _pad_prompt(prompt: Prompt, num_rows: int) -> Prompt:
    def padded(values: torch.Tensor, fill: int) -> torch.Tensor:
        return torch.cat([values, values.new_full((num_rows, *values.shape[1:]), fill)])

    return Prompt(
        given_ids_BW=padded(prompt.given_ids_BW, 0),
        aligned_ids_BW=padded(prompt.aligned_ids_BW, 0),
        ids_BP=padded(prompt.ids_BP, 0),
        lengths_B=padded(prompt.lengths_B, 1),
    )
