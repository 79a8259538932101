"""Command line: `glm-compile generate | explain | bench | verify-checkpoint`.

Exit codes: 0 done, 1 `explain` found something unmatched, 2 an error (one message on stderr;
`--debug` shows where it came from), 130 interrupted (Ctrl-C), 141 nobody reads the output any more
(`| head`).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import glm_compile
from glm_compile.errors import UnsupportedError

_DTYPES = ("float32", "bfloat16", "float16")
_CACHES = ("static", "paged", "dynamic", "none")
_INDEXER_DTYPES = ("auto", "fp8", "bf16", "fp32")
_BACKENDS = ("glm", "glm-fp8", "inductor", "eager")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = _parser().parse_args(argv)
    with _Interrupt() as interrupt, warnings.catch_warnings():
        # Dynamo's note on tracing through a cached helper of transformers; nothing to act on.
        warnings.filterwarnings("ignore", message=".*functools.lru_cache.*")
        try:
            command: Callable[[argparse.Namespace], int] = arguments.run
            code = command(arguments)
            if sys.stdout is not None:
                sys.stdout.flush()
            return code
        except KeyboardInterrupt:
            return _leave_interrupted()
        except BrokenPipeError:
            if interrupt.has_come:
                return _leave_interrupted()
            _drop_output()
            return 141
        except Exception as error:
            # An interrupt inside of torch's C++ code comes out of it as an error of another kind.
            if interrupt.has_come:
                return _leave_interrupted()
            if arguments.debug:
                raise
            kind = "" if isinstance(error, _expected_errors()) else f"{type(error).__name__}: "
            print(f"glm-compile: error: {kind}{error}", file=sys.stderr)
            return 2


class _Interrupt(contextlib.AbstractContextManager["_Interrupt"]):
    """Ctrl-C in the block raises KeyboardInterrupt once; the next one ends the process at once.

    So a second one does not print a traceback out of the clean-up of the first.

    Attributes:
        has_come: whether it was pressed.
    """

    def __init__(self) -> None:
        self.has_come = False
        self.previous: Any = None

    def __enter__(self) -> _Interrupt:
        is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if is_default and threading.current_thread() is threading.main_thread():
            self.previous = signal.signal(signal.SIGINT, self._receive)
        return self

    def __exit__(self, *_exception: object) -> None:
        if self.previous is not None and not self.has_come:
            signal.signal(signal.SIGINT, self.previous)

    def _receive(self, *_signal: object) -> None:
        self.has_come = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        raise KeyboardInterrupt


@contextlib.contextmanager
def _whole() -> Iterator[None]:
    """Hold Ctrl-C back until the block is done: what it writes is written whole."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed: list[object] = []
    previous = signal.signal(signal.SIGINT, lambda *_signal: pressed.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if pressed:
        signal.raise_signal(signal.SIGINT)


def _leave_interrupted() -> int:
    """Keep what was printed so far, and say why no more comes."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
        print("glm-compile: interrupted", file=sys.stderr)
    except BrokenPipeError:
        _drop_output()  # the reader got the same Ctrl-C
    return 130


def _drop_output() -> None:
    """The interpreter's last flush must not fail where nobody reads any more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _expected_errors() -> tuple[type[Exception], ...]:
    return glm_compile.GlmCompileError, ValueError, OSError


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser = argparse.ArgumentParser(
        prog="glm-compile",
        description="Compiled generation with GLM-5.2 (GlmMoeDsaForCausalLM) and its MTP layer.",
    )
    parser.add_argument("--version", action="version", version=glm_compile.__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_generate(commands, common)
    _add_explain(commands, common)
    _add_bench(commands, common)
    text = "check a checkpoint (not in this version)"
    command = commands.add_parser(
        "verify-checkpoint", parents=[common], help=text, description=text
    )
    command.add_argument("model", metavar="MODEL", help="directory of the checkpoint")
    command.set_defaults(run=_verify_checkpoint)
    return parser


def _add_generate(commands: Any, common: argparse.ArgumentParser) -> None:
    command = commands.add_parser(
        "generate",
        parents=[common],
        help="continue a text",
        description="Continue a text; statistics go to stderr.",
    )
    command.set_defaults(run=_generate)
    command.add_argument("model", metavar="MODEL", help="directory of the checkpoint")
    source = command.add_mutually_exclusive_group()
    source.add_argument("--prompt", help="the text; without it and --prompt-file, stdin is read")
    source.add_argument("--prompt-file", type=Path, metavar="FILE", help="file with the text")
    command.add_argument("--max-new-tokens", type=_positive, default=256, metavar="N")
    command.add_argument(
        "--num-draft-tokens", type=_count, metavar="N", help="drafts per iteration (default: 5)"
    )
    command.add_argument(
        "--temperature",
        type=_temperature,
        metavar="T",
        help="0 for greedy decoding (default: the checkpoint's generation_config.json)",
    )
    command.add_argument("--top-p", type=_probability, metavar="P")
    command.add_argument("--top-k", type=_count, metavar="K")
    command.add_argument("--seed", type=_seed, default=0, help="seed of sampling (default: 0)")
    command.add_argument("--no-mtp", action="store_true", help="decode without the MTP layer")
    command.add_argument("--stream", action="store_true", help="print tokens as they come")
    command.add_argument("--dtype", choices=_DTYPES, help="default: the checkpoint's")
    command.add_argument("--device", help="default: cuda if there is one, else cpu")
    command.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="compile the model first (default: on a GPU yes, on the CPU no)",
    )


def _add_explain(commands: Any, common: argparse.ArgumentParser) -> None:
    command = commands.add_parser(
        "explain",
        parents=[common],
        help="report what would be replaced in the model's graph, and why something would not",
        description="Report what would be replaced in the model's graph. Needs config.json alone.",
    )
    command.set_defaults(run=_explain)
    command.add_argument("model", metavar="MODEL", help="directory with config.json")
    command.add_argument("--cache", choices=_CACHES, default="static")
    command.add_argument("--batch-size", type=_positive, default=1, metavar="B")
    command.add_argument(
        "--query-len", type=_positive, default=6, metavar="S", help="tokens of the step"
    )
    command.add_argument(
        "--cache-len", type=_count, default=4096, metavar="T", help="tokens cached"
    )
    command.add_argument("--indexer-dtype", choices=_INDEXER_DTYPES, default="auto")
    command.add_argument("--no-mtp", action="store_true", help="leave the MTP layer out")
    command.add_argument(
        "--save", type=Path, metavar="DIR", help="write each pass's graph before and after"
    )


def _add_bench(commands: Any, common: argparse.ArgumentParser) -> None:
    command = commands.add_parser(
        "bench",
        parents=[common],
        help="measure a decode step against transformers'",
        description="Time of a decode step of a checkpoint, or of a slice of the release: 3 dense "
        "and 3 MoE layers at full size with random weights (a GPU with 80 GB).",
    )
    command.set_defaults(run=_bench)
    command.add_argument(
        "model", metavar="MODEL", nargs="?", help="directory of a checkpoint (default: the slice)"
    )
    command.add_argument("--backend", nargs="+", choices=_BACKENDS, default=["glm", "inductor"])
    command.add_argument("--query-len", type=int, nargs="+", default=[6], metavar="S")
    command.add_argument("--cache-len", type=int, nargs="+", default=[8192], metavar="T")
    command.add_argument("--device", help="default: cuda if there is one, else cpu")
    command.add_argument("--json", type=Path, metavar="FILE", help="write the times as JSON too")


def _generate(arguments: argparse.Namespace) -> int:
    import torch
    from transformers import AutoTokenizer, TextStreamer

    from glm_compile.checkpoint import read_facts

    # What is quick to find wrong comes before the weights.
    read_facts(arguments.model)
    if arguments.no_mtp and arguments.num_draft_tokens:
        raise ValueError("--num-draft-tokens asks for drafts of the MTP layer: leave --no-mtp out")
    sampling = _sampling(arguments)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    # What the terminal cannot show is written as an escape: the text must not be lost for it.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    inputs = tokenizer(_read_prompt(arguments), return_tensors="pt")
    num_prompt_tokens = inputs["input_ids"].shape[1]
    if num_prompt_tokens == 0:
        raise ValueError("the prompt has no tokens")
    device = _device(arguments.device, "generate")
    model, mtp = glm_compile.load(
        arguments.model,
        device=device,
        dtype=getattr(torch, arguments.dtype) if arguments.dtype else None,
        mtp=not arguments.no_mtp,
    )
    use_compile = (
        torch.device(device).type == "cuda" if arguments.compile is None else arguments.compile
    )
    step: Any = torch.compile(model, backend="glm", fullgraph=True) if use_compile else model
    torch.manual_seed(arguments.seed)
    streamer = TextStreamer(tokenizer, skip_prompt=True) if arguments.stream else None
    start = time.perf_counter()
    try:
        result = glm_compile.generate(
            step,
            inputs["input_ids"].to(device),
            attention_mask=inputs["attention_mask"].to(device),
            mtp=mtp,
            num_draft_tokens=arguments.num_draft_tokens,
            streamer=streamer,
            return_dict_in_generate=True,
            max_new_tokens=arguments.max_new_tokens,
            **sampling,
        )
    except BaseException:
        if streamer is not None and streamer.token_cache:
            # It holds the last word back, and what is said next starts on a line of its own.
            with contextlib.suppress(OSError):
                streamer.end()
        raise
    seconds = time.perf_counter() - start
    new_tokens = result.sequences[0, num_prompt_tokens:]
    if not arguments.stream:
        print(tokenizer.decode(new_tokens, skip_special_tokens=True))
    print(_statistics(len(new_tokens), seconds, result), file=sys.stderr)
    return 0


def _device(name: str | None, command: str) -> str:
    """The device that was asked for, or the default; an error if nothing can run on it."""
    import torch

    from glm_compile.arguments import check_device

    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device(name, command)
    if torch.device(name).type == "meta":
        raise UnsupportedError(f"{command}: device='meta' computes nothing; explain needs none")
    return name


def _integer(text: str, least: int, beyond: int | None = None) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected an integer, got {text!r}") from None
    if value < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
    if beyond is not None and value >= beyond:
        raise argparse.ArgumentTypeError(f"{value} does not fit 64 bits")
    return value


def _positive(text: str) -> int:
    return _integer(text, 1)


def _count(text: str) -> int:
    return _integer(text, 0)


def _seed(text: str) -> int:
    return _integer(text, -(2**63), 2**64)


def _number(text: str, expected: str, is_valid: Callable[[float], bool]) -> float:
    with contextlib.suppress(ValueError):
        value = float(text)
        if is_valid(value):
            return value
    raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")


def _temperature(text: str) -> float:
    return _number(text, "0 (greedy) or a finite number above it", lambda t: 0 <= t < math.inf)


def _probability(text: str) -> float:
    return _number(text, "a number above 0 and up to 1", lambda p: 0 < p <= 1)


def _read_prompt(arguments: argparse.Namespace) -> str:
    try:
        if arguments.prompt is not None:
            text = arguments.prompt
        elif arguments.prompt_file is not None:
            text = arguments.prompt_file.read_text(encoding="utf-8")
        elif sys.stdin is None:
            raise ValueError("no prompt: give --prompt or --prompt-file, stdin is closed")
        else:
            text = sys.stdin.read()
        # Arguments and stdin may carry undecodable bytes as lone surrogates.
        text.encode("utf-8")
    except UnicodeError as error:
        name = arguments.prompt_file or ("--prompt" if arguments.prompt is not None else "stdin")
        raise ValueError(f"the prompt ({name}) is not UTF-8: {error}") from error
    return text


def _sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    """GenerationConfig fields for what was given; what was not is left to the checkpoint."""
    given = {
        name: getattr(arguments, name)
        for name in ("temperature", "top_p", "top_k")
        if getattr(arguments, name) is not None
    }
    if given.get("temperature") == 0:
        if len(given) > 1:
            raise ValueError("--temperature 0 is greedy decoding: --top-p and --top-k have no use")
        return {"do_sample": False}
    return {"do_sample": True, **given} if given else {}


def _statistics(num_tokens: int, seconds: float, result: Any) -> str:
    line = f"{num_tokens} tokens in {seconds:.2f} s, {num_tokens / seconds:.1f} tokens/s"
    lengths = result.accept_lengths
    if lengths is not None and (lengths > 0).any():
        line += f", mean accept length {lengths[lengths > 0].float().mean():.2f}"
    return line


def _explain(arguments: argparse.Namespace) -> int:
    from glm_compile.checkpoint import load_structure
    from glm_compile.report import check_folder

    if arguments.save is not None:
        check_folder(arguments.save)
    model, mtp = load_structure(arguments.model)
    report = glm_compile.explain(
        model,
        batch_size=arguments.batch_size,
        query_len=arguments.query_len,
        cache_len=arguments.cache_len,
        cache=None if arguments.cache == "none" else arguments.cache,
        options={"indexer_dtype": arguments.indexer_dtype},
        mtp=None if arguments.no_mtp else mtp,
    )
    print(report.table())
    if arguments.save is not None:
        with _whole():
            report.save(arguments.save)
    return 0 if report.ok else 1


def _bench(arguments: argparse.Namespace) -> int:
    import torch

    from glm_compile import bench
    from glm_compile.checkpoint import read_facts

    for query_len in arguments.query_len:
        for cache_len in arguments.cache_len:
            bench.check_lengths(query_len, cache_len)
    if arguments.json is not None and not arguments.json.absolute().parent.is_dir():
        raise ValueError(f"--json: no directory {arguments.json.absolute().parent}")
    if arguments.json is not None and arguments.json.is_dir():
        raise ValueError(f"--json: {arguments.json} is a directory; name a file in it")
    device = _device(arguments.device, "bench")
    if arguments.model is not None:
        read_facts(arguments.model)
        model, _ = glm_compile.load(arguments.model, device=device, mtp=False)
    elif torch.device(device).type == "cuda":
        model = bench.make_model(bench.slice_config(), device)
    else:
        raise UnsupportedError(
            "the slice of the release needs a GPU with 80 GB of memory; on the CPU measure a "
            "checkpoint: glm-compile bench MODEL"
        )
    times = []
    for cache_len in arguments.cache_len:
        for query_len in arguments.query_len:
            for backend in arguments.backend:
                times.append(
                    bench.time_step(model, backend, query_len=query_len, cache_len=cache_len)
                )
                print(bench.line(times[-1]), flush=True)
    if arguments.json is not None:
        with _whole():
            arguments.json.write_text(json.dumps([t.as_dict() for t in times], indent=2))
    return 0


def _verify_checkpoint(arguments: argparse.Namespace) -> int:
    raise UnsupportedError(
        "verify-checkpoint is not part of this version; glm_compile.load reports every fault of a "
        "checkpoint before it takes memory"
    )
