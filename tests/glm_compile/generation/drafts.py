"""Prompts, drafts whose acceptance a test decides, and the runs that they are compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import glm_compile
from glm_compile.generation import api
from glm_compile.generation.loop import DecodingLoop
from glm_compile.mtp import GlmMoeDsaMtp, select_row

NEW = 14
VOCAB = 512

# How many drafts of iteration i (0 = the block proposed behind the prompt) are right in row b.
Plan = Callable[[int, int], int]


def random_mtp(model: Any, *, seed: int = 1, std: float = 0.1) -> GlmMoeDsaMtp:
    """MTP layer with random weights: its drafts are nearly always wrong."""
    mtp = GlmMoeDsaMtp(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in mtp.parameters():
            values = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(values * std if parameter.dim() > 1 else 1 + 0.1 * values)
    return mtp


class ScriptedMtp:
    """Drafts the next tokens of known sequences, or wrong ones, as a plan says.

    Args:
        sequences: for each row, prompt (without padding) and continuation.
        plan: number of right drafts for (iteration, row).
        inner: a real MTP layer to run along, for its cache rows.
    """

    def __init__(
        self,
        sequences: Sequence[Sequence[int]],
        plan: Plan,
        vocab_size: int,
        inner: GlmMoeDsaMtp | None = None,
    ) -> None:
        self.sequences = [list(s) for s in sequences]
        self.plan = plan
        self.vocab_size = vocab_size
        self.inner = inner
        self.is_index_shared = True
        self.lengths = torch.zeros(0)
        self.iteration = -1
        self.draft_index = 0

    def embed_positions(self, positions_BS: torch.Tensor, like: Any) -> tuple[torch.Tensor, ...]:
        """The positions themselves."""
        return positions_BS[..., None], positions_BS[..., None]

    def extend(
        self,
        ids_BS: Any,
        hidden_BSC: Any,
        positions_BS: Any,
        mask: Any,
        cache: Any,
        *,
        row_B: torch.Tensor,
        position_embeddings: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        seed_BSK = torch.zeros(*ids_BS.shape, 1, dtype=torch.int32)
        if position_embeddings is not None:
            assert torch.equal(position_embeddings[0][..., 0], positions_BS)
        if self.inner is not None:
            _, seed_BSK = self.inner.extend(
                ids_BS, hidden_BSC, positions_BS, mask, cache, row_B=row_B
            )
        self.iteration += 1
        return select_row(self._answer(positions_BS, hidden_BSC, 0), row_B), seed_BSK

    def gather_seed(self, topk_BSK: Any, cache: Any, lengths_B: Any, row_B: Any) -> Any:
        self.lengths = cache.lengths
        if self.inner is not None:
            return self.inner.gather_seed(topk_BSK, cache, lengths_B, row_B)
        return cache.gather_rows(0, topk_BSK, lengths_B, row_B)

    def draft(
        self, ids_B1: Any, hidden_B1C: Any, _: None, seed: Any, *, position_embeddings: Any
    ) -> torch.Tensor:
        positions_B1 = position_embeddings[0][..., 0]
        if self.inner is not None:
            self.inner.draft(ids_B1, hidden_B1C, positions_B1, seed)
        index = int((positions_B1[:, 0] - self.lengths).min()) + 1  # more for a finished row
        return self._answer(positions_B1, hidden_B1C, index)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(*hidden.shape[:-1], self.vocab_size)
        return logits.scatter(-1, hidden[..., :1].long(), 30.0)

    def _answer(self, positions_BS: torch.Tensor, like: torch.Tensor, index: int) -> torch.Tensor:
        """Hidden states that hold the token to draft: two behind the position of the row."""
        answer = torch.zeros(like.shape)
        for b, positions in enumerate(positions_BS.tolist()):
            is_right = self.plan(self.iteration, b) > index
            for s, position in enumerate(positions):
                sequence = self.sequences[b]
                token = sequence[position + 2] if position + 2 < len(sequence) else 0
                answer[b, s, 0] = token if is_right else (token + 1) % self.vocab_size
        return answer


def always(count: int) -> Plan:
    """Plan with the same number of right drafts everywhere."""
    return lambda iteration, row: count


_REFERENCES: dict[tuple[Any, ...], tuple[Any, torch.Tensor]] = {}


def greedy_reference(model: Any, ids: torch.Tensor, max_new_tokens: int, **kwargs: Any) -> Any:
    """Unmodified transformers, DynamicCache, batch of one; made once per prompt."""
    assert ids.shape[0] == 1
    options = {"eos_token_id": None, "pad_token_id": 0, "do_sample": False} | kwargs
    key = (id(model), max_new_tokens, *ids[0].tolist(), repr(sorted(options.items())))
    if key not in _REFERENCES:
        text = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, **options
        )
        # The model is kept, so that no other gets its id.
        _REFERENCES[key] = (model, text)
    return _REFERENCES[key][1].clone()


def prompt_of(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 500, (1, length), generator=torch.Generator().manual_seed(seed))


def padded(
    rows: Sequence[torch.Tensor], side: str, pad_id: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Batch of prompts with the padding left, right, or in the middle."""
    width = max(row.shape[1] for row in rows) + (side == "holes")
    ids = torch.full((len(rows), width), pad_id)
    mask = torch.zeros_like(ids)
    for b, row in enumerate(rows):
        length = row.shape[1]
        if side == "left":
            columns = list(range(width - length, width))
        elif side == "right":
            columns = list(range(length))
        else:
            columns = [0, *range(width - length + 1, width)]
        ids[b, columns] = row[0]
        mask[b, columns] = 1
    return ids, mask


def run(model: Any, ids: torch.Tensor, mtp: Any = None, **kwargs: Any) -> Any:
    kwargs = {"max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0} | kwargs
    if "attention_mask" not in kwargs:
        kwargs["attention_mask"] = torch.ones_like(ids)
    return glm_compile.generate(model, ids, mtp=mtp, return_dict_in_generate=True, **kwargs)


def unequal(iteration: int, row: int) -> int:
    """Accepts that change between iterations and differ between rows."""
    return [(3, 0), (0, 3), (2, 1), (1, 3)][iteration % 4][row % 2]


class Uncompiled:
    """A compiler that compiles nothing, and makes one model's steps be found again."""

    def __init__(self) -> None:
        self.owner = SimpleNamespace()
        self.options: dict[str, Any] = {}

    def __call__(self, step: Any) -> Any:
        return step


def note_loops(monkeypatch: pytest.MonkeyPatch) -> list[DecodingLoop]:
    """The loops of the calls that follow, as they are made."""
    made: list[DecodingLoop] = []

    class Noted(DecodingLoop):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(api, "DecodingLoop", Noted)
    return made


def capture_loop(monkeypatch: pytest.MonkeyPatch, *call: Any, **kwargs: Any) -> DecodingLoop:
    """The loop that a call would run, before it runs; it waits for each iteration."""
    kwargs.setdefault("overlap", False)
    loops: list[DecodingLoop] = []

    class Stop(Exception):
        pass

    def stop(self: DecodingLoop) -> Any:
        loops.append(self)
        raise Stop

    monkeypatch.setattr(api.DecodingLoop, "run", stop)
    with pytest.raises(Stop):
        run(*call, **kwargs)
    monkeypatch.undo()
    return loops[0]


def cached_rows(cache: Any, layer: int, row: int) -> list[torch.Tensor]:
    """Latents and index keys of one sequence, up to its length."""
    pages = [cache.layers[layer].latent_pages, cache.layers[layer].key_pages]
    length = int(cache.lengths[row])
    table = cache.block_table[row].long()
    return [p[table].flatten(0, 1)[:length] for p in pages if p is not None]
