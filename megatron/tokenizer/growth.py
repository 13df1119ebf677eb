"""Refuses a tokenizer.json whose steps would make texts many times as long.

The bounds follow from the file alone: whatever a text holds, ``n`` characters become at most ``growth * (n + 1)``.
"""

import base64
import json
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any

import tokenizers

MOST_GROWTH = 200
"""Characters for each one, in addition to what one normalization of Unicode makes of it."""
LONGEST_TOKEN = 1 << 12
"""Maximum characters of a token."""

_UNICODE = {"NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18}
_BOUNDS = {
    **_UNICODE,
    **{"Lowercase": 2, "BertNormalizer": 3, "ByteLevel": 5, "Metaspace": 2},
    **{"BPEDecoder": 2, "CTC": 2, "WordPiece": 2},  # at worst a blank beside each character
    **dict.fromkeys(("Strip", "StripAccents", "Nmt", "ByteFallback", "Fuse"), 1),
    **dict.fromkeys(("BertPreTokenizer", "CharDelimiterSplit", "Digits", "FixedLength", "Punctuation", "Split"), 1),
    **dict.fromkeys(("UnicodeScripts", "Whitespace", "WhitespaceSplit"), 1),
}
"""Maximum number of characters that each kind of step makes of one; splits make none."""


def check_growth(encoder: tokenizers.Tokenizer) -> None:
    """Raises ValueError if texts become more than ``MOST_GROWTH`` times as long, which takes too much memory."""
    for what, parts in {
        "normalizer and pre_tokenizer make": (encoder.normalizer, encoder.pre_tokenizer),
        "decoder makes": (encoder.decoder,),
    }.items():
        steps = [step for part in parts if part is not None for step in _steps(json.loads(part.__getstate__()))]
        once = max((_UNICODE.get(step["type"], 1) for step in steps), default=1)
        if (growth := prod(_bounds(steps)) / once) > MOST_GROWTH:
            raise ValueError(f"its {what} up to {growth:,.0f} characters of one, more than {MOST_GROWTH}")


def _steps(part: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The steps of a component, without sequences around them."""
    if part["type"] != "Sequence":
        yield part
    for name in ("normalizers", "pretokenizers", "decoders"):
        for step in part.get(name, ()):
            yield from _steps(step)


def _bounds(steps: Iterable[Mapping[str, Any]]) -> Iterator[float]:
    """Bounds whose product is that of ``steps``: one for replacements in a row that leave alone what others write."""
    bound, written = 1.0, None
    for step in steps:
        text, content = step.get("pattern", {}).get("String"), {*step.get("content", "")}
        if text and written is not None and written.isdisjoint(text):
            bound, written = max(bound, _bound(step)), written | content
        else:
            yield bound
            bound, written = _bound(step), content if text else None
    yield bound


def _bound(step: Mapping[str, Any]) -> float:
    """The growth of texts by a step. Raises ValueError for an unknown one."""
    match step:
        case {"type": "Prepend", "prepend": content}:
            return 1 + len(content)
        case {"type": "Replace", "pattern": {"String": str(text)}, "content": content} if text:
            return max(1.0, len(content) / len(text))
        case {"type": "Replace", "content": content}:  # a regular expression may match before each character
            return 1 + len(content)
        case {"type": "Precompiled", "precompiled_charsmap": table}:
            return _longest_replacement(base64.b64decode(table))
        case {"type": kind} if kind in _BOUNDS:
            return _BOUNDS[kind]
    raise ValueError(f"a step of the unknown type {step['type']}")


def _longest_replacement(table: bytes) -> int:
    """Characters of the longest text in a table of SentencePiece: size of an index, index, texts that end with NUL."""
    texts = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")
    return max(1, *(len(text.decode(errors="replace")) for text in texts))
