"""Megatron-LM's ``build_train_valid_test_datasets`` of GPT, for training scripts that call it."""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron.config import DataConfig
from megatron.data.datasets import build_datasets
from megatron.data.splits import Samples


class GPTDataset:
    """Samples in Megatron-LM's format: ``{"text": tokens int64 [s + 1]}``."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"text": self._samples.take([index])[0]}


def build_train_valid_test_datasets(
    data_prefix: str | Sequence[Any],
    data_impl: str = "mmap",
    splits_string: str = "969, 30, 1",
    train_valid_test_num_samples: Sequence[int] = (0, 0, 0),
    seq_length: int = 1024,
    seed: int = 1234,
    skip_warmup: bool = True,
) -> tuple[GPTDataset | None, GPTDataset | None, GPTDataset | None]:
    """The data sets of the three splits; None for a split without samples. Raises as ``build_datasets``.

    ``data_prefix`` is a path without suffix, or a blend: weight, path, weight, path ... ``data_impl`` and
    ``skip_warmup`` are ignored: all formats are read by memory map.
    """
    prefixes = [data_prefix] if isinstance(data_prefix, str) else data_prefix
    data = DataConfig(data_path=tuple(map(str, prefixes)), split=splits_string, seq_length=seq_length)
    counts = dict(zip(("train", "valid", "test"), train_valid_test_num_samples, strict=True))
    opened = build_datasets(data, counts, vocab_size=sys.maxsize, seed=seed)
    train, valid, test = (
        None if part is None else GPTDataset(part) for part in (opened.train, opened.valid, opened.test)
    )
    return train, valid, test
