"""The whitespace tokenizer, and the table of kinds."""

import json
from pathlib import Path

import pytest

from megatron.common.errors import DataError
from megatron.tokenizer.words import WhitespaceTokenizer

WORDS = {"<unk>": 0, "the": 1, "cat": 2, "日本": 3, "<|endoftext|>": 4}


@pytest.fixture
def vocab_file(tmp_path: Path) -> str:
    path = tmp_path / "vocab.json"
    path.write_text(json.dumps(WORDS), encoding="utf-8")
    return str(path)


def test_words_are_separated_by_whitespace(vocab_file: str):
    tokenizer = WhitespaceTokenizer(vocab_file)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.unk) == (5, 4, 0)
    assert tokenizer.tokenize(" the\tcat\n日本  dog <unk> ") == [1, 2, 3, 0, 0]
    assert tokenizer.tokenize_batch(["the", "", "cat the"]) == [[1], [], [2, 1]]
    assert tokenizer.detokenize([1, 2, 3, 4]) == "the cat 日本 <|endoftext|>"


def test_no_text_spells_the_end_of_a_document(vocab_file: str):
    assert WhitespaceTokenizer(vocab_file).tokenize("the <|endoftext|> cat") == [1, 0, 2]


def test_an_id_outside_the_vocabulary_is_a_data_error(vocab_file: str):
    with pytest.raises(DataError, match="token 5 is not in the vocabulary of 5 tokens"):
        WhitespaceTokenizer(vocab_file).detokenize([1, 5])


@pytest.mark.parametrize("token", ["<unk>", "<|endoftext|>"])
def test_the_two_special_tokens_are_needed(tmp_path: Path, token: str):
    path = tmp_path / "vocab.json"
    path.write_text(json.dumps({word: id for id, word in enumerate(set(WORDS) - {token})}))
    with pytest.raises(DataError) as caught:
        WhitespaceTokenizer(str(path))
    assert f"lacks {token}" in str(caught.value)
