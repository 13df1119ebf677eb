"""Writing tokens with megatron-core's builder, document after document; prints its seconds, wall and processor.

    PYTHONPATH=FOLDER python classic_writing.py TOKENS.npy PREFIX

FOLDER holds megatron-core, TOKENS.npy a document in each row.
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
