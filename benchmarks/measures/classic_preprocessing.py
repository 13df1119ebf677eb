"""Preprocessing in the style of Megatron-LM: one document at a time, written by megatron-core.

    PYTHONPATH=FOLDER python classic_preprocessing.py CORPUS.jsonl VOCABULARY MERGES PREFIX

FOLDER contains megatron-core. Each document is one call of the library ``tokenizers`` and ends with ``<|endoftext|>``.
"""

import json
import sys

import tokenizers
import torch
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder


def main() -> None:
    """Write PREFIX.bin and PREFIX.idx."""
    corpus, vocabulary, merges, prefix = sys.argv[1:]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(vocabulary, merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    end = tokenizer.token_to_id("<|endoftext|>")
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(tokenizer.get_vocab_size()))
    with open(corpus, encoding="utf-8") as lines:
        for line in lines:
            ids = [*tokenizer.encode(json.loads(line)["text"], add_special_tokens=False).ids, end]
            builder.add_document(torch.tensor(ids), [len(ids)])
    builder.finalize(f"{prefix}.idx")


if __name__ == "__main__":
    main()
