"""Text into a data set, against the libraries gigatoken and ``tokenizers``, and document after document, as is classic.

The corpus and its tokenizer are the quickstart's, with a vocabulary of 8,192: the documentation of Python's standard
library, 2.5 MB. Of a corpus as small, building the tokenizer and meeting words for the first time are most of the time;
so torch's source text, 32 MB, is tokenized as well. All on one core. Ids are compared, and the files of both programs,
byte for byte.
"""

import filecmp
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any

import gigatoken
import numpy as np
import tokenizers

from benchmarks.comparing import Comparison, Times, alternate
from benchmarks.measures.megatron_core import installed
from megatron.tokenizer import build_tokenizer
from megatron.tools.preprocess.indexed_dataset_builder import IndexedDatasetBuilder, best_dtype

ROOT = Path(__file__).parents[2]
VOCABULARY, BATCH, DOCUMENTS, LENGTH, SOURCES = 8192, 64, 64_000, 200, 32_000_000
GIGATOKEN, LISTS = "gigatoken", "gigatoken, lists of ids"
ONE_BATCH, ONE_BY_ONE = "tokenizers, one batch", "tokenizers, one document at a time"
GOALS = {GIGATOKEN: 1.0, LISTS: None, ONE_BATCH: 1.0, ONE_BY_ONE: None}


def measure(rounds: int) -> list[Comparison]:
    """Tokenizing in memory; writing; then whole programs, from their start to the files."""
    with tempfile.TemporaryDirectory() as name, installed() as megatron_core:
        folder = Path(name)
        corpus = folder / "corpus.jsonl"
        _tool("make_python_corpus", "--output", corpus)
        _tool("train_tokenizer", "--input", corpus, "--vocab-size", VOCABULARY, "--output-dir", folder)
        megabytes = corpus.stat().st_size / 1e6
        return [
            *_tokenizing(folder, _documentation(folder), [*GOALS], rounds),
            *_tokenizing(folder, _sources(), [GIGATOKEN, LISTS], rounds),
            _writing(folder, megatron_core, rounds),
            _programs(folder, megabytes, megatron_core, rounds),
        ]


def _documentation(folder: Path) -> list[str]:
    return [json.loads(line)["text"] for line in (folder / "corpus.jsonl").read_text("utf-8").splitlines()]


def _sources() -> list[str]:
    """The first files of torch's Python sources, ``SOURCES`` characters."""
    torch = find_spec("torch")  # which is not imported: the garbage collector would look through its objects
    assert torch is not None and torch.origin is not None
    files = sorted(Path(torch.origin).parent.rglob("*.py"))
    texts = [file.read_text("utf-8", errors="replace") for file in files]
    count = sum(1 for _ in takewhile(lambda size: size <= SOURCES, accumulate(map(len, texts))))
    return texts[:count]


def _tokenizing(folder: Path, documents: Sequence[str], peers: Sequence[str], rounds: int) -> list[Comparison]:
    """Each round begins with the two files of a tokenizer, and ends with ids: the suite's in the type of a data set.

    None is kept: Python's garbage collector would look through lists of millions, whoever's turn it is.
    """
    files = (str(folder / "vocab.json"), str(folder / "merges.txt"))
    batches = [documents[first : first + BATCH] for first in range(0, len(documents), BATCH)]

    def suite() -> tuple[list[np.ndarray], list[int]]:
        tokenizer, tokens, sizes = build_tokenizer("GPT2BPETokenizer", *files), [], []
        for batch in batches:
            found = tokenizer.tokenize_arrays(batch)
            tokens.append(np.concatenate(found, dtype=best_dtype(VOCABULARY), casting="unsafe"))
            sizes += map(len, found)
        return tokens, sizes

    def encoder() -> tokenizers.Tokenizer:
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(*files))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        return tokenizer

    def one_by_one() -> list[list[int]]:
        tokenizer = encoder()
        return [tokenizer.encode(text).ids for text in documents]

    ways: dict[str, Callable[[], Any]] = {
        GIGATOKEN: lambda: gigatoken.Tokenizer(encoder()).encode_batch(documents),
        LISTS: lambda: gigatoken.Tokenizer(encoder()).encode_batch_list(documents),
        ONE_BATCH: lambda: [encoding.ids for encoding in encoder().encode_batch_fast(documents)],
        ONE_BY_ONE: one_by_one,
    }
    os.environ["TOKENIZERS_PARALLELISM"], os.environ["RAYON_NUM_THREADS"] = "false", "1"
    _check_ids(*suite(), [ways[peer]() for peer in peers])
    times = alternate({"suite": suite, **{peer: ways[peer] for peer in peers}}, rounds)
    megabytes = sum(len(text.encode("utf-8", "replace")) for text in documents) / 1e6
    return [
        Comparison(f"tokenizing {megabytes:.2g} MB", peer, times["suite"], times[peer], megabytes, "MB", GOALS[peer])
        for peer in peers
    ]


def _check_ids(tokens: Sequence[np.ndarray], sizes: Sequence[int], others: Sequence[Any]) -> None:
    expected = np.split(np.concatenate(tokens), np.cumsum(sizes)[:-1])
    for found in others:
        if len(found) != len(expected) or not all(map(np.array_equal, map(np.asarray, found), expected)):
            raise AssertionError("the ids differ")


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
