"""Words that were seen before, so that each is tokenized once.

GPT-2's tokenizer cuts a text into words first, and merges no tokens across their ends. Most words of a text were seen
before. Python and the Rust library do not know the letters and digits of the same version of Unicode, so what stands
between two blanks and has a character beyond ASCII is not cut any further here, but left to the library in one piece.
"""

import re
from collections.abc import Callable, Sequence
from itertools import chain

_BLANK = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_BEYOND = r"\x80-\U0010ffff"
_SIGN = r"\x00-\x08\x0e-\x1f!-/:-@\[-`{-\x7f"
_WORD = re.compile(
    "|".join(
        (
            "'(?:[stmd]|re|ve|ll)",
            f" ?[A-Za-z]+(?![A-Za-z{_BEYOND}])",
            f" ?[0-9]+(?![0-9{_BEYOND}])",
            f" ?[{_SIGN}]+(?![{_SIGN}{_BEYOND}])",
            f" ?[^{_BLANK}]+",  # there is a character beyond ASCII in it
            f"[{_BLANK}]+(?![^{_BLANK}])",  # of several blanks the last belongs to what follows
            f"[{_BLANK}]",
        )
    )
)
_HELD = 1 << 18
"""Ids that are remembered, some 20 MB with their words; then all are forgotten, and memory stays flat."""
_FEW = 3
"""One word in so many, and no more, may be new: asking for a word takes longer than it does as a part of its text."""

Encode = Callable[[Sequence[str]], list[list[int]]]


class Words:
    """The ids of the words seen of late. Any number of threads may use it at once."""

    def __init__(self) -> None:
        self._ids: dict[str, list[int]] = {}
        self._held = 0

    def tokenize(self, texts: Sequence[str], encode: Encode) -> list[list[int]]:
        """The ids of each text, as by ``encode(texts)``, which is asked for new words alone where they are few."""
        known = self._ids  # even where another thread forgets meanwhile
        cut = [_WORD.findall(text) for text in texts]
        new = list(set(chain.from_iterable(cut)).difference(known))
        if _FEW * len(new) > sum(map(len, cut)):
            return encode(texts)
        if new:
            known.update(zip(new, ids := encode(new), strict=True))
            self._held += sum(map(len, ids))
        if self._held > _HELD:
            self._ids, self._held = {}, 0
        return [list(chain.from_iterable(map(known.__getitem__, words))) for words in cut]
