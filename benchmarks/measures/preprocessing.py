"""Text into a data set, against the libraries gigatoken and ``tokenizers``, and document after document, as is classic.

The corpus and its tokenizer are the quickstart's, with a vocabulary of 8,192: the documentation of Python's standard
library, 2.6 MB. All on one core. Ids are compared, and the files of both programs, byte for byte.
"""

import filecmp
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import gigatoken
import numpy as np
import tokenizers

from benchmarks.comparing import Comparison, Times, alternate
from benchmarks.measures.megatron_core import installed
from megatron.tokenizer import build_tokenizer
from megatron.tools.preprocess.indexed_dataset_builder import IndexedDatasetBuilder

ROOT = Path(__file__).parents[2]
VOCABULARY, BATCH, DOCUMENTS, LENGTH = 8192, 64, 64_000, 200
GOALS = {"gigatoken": 1.0, "tokenizers, one batch": 1.0, "tokenizers, one document at a time": None}


def measure(rounds: int) -> list[Comparison]:
    """Tokenizing in memory; writing; then whole programs, from their start to the files."""
    with tempfile.TemporaryDirectory() as name, installed() as megatron_core:
        folder = Path(name)
        corpus = folder / "corpus.jsonl"
        _tool("make_python_corpus", "--output", corpus)
        _tool("train_tokenizer", "--input", corpus, "--vocab-size", VOCABULARY, "--output-dir", folder)
        megabytes = corpus.stat().st_size / 1e6
        return [
            *_tokenizing(folder, megabytes, rounds),
            _writing(folder, megatron_core, rounds),
            _programs(folder, megabytes, megatron_core, rounds),
        ]


def _tokenizing(folder: Path, megabytes: float, rounds: int) -> list[Comparison]:
    """Each round begins with a tokenizer that has seen nothing."""
    files = (str(folder / "vocab.json"), str(folder / "merges.txt"))
    documents = [json.loads(line)["text"] for line in (folder / "corpus.jsonl").read_text("utf-8").splitlines()]
    ids = {}

    def suite() -> None:
        tokenizer = build_tokenizer("GPT2BPETokenizer", *files)
        batches = (documents[first : first + BATCH] for first in range(0, len(documents), BATCH))
        ids["suite"] = [found for batch in batches for found in tokenizer.tokenize_batch(batch)]

    def encoder() -> tokenizers.Tokenizer:
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(*files))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        return tokenizer

    def library(encode: Callable[[tokenizers.Tokenizer], list[tokenizers.Encoding]]) -> list[list[int]]:
        return [encoding.ids for encoding in encode(encoder())]

    def one_batch() -> None:
        ids["tokenizers, one batch"] = library(lambda tokenizer: tokenizer.encode_batch_fast(documents))

    def one_by_one() -> None:
        ids["tokenizers, one document at a time"] = library(
            lambda tokenizer: [tokenizer.encode(text) for text in documents]
        )

    def fastest() -> None:
        ids["gigatoken"] = gigatoken.Tokenizer(encoder()).encode_batch_list(documents)

    os.environ["TOKENIZERS_PARALLELISM"], os.environ["RAYON_NUM_THREADS"] = "false", "1"
    ways = dict(zip(["suite", *GOALS], [suite, fastest, one_batch, one_by_one], strict=True))
    times = alternate(ways, rounds)
    if any(found != ids["suite"] for found in ids.values()):
        raise AssertionError("the ids differ")
    return [
        Comparison("tokenizing", peer, times["suite"], times[peer], megabytes, "MB", goal)
        for peer, goal in GOALS.items()
    ]


def _writing(folder: Path, megatron_core: Path, rounds: int) -> Comparison:
    """Of the peer, which is a process of its own, the writing alone is timed, without its imports."""
    tokens = np.random.RandomState(1).randint(VOCABULARY, size=(DOCUMENTS, LENGTH))
    np.save(folder / "tokens.npy", tokens)
    times = {"suite": Times([], []), "classic": Times([], [])}
    for _ in range(rounds):
        wall, cpu = time.perf_counter(), time.process_time()
        with IndexedDatasetBuilder(folder / "tokens", "u2") as builder:
            for some in np.split(tokens, DOCUMENTS // BATCH):
                builder.add_documents(some.ravel(), [[LENGTH]] * BATCH)
        seconds = {"suite": (time.perf_counter() - wall, time.process_time() - cpu)}
        said = _classic("classic_writing", megatron_core, folder / "tokens.npy", folder / "classic")
        seconds["classic"] = tuple(map(float, said.split()))
        for name, (wall, cpu) in seconds.items():
            times[name].wall.append(wall)
            times[name].cpu.append(cpu)
    _check_same(folder / "tokens", folder / "classic")
    what = f"writing {DOCUMENTS:,} documents of {LENGTH} tokens, same files"
    return Comparison(what, "megatron-core's builder", times["suite"], times["classic"], DOCUMENTS, "documents")


def _programs(folder: Path, megabytes: float, megatron_core: Path, rounds: int) -> Comparison:
    files = [folder / "vocab.json", folder / "merges.txt"]

    def suite() -> None:
        words = ["--input", folder / "corpus.jsonl", "--output-prefix", folder / "suite", "--append-eod"]
        _tool("preprocess_data", *words, "--vocab-file", files[0], "--merge-file", files[1])

    def classic() -> None:
        _classic("classic_preprocessing", megatron_core, folder / "corpus.jsonl", *files, folder / "classic")

    times = alternate({"suite": suite, "classic": classic}, rounds)
    _check_same(folder / "suite_text_document", folder / "classic")
    what = "preprocess_data.py from start to end, same files"
    return Comparison(
        what, "megatron-core, one document at a time", times["suite"], times["classic"], megabytes, "MB", 8
    )


def _check_same(ours: Path, theirs: Path) -> None:
    for ending in ("bin", "idx"):
        if not filecmp.cmp(f"{ours}.{ending}", f"{theirs}.{ending}", shallow=False):
            raise AssertionError(f"the two .{ending} files differ")


def _tool(name: str, *words: object) -> None:
    _run(ROOT / "tools" / f"{name}.py", words, {})


def _classic(name: str, megatron_core: Path, *words: object) -> str:
    return _run(ROOT / "benchmarks" / "measures" / f"{name}.py", words, {"PYTHONPATH": str(megatron_core)})


def _run(script: Path, words: Sequence[object], environ: dict[str, str]) -> str:
    """What the script prints."""
    command = [sys.executable, "-W", "ignore", str(script), *map(str, words)]
    ended = subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(f"{script.name}: exit code {ended.returncode}\n{ended.stderr}")
    return ended.stdout
