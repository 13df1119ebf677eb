"""Random samples of a data set, against slices of a numpy memory map as nanoGPT takes them.

A data set of 2,000 documents of 5,000 tokens on average, in the page cache. The suite's samples go over the ends of
documents in shuffled order; the slice is of consecutive tokens, and knows no documents.
"""

import tempfile
from pathlib import Path

import numpy as np

from benchmarks.comparing import Comparison, alternate
from megatron.config import DataConfig
from megatron.data.datasets import build_datasets
from megatron.data.indexed_dataset_builder import IndexedDatasetBuilder

DOCUMENTS, MEAN_LENGTH, SEQUENCE, READS, VOCABULARY, GOAL = 2000, 5000, 1024, 5000, 50257, 0.4


def measure(rounds: int) -> list[Comparison]:
    """Reading the same number of samples both ways."""
    random = np.random.RandomState(1)
    with tempfile.TemporaryDirectory() as folder:
        prefix = str(Path(folder) / "text")
        with IndexedDatasetBuilder(prefix, np.dtype("u2")) as builder:
            for length in random.geometric(1 / MEAN_LENGTH, DOCUMENTS):
                builder.add_sequence(random.randint(VOCABULARY, size=length))
                builder.end_document()
        dataset = build_datasets(
            DataConfig(data_path=(prefix,), seq_length=SEQUENCE, split="1,0,0"), vocab_size=VOCABULARY,
            global_batch_size=1, train_iters=READS, eval_interval=READS, eval_iters=0, seed=1,
        ).train  # fmt: skip
        tokens = np.memmap(f"{prefix}.bin", dtype=np.uint16, mode="r")
        samples, places = random.permutation(READS), random.randint(len(tokens) - SEQUENCE, size=READS)

        def ours() -> None:
            for sample in samples:
                dataset[sample]

        def slices() -> None:
            for place in places:
                tokens[place : place + SEQUENCE + 1].astype(np.int64)

        times = alternate({"suite": ours, "slices": slices}, rounds)
    what = f"samples of {SEQUENCE}+1 tokens, documents shuffled and joined"
    return [
        Comparison(what, "numpy memmap slices, one document", times["suite"], times["slices"], READS, "samples", GOAL)
    ]
