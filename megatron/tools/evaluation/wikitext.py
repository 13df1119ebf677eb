"""WikiText as it is usually written: removes the spaces that the data set has around punctuation. No torch here."""

import re

_SPACED = (
    ("s '", "s'"),
    # inside words and numbers
    (" @-@ ", "-"),
    (" @,@ ", ","),
    (" @.@ ", "."),
    # after a word
    *((f" {mark} ", f"{mark} ") for mark in ":;.!?,"),
)
_ENCLOSED = (("(", ")"), ("[", "]"), ("{", "}"), ('"', '"'), ("'", "'"))
"""Pairs whose inner blanks are removed."""
_REST = (
    # headings
    ("= = = =", "===="),
    ("= = =", "==="),
    ("= =", "=="),
    (" ° ", "°"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
)


def detokenize_wikitext(text: str) -> str:
    """``text`` without the blanks that WikiText inserts."""
    for old, new in _SPACED:
        text = text.replace(old, new)
    for opening, closing in _ENCLOSED:
        inside = rf"\s*([^{re.escape(closing)}]*?)\s*"
        text = re.sub(f"{re.escape(opening)}{inside}{re.escape(closing)}", rf"{opening}\1{closing}", text)
    for old, new in _REST:
        text = text.replace(old, new)
    return text


def count_words(text: str) -> int:
    """Words of WikiText's tokenized text, which normalize perplexity: split at blanks only, so line ends count."""
    return len(text.strip().split(" "))
