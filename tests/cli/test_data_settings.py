"""Flags of data: blends, a data set for each split, and mock data."""

from fractions import Fraction

import pytest
from support.command_lines import CPU, SMALL, complaints, parse, read

from megatron.cli import parse_run
from megatron.common.errors import ConfigError
from megatron.config.data import Part
from megatron.model.architectures import BERT, GPT2
from megatron.model.spec import ArchitectureSpec


def test_each_split_may_have_data_of_its_own() -> None:
    own = SMALL.replace("--data-path corpus", "--train-data-path 1 a 3 b --test-data-path c").split()
    data = parse_run(own, CPU).data
    assert data.blends == {
        "train": (Part(Fraction(1, 4), "a"), Part(Fraction(3, 4), "b")),
        "valid": (),
        "test": (Part(Fraction(1), "c"),),
    }
    assert data.prefixes == ("a", "b", "c") and data.proportions == "1/4 3/4; ; 1"
    assert parse_run([*own, "--valid-data-path", "d"], CPU).data.contents == (("a", "b"), ("d",), ("c",))
    assert complaints("--train-data-path other") == [
        "--data-path corpus and --train-data-path other exclude each other: give one"
    ]
    with pytest.raises(ConfigError, match="--split 1 and --train-data-path 1 a 3 b exclude each other"):
        parse_run([*own, "--split", "1"], CPU)


WITHOUT_DATA = SMALL.partition("--data-path")[0]


@pytest.mark.parametrize(
    "architecture, words, expected",
    [
        (GPT2, "--mock-data", ("NullTokenizer", 50257)),
        (BERT, "--mock-data", ("NullTokenizer", 30522)),
        (BERT, "--mock-data --vocab-size 100", ("NullTokenizer", 100)),
        (GPT2, "--mock-data --vocab-file v --merge-file m", ("GPT2BPETokenizer", None)),
        (GPT2, "--data-path d --tokenizer-type NullTokenizer --vocab-size 100", ("NullTokenizer", 100)),
    ],
)
def test_mock_data_and_their_tokenizer(
    architecture: ArchitectureSpec, words: str, expected: tuple[str, int | None]
) -> None:
    data = parse_run([*WITHOUT_DATA.split(), *words.split()], CPU, architecture).data
    assert (data.tokenizer_type, data.vocab_size) == expected


def test_the_size_of_another_vocabulary_has_no_effect() -> None:
    (warning,) = read("--vocab-size 9").warnings
    assert warning.startswith(
        "--vocab-size has no effect without --tokenizer-type NullTokenizer, HuggingFaceTokenizer or GPTSentencePiece"
    )


NULL = "--data-path d --tokenizer-type NullTokenizer"


@pytest.mark.parametrize(
    "architecture, words, message",
    [
        (GPT2, "--mock-data --data-path d", "--mock-data and --data-path d exclude each other: give one"),
        (GPT2, "--mock-data --merge-file m", "--tokenizer-type NullTokenizer and --merge-file exclude each other: "),
        (GPT2, NULL, "--tokenizer-type NullTokenizer needs --vocab-size: add it, or remove --tokenizer-type"),
        (BERT, f"{NULL} --vocab-size 100", "--tokenizer-type NullTokenizer does not suit BERT: use BertWordPieceLower"),
        (BERT, "--data-path d --tokenizer-type BertWordPieceCase", "--vocab-file is required"),
        (GPT2, "--mock-data --vocab-file v", "--merge-file is required with --tokenizer-type GPT2BPETokenizer; for a "),
        (GPT2, "--vocab-file v --merge-file m", "--data-path is required (or --train-data-path, or --mock-data)"),
    ],
)  # fmt: skip
def test_wrong_mock_data_are_refused(architecture: ArchitectureSpec, words: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_run([*WITHOUT_DATA.split(), *words.split()], CPU, architecture)
    assert len(caught.value.messages) == 1 and caught.value.messages[0].startswith(message)


def test_a_blend_is_split_as_one_data_set_is() -> None:
    data = parse("--data-path 0.3 a 0.60 b 0.1 c").data
    assert {name: [str(part.share) for part in parts] for name, parts in data.blends.items()} == dict.fromkeys(
        ("train", "valid", "test"), ["3/10", "3/5", "1/10"]
    )
    assert data.contents == (("a", "b", "c"),) and data.proportions == "3/10 3/5 1/10"


@pytest.mark.parametrize(
    "words, message",
    [
        ("a b", "a is not a number: give a weight before b"),
        ("\N{ARABIC-INDIC DIGIT ONE} b", "\N{ARABIC-INDIC DIGIT ONE} is not a number: give a weight before b"),
        ("1_0 a 1 b", "1_0 is not a number: give a weight before a"),
        ("1 a b", "3 arguments: give one prefix, or WEIGHT PREFIX for each data set"),
        ("-1 a 1 b", "-1 before a must be from 1e-12 to 1e18: remove data sets that are not used"),
        ("1 x/a 2 b 1 x//a", "x/a is given twice: give it once, with the sum of its weights"),
    ],
)
def test_a_wrong_blend_is_refused(words: str, message: str) -> None:
    assert complaints(f"--data-path {words}") == [f"--data-path {words}: {message}"]
    assert f"--data-path {words}: {message}" in complaints(f"--data-path {words} --sft --epochs 1")
