"""How many tokens there are, of which kinds, in documents of which lengths."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from megatron.data.sources import SPLIT_NAMES, Source
from megatron.tokenizer import Tokenizer

PERCENTILES = (1, 10, 50, 90, 99)
_BLOCK = 1 << 22
"""Tokens counted at a time."""
_FREQUENT = 10


def document_lengths(source: Source) -> np.ndarray:
    """Tokens of each document of a source, int64 [documents]."""
    return np.diff(source.indexed.document_starts[source.documents.start : source.documents.stop + 1])


def statistics_of(splits: Mapping[str, Sequence[Source]], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The figures of each source of each split."""
    return [
        {"split": name, "data": source.indexed.prefix, "share": float(source.share), **_figures(source, tokenizer)}
        for name, sources in splits.items()
        for source in sources
    ]


def _figures(source: Source, tokenizer: Tokenizer) -> dict[str, Any]:
    lengths = document_lengths(source)
    counts = _count_tokens(source, tokenizer.vocab_size)
    inside = counts[: tokenizer.vocab_size]
    total = int(counts.sum())
    probability = inside[inside > 0] / max(total, 1)
    frequent = np.argsort(-inside, kind="stable")[: min(_FREQUENT, np.count_nonzero(inside))].tolist()
    return {
        "documents": len(lengths),
        "empty": int(np.count_nonzero(lengths == 0)),
        "tokens": total,
        "mean": float(lengths.mean()) if len(lengths) else 0.0,
        "longest": int(lengths.max(initial=0)),
        "percentiles": dict(zip(map(str, PERCENTILES), _percentiles(lengths), strict=True)),
        "vocabulary_used": int(np.count_nonzero(inside)),
        "vocabulary": tokenizer.vocab_size,
        "beyond_vocabulary": int(counts[tokenizer.vocab_size :].sum()),
        "ends_of_documents": int(inside[tokenizer.eod]),
        "entropy": float(-(probability * np.log(probability)).sum()) if len(probability) else 0.0,
        "frequent": [[tokenizer.detokenize([token]), int(inside[token])] for token in frequent],
    }


def _percentiles(lengths: np.ndarray) -> list[float]:
    return np.percentile(lengths, PERCENTILES).tolist() if len(lengths) else [0.0] * len(PERCENTILES)


def _count_tokens(source: Source, vocab_size: int) -> np.ndarray:
    """How often each token is there, int64 [vocab_size + 1]; the last are those outside of the vocabulary."""
    starts = source.indexed.document_starts
    first, end = int(starts[source.documents.start]), int(starts[source.documents.stop])
    counts = np.zeros(vocab_size + 1, np.int64)
    for begin in range(first, end, _BLOCK):
        tokens = source.indexed.span(begin, min(_BLOCK, end - begin)).astype(np.int64)
        tokens[(tokens < 0) | (tokens > vocab_size)] = vocab_size
        counts += np.bincount(tokens, minlength=vocab_size + 1)
    return counts


def as_text(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """In lines."""
    for row in found:
        percentiles = ", ".join(f"{value:,.0f} ({name} %)" for name, value in row["percentiles"].items())
        frequent = " ".join(f"{text!r}" for text, _ in row["frequent"])
        yield f"{SPLIT_NAMES[row['split']]}, {row['share']:.2%}: {row['data']}"
        yield f"  {row['documents']:,} documents ({row['empty']:,} empty), {row['tokens']:,} tokens"
        yield f"  tokens of a document: {row['mean']:,.1f} on average, {percentiles}, {row['longest']:,} at most"
        yield (
            f"  {row['vocabulary_used']:,} of {row['vocabulary']:,} tokens of the vocabulary, entropy "
            f"{row['entropy']:.3f} nats, {row['ends_of_documents']:,} ends of documents"
        )
        if row["beyond_vocabulary"]:
            yield f"  WRONG: {row['beyond_vocabulary']:,} tokens are outside of the vocabulary"
        yield f"  most frequent: {frequent}"
