"""The corpus: the Python standard library of the running interpreter, packed as token ids.

Held-out text is whole files. A prepared corpus is a folder of four files (token ids, tokenizer,
description), so that one machine can prepare what another one trains on.
"""

from __future__ import annotations

import json
import random
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SPECIAL_TOKENS = ("<|endoftext|>", "<|user|>", "<|observation|>", "[gMASK]", "<sop>")
END_OF_TEXT_ID, USER_ID, OBSERVATION_ID, GMASK_ID, SOP_ID = range(len(SPECIAL_TOKENS))
EOS_IDS = (END_OF_TEXT_ID, USER_ID, OBSERVATION_ID)
VOCAB_SIZE = 1024

# A line break and the indentation after it are one piece; digits stand alone.
_PIECES = r"\r?\n[ \t]*| ?[^\W\d]+|\d| ?[^\w\s]+|[ \t]+"
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "encodings", "pydoc_data", "__pycache__"}
_MIN_FILE_BYTES, _MAX_FILE_BYTES = 400, 420_000
_NUM_HELD_OUT_FILES = 48


@dataclass(frozen=True)
class Corpus:
    """Token ids of both splits and what is needed to count bytes.

    Attributes:
        train: uint16 [num_train_tokens], all training files in a fixed shuffled order.
        held_out: uint16 [num_held_out_tokens].
        token_bytes: int64 [VOCAB_SIZE], bytes of text each token stands for (0 for special tokens).
        tokenizer_json: the tokenizer in the `tokenizers` library's format.
    """

    train: np.ndarray
    held_out: np.ndarray
    token_bytes: np.ndarray
    tokenizer_json: str


def list_source_files(root: Path) -> list[Path]:
    """Return the standard library's source files under `root`, sorted by their relative path."""
    files = []
    for path in sorted(root.rglob("*.py")):
        if _SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts):
            size = path.stat().st_size
            if _MIN_FILE_BYTES <= size <= _MAX_FILE_BYTES:
                files.append(path)
    return files


def read_texts(files: Iterable[Path]) -> list[str]:
    """Read the files that are valid UTF-8; test data in other encodings is left out."""
    texts = []
    for path in files:
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue
    return texts


def train_tokenizer(texts: Iterable[str]):
    """Train a byte-level BPE tokenizer of `VOCAB_SIZE` entries; special tokens come first."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def token_byte_lengths(tokenizer) -> np.ndarray:
    """Bytes per token, int64 [VOCAB_SIZE]. In byte-level BPE each character is one byte."""
    lengths = [len(tokenizer.id_to_token(i)) for i in range(tokenizer.get_vocab_size())]
    lengths[: len(SPECIAL_TOKENS)] = [0] * len(SPECIAL_TOKENS)
    return np.array(lengths, dtype=np.int64)


def _pack(tokenizer, texts: list[str]) -> np.ndarray:
    """Encode documents as `[gMASK]<sop> text <|endoftext|>`, one after the other, uint16."""
    pieces = []
    for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
        pieces.append(np.array([GMASK_ID, SOP_ID, *encoding.ids, END_OF_TEXT_ID], dtype=np.uint16))
    return np.concatenate(pieces)


def prepare_corpus(folder: Path, *, seed: int = 0) -> Corpus:
    """Build the corpus from the local standard library into `folder`, and return it."""
    from tokenizers import Tokenizer

    root = Path(sysconfig.get_paths()["stdlib"])
    files = list_source_files(root)
    random.Random(seed).shuffle(files)
    held_out_files, train_files = files[:_NUM_HELD_OUT_FILES], files[_NUM_HELD_OUT_FILES:]
    train_texts, held_out_texts = read_texts(train_files), read_texts(held_out_files)

    tokenizer: Tokenizer = train_tokenizer(train_texts)
    train, held_out = _pack(tokenizer, train_texts), _pack(tokenizer, held_out_texts)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    np.save(folder / "train.npy", train)
    np.save(folder / "held_out.npy", held_out)
    description = {
        "python": sysconfig.get_python_version(),
        "seed": seed,
        "num_train_tokens": int(train.size),
        "num_held_out_tokens": int(held_out.size),
        "bytes_per_token": float(token_byte_lengths(tokenizer)[train].mean()),
        "held_out_files": [str(path.relative_to(root)) for path in held_out_files],
    }
    (folder / "corpus.json").write_text(json.dumps(description, indent=1) + "\n")
    return load_corpus(folder)


def load_corpus(folder: Path) -> Corpus:
    """Load a corpus that `prepare_corpus` wrote."""
    from tokenizers import Tokenizer

    tokenizer_json = (folder / "tokenizer.json").read_text(encoding="utf-8")
    tokenizer = Tokenizer.from_str(tokenizer_json)
    return Corpus(
        train=np.load(folder / "train.npy"),
        held_out=np.load(folder / "held_out.npy"),
        token_bytes=token_byte_lengths(tokenizer),
        tokenizer_json=tokenizer_json,
    )
