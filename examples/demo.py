"""Load the tiny GLM-5.2, print what the backend replaces, and let it write with its own MTP layer.

    python examples/demo.py [--prompt-file FILE] [--num-draft-tokens K] [--max-new-tokens N]

Runs on a CPU, most of the time compiling, and on a GPU if there is one. The model was trained on
the Python standard library's sources; the default prompt was written for this demonstration, and
chosen because the greedy text after it does not loop.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from pathlib import Path

import torch
from transformers import AutoTokenizer, TextStreamer

import glm_compile

HERE = Path(__file__).parent


def distinct_share(ids: list[int], length: int = 4) -> float:
    """Share of different n-grams among all: near 0 for text that loops, 1 for none repeated."""
    grams = [tuple(ids[i : i + length]) for i in range(len(ids) - length + 1)]
    return len(set(grams)) / max(len(grams), 1)


def main(argv: list[str] | None = None) -> None:
    """Run the demonstration."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", type=Path, default=HERE / "tiny_glm52")
    parser.add_argument("--prompt-file", type=Path, default=HERE / "demo_prompt.txt")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--num-draft-tokens", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    logging.basicConfig(format="%(message)s")
    # Dynamo's note on tracing through a cached helper of transformers; nothing a reader can act on.
    warnings.filterwarnings("ignore", message=".*functools.lru_cache.*")

    print(f"== loading {args.model.name}")
    model, mtp = glm_compile.load(args.model, device=args.device)
    tokenizer = AutoTokenizer.from_pretrained(args.model)

    print("== what the backend replaces in the model and in its MTP layer")
    print(glm_compile.explain(model, cache="paged").table())
    print(glm_compile.explain(mtp, cache="paged").table())

    prompt = args.prompt_file.read_text()
    inputs = tokenizer(prompt, return_tensors="pt").to(args.device)
    num_prompt_tokens = inputs.input_ids.shape[1]
    print(
        f"== prompt: {num_prompt_tokens} tokens; each layer attends to {model.config.index_topk} "
        "of them\n== compiling (generated code is cached for the next run)"
    )
    compiled = torch.compile(model, backend="glm", fullgraph=True)
    glm_compile.warmup(
        compiled,
        mtp,
        num_draft_tokens=args.num_draft_tokens,
        max_cache_len=num_prompt_tokens + args.max_new_tokens + args.num_draft_tokens + 1,
    )
    print("== the prompt, and from the mark on the model")
    print(prompt, end="\N{BLACK RIGHT-POINTING TRIANGLE}", flush=True)
    result = glm_compile.generate(
        compiled,
        **inputs,
        max_new_tokens=args.max_new_tokens,
        mtp=mtp,
        num_draft_tokens=args.num_draft_tokens,
        do_sample=False,
        streamer=TextStreamer(tokenizer, skip_prompt=True),
        return_dict_in_generate=True,
    )
    ids = result.sequences[0, num_prompt_tokens:].tolist()
    lengths = [row[0] for row in result.accept_lengths]
    print(
        f"== {len(ids)} tokens in {result.timings['total']:.2f} s: "
        f"{len(ids) / result.timings['total']:.1f} tokens/s on {args.device}, "
        f"prompt included\n"
        f"== mean accept length {sum(lengths[1:]) / max(len(lengths) - 1, 1):.2f} "
        f"(accepted drafts + 1, of at most {args.num_draft_tokens + 1}) "
        f"over {len(lengths) - 1} iterations; distinct 4-grams {distinct_share(ids):.0%}"
    )


if __name__ == "__main__":
    main()
