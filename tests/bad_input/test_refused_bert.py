"""Invalid arguments of pretrain_bert.py: one line each, before torch is imported."""

from pathlib import Path

import pytest
from support.programs import TINY_MODEL, Programs
from support.refusals import refusal

COMMAND = (
    *TINY_MODEL,
    *"--data-path whole --split 1,0,0 --batch-size 2 --train-iters 4 --eval-iters 1".split(),
    *"--vocab-file vocab.txt --tokenizer-type BertWordPieceLowerCase".split(),
)
NO_SENTENCES = (
    'the training split of whole by --split "1,0,0" (200 of 200 documents) holds no document of two sentences: make '
    "the data set with tools/preprocess_data.py --split-sentences, or use another --split or more text"
)
NO_MASK = (
    "no-mask.txt: the vocabulary lacks [MASK]; is it BERT's vocab.txt, a token a line? (tools/train_tokenizer.py makes "
    "one)"
)


@pytest.fixture
def place(programs: Programs, tmp_path: Path) -> Path:
    """A folder with the tiny data set, whose documents have no sentences, and vocabularies with and without [MASK]."""
    vocabulary, prefix = Path(programs.sentence_arguments[5]), Path(programs.data_arguments[1])
    for end in (".bin", ".idx"):
        (tmp_path / f"whole{end}").write_bytes(prefix.with_suffix(end).read_bytes())
    (tmp_path / "vocab.txt").write_text(vocabulary.read_text())
    (tmp_path / "no-mask.txt").write_text(vocabulary.read_text().replace("[MASK]\n", ""))
    return tmp_path


@pytest.mark.parametrize(
    ("words", "code", "messages"),
    [
        ("--vocab-file no-mask.txt", 3, [NO_SENTENCES, NO_MASK]),
        ("--merge-file x", 3, [NO_SENTENCES, "--merge-file x: WordPiece has no merges; leave the flag out"]),
        (
            "--tokenizer-type GPT2BPETokenizer --eod-mask-loss",
            2,
            [
                "--eod-mask-loss: pretrain_bert.py has no such flag: it is GPT-2's, for pretrain_gpt2.py",
                "--tokenizer-type GPT2BPETokenizer does not suit BERT: use BertWordPieceLowerCase or BertWordPieceCase",
                "--merge-file is required with --tokenizer-type GPT2BPETokenizer",
            ],
        ),
    ],
)
def test_every_error_is_reported_on_its_own_line(place: Path, words: str, code: int, messages: list[str]):
    assert refusal(place, words, program="pretrain_bert.py", command=COMMAND) == (code, messages)
