"""Finds documents that are in several splits, or several times in one."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from megatron.config.data import SPLITS
from megatron.data.splits import SPLIT_NAMES, Source

_SHOWN = 5
_DIGEST = np.dtype("V16")


class Documents(NamedTuple):
    """The documents of a split."""

    digests: np.ndarray
    """Hash of the tokens of each document, 16 bytes [documents]."""
    tokens: np.ndarray
    """Number of tokens of each document, int64 [documents]."""
    sources: Sequence[Source]

    def name(self, number: int) -> str:
        """The name of a document: its data set and its number there."""
        for _, indexed, documents in self.sources:
            if number < len(documents):
                return f"{indexed.prefix} document {documents.start + number}"
            number -= len(documents)
        raise IndexError(number)


def hash_documents(sources: Sequence[Source], eod: int | None) -> Documents:
    """Hash the documents of a split, independently of the type of tokens and without a final ``eod``."""
    digests, tokens = [], []
    for _, indexed, documents in sources:
        starts = indexed.document_starts
        hashes = bytearray()
        for document in documents:
            text = indexed.span(int(starts[document]), int(starts[document + 1] - starts[document])).astype("<i4")
            text = text[:-1] if len(text) and text[-1] == eod else text
            hashes += hashlib.blake2b(text.data, digest_size=_DIGEST.itemsize).digest()
        digests.append(np.frombuffer(bytes(hashes), _DIGEST))
        tokens.append(np.diff(starts[documents.start : documents.stop + 1]))
    return Documents(np.concatenate(digests), np.concatenate(tokens), sources)


def find_overlaps(splits: Mapping[str, Sequence[Source]], eod: int | None) -> dict[str, Any]:
    """Documents of validation and test that are also in an earlier split, and documents repeated within a split."""
    hashed = {name: hash_documents(splits[name], eod) for name in SPLITS if name in splits}
    return {
        "within": [_repeated(name, documents) for name, documents in hashed.items()],
        "between": [_shared(first, second, hashed[first], hashed[second]) for first, second in combinations(hashed, 2)],
    }


def overlaps(result: Mapping[str, Any]) -> bool:
    """Whether two splits share a document."""
    return any(row["documents"] for row in result["between"])


def _repeated(name: str, documents: Documents) -> dict[str, Any]:
    different, counts = np.unique(documents.digests, return_counts=True)
    return {
        "split": name,
        "documents": len(documents.digests),
        "different": len(different),
        "most": int(counts.max(initial=0)),
    }


def _shared(first: str, second: str, earlier: Documents, later: Documents) -> dict[str, Any]:
    shared = np.flatnonzero(np.isin(later.digests, earlier.digests))
    examples = []
    for number in shared[:_SHOWN].tolist():
        twin = int(np.flatnonzero(earlier.digests == later.digests[number])[0])
        examples.append([later.name(number), earlier.name(twin)])
    return {
        "splits": [first, second],
        "documents": len(shared),
        "of": len(later.digests),
        "tokens": int(later.tokens[shared].sum()),
        "of_tokens": int(later.tokens.sum()),
        "examples": examples,
    }


def overlaps_as_text(result: Mapping[str, Any]) -> Iterator[str]:
    """The result of ``find_overlaps`` as lines of text."""
    for row in result["within"]:
        yield (
            f"{SPLIT_NAMES[row['split']]}: {row['documents']:,} documents, {row['different']:,} different ones, "
            f"the most frequent {row['most']:,} times"
        )
    for row in result["between"]:
        first, second = (SPLIT_NAMES[name] for name in row["splits"])
        yield (
            f"{second} in {first}: {row['documents']:,} of {row['of']:,} documents, {row['tokens']:,} of "
            f"{row['of_tokens']:,} tokens"
        )
        yield from (f"  {later} is {earlier}" for later, earlier in row["examples"])
