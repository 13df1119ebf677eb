"""Data sets go to and fro between this program and NVIDIA's megatron-core, unchanged.

Both packages are called ``megatron``, so the other one runs in a process that does not see ours.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.data.indexed_dataset import IndexedDataset

DOCUMENTS = [[1, 2, 3], [65000, 0], [7] * 300]

WRITE = """
import json, sys
import numpy, torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
prefix, dtype, documents = sys.argv[1], getattr(numpy, sys.argv[2]), json.loads(sys.argv[3])
builder = IndexedDatasetBuilder(prefix + ".bin", dtype=dtype)
for document in documents:
    builder.add_item(torch.tensor(document))
    builder.end_document()
builder.finalize(prefix + ".idx")
"""

READ = """
import json, sys
from megatron.core.datasets.indexed_dataset import IndexedDataset
dataset = IndexedDataset(sys.argv[1])
print(json.dumps({
    "documents": [dataset[n].tolist() for n in range(len(dataset))],
    "doc_idx": dataset.document_indices.tolist(),
    "dtype": dataset.index.dtype.__name__,
}))
"""


@pytest.fixture(scope="session")
def megatron_core(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """``megatron_core(script, *arguments)``: run a script that imports megatron-core; what it prints."""
    folder = tmp_path_factory.mktemp("megatron-core")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder]
    subprocess.run([*install, "megatron-core==0.16.1"], check=True)

    def run(script: str, *arguments: str) -> str:
        return subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script, *arguments],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder)},
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout

    return run


@pytest.mark.parametrize(("name", "dtype"), [("uint16", "u2"), ("int32", "i4")])
def test_files_are_the_same_bytes(
    tmp_path: Path, megatron_core: Callable[..., str], write_dataset: Callable[..., str], name: str, dtype: str
) -> None:
    theirs = str(tmp_path / "theirs")
    megatron_core(WRITE, theirs, name, json.dumps(DOCUMENTS))
    dataset = IndexedDataset(theirs)
    assert [dataset.get(n).tolist() for n in range(3)] == DOCUMENTS
    assert dataset.doc_idx.tolist() == [0, 1, 2, 3]
    ours = write_dataset(DOCUMENTS, dtype, "ours")
    for ending in ("bin", "idx"):
        assert Path(f"{ours}.{ending}").read_bytes() == Path(f"{theirs}.{ending}").read_bytes()


def test_megatron_core_reads_ours(megatron_core: Callable[..., str], write_dataset: Callable[..., str]) -> None:
    found = json.loads(megatron_core(READ, write_dataset(DOCUMENTS)).splitlines()[-1])
    assert found == {"documents": DOCUMENTS, "doc_idx": [0, 1, 2, 3], "dtype": "uint16"}
