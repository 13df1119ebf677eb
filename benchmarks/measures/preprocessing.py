"""Text into a data set, compared with the library ``tokenizers``, in one batch and document after document.

The corpus and its tokenizer are the quickstart's, with a vocabulary of 8,192: the documentation of Python's standard
library, 2.5 MB. All on one core, and every id is compared. GPT-2's tokenizer is faster where gigatoken is installed.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from benchmarks.comparing import Comparison, alternate
from megatron.data.indexed_dataset_builder import best_dtype
from megatron.tokenizer import build_tokenizer

ROOT = Path(__file__).parents[2]
VOCABULARY, BATCH = 8192, 64


def measure(rounds: int) -> list[Comparison]:
    """Each round begins with the two files of a tokenizer, and ends with ids: here in the type of a data set."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = folder / "corpus.jsonl"
        _tool("make_python_corpus", "--output", corpus)
        _tool("train_tokenizer", "--input", corpus, "--vocab-size", VOCABULARY, "--output-dir", folder)
        documents = [json.loads(line)["text"] for line in corpus.read_text("utf-8").splitlines()]
        ways = _ways(documents, str(folder / "vocab.json"), str(folder / "merges.txt"))
        os.environ["TOKENIZERS_PARALLELISM"], os.environ["RAYON_NUM_THREADS"] = "false", "1"
        expected = ways["suite"]()
        for way in ways.values():
            if not all(map(np.array_equal, way(), expected)):
                raise AssertionError("the ids differ")
        times = alternate(ways, rounds)
    ours, megabytes = times.pop("suite"), sum(len(text.encode("utf-8", "replace")) for text in documents) / 1e6
    return [
        Comparison(f"tokenizing {megabytes:.2g} MB", peer, ours, theirs, megabytes, "MB")
        for peer, theirs in times.items()
    ]


def _ways(documents: list[str], *files: str) -> dict[str, Callable[[], list[Any]]]:
    """Ids of each document, by each tokenizer."""
    batches = [documents[first : first + BATCH] for first in range(0, len(documents), BATCH)]

    def suite() -> list[np.ndarray]:
        tokenizer, dtype = build_tokenizer("GPT2BPETokenizer", *files), best_dtype(VOCABULARY)
        return [ids.astype(dtype) for batch in batches for ids in tokenizer.tokenize_arrays(batch)]

    def encoder() -> tokenizers.Tokenizer:
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(*files))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        return tokenizer

    def one_by_one() -> list[list[int]]:
        tokenizer = encoder()
        return [tokenizer.encode(text).ids for text in documents]

    return {
        "suite": suite,
        "tokenizers, one batch": lambda: [encoding.ids for encoding in encoder().encode_batch_fast(documents)],
        "tokenizers, one document at a time": one_by_one,
    }


def _tool(name: str, *words: object) -> None:
    command = [sys.executable, "-W", "ignore", str(ROOT / "tools" / f"{name}.py"), *map(str, words)]
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(f"{name}.py: exit code {ended.returncode}\n{ended.stderr}")
