"""Train the tiny GLM-5.2 with its MTP layer, and write it as a checkpoint in the release's format.

    python examples/train_tiny_glm52.py --minutes 8 --compile --out examples/tiny_glm52

The corpus is the standard library of the Python that runs this; `--corpus` keeps the prepared
token ids in a folder, so that another machine can use the same ones. The whole recipe follows
the clock (`--minutes`) or a number of steps (`--steps`). `--continue-from` starts from a checkpoint
with a fresh optimizer. The commands of the shipped weights are in `tiny_glm52/README.md`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from tiny_training import checkpoint, corpus, measures
from tiny_training.losses import training_loss
from tiny_training.model import (
    NUM_DRAFTS,
    DecoderLayer,
    Router,
    Selection,
    TinyConfig,
    TinyGlm,
    count_parameters,
    initialize,
    set_dropout,
)
from tiny_training.schedule import Hyperparameters, Optimizer, Phases
from torch import Tensor

_LOOK_AHEAD = NUM_DRAFTS + 1


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--minutes", type=float, default=8.0, help="training time")
    parser.add_argument("--steps", type=int, help="number of steps, instead of --minutes")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--corpus", type=Path, help="folder of the prepared corpus")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens-per-step", type=int, default=32768)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 512, 512, 1024])
    parser.add_argument("--dropout", type=float, default=Hyperparameters.dropout)
    parser.add_argument("--learning-rate", type=float, default=Hyperparameters.learning_rate)
    parser.add_argument("--sparse-from", type=float, default=Phases.sparse)
    parser.add_argument("--align-every", type=int, default=2, help="steps per alignment loss")
    parser.add_argument("--continue-from", type=Path, help="checkpoint to start from")
    parser.add_argument("--compile", action="store_true", help="compile the layers' two halves")
    parser.add_argument("--report-windows", type=int, default=32, help="held-out text in reports")
    parser.add_argument("--log", type=Path, help="file for one JSON line per report")
    return parser.parse_args(argv)


class Batches:
    """Random batches of each length; every length walks through the whole corpus in epochs."""

    def __init__(self, tokens: np.ndarray, device: str, tokens_per_step: int, seed: int) -> None:
        self.tokens = torch.from_numpy(tokens.astype(np.int32)).to(device)
        self.tokens_per_step = tokens_per_step
        self.rng = np.random.default_rng(seed)
        self.queues: dict[int, Iterator[np.ndarray]] = {}

    def _starts(self, length: int, num: int) -> Iterator[np.ndarray]:
        while True:
            last = len(self.tokens) - length - _LOOK_AHEAD
            starts = np.arange(self.rng.integers(length), last, length)
            self.rng.shuffle(starts)
            yield from starts[: len(starts) // num * num].reshape(-1, num)

    def next(self, length: int) -> Tensor:
        """Return int64 [B, length + 6] with B * length tokens per step."""
        num = max(self.tokens_per_step // length, 1)
        queue = self.queues.setdefault(length, self._starts(length, num))
        starts = torch.from_numpy(next(queue)).to(self.tokens.device)
        offsets = torch.arange(length + _LOOK_AHEAD, device=self.tokens.device)
        return self.tokens[starts[:, None] + offsets].long()


def compile_layers(model: TinyGlm) -> None:
    """Compile what surrounds attention in every layer; equal layers share their code."""
    torch._dynamo.config.recompile_limit = 64
    for module in model.modules():
        if isinstance(module, DecoderLayer):
            module.project = torch.compile(module.project, dynamic=False)
            module.project_queries = torch.compile(module.project_queries, dynamic=False)
            module.finish = torch.compile(module.finish, dynamic=False)
            if module.self_attn.indexer is not None:
                module.self_attn.indexer.compile(dynamic=False)


class Trainer:
    def __init__(self, args: argparse.Namespace, data: corpus.Corpus) -> None:
        self.args, self.data = args, data
        self.phases = Phases(sparse=args.sparse_from)
        if args.continue_from is not None:
            self.phases = Phases(drafts=0.0, alignment=0.0, sparse=args.sparse_from)
        self.hyper = Hyperparameters(dropout=args.dropout, learning_rate=args.learning_rate)
        torch.manual_seed(args.seed)
        if args.continue_from is not None:
            self.model = checkpoint.load_checkpoint(
                args.continue_from, args.device, index_topk=TinyConfig().index_topk
            ).train()
        else:
            self.model = TinyGlm(TinyConfig())
            initialize(self.model, args.seed)
            self.model.to(args.device)
        set_dropout(self.model, self.hyper.dropout)
        if args.compile:
            compile_layers(self.model)
        self.optimizer = Optimizer(self.model, self.hyper)
        self.batches = Batches(data.train, args.device, args.tokens_per_step, args.seed)
        self.routers = [m for m in self.model.modules() if isinstance(m, Router)]
        self.lengths = np.random.default_rng(args.seed + 1)
        self.num_tokens = 0

    def step(self, number: int, progress: float) -> dict[str, Tensor]:
        """Run one optimisation step and return the parts of its loss."""
        phases = self.phases
        tokens = self.batches.next(int(self.lengths.choice(self.args.lengths)))
        aligned = progress >= phases.alignment and number % self.args.align_every == 0
        selection = Selection(
            mode="sparse" if progress >= phases.sparse else "dense",
            align_sequences=max(tokens.shape[0] // 8, 1) if aligned else 0,
        )
        with torch.autocast(self.args.device.split(":")[0], torch.bfloat16):
            loss, parts = training_loss(
                self.model, tokens, selection, with_drafts=progress >= phases.drafts
            )
        loss.backward()
        self.optimizer.step(progress)
        if progress < phases.freeze_router_bias:
            for router in self.routers:
                router.balance(self.hyper.router_bias_step)
        self.num_tokens += tokens.shape[0] * (tokens.shape[1] - _LOOK_AHEAD)
        return parts

    def warm_up(self) -> None:
        """Compile for every shape before the clock starts, on a copy of the weights' state."""
        before = {name: t.clone() for name, t in self.model.state_dict().items()}
        for length in sorted(set(self.args.lengths)):
            for mode in ("dense", "sparse") if self.phases.sparse > 0 else ("sparse",):
                tokens = self.batches.next(length)
                selection = Selection(mode, max(tokens.shape[0] // 8, 1))
                with torch.autocast(self.args.device.split(":")[0], torch.bfloat16):
                    loss, _ = training_loss(self.model, tokens, selection, with_drafts=True)
                loss.backward()
                self.model.zero_grad(set_to_none=True)
        self.model.load_state_dict(before)
        for router in self.routers:
            router.load_E.zero_()

    def evaluate(self) -> dict[str, float]:
        """A quick look at held-out loss and acceptance; the evaluation script measures properly."""
        num_windows = self.args.report_windows
        held_out = measures.windows(self.data.held_out, 1024, num_windows)
        seen = measures.windows(self.data.train[: num_windows * 1024], 1024)
        self.model.eval()
        stance = torch.compiler.set_stance("force_eager") if self.args.compile else nullcontext()
        with stance, torch.autocast(self.args.device.split(":")[0], torch.bfloat16):
            losses = {
                mode: measures.held_out_loss(self.model, held_out, self.data.token_bytes, mode)
                for mode in ("dense", "sparse")
            }
            train = measures.held_out_loss(self.model, seen, self.data.token_bytes, "dense")
            acceptance = measures.teacher_forced_acceptance(self.model, held_out)
        self.model.train()
        return {
            "held_out_dense": losses["dense"]["nats_per_token"],
            "held_out_sparse": losses["sparse"]["nats_per_token"],
            "held_out_bits_per_byte": losses["sparse"]["bits_per_byte"],
            "train_dense": train["nats_per_token"],
            "accept_length": acceptance["accept_length"],
        }


def report(trainer: Trainer, number: int, progress: float, seconds: float, parts: dict) -> None:
    """Print one line, and append it to the log."""
    line = {
        "step": number,
        "progress": progress,
        "seconds": seconds,
        "tokens_per_second": trainer.num_tokens / max(seconds, 1e-9),
        "epochs": trainer.num_tokens / len(trainer.data.train),
        **{name: value.tolist() for name, value in parts.items()},
    }
    _write_line(trainer.args.log, line)


def _write_line(log: Path | None, line: dict) -> None:
    rounded = json.dumps(_rounded(line))
    print(rounded, flush=True)
    if log is not None:
        with log.open("a", encoding="utf-8") as file:
            file.write(rounded + "\n")


def _rounded(value):
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def train(args: argparse.Namespace, data: corpus.Corpus) -> None:
    """Train and write the checkpoint: at every tenth of the second half, and at the end."""
    trainer = Trainer(args, data)
    print(f"{count_parameters(trainer.model):,} parameters, {len(data.train):,} training tokens")
    if args.compile:
        began = time.perf_counter()
        trainer.warm_up()
        print(f"compiled in {time.perf_counter() - began:.0f} s", flush=True)
    began, paused, number, tenth, reported = time.perf_counter(), 0.0, 0, 1, 0.0
    while True:
        seconds = time.perf_counter() - began - paused
        progress = number / args.steps if args.steps else seconds / (60 * args.minutes)
        if progress >= 1.0:
            break
        parts = trainer.step(number, progress)
        number += 1
        if ("alignment" in parts and seconds - reported >= 10) or number in (1, 20):
            reported = seconds
            report(trainer, number, progress, seconds, parts)
        if progress >= tenth / 10:
            paused_from = time.perf_counter()
            _write_line(args.log, trainer.evaluate())
            if tenth >= 5:
                checkpoint.save_checkpoint(trainer.model, data.tokenizer_json, args.out)
            tenth = int(progress * 10) + 1
            paused += time.perf_counter() - paused_from
    report(trainer, number, 1.0, time.perf_counter() - began - paused, parts)
    _write_line(args.log, trainer.evaluate())
    checkpoint.save_checkpoint(trainer.model, data.tokenizer_json, args.out)


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    torch.set_float32_matmul_precision("high")
    if args.corpus is not None and (args.corpus / "train.npy").exists():
        train(args, corpus.load_corpus(args.corpus))
    elif args.corpus is not None:
        train(args, corpus.prepare_corpus(args.corpus))
    else:
        with tempfile.TemporaryDirectory() as folder:
            data = corpus.prepare_corpus(Path(folder))
        train(args, data)


if __name__ == "__main__":
    main()
