"""A preprocessing script that was written for Megatron-LM v1.1.5 makes the data set of tools/preprocess_data.py."""

import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from support.programs import Programs

from megatron.common.errors import DataError
from megatron.data import indexed_dataset
from megatron.tokenizer import build_tokenizer


def preprocess(args: Namespace) -> None:
    """As such scripts do it."""
    tokenizer = build_tokenizer(args)
    builder = indexed_dataset.make_builder(
        f"{args.output_prefix}.bin", impl=args.dataset_impl, vocab_size=tokenizer.vocab_size
    )
    with open(args.input) as lines:
        for line in lines:
            ids = tokenizer.tokenize(json.loads(line)["text"])
            ids.append(tokenizer.eod)
            builder.add_item(torch.IntTensor(ids))
            builder.end_document()
    builder.finalize(f"{args.output_prefix}.idx")


@pytest.mark.parametrize("impl", ["mmap", "lazy"])
def test_a_classic_script(programs: Programs, tmp_path: Path, impl: str) -> None:
    expected = Path(programs.data_arguments[1])
    vocabulary, corpus = expected.with_name("vocab.json"), expected.with_name("corpus.jsonl")
    args = Namespace(
        input=corpus,
        tokenizer_type="WhitespaceTokenizer",
        vocab_file=str(vocabulary),
        merge_file=None,
        output_prefix=tmp_path / "classic",
        dataset_impl=impl,
        rank=0,
        make_vocab_size_divisible_by=128,
        model_parallel_size=2,
    )
    preprocess(args)
    assert args.padded_vocab_size == 256
    for ending in ("bin", "idx"):
        assert (tmp_path / f"classic.{ending}").read_bytes() == Path(f"{expected}.{ending}").read_bytes()


def test_sequences_and_documents(tmp_path: Path) -> None:
    builder = indexed_dataset.make_builder(f"{tmp_path}/data.bin", "mmap", 70_000)
    for sequences in ([[1, 2], [3]], [], [[7]]):
        for sequence in sequences:
            builder.add_item(sequence)
        builder.end_document()
    with pytest.raises(DataError, match="token 70000 is not in the vocabulary of 70000 tokens"):
        builder.add_item(torch.tensor([5, 70_000]))
    builder.finalize(f"{tmp_path}/data.idx")
    found = indexed_dataset.IndexedDataset(tmp_path / "data")
    assert [found.get(n).tolist() for n in range(len(found))] == [[1, 2], [3], [7]]
    assert found.doc_idx.tolist() == [0, 2, 2, 3]
