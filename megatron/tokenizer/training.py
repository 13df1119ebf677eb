"""Making a vocabulary from text. The same text, in the same order, makes the same vocabulary."""

import json
from collections import Counter
from collections.abc import Iterable

import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from megatron.errors import ConfigError
from megatron.tokenizer.vocabulary import EOD, UNK


def train_gpt2_bpe(
    documents: Iterable[str], vocab_size: int, min_frequency: int, *, show_progress: bool = False
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of a byte-level BPE: the 256 bytes, then merges, ``<|endoftext|>`` last, as in GPT-2.

    Pairs that are seen less than ``min_frequency`` times are not merged, so the vocabulary of a
    small corpus stays below ``vocab_size``. ``show_progress`` draws bars on stderr, and leaves some
    empty lines on stdout. Raises ConfigError if ``vocab_size`` has no room for the bytes.
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
    # The library shows its merges in this description only.
    model = json.loads(tokenizer.to_str())["model"]
    vocabulary = sorted(model["vocab"], key=model["vocab"].get)
    # No merge spells EOD, for none crosses from punctuation to letters.
    return number([*vocabulary, EOD]), [tuple(merge) for merge in model["merges"]]


def train_whitespace(documents: Iterable[str], vocab_size: int, min_frequency: int) -> dict[str, int]:
    """``<unk>``, then the words seen ``min_frequency`` times or more, most frequent first, then ``<|endoftext|>``.

    Raises ConfigError if ``vocab_size`` has no room for a word.
    """
    if vocab_size < 3:
        raise ConfigError(f"--vocab-size {vocab_size} is too small: {UNK}, {EOD} and a word need 3 or more")
    counts = Counter(word for document in documents for word in document.split())
    for reserved in (UNK, EOD):
        counts.pop(reserved, None)
    # Words of equal count go by the alphabet: the order of the documents then plays no part.
    ranked = sorted((-count, word) for word, count in counts.items() if count >= min_frequency)
    return number([UNK, *(word for _, word in ranked[: vocab_size - 2]), EOD])


def number(tokens: list[str]) -> dict[str, int]:
    """The tokens with their places as ids."""
    return {token: id for id, token in enumerate(tokens)}
