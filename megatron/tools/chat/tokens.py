"""Tokenizes texts with special tokens, such as those of a chat template, and makes their loss masks. No torch here."""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from megatron.tokenizer import Tokenizer
from megatron.tokenizer.base import EOD, RustTokenizer


class Text(NamedTuple):
    """A text that is tokenized in one piece."""

    text: str
    counted: Sequence[tuple[int, int]] = ()
    """Ranges of characters that count in the loss."""


def special_tokens(tokenizer: Tokenizer) -> Mapping[str, int]:
    """The ids of the special tokens that a template may write, by their text."""
    return getattr(tokenizer, "special_tokens", {EOD: tokenizer.eod})


def tokenize_texts(tokenizer: Tokenizer, texts: Sequence[Text]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield ids and loss mask of each text: 1 for tokens with a character that counts in the loss, else 0.

    Texts of special tokens are encoded as special tokens. With a tokenizer without character offsets, the ranges that
    count are tokenized separately.
    """
    if not isinstance(tokenizer, RustTokenizer):
        yield from _tokenize_ranges(tokenizer, texts)
        return
    for text, encoding in zip(texts, tokenizer.encode_marked([text.text for text in texts]), strict=True):
        begins, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
        mask = np.zeros(len(begins), np.int64)
        for begin, end in text.counted:
            mask |= (begins < end) & (np.maximum(ends, begins + 1) > begin)
        yield encoding.ids, mask.tolist()


def tokenize_marked(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text, in which texts of special tokens are special tokens."""
    [(ids, _)] = tokenize_texts(tokenizer, [Text(text)])
    return ids


@lru_cache(maxsize=4)
def puts_blank(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer puts a blank in front of a text, as that of Llama 2 does."""
    return tokenizer.detokenize(2 * tokenizer.tokenize("1")) != "11"


def tokenize_continuation(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text that follows another one, without a blank that the tokenizer puts in front of it."""
    for before in ("\n", ".") if puts_blank(tokenizer) else ():
        first, both = tokenizer.tokenize(before), tokenize_marked(tokenizer, before + text)
        if both[: len(first)] == first:
            return both[len(first) :]
    return tokenize_marked(tokenizer, text)


def _tokenize_ranges(tokenizer: Tokenizer, texts: Sequence[Text]) -> Iterator[tuple[list[int], list[int]]]:
    special = special_tokens(tokenizer)
    names = sorted(special, key=len, reverse=True)
    pattern = re.compile("(" + "|".join(map(re.escape, names)) + ")")
    for text in texts:
        ids: list[int] = []
        mask: list[int] = []
        cuts = [0, *(cut for span in text.counted for cut in span), len(text.text)]
        continues = False
        for number, (begin, end) in enumerate(zip(cuts, cuts[1:], strict=False)):
            for piece in filter(None, pattern.split(text.text[begin:end])):
                tokenize = partial(tokenize_continuation, tokenizer) if continues else tokenizer.tokenize
                piece_ids = [special[piece]] if piece in special else tokenize(piece)
                continues = piece not in special
                ids += piece_ids
                mask += [number % 2] * len(piece_ids)
        yield ids, mask
