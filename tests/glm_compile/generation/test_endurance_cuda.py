"""Long runs of captured iterations, and calls that are broken off.

Steps run eagerly, behind a stand-in for a compiled model's: nothing is compiled, and graphs are
kept between calls. bfloat16, whose experts do not wait for the device.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from glm_compile.generation import api
from glm_compile.generation.loop import DecodingLoop
from tests.glm_compile.generation.drafts import Uncompiled, note_loops, prompt_of, random_mtp, run
from tests.tiny_models import tiny_config, tiny_model

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    config = tiny_config(num_hidden_layers=1, first_k_dense_replace=0, indexer_types=["full"])
    model = tiny_model(config, dtype=torch.bfloat16).cuda()
    return model, random_mtp(model)


@pytest.fixture(autouse=True)
def loops(monkeypatch: pytest.MonkeyPatch) -> list[DecodingLoop]:
    """The loops of calls; models are taken for compiled ones."""
    compilers: dict[int, Uncompiled] = {}

    def unwrap(model: Any) -> tuple[Any, Uncompiled]:
        return model, compilers.setdefault(id(model), Uncompiled())

    monkeypatch.setattr(api, "unwrap_compiled", unwrap)
    return note_loops(monkeypatch)


def decode(pair: tuple[Any, Any], ids: torch.Tensor, **kwargs: Any) -> Any:
    model, mtp = pair
    kwargs = {"num_draft_tokens": 2, "cuda_graph": True} | kwargs
    return run(model, ids.cuda(), mtp, **kwargs)


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_thousand_iterations_beside_poisoned_rows(
    pair: Any, monkeypatch: pytest.MonkeyPatch, loops: list[Any], do_sample: bool
) -> None:
    """Padding rows hold NaN and any tokens; behind each row's end lies what was never written."""
    ids = torch.cat([prompt_of(12, seed) for seed in range(5)])
    fields = {"max_new_tokens": 1100, "do_sample": do_sample, "temperature": 0.9}
    torch.manual_seed(1)
    expected = decode(pair, ids, **fields)
    iterate = DecodingLoop._iterate

    def poison(loop: DecodingLoop) -> None:
        cache, state = loop.cache, loop.state
        assert loop.request.num_padding == 1
        pages_of_padding = cache.block_table[-1].long()
        lengths_B1 = cache.lengths.long()[:, None]
        for layer in cache.layers:
            for pages in (layer.latent_pages, layer.key_pages):
                if pages is None:
                    continue
                pages[pages_of_padding] = torch.nan
                # A row of the last page of each sequence, behind its end.
                behind_B1 = (lengths_B1 + 40).clamp_max(cache.max_cache_len - 1)
                page_B1 = cache.block_table.long().gather(1, behind_B1 // pages.shape[1])
                # Not NaN: attention in plain torch multiplies what it masks by zero.
                pages[page_B1[:-1], behind_B1[:-1] % pages.shape[1]] = 1e3
        state.block_BS[-1] = 77
        state.text_BW[-1] = 78
        iterate(loop)

    monkeypatch.setattr(DecodingLoop, "_iterate", poison)
    torch.manual_seed(1)
    result = decode(pair, ids, **fields)
    assert result.num_iterations >= (1000 if not do_sample else 500)
    assert torch.equal(result.accept_lengths, expected.accept_lengths)
    assert torch.equal(result.sequences, expected.sequences)


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_memory_is_steady_over_ten_thousand_iterations(
    pair: Any, monkeypatch: pytest.MonkeyPatch, loops: list[Any]
) -> None:
    """On the device to the byte; the process grows by less than 4 MB in the second half."""
    iterate, num_iterations, peaks, host = DecodingLoop._iterate, 0, [], []

    def note(loop: DecodingLoop) -> None:
        nonlocal num_iterations
        iterate(loop)
        num_iterations += 1
        peaks[-1] = max(peaks[-1], torch.cuda.memory_allocated())

    monkeypatch.setattr(DecodingLoop, "_iterate", note)
    while num_iterations < 10_000:
        # What the call before has left, and the loop that is noted here.
        loops.clear()
        gc.collect()
        peaks.append(0)
        decode(pair, prompt_of(12, num_iterations), max_new_tokens=1900)
        host.append(resident_bytes())
    # The first call has the warm-up and the capture.
    assert len(peaks) >= 4 and max(peaks[2:]) <= peaks[1], peaks
    assert host[-1] - host[len(host) // 2] < 4 << 20, host


class Breaks:
    """A streamer that raises at its fourth token."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.count = 0

    def put(self, value: torch.Tensor) -> None:
        self.count += 1
        if self.count == 5:
            raise self.error

    def end(self) -> None:
        pass


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("enough")], ids=repr)
@pytest.mark.parametrize("do_sample", [False, True])
def test_a_call_that_is_broken_off_leaves_the_graph_usable(
    pair: Any, loops: list[Any], error: BaseException, do_sample: bool
) -> None:
    ids = prompt_of(12)
    fields = {"max_new_tokens": 30, "do_sample": do_sample}
    torch.manual_seed(1)
    expected = decode(pair, ids, **fields).sequences
    for place in ("streamer", "stopping_criteria"):
        callback: Any = Breaks(error)
        if place == "stopping_criteria":
            callback = [lambda ids, scores, breaks=callback: breaks.put(ids) or False]
        with pytest.raises(type(error)):
            decode(pair, ids, **fields, **{place: callback})
        torch.manual_seed(1)
        assert torch.equal(decode(pair, ids, **fields).sequences, expected)
    assert all(loop.graphed is loops[0].graphed for loop in loops)
    assert loops[0].graphed.num_captures == 1


@pytest.mark.parametrize("num_drafts", [0, 2])
def test_a_callback_that_draws_on_the_device(pair: Any, num_drafts: int) -> None:
    """Replays draw what the host's way of running draws, whatever else does."""

    class Draws:
        def put(self, value: torch.Tensor) -> None:
            torch.rand(3, device="cuda")

        def end(self) -> None:
            pass

    results = []
    for fields in ({"cuda_graph": False, "overlap": False}, {"cuda_graph": False}, {}):
        for _ in range(2):
            torch.manual_seed(1)
            results.append(
                decode(
                    pair, prompt_of(12), num_draft_tokens=num_drafts, max_new_tokens=40,
                    do_sample=True, streamer=Draws(), **fields,
                ).sequences
            )  # fmt: skip
    assert all(torch.equal(result, results[0]) for result in results)


def test_calls_of_two_models_in_turn_and_one_inside_the_other(pair: Any) -> None:
    other_model = tiny_model(pair[0].config, dtype=torch.bfloat16, seed=9).cuda()
    other = other_model, random_mtp(other_model, seed=4)
    prompts = prompt_of(12), prompt_of(7, 2)
    texts = {}
    for _ in range(3):
        for which, models in (("one", pair), ("other", other)):
            for i, ids in enumerate(prompts):
                text = decode(models, ids, max_new_tokens=40).sequences
                assert torch.equal(texts.setdefault((which, i), text), text)

    class Nested:
        def put(self, value: torch.Tensor) -> None:
            for which, models in (("one", pair), ("other", other)):
                got = decode(models, prompts[1], max_new_tokens=6).sequences
                assert torch.equal(got, texts[which, 1][:, :13])

        def end(self) -> None:
            pass

    outer = decode(pair, prompts[0], max_new_tokens=12, streamer=Nested()).sequences
    assert torch.equal(outer, texts["one", 0][:, :24])
