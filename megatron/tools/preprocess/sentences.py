"""Splits text into sentences, for BERT's sentence pairs."""

import re
from collections.abc import Iterator

ABBREVIATIONS = frozenset(
    "adj adm adv al approx assn ave bldg bros brig ca capt cf ch chap cmdr co col comdr corp cpl dept dist dr ed eds "
    "e.g eg eq esp est et ext fig figs fn fr ft gen gov hon hr i.e ie inc incl inst jr lt ltd maj messrs mgr "
    "mr mrs ms mt mts mx orig p pp ph.d phd prof pvt rep rev resp sen sgt sr st supt trans "
    "univ v viz vol vols vs".split()
)
"""Words before a stop that does not end a sentence, in lower case and without their last stop."""

_BLANK_LINES = re.compile(r"(\n\s*\n)")
_END = re.compile(
    r"""(?<![.!?\u2026])[.!?\u2026]+["'\u2019\u201d\u00bb)\]]*\s+(?=["'\u2018\u201c\u00ab(\[]*[^\W_a-z]|["'\u2018\u201c\u00ab(\[]*[^\w\s])"""
    r"""|[\u3002\uff01\uff1f]+["'\u2019\u201d\u300d\u300f)\]]*\s*"""
)
_LAST_WORD = re.compile(r"[^\s(\[\"'\u2018\u201c]+$")


_LONGER_THAN_ABBREVIATIONS = 64
"""Characters."""


def split_sentences(text: str, *, keep_newlines: bool = False) -> list[str]:
    """The sentences of ``text`` in order; together they are all of its words.

    White space around a sentence is removed, or kept at its end with ``keep_newlines``: then they are all of the text.
    """
    if not text.strip():
        return []
    sentences = [""]
    for piece in _pieces(text):
        if piece.strip() and sentences[-1].strip():
            sentences.append(piece)
        else:
            sentences[-1] += piece
    return sentences if keep_newlines else [sentence.strip() for sentence in sentences]


def _pieces(text: str) -> Iterator[str]:
    """``text`` cut after each sentence and the white space that follows it; some pieces are white space alone."""
    paragraphs, blank_lines = (parts := _BLANK_LINES.split(text))[::2], [*parts[1::2], ""]
    for paragraph, blank in zip(paragraphs, blank_lines, strict=True):
        start = 0
        for end in _END.finditer(paragraph):
            if not _is_abbreviation(paragraph[start : end.start()], end.group()):
                yield paragraph[start : end.end()]
                start = end.end()
        yield paragraph[start:] + blank


def _is_abbreviation(before: str, mark: str) -> bool:
    """Whether a single stop belongs to the word before it."""
    if mark.rstrip() != ".":
        return False
    found = _LAST_WORD.search(before[-_LONGER_THAN_ABBREVIATIONS:])
    word = found.group() if found else ""
    return word.lower() in ABBREVIATIONS or (len(word) == 1 and word.isupper() and word != "I")
