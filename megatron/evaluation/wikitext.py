"""WikiText's text as it was before it was cut into words.

WikiText sets blanks around punctuation and writes ``@-@`` for a hyphen inside a word. These are the rules that
Megatron-LM published its figures with, in their order, which matters; others count by them, too. One of theirs is
left out: it is for a digit between an apostrophe and slashes, which WikiText has nowhere, and garbles it.
"""

import re

_SPACED = (
    ("s '", "s'"),
    # inside words and numbers
    (" @-@ ", "-"),
    (" @,@ ", ","),
    (" @.@ ", "."),
    # behind a word
    *((f" {mark} ", f"{mark} ") for mark in ":;.!?,"),
)
_ENCLOSED = ("()", "[]", "{}", '""', "''")
"""Pairs that lose the blanks on their inside."""
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
    """``text`` without the blanks that WikiText put there."""
    for old, new in _SPACED:
        text = text.replace(old, new)
    for opening, closing in _ENCLOSED:
        inside = rf"\s*([^{re.escape(closing)}]*?)\s*"
        text = re.sub(f"{re.escape(opening)}{inside}{re.escape(closing)}", rf"{opening}\1{closing}", text)
    for old, new in _REST:
        text = text.replace(old, new)
    return text


def count_words(text: str) -> int:
    """Words of WikiText's own text, by which perplexity is normalised: what blanks part, ends of lines among them."""
    return len(text.strip().split(" "))
