"""Invalid arguments of pretrain_bert.py: one line each, before torch is imported."""

import json
from pathlib import Path

import pytest
from support.programs import TINY_MODEL, Programs
from support.refusals import refusal

COMMAND = (
    *TINY_MODEL,
    *"--data-path sentences_text_sentence --split 8,1,1 --batch-size 2 --train-iters 4 --eval-iters 1".split(),
    *"--vocab-file vocab.txt --tokenizer-type BertWordPieceLowerCase".split(),
)


@pytest.fixture
def place(programs: Programs, tmp_path: Path) -> Path:
    """A folder with the tiny data set of sentences, its vocabulary, and some that are not BERT's."""
    prefix, vocabulary = (Path(programs.sentence_arguments[n]) for n in (1, 5))
    for file in (vocabulary, prefix.with_suffix(".bin"), prefix.with_suffix(".idx")):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0}))
    (tmp_path / "no-mask.txt").write_text(vocabulary.read_text().replace("[MASK]\n", ""))
    whole = Path(programs.data_arguments[1])
    for end in (".bin", ".idx"):
        (tmp_path / f"whole{end}").write_bytes(whole.with_suffix(end).read_bytes())
    return tmp_path


@pytest.mark.parametrize(
    ("words", "code", "messages"),
    [
        (
            "--data-path whole --split 1,0,0",
            3,
            [
                'the training split of whole by --split "1,0,0" (200 of 200 documents) holds no document of two '
                "sentences: make the data set with tools/preprocess_data.py --split-sentences, or use another "
                "--split or more text"
            ],
        ),
        (
            "--vocab-file no-mask.txt",
            3,
            [
                "no-mask.txt: the vocabulary lacks [MASK]; is it BERT's vocab.txt, a token a line? "
                "(tools/train_tokenizer.py makes one)"
            ],
        ),
        (
            "--vocab-file vocab.json",
            3,
            [
                "vocab.json: the vocabulary lacks [PAD], [UNK], [CLS], [SEP], [MASK]; is it BERT's vocab.txt, a token "
                "a line? (tools/train_tokenizer.py makes one)"
            ],
        ),
        ("--merge-file x", 3, ["--merge-file x: WordPiece has no merges; leave the flag out"]),
        (
            "--tokenizer-type GPT2BPETokenizer --eod-mask-loss",
            2,
            [
                "--eod-mask-loss: pretrain_bert.py has no such flag: it is GPT-2's, for pretrain_gpt2.py",
                "--tokenizer-type GPT2BPETokenizer does not suit BERT: use BertWordPieceLowerCase or BertWordPieceCase",
                "--merge-file is required with --tokenizer-type GPT2BPETokenizer",
            ],
        ),
        ("--mask-prob 1", 2, ["--mask-prob 1 must be from 0 to 1, 1 excluded"]),
    ],
)
def test_every_error_is_reported_on_its_own_line(place: Path, words: str, code: int, messages: list[str]):
    assert refusal(place, words, program="pretrain_bert.py", command=COMMAND) == (code, messages)
