from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import glm_compile
from glm_compile.cli import main
from tests.checkpoints import random_mtp, write_checkpoint
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.newest_transformers


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny model with a tokenizer that has one token a byte."""
    model = tiny_model()
    path = write_checkpoint(tmp_path_factory.mktemp("tiny"), model, random_mtp(model))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    return path


def run(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def expected_text(checkpoint, prompt, num_tokens):
    model, _ = glm_compile.load(checkpoint, mtp=False)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    out = model.generate(ids, max_new_tokens=num_tokens, do_sample=False)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True) + "\n"


class TestGenerate:
    arguments = ("--max-new-tokens", 10, "--temperature", 0, "--device", "cpu")

    def test_it_prints_the_text_and_the_statistics(self, checkpoint, capsys):
        code, out, err = run(capsys, "generate", checkpoint, "--prompt", "hello", *self.arguments)
        assert code == 0
        assert out == expected_text(checkpoint, "hello", 10)
        line = err.splitlines()[-1]
        assert line.startswith("10 tokens in ")
        assert "tokens/s" in line and "mean accept length" in line

    def test_a_prompt_comes_from_a_file_or_stdin(self, checkpoint, capsys, tmp_path, monkeypatch):
        expected = expected_text(checkpoint, "hello", 10)
        (tmp_path / "prompt.txt").write_text("hello")
        file = ("--prompt-file", tmp_path / "prompt.txt", "--no-mtp")
        code, out, _ = run(capsys, "generate", checkpoint, *file, *self.arguments)
        assert (code, out) == (0, expected)
        monkeypatch.setattr(sys, "stdin", io.StringIO("hello"))
        code, out, _ = run(capsys, "generate", checkpoint, "--num-draft-tokens", 2, *self.arguments)
        assert (code, out) == (0, expected)

    def test_streaming_prints_the_same_text(self, checkpoint, capsys):
        arguments = ("generate", checkpoint, "--prompt", "hello", "--stream", *self.arguments)
        code, out, _ = run(capsys, *arguments)
        assert (code, out) == (0, expected_text(checkpoint, "hello", 10))

    def test_a_seed_repeats_a_sample(self, checkpoint, capsys):
        sampling = ("--temperature", 0.8, "--top-p", 0.9, "--top-k", 40, "--max-new-tokens", 12)

        def sample(seed):
            arguments = ("generate", checkpoint, "--prompt", "hello", "--device", "cpu")
            code, out, _ = run(capsys, *arguments, *sampling, "--seed", seed)
            assert code == 0
            return out

        assert sample(1) == sample(1) != sample(2)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("--prompt", ""), "the prompt has no tokens"),
            (
                ("--prompt", "a", "--temperature", 0, "--top-k", 4),
                "--top-p and --top-k have no use",
            ),
            (("--prompt", "a", "--no-mtp", "--num-draft-tokens", 2), "leave --no-mtp out"),
            (("--prompt", "a", "--device", "meta"), "device='meta' computes nothing"),
            (("--prompt-file", "/no/such/file"), "/no/such/file"),
        ],
    )
    def test_mistakes_are_one_message(self, checkpoint, capsys, arguments, message):
        code, out, err = run(capsys, "generate", checkpoint, "--device", "cpu", *arguments)
        assert code == 2 and out == ""
        assert err.splitlines()[-1].startswith("glm-compile: error: ")
        assert message in err and "Traceback" not in err


class TestExplain:
    def test_it_prints_both_reports_and_says_ok_by_its_exit_code(
        self, checkpoint, capsys, tmp_path
    ):
        code, out, _ = run(
            capsys,
            "explain",
            checkpoint,
            "--cache",
            "paged",
            "--cache-len",
            60,
            "--save",
            tmp_path / "graphs",
        )
        assert "indexer_topk" in out and "MTP" in out
        assert code == 0, out
        assert any((tmp_path / "graphs").iterdir())

    def test_something_unmatched_is_exit_code_one(self, checkpoint, capsys, monkeypatch):
        from glm_compile.report import CompileReport

        report = CompileReport(expected={"mask": 1}, matches={"mask": 0})
        monkeypatch.setattr(glm_compile, "explain", lambda *args, **kwargs: report)
        code, out, _ = run(capsys, "explain", checkpoint)
        assert code == 1 and "mask" in out


class TestErrors:
    def test_commands_of_later_versions_say_so(self, capsys):
        code, _, err = run(capsys, "verify-checkpoint", "somewhere")
        assert code == 2 and "is not part of this version" in err

    @pytest.mark.parametrize("command", [("bench",), ("generate", "--prompt", "a")])
    def test_a_device_that_is_not_there_is_one_message(self, checkpoint, capsys, command):
        code, _, err = run(capsys, *command, checkpoint, "--device", "cuda:77")
        assert code == 2 and f"error: {command[0]}: device='cuda:77' cannot be used: " in err

    def test_debug_shows_where_an_error_came_from(self, tmp_path):
        arguments = ["generate", str(tmp_path), "--prompt", "a", "--device", "cpu"]
        with pytest.raises(glm_compile.CheckpointError, match=r"has no config\.json"):
            main([*arguments, "--debug"])

    def test_an_unforeseen_error_names_its_kind(self, checkpoint, capsys, monkeypatch):
        def fail(*args, **kwargs):
            raise RuntimeError("out of luck")

        monkeypatch.setattr(glm_compile, "load", fail)
        code, _, err = run(capsys, "generate", checkpoint, "--prompt", "a", "--device", "cpu")
        assert code == 2 and err == "glm-compile: error: RuntimeError: out of luck\n"

    @pytest.mark.parametrize("arguments", [[], ["generate"], ["bake", "x"]])
    def test_wrong_usage_is_exit_code_two(self, capsys, arguments):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
        assert "usage: glm-compile" in capsys.readouterr().err

    def test_the_module_runs_as_a_program(self):
        done = subprocess.run(
            [sys.executable, "-m", "glm_compile", "--version"], capture_output=True, text=True
        )
        assert done.returncode == 0 and done.stdout.strip() == glm_compile.__version__


def test_help_needs_no_torch():
    code = "import sys; sys.argv = ['x', '--help']\nfrom glm_compile.cli import main\n"
    code += "try:\n    main()\nexcept SystemExit:\n    print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "False"
    assert torch.__version__  # this process has it


def test_choices_are_those_of_the_functions():
    """Written again in the command line, which must not import torch for its help."""
    from glm_compile import bench, checkpoint, cli, explanation, options

    assert cli._BACKENDS == bench.BACKENDS
    assert cli._INDEXER_DTYPES == options.INDEXER_DTYPES
    assert [None if c == "none" else c for c in cli._CACHES] == list(explanation.CACHES)
    assert [getattr(torch, name) for name in cli._DTYPES] == list(checkpoint._LOADABLE)


def program(*arguments, **kwargs):
    command = [sys.executable, "-m", "glm_compile", "generate", "--device", "cpu", *arguments]
    return subprocess.run(
        [str(part) for part in command], capture_output=True, timeout=120, check=False, **kwargs
    )


def test_a_prompt_that_is_not_utf8_is_one_message(checkpoint, capsys, tmp_path):
    (tmp_path / "prompt.txt").write_bytes(b"ab\xff")
    code, _, err = run(capsys, "generate", checkpoint, "--prompt-file", tmp_path / "prompt.txt")
    assert code == 2 and "prompt.txt) is not UTF-8" in err
    code, _, err = run(capsys, "generate", checkpoint, "--prompt", "ab\udcff")
    assert code == 2 and "(--prompt) is not UTF-8" in err


def test_a_closed_stdin_is_one_message(checkpoint, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    code, _, err = run(capsys, "generate", checkpoint)
    assert code == 2 and "stdin is closed" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("generate MODEL --seed 18446744073709551616", "--seed: 18446744073709551616 does not fit"),
        ("generate MODEL --seed x", "--seed: expected an integer, got 'x'"),
        ("generate MODEL --max-new-tokens 0", "--max-new-tokens: must be at least 1, got 0"),
        ("generate MODEL --num-draft-tokens -1", "--num-draft-tokens: must be at least 0, got -1"),
        ("generate MODEL --temperature nan", "--temperature: expected 0 (greedy) or a finite"),
        ("generate MODEL --top-p 2", "--top-p: expected a number above 0 and up to 1, got '2'"),
        ("generate MODEL --top-k -1", "--top-k: must be at least 0, got -1"),
        ("explain MODEL --batch-size 0", "--batch-size: must be at least 1, got 0"),
        ("explain MODEL --cache-len 4k", "--cache-len: expected an integer, got '4k'"),
    ],
)
def test_a_number_that_cannot_be_is_wrong_usage(capsys, arguments, message):
    with pytest.raises(SystemExit):
        main(arguments.split())
    assert message in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_named_before_any_work(checkpoint, capsys, monkeypatch):
    def fail(*args, **kwargs):
        pytest.fail("it works already")

    monkeypatch.setattr("glm_compile.checkpoint.load_structure", fail)
    monkeypatch.setattr(glm_compile, "load", fail)
    file = checkpoint / "config.json"
    code, _, err = run(capsys, "explain", checkpoint, "--save", file)
    assert code == 2 and "config.json exists and is not a folder" in err
    code, _, err = run(capsys, "bench", checkpoint, "--device", "cpu", "--json", checkpoint)
    assert code == 2 and "is a directory; name a file in it" in err


def test_a_reader_that_has_enough_is_no_error(checkpoint):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "glm_compile", "generate", str(checkpoint), "--device", "cpu"]
    done = subprocess.run(
        [*command, "--prompt", "a", "--max-new-tokens", "4"],
        stdout=write, stderr=subprocess.PIPE, text=True, timeout=120, check=False,
    )  # fmt: skip
    os.close(write)
    assert done.returncode == 141
    assert "rror" not in done.stderr


def test_text_that_the_terminal_cannot_show_is_escaped(checkpoint):
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    arguments = (checkpoint, "--prompt", "hello", "--max-new-tokens", 40, "--temperature", 0)
    done = program(*arguments, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii() and done.stdout.strip()
