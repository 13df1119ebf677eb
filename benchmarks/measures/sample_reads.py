"""Batches of random samples of a data set, compared with slices of a numpy memory map and nanoGPT's batches.

Two data sets of 10 million tokens, in the page cache: documents of 5,000 tokens on average, where a fifth of the
samples cross a document boundary, and a single document. This project reads samples in shuffled order; the others
read consecutive tokens from random positions and know no documents.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.comparing import Comparison, alternate
from megatron.config import DataConfig
from megatron.data.datasets import build_datasets
from megatron.tools.preprocess.indexed_dataset_builder import IndexedDatasetBuilder

TOKENS, SEQUENCE, BATCH, READS, VOCABULARY = 10_000_000, 1024, 8, 8000, 50257
DOCUMENTS = {"documents shuffled and joined": TOKENS // 5000, "one document": 1}
GOALS = {"memmap slices": None, "nanoGPT's batches": 2.0}


def measure(rounds: int) -> list[Comparison]:
    """Reading the same number of samples all ways."""
    return [comparison for what in DOCUMENTS for comparison in _compare(what, rounds)]


def _compare(what: str, rounds: int) -> list[Comparison]:
    random = np.random.RandomState(1)
    with tempfile.TemporaryDirectory() as folder:
        prefix = str(Path(folder) / "text")
        ends = np.sort(random.randint(1, TOKENS, DOCUMENTS[what] - 1))
        with IndexedDatasetBuilder(prefix, np.dtype("u2")) as builder:
            for document in np.split(random.randint(VOCABULARY, size=TOKENS), ends):
                builder.add_sequence(document)
                builder.end_document()
        numbers = random.permutation(READS).reshape(-1, BATCH).tolist()
        places = random.randint(TOKENS - SEQUENCE, size=(READS // BATCH, BATCH)).tolist()
        ways = {
            "suite": _suite(prefix, numbers),
            "memmap slices": _slices(prefix, places),
            "nanoGPT's batches": _nano_gpt(prefix, places),
        }
        times = alternate(ways, rounds)
    work = f"batches of {BATCH} samples of {SEQUENCE}+1 tokens, {what}"
    return [Comparison(work, peer, times["suite"], times[peer], READS, "samples", goal) for peer, goal in GOALS.items()]


def _suite(prefix: str, batches: list[list[int]]) -> Callable[[], None]:
    dataset = build_datasets(
        DataConfig(data_path=(prefix,), seq_length=SEQUENCE, split="1,0,0"), vocab_size=VOCABULARY,
        global_batch_size=BATCH, train_iters=READS // BATCH, eval_interval=READS, eval_iters=0, seed=1,
    ).train  # fmt: skip

    def read() -> None:
        for numbers in batches:
            dataset.take(numbers)

    return read


def _slices(prefix: str, batches: list[list[int]]) -> Callable[[], None]:
    tokens = np.memmap(f"{prefix}.bin", dtype=np.uint16, mode="r")

    def read() -> None:
        for places in batches:
            np.stack([tokens[place : place + SEQUENCE + 1].astype(np.int64) for place in places])

    return read


def _nano_gpt(prefix: str, batches: list[list[int]]) -> Callable[[], None]:
    """Inputs and labels one by one, from a map that is opened anew for each batch, which keeps memory from growing."""

    def read() -> None:
        for places in batches:
            tokens = np.memmap(f"{prefix}.bin", dtype=np.uint16, mode="r")
            for shift in (0, 1):
                np.stack([tokens[place + shift : place + shift + SEQUENCE].astype(np.int64) for place in places])

    return read
