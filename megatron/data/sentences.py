"""Where sentences end, by rule: no model, and no language but what writes like English.

A sentence ends with a full stop, question or exclamation mark, and what closes brackets and quotation marks behind it,
before a blank and something that may begin another: no lower-case letter. A stop behind an abbreviation or a single
capital ends none. An empty line ends one always, and so does a mark of Chinese or Japanese, without a blank.
"""

import re

ABBREVIATIONS = frozenset(
    "adj adm adv al approx assn ave bldg bros brig ca capt cf ch chap cmdr co col comdr corp cpl dept dist dr ed eds "
    "e.g eg eq esp est et ext fig figs fn fr ft gen gov hon hr i.e ie inc incl inst jr lt ltd maj messrs mgr "
    "mr mrs ms mt mts mx orig p pp ph.d phd prof pvt rep rev resp sen sgt sr st supt trans "
    "univ v viz vol vols vs".split()
)
"""Words before a stop that does not end a sentence, in lower case and without their last stop."""

_PARAGRAPH = re.compile(r"\n\s*\n")
_END = re.compile(
    r"""[.!?\u2026]+["'\u2019\u201d\u00bb)\]]*\s+(?=["'\u2018\u201c\u00ab(\[]*[^\W_a-z]|["'\u2018\u201c\u00ab(\[]*[^\w\s])"""
    r"""|[\u3002\uff01\uff1f]+["'\u2019\u201d\u300d\u300f)\]]*\s*"""
)
_LAST_WORD = re.compile(r"[^\s(\[\"'\u2018\u201c]+$")


def split_sentences(text: str) -> list[str]:
    """The sentences of ``text`` in order, without the blanks around them; together they are all of its words."""
    sentences = []
    for paragraph in _PARAGRAPH.split(text):
        start = 0
        for end in _END.finditer(paragraph):
            if not _is_abbreviation(paragraph[start : end.start()], end.group()):
                sentences.append(paragraph[start : end.end()].strip())
                start = end.end()
        sentences.append(paragraph[start:].strip())
    return [sentence for sentence in sentences if sentence]


def _is_abbreviation(before: str, mark: str) -> bool:
    """Whether a single stop belongs to the word before it."""
    if mark.rstrip() != ".":
        return False
    found = _LAST_WORD.search(before)
    word = found.group() if found else ""
    return word.lower() in ABBREVIATIONS or (len(word) == 1 and word.isupper() and word != "I")
