"""Measure the trained tiny GLM-5.2: held-out loss, what the indexer is worth, accept lengths.

    python examples/evaluate_tiny_glm52.py --device cuda

Reads the stored bf16 weights and computes in float32. Each figure's definition is in
`tiny_training/measures.py`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import mean

import numpy as np
import torch
from tiny_training import checkpoint, corpus, measures
from tiny_training.model import TinyGlm

_HERE = Path(__file__).parent
_GOOD_DISTINCT = 0.5


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--checkpoint", type=Path, default=_HERE / "tiny_glm52")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--corpus", type=Path, help="folder of the prepared corpus")
    parser.add_argument("--windows", type=int, help="windows of 1024 tokens (all)")
    parser.add_argument("--num-prompts", type=int, default=64, help="held-out prompts")
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--prompt-files", type=Path, nargs="*", default=[_HERE / "demo_prompt.txt"])
    parser.add_argument("--demo-tokens", type=int, default=128, help="new tokens for these")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for the figures")
    return parser.parse_args(argv)


def loss_figures(model: TinyGlm, held_out: torch.Tensor, token_bytes: np.ndarray) -> dict:
    """Held-out loss: dense attention, the indexers' selection, as many random visible keys."""
    torch.manual_seed(0)
    losses = {
        mode: measures.held_out_loss(model, held_out, token_bytes, mode)
        for mode in ("dense", "sparse", "random")
    }
    nats = {mode: figures["nats_per_token"] for mode, figures in losses.items()}
    return {
        **losses,
        "sparse_over_dense": nats["sparse"] / nats["dense"],
        "random_over_sparse": nats["random"] / nats["sparse"],
    }


def summarize(runs: list[measures.Generation]) -> dict:
    """Accept length per iteration over all sequences, and over those that do not loop."""

    def accept_length(some: list[measures.Generation]) -> float | None:
        lengths = [length for run in some for length in run.accept_lengths]
        return mean(lengths) if lengths else None

    distinct = [measures.distinct_ngrams(run.new_tokens) for run in runs]
    varied = [run for run, share in zip(runs, distinct) if share >= _GOOD_DISTINCT]
    return {
        "num_sequences": len(runs),
        "num_iterations": sum(len(run.accept_lengths) for run in runs),
        "accept_length": accept_length(runs),
        "mean_distinct_4grams": mean(distinct),
        "num_not_looping": len(varied),
        "accept_length_not_looping": accept_length(varied),
        "mean_new_tokens": mean(len(run.new_tokens) for run in runs),
    }


_SETTINGS = {
    "greedy": {"temperature": 0.0},
    "temperature_1": {"temperature": 1.0},
    "temperature_1_top_p_0.95": {"temperature": 1.0, "top_p": 0.95},
}


def generation_figures(
    model: TinyGlm, prompts: list[list[int]], new_tokens: int, seed: int
) -> dict[str, dict]:
    return {
        name: summarize(
            measures.generate_with_drafts(model, prompts, new_tokens, seed=seed, **setting)
        )
        for name, setting in _SETTINGS.items()
    }


def held_out_prompts(tokens: np.ndarray, num: int, length: int) -> list[list[int]]:
    """`num` pieces of `length` tokens, evenly spread over the held-out files."""
    if num == 0:
        return []
    starts = np.linspace(0, len(tokens) - length, num).astype(int)
    return [tokens[start : start + length].tolist() for start in starts]


def demo_figures(
    model: TinyGlm, tokenizer, paths: list[Path], new_tokens: int, seed: int
) -> dict[str, dict]:
    """Continue the prompts greedily and sampled; print the texts."""
    prompts = [
        tokenizer.encode(path.read_text(encoding="utf-8"), add_special_tokens=False).ids
        for path in paths
    ]
    figures: dict[str, dict] = {path.name: {} for path in paths}
    for name, setting in _SETTINGS.items():
        runs = measures.generate_with_drafts(model, prompts, new_tokens, seed=seed, **setting)
        for path, run in zip(paths, runs):
            figures[path.name][name] = {
                "accept_length": run.mean_accept_length,
                "distinct_4grams": measures.distinct_ngrams(run.new_tokens),
                "prompt_tokens": run.prompt_len,
                "new_tokens": len(run.new_tokens),
            }
            print(f"--- {path.name}, {name}: {figures[path.name][name]}")
            print(tokenizer.decode(run.new_tokens), "\n")
    return figures


def main(argv: list[str] | None = None) -> None:
    from tokenizers import Tokenizer

    args = parse_arguments(argv)
    if args.corpus is not None and (args.corpus / "held_out.npy").exists():
        data = corpus.load_corpus(args.corpus)
    else:
        with tempfile.TemporaryDirectory() as folder:
            data = corpus.prepare_corpus(args.corpus or Path(folder))
    tokenizer = Tokenizer.from_file(str(args.checkpoint / "tokenizer.json"))
    if tokenizer.to_str() != Tokenizer.from_str(data.tokenizer_json).to_str():
        print("note: the checkpoint's tokenizer differs from this corpus' (another Python release)")
    model = checkpoint.load_checkpoint(args.checkpoint, args.device)
    held_out = measures.windows(data.held_out, 1024, args.windows)
    figures = {
        "loss": loss_figures(model, held_out, data.token_bytes),
        "teacher_forced": measures.teacher_forced_acceptance(model, held_out),
    }
    prompts = held_out_prompts(data.held_out, args.num_prompts, args.prompt_len)
    if prompts:
        figures["generation"] = generation_figures(model, prompts, args.new_tokens, args.seed)
    demos = [path for path in args.prompt_files if path.exists()]
    if demos:
        figures["demo"] = demo_figures(model, tokenizer, demos, args.demo_tokens, args.seed)
    text = json.dumps(figures, indent=1)
    print(text)
    if args.json is not None:
        args.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
