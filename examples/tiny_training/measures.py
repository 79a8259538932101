"""What is measured on a trained model, each with its exact definition in the docstring."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .corpus import EOS_IDS
from .model import NUM_DRAFTS, Selection, TinyGlm


def windows(tokens: np.ndarray, length: int, limit: int | None = None) -> Tensor:
    """Cut a token stream into windows that do not overlap, int64 [num_windows, length].

    With a `limit`, that many of them, evenly spread.
    """
    num = len(tokens) // length
    cut = torch.from_numpy(tokens[: num * length].astype(np.int64)).view(num, length)
    return cut if limit is None else cut[:: max(num // limit, 1)][:limit]


@torch.no_grad()
def held_out_loss(
    model: TinyGlm, windows_BS: Tensor, token_bytes: np.ndarray, mode: str, batch_size: int = 8
) -> dict[str, float]:
    """Mean loss over all tokens of all windows except each window's first.

    Bits per byte divide the total by the bytes of text that these tokens stand for.
    """
    device = model.lm_head.weight.device
    bytes_V = torch.from_numpy(token_bytes).to(device)
    nats, num_tokens, num_bytes = 0.0, 0, 0
    for batch in windows_BS.split(batch_size):
        tokens = batch.to(device)
        logits = model.lm_head(model(tokens[:, :-1], Selection(mode))).float()
        labels = tokens[:, 1:]
        log_probs = logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1))
        nats -= float(log_probs.double().sum())
        num_tokens += labels.numel()
        num_bytes += int(bytes_V[labels].sum())
    return {
        "nats_per_token": nats / num_tokens,
        "bits_per_byte": nats / math.log(2) / num_bytes,
        "num_tokens": num_tokens,
    }


@torch.no_grad()
def teacher_forced_acceptance(
    model: TinyGlm, windows_BS: Tensor, mode: str = "sparse", batch_size: int = 8
) -> dict[str, float | list[float]]:
    """Accept length on held-out text, every row of every window that has 5 target rows after it.

    Row t: the drafts d1..d5 read the text's own tokens and are compared with the target's argmax
    after the same text. Accept length = 1 + number of leading drafts that agree, averaged over
    rows. Also: the same counted against the text itself ("text_anchored": drafts that equal the
    next tokens of the text), and the agreement rate of each step alone.
    """
    device = model.lm_head.weight.device
    agreed, anchored, num_rows = torch.zeros(NUM_DRAFTS), torch.zeros(NUM_DRAFTS), 0
    alone = torch.zeros(NUM_DRAFTS)
    for batch in windows_BS.split(batch_size):
        tokens = batch.to(device)
        hidden = model(tokens, Selection(mode))
        target = model.lm_head(hidden).argmax(-1)
        drafts = model.draft(tokens, hidden, Selection(mode))
        rows = tokens.shape[1] - 1 - NUM_DRAFTS
        guesses = torch.stack([logits[:, :rows].argmax(-1) for logits in drafts])
        wanted = torch.stack([target[:, 1 + j : 1 + j + rows] for j in range(NUM_DRAFTS)])
        text = torch.stack([tokens[:, 2 + j : 2 + j + rows] for j in range(NUM_DRAFTS - 1)])
        hits = (guesses == wanted).float()
        alone += hits.sum((1, 2)).cpu()
        agreed += hits.cumprod(0).sum((1, 2)).cpu()
        text_hits = (guesses[:-1] == text).float()
        anchored[:-1] += text_hits.cumprod(0).sum((1, 2)).cpu()
        num_rows += rows * tokens.shape[0]
    return {
        "accept_length": 1.0 + float(agreed.sum()) / num_rows,
        "agreement_per_step": [round(float(a) / num_rows, 3) for a in alone],
        "text_anchored_first_4": 1.0 + float(anchored.sum()) / num_rows,
        "num_rows": num_rows,
    }


def distinct_ngrams(tokens: list[int], n: int = 4) -> float:
    """Share of distinct n-grams among all n-grams; 1 for fewer than n tokens."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def accept_greedy(drafts: Tensor, target_logits: Tensor) -> tuple[int, int]:
    """Number of accepted drafts and the target's own next token.

    `drafts` int64 [K]; `target_logits` [K + 1, V], row i after i accepted drafts.
    """
    choices = target_logits.argmax(-1)
    num = int((drafts == choices[:-1]).long().cumprod(0).sum())
    return num, int(choices[num])


def accept_by_rejection(
    drafts: Tensor, draft_probs: Tensor, target_probs: Tensor, generator: torch.Generator
) -> tuple[int, int]:
    """Rejection sampling: accept draft x with probability min(1, p(x) / q(x)), in order.

    At the first rejection the token comes from the residual max(p - q, 0), normalised; after K
    acceptances from the target's last row. `draft_probs` [K, V], `target_probs` [K + 1, V], CPU.
    """
    num_drafts = drafts.shape[0]
    coins = torch.rand(num_drafts, generator=generator)
    for i in range(num_drafts):
        token = int(drafts[i])
        if coins[i] * draft_probs[i, token] >= target_probs[i, token]:
            residual = (target_probs[i] - draft_probs[i]).clamp_min(0.0)
            return i, int(torch.multinomial(residual, 1, generator=generator))
    return num_drafts, int(torch.multinomial(target_probs[-1], 1, generator=generator))


@dataclass
class Generation:
    """One sequence: prompt and new tokens, and one accept length per iteration."""

    tokens: list[int]
    prompt_len: int
    accept_lengths: list[int]
    finished: bool = False

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def mean_accept_length(self) -> float:
        return sum(self.accept_lengths) / max(len(self.accept_lengths), 1)


def nucleus(probs_NV: Tensor, top_p: float) -> Tensor:
    """Keep the smallest set of most likely tokens whose mass reaches `top_p`, renormalised."""
    if top_p >= 1.0:
        return probs_NV
    ordered, order = probs_NV.sort(-1, descending=True)
    ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= top_p, 0.0)
    kept = torch.zeros_like(probs_NV).scatter(-1, order, ordered)
    return kept / kept.sum(-1, keepdim=True)


@torch.no_grad()
def generate_with_drafts(
    model: TinyGlm,
    prompts: list[list[int]],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    mode: str = "sparse",
) -> list[Generation]:
    """Speculative decoding with 5 drafts a time, as an engine would do it, but without caches.

    Every iteration drafts from the last committed row (the seed: keys, values and selection of the
    row before the newest token), verifies all drafts in one target pass, and commits the accepted
    drafts plus one target token. Temperature 0 is greedy; otherwise drafts are sampled and
    accepted by rejection sampling, with `top_p` applied to target and drafts alike. Accept length
    counts accepted drafts + 1, before cutting at an end-of-text token or at the budget.
    """
    generator = torch.Generator().manual_seed(seed)
    runs = [Generation(list(prompt), len(prompt), []) for prompt in prompts]
    tokens, lengths = _pad(model, prompts)
    hidden = model(tokens, Selection(mode))
    for run, logits in zip(runs, _tail_logits(model, hidden, lengths, 1)):
        run.tokens.append(_pick(logits[0], temperature, top_p, generator)[0])
    active = runs
    while active:
        tokens, lengths = _pad(model, [run.tokens for run in active])
        # The newest token has no hidden state yet; its row is not used.
        hidden = _fit(hidden, tokens.shape[1])
        drafts, draft_probs = _draft(
            model, tokens, hidden, lengths - 2, temperature, top_p, generator, mode
        )
        tokens, lengths = _pad(model, [run.tokens + d for run, d in zip(active, drafts.tolist())])
        hidden = model(tokens, Selection(mode))
        logits = _tail_logits(model, hidden, lengths, NUM_DRAFTS + 1)
        for i, run in enumerate(active):
            if temperature == 0.0:
                num, token = accept_greedy(drafts[i], logits[i])
            else:
                target_probs = nucleus((logits[i] / temperature).softmax(-1), top_p)
                num, token = accept_by_rejection(drafts[i], draft_probs[i], target_probs, generator)
            run.accept_lengths.append(num + 1)
            for new in [*drafts[i, :num].tolist(), token]:
                run.tokens.append(new)
                if new in EOS_IDS or len(run.new_tokens) >= max_new_tokens:
                    run.finished = True
                    break
        kept = [i for i, run in enumerate(active) if not run.finished]
        hidden, active = hidden[kept], [active[i] for i in kept]
    return runs


def _pick(
    logits_V: Tensor, temperature: float, top_p: float, generator: torch.Generator
) -> tuple[int, Tensor]:
    """Choose a token; also return the distribution that it was drawn from."""
    if temperature == 0.0:
        return int(logits_V.argmax()), logits_V.softmax(-1)
    probs = nucleus((logits_V / temperature).softmax(-1), top_p)
    return int(torch.multinomial(probs, 1, generator=generator)), probs


def _pad(model: TinyGlm, sequences: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Pad on the right, which causal attention never sees; returns tokens and lengths."""
    device = model.lm_head.weight.device
    lengths = torch.tensor([len(s) for s in sequences])
    width = -(-int(lengths.max()) // 16) * 16
    tokens = torch.zeros(len(sequences), width, dtype=torch.long)
    for row, sequence in zip(tokens, sequences):
        row[: len(sequence)] = torch.tensor(sequence)
    return tokens.to(device), lengths.to(device)


def _fit(hidden_BSC: Tensor, width: int) -> Tensor:
    """Cut or pad the rows to `width`."""
    return torch.nn.functional.pad(hidden_BSC, (0, 0, 0, width - hidden_BSC.shape[1]))


def _tail_logits(model: TinyGlm, hidden_BSC: Tensor, lengths_B: Tensor, num: int) -> Tensor:
    """The target's logits after each of the last `num` tokens, float32 CPU [B, num, V]."""
    rows = (lengths_B - num)[:, None] + torch.arange(num, device=lengths_B.device)
    picked = hidden_BSC.gather(1, rows.unsqueeze(-1).expand(-1, -1, hidden_BSC.shape[-1]))
    return model.lm_head(picked).float().cpu()


def _draft(
    model: TinyGlm,
    tokens_BS: Tensor,
    hidden_BSC: Tensor,
    seed_B: Tensor,
    temperature: float,
    top_p: float,
    generator: torch.Generator,
    mode: str,
) -> tuple[Tensor, Tensor]:
    """Draft 5 tokens for each sequence; int64 [B, 5] and their distributions [B, 5, V], CPU."""
    chosen: list[Tensor] = []
    distributions: list[Tensor] = []

    def pick(logits_BV: Tensor) -> Tensor:
        picks = [_pick(row, temperature, top_p, generator) for row in logits_BV.float().cpu()]
        chosen.append(torch.tensor([token for token, _ in picks]))
        distributions.append(torch.stack([probs for _, probs in picks]))
        return chosen[-1].to(logits_BV.device)

    model.draft_from_seed(tokens_BS, hidden_BSC, seed_B, Selection(mode), pick)
    return torch.stack(chosen, 1), torch.stack(distributions, 1)
