"""Plain text and a vocabulary of whole words: from the file to a trained iteration, and files that do not fit."""

import bz2
import json
import math
import random
from pathlib import Path

import pytest
from support.programs import TINY_MODEL, Programs, read_metrics

from megatron.common.errors import DataError
from megatron.data.indexed_dataset import IndexedDataset
from megatron.tools.preprocess.job import Job
from megatron.tools.preprocess.preprocess import preprocess

WORDS = [f"w{n}" for n in range(30)]


def write_vocabulary(path: Path, words: list[str]) -> Path:
    path.write_text(json.dumps({word: number for number, word in enumerate(words)}))
    return path


def test_a_text_without_an_ending_trains_by_the_classic_commands(programs: Programs, tmp_path: Path) -> None:
    """The merges are named, as always in these commands; the file need not even exist."""
    chance = random.Random(2)
    sentences = [chance.choices(WORDS, k=chance.randint(2, 12)) for _ in range(60)]
    sentences[7][1] = "unseen"
    corpus = tmp_path / "corpus"
    corpus.write_bytes(bz2.compress("".join(" ".join(words) + " .\n" for words in sentences).encode()))
    vocabulary = write_vocabulary(tmp_path / "vocab.json", [*WORDS, ".", "<unk>", "<|endoftext|>"])
    tokenizer = ["--tokenizer-type", "WhitespaceTokenizer", "--merge-file", tmp_path / "merges.txt"]
    note = f".py: warning: --merge-file {tmp_path}/merges.txt is not used: WhitespaceTokenizer has no merges\n"
    made = programs.python(
        "tools/preprocess_data.py", "--input", corpus, "--output-prefix", tmp_path / "own",
        "--vocab", vocabulary, "--dataset-impl", "mmap", *tokenizer, "--append-eod", "--keep-newlines",
        "--split-sentences", "--chunk-size", "25",
    ).ok()  # fmt: skip
    assert "preprocess_data.py: warning: --chunk-size 25 has no effect: " in made.output
    assert made.output.count(note) == 1 and made.output.endswith("; 1 words not in the vocabulary\n")
    dataset = IndexedDataset(tmp_path / "own_text_sentence")
    ids = {word: number for number, word in enumerate(WORDS)} | {"unseen": 31}
    assert [dataset.get(n).tolist() for n in range(60)] == [[*map(ids.get, words), 30, 32] for words in sentences]
    trained = programs.warm(
        1, "pretrain_gpt2.py", *TINY_MODEL, "--train-iters", "1", "--batch-size", "2", "--eval-iters", "0",
        "--data-path", tmp_path / "own_text_sentence", "--vocab-file", vocabulary, *tokenizer, "--split", "1,0,0",
        "--metrics-file", tmp_path / "metrics",
    ).ok()  # fmt: skip
    assert trained.output.count(note) == 1
    assert read_metrics(tmp_path / "metrics")[0]["lm_loss"] == pytest.approx(math.log(33), abs=0.2)


@pytest.mark.parametrize(
    ("settings", "words", "messages"),
    [
        ({}, WORDS, ["corpus:1: not JSON", "add --input-format text", "--tokenizer-type WhitespaceTokenizer"]),
        (
            {"tokenizer_type": "GPT2BPETokenizer", "input_format": "text"},
            WORDS,
            ["have no token", "for one of whole words add --tokenizer-type WhitespaceTokenizer"],
        ),
        (
            {"input_format": "text"},
            ["a", "b"],
            ["none of the 4 words of ", "is in --vocab-file", "was made for this text"],
        ),
    ],
    ids=["format", "tokenizer", "words"],
)
def test_files_that_do_not_fit(tmp_path: Path, settings: dict, words: list[str], messages: list[str]) -> None:
    """A text that begins like JSON, words taken for bytes, and a vocabulary of another text."""
    (tmp_path / "corpus").write_text("[w1 w2\nw3 w4\n")
    vocabulary = write_vocabulary(tmp_path / "vocab.json", [*words, "<unk>", "<|endoftext|>"])
    settings = {"tokenizer_type": "WhitespaceTokenizer", **settings}
    job = Job(inputs=(tmp_path / "corpus",), output_prefix=f"{tmp_path}/own", vocab_file=str(vocabulary), **settings)
    with pytest.raises(DataError) as caught:
        preprocess(job, lambda summary: None, print)
    assert len(caught.value.messages) == 1 and all(message in str(caught.value) for message in messages)
    assert {path.name for path in tmp_path.iterdir()} == {"corpus", "vocab.json"}
