"""Write tokens with megatron-core's builder, one document at a time; prints the seconds, wall-clock and CPU time.

    PYTHONPATH=FOLDER python classic_writing.py TOKENS.npy PREFIX

FOLDER contains megatron-core; each row of TOKENS.npy is a document.
"""

import sys
import time

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder


def main() -> None:
    """Write PREFIX.bin and PREFIX.idx."""
    documents = list(torch.from_numpy(np.load(sys.argv[1])))
    wall, cpu = time.perf_counter(), time.process_time()
    builder = IndexedDatasetBuilder(f"{sys.argv[2]}.bin", dtype=np.uint16)
    for document in documents:
        builder.add_item(document)
        builder.end_document()
    builder.finalize(f"{sys.argv[2]}.idx")
    print(time.perf_counter() - wall, time.process_time() - cpu)


if __name__ == "__main__":
    main()
