"""Trains vocabularies on text, deterministically for the same text in the same order."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator

import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from megatron.common.errors import ConfigError
from megatron.tokenizer.base import EOD, UNK
from megatron.tokenizer.words import CONTINUES, SPECIAL, normalizer


def train_gpt2_bpe(
    documents: Iterable[str], vocab_size: int, min_frequency: int, *, show_progress: bool = False
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Train vocabulary and merges of a byte-level BPE: the 256 bytes, merges, then ``<|endoftext|>``, as in GPT-2.

    Pairs that occur less than ``min_frequency`` times are not merged, so that the vocabulary of a small corpus is
    smaller than ``vocab_size``. ``show_progress`` draws bars on stderr, and empty lines on stdout. Raises ConfigError
    if ``vocab_size`` is too small for the bytes.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size <= len(alphabet):
        raise ConfigError(f"--vocab-size {vocab_size} is too small: a byte-level BPE needs {len(alphabet) + 1} or more")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1, min_frequency=min_frequency, initial_alphabet=alphabet, show_progress=show_progress
    )
    tokenizer.train_from_iterator(documents, trainer)
    # The library returns its merges only in its JSON.
    model = json.loads(tokenizer.to_str())["model"]
    vocabulary = sorted(model["vocab"], key=model["vocab"].get)
    # No merge results in EOD, since merges do not cross from punctuation to letters.
    return number_tokens([*vocabulary, EOD]), [tuple(merge) for merge in model["merges"]]


def train_wordpiece(
    documents: Iterable[str], vocab_size: int, min_frequency: int, *, lower_case: bool
) -> dict[str, int]:
    """Train a WordPiece vocabulary: BERT's special tokens, the characters, then merges of the most frequent pairs.

    The library's trainer breaks ties in the order of its hash tables, so that no two trainings agree. Here each
    character, and each character that continues a word, gets a code in order of occurrence in the text, and the pieces
    are the tokens of a BPE over these codes.
    Raises ConfigError if ``vocab_size`` is too small for the characters.
    """
    codes: dict[str, str] = {}
    clean, cut = normalizer(lower_case), pre_tokenizers.BertPreTokenizer()

    def encode(document: str) -> str:
        words = (word for word, _ in cut.pre_tokenize_str(clean.normalize_str(document)))
        return " ".join(
            "".join(_code(codes, (CONTINUES if n else "") + c) for n, c in enumerate(word)) for word in words
        )

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.BpeTrainer(
        vocab_size=max(vocab_size - len(SPECIAL), 0), min_frequency=min_frequency, show_progress=False
    )
    tokenizer.train_from_iterator(map(encode, documents), trainer)
    if vocab_size < len(SPECIAL) + len(codes):
        raise ConfigError(
            f"--vocab-size {vocab_size} is too small: the text's characters, each at the beginning of a word and "
            f"inside of one, and {', '.join(SPECIAL)} need {len(SPECIAL) + len(codes)} or more"
        )
    characters = {code: character for character, code in codes.items()}
    vocabulary = tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    pieces = ["".join(_joined(characters[code] for code in token)) for token in tokens]
    return number_tokens([*SPECIAL, *pieces])


def _code(codes: dict[str, str], character: str) -> str:
    """The code of a character, from a private-use plane of Unicode."""
    return codes.setdefault(character, chr(0xF0000 + len(codes)))


def _joined(characters: Iterable[str]) -> Iterator[str]:
    """The characters of a piece, with the continuation mark only at its start."""
    for n, character in enumerate(characters):
        yield character.removeprefix(CONTINUES) if n else character


def train_whitespace(documents: Iterable[str], vocab_size: int, min_frequency: int) -> dict[str, int]:
    """``<unk>``, the words that occur at least ``min_frequency`` times, most frequent first, then ``<|endoftext|>``.

    Raises ConfigError if ``vocab_size`` is too small for a word.
    """
    if vocab_size < 3:
        raise ConfigError(f"--vocab-size {vocab_size} is too small: {UNK}, {EOD} and a word need 3 or more")
    counts = Counter(word for document in documents for word in document.split())
    for reserved in (UNK, EOD):
        counts.pop(reserved, None)
    # Words of equal count are sorted alphabetically, independently of the order of documents.
    ranked = sorted((-count, word) for word, count in counts.items() if count >= min_frequency)
    return number_tokens([UNK, *(word for _, word in ranked[: vocab_size - 2]), EOD])


def number_tokens(tokens: list[str]) -> dict[str, int]:
    """The tokens with their positions as ids."""
    return {token: id for id, token in enumerate(tokens)}
