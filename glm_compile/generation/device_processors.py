"""transformers' logits processors as work for the device, on all rows of a block at once.

transformers calls a processor with one prefix of one length. Here a rule stands for each of its
processors and takes a whole block: row s of a sequence follows its text and the drafts before s,
which stand in the text's buffer behind it. Each row gets what the processor of transformers gives
for that prefix. Lengths stay on the device and shapes do not depend on them, so that iterations may
be launched ahead of their results, and captured in a CUDA graph.

A rule's constants are fixed in a captured iteration. Its tensors (masks over the vocabulary,
limits, what a sequence has said so far) lie at fixed addresses; `take` fills them for another call.

B batch, S rows of a block, V vocabulary, W width of the text buffer, N n-grams or biased sequences,
G tokens of an n-gram, P tokens of a prefix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import torch
from transformers.generation import logits_process

from glm_compile.ops.filtered_softmax import filtered_softmax
from glm_compile.ops.forbid_ngrams import forbid_ngrams
from glm_compile.ops.repetition_penalty import in_bin, note_tokens, repetition_penalty

# Stands where an n-gram is missing; no token equals it.
_NO_TOKEN = -(1 << 40)


class Rows:
    """Prefixes of a block's rows: row s of sequence b follows `text_BW[b, : ends_BS[b, s]]`.

    Args:
        text_BW: tokens, the drafts behind them included.
        starts_B: columns of each sequence's text, without drafts.
        num_rows: rows of the block.
        num_drafts: drafts before the first row; row s follows s more.
    """

    def __init__(
        self, text_BW: torch.Tensor, starts_B: torch.Tensor, num_rows: int, num_drafts: int
    ) -> None:
        self.text_BW = text_BW
        self.starts_B = starts_B
        self.num_rows = num_rows
        self.num_drafts = num_drafts

    @cached_property
    def ends_BS(self) -> torch.Tensor:
        """Tokens of each prefix."""
        last = self.num_drafts + self.num_rows
        return self.starts_B[:, None] + self._range(self.num_drafts, last)

    def tail(self, size: int) -> torch.Tensor:
        """The last tokens of each prefix [B,S,size]; a shorter prefix has others in front."""
        columns_BSP = (self.ends_BS[..., None] + self._range(-size, 0)).clamp_min(0)
        return self.text_BW.gather(1, columns_BSP.flatten(1)).view_as(columns_BSP)

    def _range(self, start: int, end: int) -> torch.Tensor:
        return torch.arange(start, end, device=self.text_BW.device)


class Rule:
    """One processor of transformers on all rows of a block.

    Attributes:
        reads_text: whether `rows` is looked at.
        constants: what two rules of one kind may differ in, but for their tensors.
        tensors: what `take` copies from the same rule of another call.
    """

    reads_text = True

    def __init__(self, *constants: Any, **tensors: torch.Tensor) -> None:
        self.constants = constants
        self.tensors = tensors

    def __call__(self, scores_BSV: torch.Tensor, rows: Rows) -> torch.Tensor:
        raise NotImplementedError

    def note(self, tokens_BS: torch.Tensor, kept_B: torch.Tensor, starts_B: torch.Tensor) -> None:
        """Learn of the tokens that are appended to each text: the first `kept_B` of a block."""

    def take(self, other: Rule) -> None:
        """Go on with another call's tensors."""
        for name, tensor in self.tensors.items():
            tensor.copy_(other.tensors[name])

    @property
    def signature(self) -> tuple[Any, ...]:
        """Equal for rules that launch the same work."""
        shapes = tuple((name, tuple(t.shape)) for name, t in self.tensors.items())
        return type(self), self.constants, shapes


class Call:
    """What rules are made from, besides a processor.

    Attributes:
        prompt_BW: the prompts with their padding on the left, on the device.
        vocab_size: V.
    """

    def __init__(self, prompt_BW: torch.Tensor, vocab_size: int) -> None:
        self.prompt_BW = prompt_BW
        self.vocab_size = vocab_size
        self.device = prompt_BW.device

    def number(self, value: Any) -> torch.Tensor:
        """An integer that a call decides, 0-d."""
        return torch.tensor(int(value), dtype=torch.long, device=self.device)

    def mask(self, ids: Any, name: str | None = None) -> torch.Tensor:
        """Bool [V], true at the ids; others than the vocabulary's are an error of a name."""
        ids = torch.as_tensor(ids).flatten().tolist()
        known = [i for i in ids if 0 <= i < self.vocab_size]
        if name is not None and len(known) < len(ids):
            self.refuse(name, [i for i in ids if i not in known])
        mask_V = torch.zeros(self.vocab_size, dtype=torch.bool)
        mask_V[known] = True
        return mask_V.to(self.device)

    def refuse(self, name: str, ids: list[int]) -> None:
        """Raise ValueError for ids of a processor."""
        raise ValueError(f"generate: {name} must hold ids in 0..{self.vocab_size - 1}, got {ids}")

    def seen(self, ids_BX: torch.Tensor, counts_BX: torch.Tensor | bool = True) -> torch.Tensor:
        """Bool [B,V+1], true at the ids that count; those outside the vocabulary are in the bin."""
        seen_BV = torch.zeros(
            ids_BX.shape[0], self.vocab_size + 1, dtype=torch.bool, device=self.device
        )
        return seen_BV.scatter_(1, in_bin(ids_BX, counts_BX, self.vocab_size), True)


class _Same:
    """Equal to another one of the same object only, which it keeps."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


# -- processors that do not look at the text ------------------------------------------------------


class Nothing(Rule):
    """A processor that leaves every score of this call as it is."""

    reads_text = False

    def __call__(self, scores_BSV: torch.Tensor, rows: Rows) -> torch.Tensor:
        return scores_BSV


class Unchanged(Rule):
    """A processor that never waits for the device: transformers' own code on the rows."""

    reads_text = False

    def __init__(self, processor: Any, call: Call) -> None:
        plain = (bool, int, float, str, type(None))
        settings = [
            (name, value if isinstance(value, plain) else _Same(value))
            for name, value in sorted(vars(processor).items())
        ]
        super().__init__(type(processor), *settings)
        self._processor = processor

    def __call__(self, scores_BSV: torch.Tensor, rows: Rows) -> torch.Tensor:
        scores_RV = scores_BSV.flatten(0, 1)
        return self._processor(None, scores_RV).view_as(scores_BSV)


class Eta(Rule):
    """EtaLogitsWarper. Its entropy comes from a class that checks values on the host."""

    reads_text = False

    def __init__(self, processor: Any, call: Call) -> None:
        least = processor.min_tokens_to_keep
        super().__init__(float(processor.epsilon), processor.filter_value, least)

    def __call__(self, scores_BSV: torch.Tensor, rows: Rows) -> torch.Tensor:
        epsilon, filter_value, least = self.constants
        probs_BSV = scores_BSV.softmax(dim=-1)
        entropy_BS = _entropy(scores_BSV)
        eta_BS1 = (math.sqrt(epsilon) * torch.exp(-entropy_BS)).clamp_max(epsilon)[..., None]
        kth_BS1 = torch.topk(scores_BSV, min(least, scores_BSV.shape[-1]))[0][..., -1:]
        removed_BSV = (probs_BSV < eta_BS1) & (scores_BSV < kth_BS1)
        return scores_BSV.masked_fill(removed_BSV, filter_value)


class TopH(Rule):
    """TopHLogitsWarper, whose entropy comes from the same class."""

    reads_text = False

    def __init__(self, processor: Any, call: Call) -> None:
        super().__init__(processor.top_n, float(processor.top_h), processor.filter_value)

    def __call__(self, scores_BSV: torch.Tensor, rows: Rows) -> torch.Tensor:
        top_n, top_h, filter_value = self.constants
        top_BSN, ids_BSN = torch.topk(scores_BSV, min(top_n, scores_BSV.shape[-1]))
        probs_BSN = (top_BSN - top_BSN.logsumexp(dim=-1, keepdim=True)).softmax(dim=-1)
        limit_BS1 = (_entropy(top_BSN) * top_h)[..., None]
        keeps_BSN = torch.cumsum(-probs_BSN * probs_BSN.log(), dim=-1) <= limit_BS1
        keeps_BSN[..., :1].fill_(True)
        keeps_BSV = torch.zeros_like(scores_BSV, dtype=torch.bool).scatter_(-1, ids_BSN, keeps_BSN)
        return scores_BSV.masked_fill(~keeps_BSV, filter_value)


class Suppress(Rule):
    """SuppressTokensLogitsProcessor."""

    reads_text = False

    def __init__(self, processor: Any, call: Call) -> None:
        super().__init__(mask_V=call.mask(processor.suppress_tokens))

    def __call__(self, scores_BSV: torch.Tensor, rows: Rows) -> torch.Tensor:
        return scores_BSV.masked_fill(self.tensors["mask_V"], -torch.inf)


def _entropy(scores_BSV: torch.Tensor) -> torch.Tensor:
    """As torch.distributions.Categorical(logits=scores).entropy()."""
    logits_BSV = scores_BSV - scores_BSV.logsumexp(dim=-1, keepdim=True)
    probs_BSV = logits_BSV.softmax(dim=-1)
    return -(logits_BSV.clamp_min(torch.finfo(logits_BSV.dtype).min) * probs_BSV).sum(-1)


# -- processors that look at the length of the prefix ---------------------------------------------


class Suppressed(Rule):
    """Some tokens are forbidden where the prefix has a length below a limit, or equal to it."""

    def __init__(self, is_below: bool, mask_V: torch.Tensor, limit: torch.Tensor) -> None:
        super().__init__(is_below, mask_V=mask_V, limit=limit)

    def __call__(self, scores_BSV: torch.Tensor, rows: Rows) -> torch.Tensor:
        limit = self.tensors["limit"]
        holds_BS = rows.ends_BS < limit if self.constants[0] else rows.ends_BS == limit
        return scores_BSV.masked_fill(holds_BS[..., None] & self.tensors["mask_V"], -torch.inf)


def min_length(processor: Any, call: Call) -> Rule:
    """MinLengthLogitsProcessor."""
    return Suppressed(True, call.mask(processor.eos_token_id), call.number(processor.min_length))


def min_new_tokens(processor: Any, call: Call) -> Rule:
    """MinNewTokensLengthLogitsProcessor."""
    limit = processor.prompt_length_to_skip + processor.min_new_tokens
    return Suppressed(True, call.mask(processor.eos_token_id), call.number(limit))


def suppress_at_begin(processor: Any, call: Call) -> Rule:
    """SuppressTokensAtBeginLogitsProcessor."""
    mask_V = call.mask(processor.begin_suppress_tokens)
    return Suppressed(False, mask_V, call.number(processor.begin_index))


class Forced(Rule):
    """Only some tokens are left, all alike, where the prefix has one length."""

    def __init__(self, mask_V: torch.Tensor, length: torch.Tensor) -> None:
        super().__init__(forced_V=torch.where(mask_V, 0.0, -torch.inf), length=length)

    def __call__(self, scores_BSV: torch.Tensor, rows: Rows) -> torch.Tensor:
        holds_BS1 = (rows.ends_BS == self.tensors["length"])[..., None]
        return torch.where(holds_BS1, self.tensors["forced_V"], scores_BSV)


def forced_bos(processor: Any, call: Call) -> Rule:
    """ForcedBOSTokenLogitsProcessor: the first token behind a prompt of one, else nothing."""
    if call.prompt_BW.shape[1] > 1:
        return Nothing()
    return Forced(call.mask(processor.bos_token_id, "forced_bos_token_id"), call.number(1))


def forced_eos(processor: Any, call: Call) -> Rule:
    """ForcedEOSTokenLogitsProcessor."""
    mask_V = call.mask(processor.eos_token_id, "forced_eos_token_id")
    return Forced(mask_V, call.number(processor.max_length - 1))


class DecayedLength(Rule):
    """ExponentialDecayLengthPenalty: the end of the sequence gains with each token."""

    def __init__(self, processor: Any, call: Call) -> None:
        super().__init__(
            float(processor.regulation_factor),
            mask_V=call.mask(processor.eos_token_id, "eos_token_id"),
            start=call.number(processor.regulation_start),
        )

    def __call__(self, scores_BSV: torch.Tensor, rows: Rows) -> torch.Tensor:
        beyond_BS = rows.ends_BS - self.tensors["start"]
        gain_BS = torch.pow(self.constants[0], beyond_BS.double().clamp_min(0)) - 1
        penalty_BSV = scores_BSV.abs() * gain_BS.to(scores_BSV.dtype)[..., None]
        gains_BSV = self.tensors["mask_V"] & scores_BSV.isfinite() & (beyond_BS > 0)[..., None]
        return torch.where(gains_BSV, scores_BSV + penalty_BSV, scores_BSV)


# -- processors that look at the tokens of the prefix ---------------------------------------------


class RepetitionPenalty(Rule):
    """RepetitionPenaltyLogitsProcessor: tokens that the prefix has from some column on."""

    def __init__(self, processor: Any, call: Call) -> None:
        batch_size, width = call.prompt_BW.shape
        first = processor.prompt_ignore_length
        first_B = torch.zeros(batch_size, dtype=torch.long, device=call.device)
        if first is not None:
            first = torch.as_tensor(first, device=call.device)
            if first.dim() == 1 and len(first) != batch_size:
                raise ValueError(
                    f"generate: prompt_ignore_length of a repetition penalty must be a number for "
                    f"each of {batch_size} sequences, got {len(first)}"
                )
            first_B = first_B + first
        columns_W = torch.arange(width, device=call.device)
        seen_BV = call.seen(call.prompt_BW, columns_W >= first_B[:, None])
        super().__init__(float(processor.penalty), seen_BV=seen_BV, first_B=first_B)

    def __call__(self, scores_BSV: torch.Tensor, rows: Rows) -> torch.Tensor:
        return repetition_penalty(
            scores_BSV,
            self.tensors["seen_BV"],
            rows.text_BW,
            rows.starts_B,
            self.tensors["first_B"],
            rows.num_drafts,
            self.constants[0],
        )

    def note(self, tokens_BS: torch.Tensor, kept_B: torch.Tensor, starts_B: torch.Tensor) -> None:
        note_tokens(self.tensors["seen_BV"], tokens_BS, kept_B, starts_B, self.tensors["first_B"])


class PromptPenalty(RepetitionPenalty):
    """EncoderRepetitionPenaltyLogitsProcessor: tokens of the prompt alone."""

    def __init__(self, processor: Any, call: Call) -> None:
        ids_BW = per_sequence(processor.encoder_input_ids.to(call.device), call)
        # No column counts that comes after the prompt.
        never_B = torch.full((len(ids_BW),), torch.iinfo(torch.long).max, device=call.device)
        seen_BV = call.seen(ids_BW)
        Rule.__init__(self, float(processor.penalty), seen_BV=seen_BV, first_B=never_B)


def per_sequence(values: torch.Tensor, call: Call) -> torch.Tensor:
    """A row for each sequence, where there is one for each prompt."""
    return values.repeat_interleave(call.prompt_BW.shape[0] // values.shape[0], dim=0)


class NoRepeatNGram(Rule):
    """NoRepeatNGramLogitsProcessor. Its time grows with the width of the text buffer."""

    def __init__(self, processor: Any, call: Call) -> None:
        super().__init__(processor.ngram_size)

    def __call__(self, scores_BSV: torch.Tensor, rows: Rows) -> torch.Tensor:
        size, text_BW = self.constants[0], rows.text_BW
        if text_BW.shape[1] < size:
            return scores_BSV
        return forbid_ngrams(
            scores_BSV,
            text_BW.unfold(1, size, 1),
            text_BW,
            rows.starts_B,
            rows.num_drafts,
            is_text=True,
        )


class NoPromptNGram(Rule):
    """EncoderNoRepeatNGramLogitsProcessor: n-grams of the prompt."""

    def __init__(self, processor: Any, call: Call) -> None:
        size = processor.ngram_size
        ngrams = [
            [[*prefix, last] for prefix, tokens in row.items() for last in dict.fromkeys(tokens)]
            for row in processor.generated_ngrams
        ]
        # Powers of two, so that calls share their graphs.
        width = max(1, *(len(row) for row in ngrams))
        width = 1 << (width - 1).bit_length()
        filler = [[_NO_TOKEN] * size]
        rows = [row + filler * (width - len(row)) for row in ngrams]
        ngrams_BNG = per_sequence(torch.tensor(rows, device=call.device), call)
        super().__init__(size, ngrams_BNG=ngrams_BNG)

    def __call__(self, scores_BSV: torch.Tensor, rows: Rows) -> torch.Tensor:
        return forbid_ngrams(
            scores_BSV,
            self.tensors["ngrams_BNG"],
            rows.text_BW,
            rows.starts_B,
            rows.num_drafts,
            is_text=False,
        )


class SequenceBias(Rule):
    """SequenceBiasLogitsProcessor, and NoBadWordsLogitsProcessor, which is one of minus infinity.

    A longer sequence biases its last token behind the others.
    """

    def __init__(self, processor: Any, call: Call) -> None:
        biases = {tuple(map(int, ids)): float(b) for ids, b in processor.sequence_bias.items()}
        if wrong := [i for ids in biases for i in ids if i >= call.vocab_size]:
            self._refuse(processor, call, wrong)
        super().__init__(tuple(biases.items()))
        self.reads_text = any(len(ids) > 1 for ids in biases)
        self._single_V = torch.zeros(call.vocab_size)
        for ids, bias in biases.items():
            if len(ids) == 1:
                self._single_V[ids[0]] = bias
        self._single_V = self._single_V.to(call.device)
        # Sequences of one length, no last token twice: additions in one order, always.
        groups: list[dict[int, tuple[tuple[int, ...], float]]] = []
        for length in dict.fromkeys(len(ids) for ids in biases if len(ids) > 1):
            rounds: list[dict[int, tuple[tuple[int, ...], float]]] = []
            for ids, bias in biases.items():
                if len(ids) != length:
                    continue
                free = next((r for r in rounds if ids[-1] not in r), None)
                if free is None:
                    rounds.append(free := {})
                free[ids[-1]] = (ids[:-1], bias)
            groups += rounds
        self._groups = [
            (
                torch.tensor([prefix for prefix, _ in group.values()], device=call.device),
                torch.tensor(list(group), device=call.device),
                torch.tensor([bias for _, bias in group.values()], device=call.device),
            )
            for group in groups
        ]

    @staticmethod
    def _refuse(processor: Any, call: Call, wrong: list[int]) -> None:
        is_bad_words = isinstance(processor, logits_process.NoBadWordsLogitsProcessor)
        call.refuse("bad_words_ids" if is_bad_words else "sequence_bias", wrong)

    def __call__(self, scores_BSV: torch.Tensor, rows: Rows) -> torch.Tensor:
        if not self._groups:
            return scores_BSV + self._single_V
        bias_BSV = self._single_V.expand_as(scores_BSV).clone()
        for prefixes_NP, last_N, biases_N in self._groups:
            size = prefixes_NP.shape[1]
            holds_BSN = (rows.tail(size)[:, :, None] == prefixes_NP).all(dim=-1)
            holds_BSN &= (rows.ends_BS >= size)[..., None]
            bias_BSV.index_add_(-1, last_N, torch.where(holds_BSN, biases_N, 0.0))
        return scores_BSV + bias_BSV


_RULES: dict[str, Callable[[Any, Call], Rule]] = {
    "EncoderNoRepeatNGramLogitsProcessor": NoPromptNGram,
    "EncoderRepetitionPenaltyLogitsProcessor": PromptPenalty,
    "EpsilonLogitsWarper": Unchanged,
    "EtaLogitsWarper": Eta,
    "ExponentialDecayLengthPenalty": DecayedLength,
    "ForcedBOSTokenLogitsProcessor": forced_bos,
    "ForcedEOSTokenLogitsProcessor": forced_eos,
    "InfNanRemoveLogitsProcessor": Unchanged,
    "LogitNormalization": Unchanged,
    "MinLengthLogitsProcessor": min_length,
    "MinNewTokensLengthLogitsProcessor": min_new_tokens,
    "MinPLogitsWarper": Unchanged,
    "NoBadWordsLogitsProcessor": SequenceBias,
    "NoRepeatNGramLogitsProcessor": NoRepeatNGram,
    "RepetitionPenaltyLogitsProcessor": RepetitionPenalty,
    "SequenceBiasLogitsProcessor": SequenceBias,
    "SuppressTokensAtBeginLogitsProcessor": suppress_at_begin,
    "SuppressTokensLogitsProcessor": Suppress,
    "TemperatureLogitsWarper": Unchanged,
    "TopHLogitsWarper": TopH,
    "TopKLogitsWarper": Unchanged,
    "TopPLogitsWarper": Unchanged,
    "TypicalLogitsWarper": Unchanged,
}


def runs_on_device(processor: Any) -> bool:
    """Whether there is a rule for a processor; none for a subclass, which may do anything."""
    is_transformers = type(processor).__module__ == logits_process.__name__
    return is_transformers and type(processor).__name__ in _RULES


def _split_filters(processors: Sequence[Any]) -> tuple[int, tuple[float, int, float]]:
    """How many processors stand before temperature, top-k and top-p; and these three."""
    values: dict[str, Any] = {}
    count = len(processors)
    for name, attribute in (
        ("TopPLogitsWarper", "top_p"),
        ("TopKLogitsWarper", "top_k"),
        ("TemperatureLogitsWarper", "temperature"),
    ):
        last = processors[count - 1] if count else None
        is_usual = getattr(last, "filter_value", -math.inf) == -math.inf
        is_usual &= getattr(last, "min_tokens_to_keep", 1) == 1
        if type(last).__name__ == name and is_usual:
            values[attribute] = getattr(last, attribute)
            count -= 1
    filters = values.get("temperature", 1.0), values.get("top_k", 0), values.get("top_p", 1.0)
    return count, filters


class DeviceProcessors:
    """Logits to scores in float32 on the device.

    Args:
        processors: each one `runs_on_device`.
        prompt_BW: the prompts with their padding on the left.
        vocab_size: V.

    Attributes:
        needs_host: never.
        needs_text: whether drafts have to stand behind the text.
        why_host: None.

    Raises:
        ValueError: ids outside the vocabulary.
    """

    needs_host = False
    why_host: str | None = None

    def __init__(
        self, processors: Iterable[Any], *, prompt_BW: torch.Tensor, vocab_size: int
    ) -> None:
        # Tensors made in inference mode could not be written in a later call outside of it.
        processors = list(processors)
        with torch.inference_mode(False), torch.no_grad():
            call = Call(prompt_BW, vocab_size)
            self.rules = [_RULES[type(p).__name__](p, call) for p in processors]
        self._num_first, self._filters = _split_filters(processors)
        self.needs_text = any(rule.reads_text for rule in self.rules)

    @property
    def signature(self) -> tuple[Any, ...]:
        """Equal for two lists that launch the same work."""
        return tuple(rule.signature for rule in self.rules)

    def __call__(
        self,
        logits_BSV: torch.Tensor,
        text_BW: torch.Tensor,
        starts_B: torch.Tensor,
        num_drafts: int = 0,
    ) -> torch.Tensor:
        """Scores [B,S,V] of rows that follow the text and that many drafts, and one more each.

        Args:
            logits_BSV: any floating dtype; left alone.
            text_BW: tokens, with the drafts behind them.
            starts_B: columns of each text, without drafts.
        """
        rows = Rows(text_BW, starts_B, logits_BSV.shape[1], num_drafts)
        return self._apply(self.rules, logits_BSV.float(), rows)

    def probabilities(
        self,
        logits_BSV: torch.Tensor,
        text_BW: torch.Tensor,
        starts_B: torch.Tensor,
        num_drafts: int = 0,
    ) -> torch.Tensor:
        """Softmax [B,S,V] of the same scores, in float32.

        A temperature, top-k and top-p at the end of the list, which is where transformers puts
        them, are one op with the softmax (`filtered_softmax`): of several tokens with equal scores
        at top-p's edge it keeps those of the highest ids, transformers those that its sort happens
        to place there.
        """
        rows = Rows(text_BW, starts_B, logits_BSV.shape[1], num_drafts)
        if first := self.rules[: self._num_first]:
            logits_BSV = self._apply(first, logits_BSV.float(), rows)
        return filtered_softmax(logits_BSV.flatten(0, 1), *self._filters).view(logits_BSV.shape)

    @staticmethod
    def _apply(rules: Sequence[Rule], scores_BSV: torch.Tensor, rows: Rows) -> torch.Tensor:
        for rule in rules:
            scores_BSV = rule(scores_BSV, rows)
        return scores_BSV

    def note(self, tokens_BS: torch.Tensor, kept_B: torch.Tensor, starts_B: torch.Tensor) -> None:
        """Learn of a block: the first `kept_B` of its tokens, from the column `starts_B` on."""
        for rule in self.rules:
            rule.note(tokens_BS, kept_B, starts_B)

    def take(self, other: DeviceProcessors) -> None:
        """Begin another call, whose processors have the same signature."""
        for rule, theirs in zip(self.rules, other.rules):
            if rule is not theirs:
                rule.take(theirs)

    def add_rows(self, num_rows: int) -> None:
        """Take in that many further sequences, whose scores do not matter."""
        for rule in self.rules:
            for name, tensor in rule.tensors.items():
                # The shape letters say which have a row for each sequence.
                if name.rpartition("_")[2].startswith("B"):
                    with torch.inference_mode(False), torch.no_grad():
                        nothing = tensor.new_zeros(num_rows, *tensor.shape[1:])
                        rule.tensors[name] = torch.cat([tensor, nothing])

    def check_kept(self, kept: Any) -> None:
        """Every token may be kept."""
