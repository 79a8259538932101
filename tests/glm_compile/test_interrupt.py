"""Ctrl-C on the command line: exit code 130, one line, what was printed stays, no half of a file.

Each test runs the program in a process group of its own and sends SIGINT to all of it, as a
terminal does. `announce` makes the program say when it has got somewhere; it goes on from there.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from glm_compile.cli import main
from glm_compile.inner import why_no_inductor
from tests.checkpoints import random_mtp, write_checkpoint
from tests.compiling import short_model

pytestmark = pytest.mark.newest_transformers

TINY = Path(__file__).parents[2] / "examples" / "tiny_glm52"
PROMPT = ("--prompt", "import os\n", "--device", "cpu")

# Runs before the command line: says "here" on stderr at the n-th call of a function, each of which
# takes a moment longer.
ANNOUNCE = """
import importlib, sys, time
module, _, name = {where!r}.partition(":")
owner = importlib.import_module(module)
*path, name = name.split(".")
for part in path:
    owner = getattr(owner, part)
original, calls = getattr(owner, name), []
def announced(*args, **kwargs):
    calls.append(1)
    if len(calls) == {nth}:
        print("here", file=sys.stderr, flush=True)
    time.sleep({seconds})
    return original(*args, **kwargs)
setattr(owner, name, announced)
"""
MAIN = """
import sys
from glm_compile.cli import main
sys.exit(main())
"""


def announce(where, nth=1, seconds=0.05):
    return ANNOUNCE.format(where=where, nth=nth, seconds=seconds)


class Program:
    """The command line in a process group of its own, after `before` has run in it."""

    def __init__(self, *arguments, before="", **environment):
        command = [sys.executable, "-u", "-c", before + MAIN, *map(str, arguments)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, start_new_session=True, env=os.environ | environment,
        )  # fmt: skip
        self.seen = ""

    def wait_until_here(self):
        for line in self.process.stderr:
            self.seen += line
            if line == "here\n":
                return
        pytest.fail(f"never got there: {self.seen}")

    def interrupt(self):
        os.killpg(self.process.pid, signal.SIGINT)

    def finish(self):
        """Exit code, stdout and stderr without bars of progress."""
        try:
            out, err = self.process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise
        return self.process.returncode, out, self.seen + err


def assert_quiet(code, err):
    assert code == 130, err
    assert err.splitlines()[-1] == "glm-compile: interrupted"
    assert "Traceback" not in err and "Error" not in err and "KeyboardInterrupt" not in err


@pytest.mark.parametrize(
    ("where", "nth"),
    [
        ("transformers:AutoTokenizer.from_pretrained", 1),
        ("glm_compile.mtp:GlmMoeDsaMtp.copy_tensors", 1),
    ],
)
def test_while_it_loads(where, nth):
    program = Program("generate", TINY, *PROMPT, before=announce(where, nth))
    program.wait_until_here()
    program.interrupt()
    code, out, err = program.finish()
    assert_quiet(code, err)
    assert out == ""


@pytest.mark.parametrize("is_streamed", [False, True])
def test_while_it_writes(is_streamed):
    """Text that came out stays, with the word that the streamer held back and an end of line."""
    before = announce("glm_compile.generation.loop:DecodingLoop._iterate", nth=20, seconds=0)
    stream = ("--stream",) if is_streamed else ()
    arguments = ("generate", TINY, *PROMPT, "--max-new-tokens", 3000, *stream)
    program = Program(*arguments, before=before)
    program.wait_until_here()
    program.interrupt()
    code, out, err = program.finish()
    assert_quiet(code, err)
    assert (len(out) > 20 and out.endswith("\n")) if is_streamed else out == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "where",
    [
        "glm_compile.pipeline:read_facts",
        "torch._inductor.cpp_builder:CppBuilder.build",
    ],
)
def test_while_it_compiles(where, tmp_path):
    if (reason := why_no_inductor("cpu")) is not None:
        pytest.skip(reason)
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    arguments = ("generate", TINY, *PROMPT, "--compile", "--stream")
    program = Program(*arguments, before=announce(where, seconds=0), **environment)
    program.wait_until_here()
    program.interrupt()
    code, out, err = program.finish()
    assert_quiet(code, err)
    assert out == ""


def test_an_interrupt_that_came_out_as_another_error():
    """torch's C++ code makes a RuntimeError of one, and Dynamo an error of its own of that."""
    before = """
import os, signal
import glm_compile
def load(*args, **kwargs):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        while True:
            pass
    except KeyboardInterrupt as error:
        raise RuntimeError("KeyboardInterrupt: \\n\\nAt:\\n  ...") from error
glm_compile.load = load
"""
    for debug in ((), ("--debug",)):
        code, out, err = Program("generate", TINY, *PROMPT, *debug, before=before).finish()
        assert (code, out, err) == (130, "", "glm-compile: interrupted\n")


def test_a_second_one_ends_it_at_once():
    before = """
import atexit, sys, time
def linger():
    print("here", file=sys.stderr, flush=True)
    time.sleep(50)
atexit.register(linger)
"""
    before += announce("glm_compile.checkpoint:_load_model").replace('"here"', '"loading"')
    program = Program("generate", TINY, *PROMPT, before=before)
    for line in program.process.stderr:
        if line == "loading\n":
            break
    program.interrupt()
    program.wait_until_here()
    program.interrupt()
    code, _, err = program.finish()
    assert code == -signal.SIGINT
    assert "Traceback" not in err and "KeyboardInterrupt" not in err


def test_its_reader_is_gone_as_well():
    """`| less`: both get the Ctrl-C, and the reader is the quicker one."""
    before = announce("glm_compile.generation.loop:DecodingLoop._iterate", nth=5, seconds=0.2)
    arguments = ("generate", TINY, *PROMPT, "--max-new-tokens", 3000, "--stream")
    program = Program(*arguments, before=before)
    program.wait_until_here()
    program.process.stdout.close()
    program.interrupt()
    err = program.process.stderr.read()
    assert program.process.wait(timeout=60) in (130, 141)
    assert "Traceback" not in err and "rror" not in err


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    model = short_model()
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), model, random_mtp(model))


def explain(checkpoint, folder, before=""):
    return Program("explain", checkpoint, "--cache-len", 60, "--save", folder, before=before)


@pytest.mark.slow
def test_a_report_is_written_whole(checkpoint, tmp_path):
    def contents(folder):
        return {file.name: file.read_text() for file in folder.iterdir()}

    arguments = ["explain", checkpoint, "--cache-len", 60, "--save", tmp_path / "whole"]
    assert main([*map(str, arguments)]) == 0
    whole = contents(tmp_path / "whole")
    assert len(whole) > 10
    (tmp_path / "old").mkdir()
    for name in whole:
        (tmp_path / "old" / name).write_text("of an earlier report")
    for target, where in (("new", "pathlib:Path.write_text"), ("old", "pathlib:Path.replace")):
        program = explain(checkpoint, tmp_path / target, announce(where, nth=4, seconds=0.02))
        program.wait_until_here()
        program.interrupt()
        code, out, err = program.finish()
        assert_quiet(code, err)
        assert "tier: exact" in out
        assert contents(tmp_path / target) == whole
    # Nor is anything else left lying about.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "old", "whole"]


def test_no_report_is_begun_before_there_is_one(checkpoint, tmp_path):
    program = explain(checkpoint, tmp_path / "graphs", announce("glm_compile.explanation:_trace"))
    program.wait_until_here()
    program.interrupt()
    code, out, err = program.finish()
    assert_quiet(code, err)
    assert out == "" and list(tmp_path.iterdir()) == []
