"""Data sets to test with."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from megatron.config import DataConfig
from megatron.data.datasets import Datasets, build_datasets
from megatron.data.indexed_dataset_builder import IndexedDatasetBuilder
from megatron.tokenizer.words import SPECIAL

WORDS, PIECES = 60, 30
TEXT_TOKENS = len(SPECIAL) + WORDS + PIECES
SAMPLES = {"train": 100, "valid": 32, "test": 8}
DOCUMENTS = [list(range(100 * n, 100 * n + 1 + 7 * n % 23)) for n in range(60)]
"""Tokens that encode the document (hundreds) and the position in it."""


def built(
    data: DataConfig,
    samples: Mapping[str, int] = SAMPLES,
    *,
    vocab_size: int = 60_000,
    seed: int = 5,
    masked_lm: bool = False,
) -> Datasets:
    """``build_datasets`` where most of its arguments do not matter."""
    return build_datasets(data, samples, vocab_size=vocab_size, seed=seed, masked_lm=masked_lm)


@pytest.fixture(scope="session")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``text_sentence``, whose documents have 1 to 12 random sentences, and ``vocab.txt``."""
    folder, chance = tmp_path_factory.mktemp("sentences"), np.random.RandomState(3)
    tokens = [*SPECIAL, *(f"w{n}" for n in range(WORDS)), *(f"##p{n}" for n in range(PIECES))]
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in tokens))
    with IndexedDatasetBuilder(folder / "text_sentence", "u2") as builder:
        for number in [1, 2, 7, 3, 1, 12, 2, 5] * 5:
            builder.add_document(*(chance.randint(5, TEXT_TOKENS, chance.randint(1, 25)) for _ in range(number)))
    return folder


@pytest.fixture
def write_dataset(tmp_path: Path) -> Callable[..., str]:
    """``write_dataset(documents, dtype="u2", name="data")``: write a data set; its prefix."""

    def write(documents: Sequence[Sequence[int]], dtype: str = "u2", name: str = "data") -> str:
        prefix = str(tmp_path / name)
        with IndexedDatasetBuilder(prefix, dtype) as builder:
            for document in documents:
                builder.add_document(document)
        return prefix

    return write


@pytest.fixture
def data(write_dataset: Callable[..., str]) -> DataConfig:
    """A data set of ``DOCUMENTS``, split in three."""
    return DataConfig(data_path=(write_dataset(DOCUMENTS),), seq_length=16, split="40,10,10")
