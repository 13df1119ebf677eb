"""Data sets to test with."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from megatron.data.indexed_dataset_builder import IndexedDatasetBuilder


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
