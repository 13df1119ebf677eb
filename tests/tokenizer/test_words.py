"""Tokenizers of words: WordPiece against transformers' BERT tokenizer, words between white space, and vocabularies that
cannot be read."""

import json
from pathlib import Path

import pytest

from megatron.common.errors import DataError
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.words import SPECIAL, WhitespaceTokenizer
from megatron.tools.preprocess.tokenizer_training import train_wordpiece

TEXTS = [
    "The cat sat on the mat, and the hat of the cat was naïve.",
    "Cats and hats: 日本 MAT-ted, unseen Ωmega [MASK] [SEP] ##at!",
    "",
    "x" * 150,
    "tabs\tand\nlines\x00 ...",
]


@pytest.fixture(params=["BertWordPieceLowerCase", "BertWordPieceCase"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def vocab_file(kind: str, tmp_path: Path) -> Path:
    vocabulary = train_wordpiece(TEXTS[:2], 90, 1, lower_case=kind.endswith("LowerCase"))
    path = tmp_path / "vocab.txt"
    path.write_text("".join(f"{piece}\n" for piece in vocabulary))
    return path


def test_the_same_ids_as_transformers(kind: str, vocab_file: Path):
    from transformers import BertTokenizer

    ours = build_tokenizer(kind, str(vocab_file), None)
    theirs = BertTokenizer(str(vocab_file), do_lower_case=kind.endswith("LowerCase"))
    plain = [text.replace("[MASK] [SEP]", "") for text in TEXTS]  # theirs takes these for the tokens
    assert ours.tokenize_batch(plain) == [theirs(text, add_special_tokens=False)["input_ids"] for text in plain]
    assert ours.tokenize(TEXTS[1]) == ours.tokenize_batch(TEXTS)[1]
    assert not {ours.mask, ours.sep, ours.cls, ours.pad} & {id for ids in ours.tokenize_batch(TEXTS) for id in ids}


def test_detokenize_restores_words(vocab_file: Path, kind: str):
    tokenizer = build_tokenizer(kind, str(vocab_file), None)
    text = tokenizer.detokenize(tokenizer.tokenize("the cat sat on the mat"))
    assert text == "the cat sat on the mat"


def test_trained_wordpieces_cover_the_text(kind: str, vocab_file: Path):
    tokenizer = build_tokenizer(kind, str(vocab_file), None)
    pieces = vocab_file.read_text().splitlines()
    assert tuple(pieces[:5]) == SPECIAL and 70 < len(pieces) == tokenizer.vocab_size <= 90
    assert "cat" in pieces and "##at" in pieces
    assert 1 not in tokenizer.tokenize(TEXTS[0]), "nothing is unknown"
    assert tokenizer.continues.tolist() == [piece.startswith("##") for piece in pieces]


WORDS = {"<unk>": 0, "the": 1, "cat": 2, "日本": 3, "<|endoftext|>": 4}


def test_words_are_separated_by_whitespace(tmp_path: Path):
    """And none is the end of a document."""
    (path := tmp_path / "vocab.json").write_text(json.dumps(WORDS), encoding="utf-8")
    tokenizer = WhitespaceTokenizer(str(path))
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.unk) == (5, 4, 0)
    assert tokenizer.tokenize(" the\tcat\n日本  dog <unk> <|endoftext|>") == [1, 2, 3, 0, 0, 0]
    assert tokenizer.tokenize_batch(["the", "", "cat the"]) == [[1], [], [2, 1]]
    assert tokenizer.detokenize([1, 2, 3, 4]) == "the cat 日本 <|endoftext|>"


def without(token: str) -> str:
    return json.dumps({word: id for id, word in enumerate(word for word in WORDS if word != token)})


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("BertWordPieceCase", "[PAD]\n[UNK]\n[CLS]\n[SEP]\nthe\n", r"lacks \[MASK\]; is it BERT's vocab.txt"),
        ("BertWordPieceCase", '{"a": 0}\n', r"the vocabulary lacks \[PAD\], \[UNK\], \[CLS\], \[SEP\], \[MASK\]"),
        ("BertWordPieceCase", "[PAD]\nthe\nthe\n", ":3: 'the' repeats line 2"),
        ("BertWordPieceCase", "[PAD]\n\nthe\n", ":2: empty"),
        ("WhitespaceTokenizer", without("<unk>"), "lacks <unk>; add it with the id 4"),
        ("WhitespaceTokenizer", without("<|endoftext|>"), r"lacks <\|endoftext\|>; add it with the id 4"),
    ],
)
def test_broken_vocabularies_are_named(tmp_path: Path, kind: str, text: str, message: str):
    (path := tmp_path / "vocab").write_text(text)
    with pytest.raises(DataError, match=message):
        build_tokenizer(kind, str(path), None)
