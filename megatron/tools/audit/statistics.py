"""Statistics of the data: tokens, vocabulary, lengths of documents, and duplicate documents."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from megatron.config.data import SPLITS
from megatron.data.datasets import BlendedDataset
from megatron.data.splits import SPLIT_NAMES, Source, all_sources
from megatron.tokenizer import Tokenizer
from megatron.tools.audit.case import Case

_SHOWN = 5
_DIGEST = np.dtype("V16")


class Documents(NamedTuple):
    """The documents of a split."""

    digests: np.ndarray
    """A hash of each one's tokens, 16 bytes [documents]."""
    tokens: np.ndarray
    """int64 [documents]"""
    sources: Sequence[Source]

    def name(self, number: int) -> str:
        """The name of a document: its data set and its number there."""
        for _, indexed, documents in self.sources:
            if number < len(documents):
                return f"{indexed.prefix} document {documents.start + number}"
            number -= len(documents)
        raise IndexError(number)


def hash_documents(sources: Sequence[Source], eod: int | None) -> Documents:
    """Hash the documents of a split, whatever the type of their tokens, and without a final ``eod``."""
    digests, tokens = [], []
    for source in sources:
        _, indexed, documents = source
        starts = indexed.document_starts
        hashes = bytearray()
        for document in documents:
            text = indexed.span(int(starts[document]), int(starts[document + 1] - starts[document])).astype("<i4")
            text = text[:-1] if len(text) and text[-1] == eod else text
            hashes += hashlib.blake2b(text.data, digest_size=_DIGEST.itemsize).digest()
        digests.append(np.frombuffer(bytes(hashes), _DIGEST))
        tokens.append(document_lengths(source))
    return Documents(np.concatenate(digests), np.concatenate(tokens), sources)


def find_overlaps(splits: Mapping[str, Sequence[Source]], eod: int | None) -> dict[str, Any]:
    """Documents of validation and test that are also in an earlier split, and documents repeated within a split."""
    hashed = {name: hash_documents(splits[name], eod) for name in SPLITS if name in splits}
    return {
        "within": [_repeated(name, documents) for name, documents in hashed.items()],
        "between": [_shared(first, second, hashed[first], hashed[second]) for first, second in combinations(hashed, 2)],
    }


def overlaps(found: Mapping[str, Any]) -> bool:
    """Whether two splits share a document."""
    return any(row["documents"] for row in found["between"])


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


def overlaps_as_text(found: Mapping[str, Any]) -> Iterator[str]:
    """The result in lines."""
    for row in found["within"]:
        yield (
            f"{SPLIT_NAMES[row['split']]}: {row['documents']:,} documents, {row['different']:,} different ones, "
            f"the most frequent {row['most']:,} times"
        )
    for row in found["between"]:
        first, second = (SPLIT_NAMES[name] for name in row["splits"])
        yield (
            f"{second} in {first}: {row['documents']:,} of {row['of']:,} documents, {row['tokens']:,} of "
            f"{row['of_tokens']:,} tokens"
        )
        yield from (f"  {later} is {earlier}" for later, earlier in row["examples"])


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


def statistics_as_text(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The figures in lines."""
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


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_POINTS = 200
"""Iterations at which the mix is drawn."""


def draw(case: Case) -> "Figure":
    """A figure of the lengths of training documents, and of the mix of data sets over the iterations.

    Raises CheckpointError or DataError if the samples are unknown, or the data are not the same.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    sources = all_sources(case.data)["train"]
    ends, mix = source_mix(case)
    with rc_context({"font.size": 11, "axes.titlesize": 12, "axes.grid": True, "grid.alpha": 0.3}):
        figure = Figure(figsize=(12, 8), dpi=120, layout="constrained")
        figure.suptitle(f"What {case.saved.path} was trained on", fontsize=15)
        above, below = figure.subplots(2)
        _draw_lengths(above, sources, case.data.seq_length)
        _draw_mix(below, sources, ends, mix)
    return figure


def source_mix(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """The share of each data set in the samples, in intervals of iterations.

    Returns the ends of the intervals, int64 [n], and the shares, float64 [n, data sets].
    """
    last = case.saved.iteration
    ends = np.unique(np.linspace(0, last, min(last, _POINTS) + 1).astype(np.int64))[1:]
    stops = [case.samples_up_to(iteration) for iteration in ends.tolist()]
    samples = case.training_samples(stops[-1])
    if not isinstance(samples, BlendedDataset):
        return ends, np.ones((len(ends), 1))
    counts = np.array([samples.order.counts(stop) for stop in stops])
    steps = np.diff(counts, axis=0, prepend=0)
    return ends, steps / steps.sum(axis=1, keepdims=True)


def _draw_lengths(axes: "Axes", sources: Sequence[Source], seq_length: int) -> None:
    lengths = [np.maximum(document_lengths(source), 1) for source in sources]
    together = np.concatenate(lengths)
    bins = np.geomspace(together.min(), together.max() + 1, 60).tolist()
    for number, (source, length) in enumerate(zip(sources, lengths, strict=True)):
        axes.hist(length, bins, histtype="stepfilled", alpha=0.5, color=f"C{number}", label=source.indexed.prefix)
    axes.axvline(seq_length, color="black", linestyle="--", label=f"a sample, {seq_length} tokens")
    axes.set(title="Length of training documents", xlabel="tokens", ylabel="documents", xscale="log")
    axes.legend()


def _draw_mix(axes: "Axes", sources: Sequence[Source], ends: np.ndarray, mix: np.ndarray) -> None:
    # Each value holds from the end of the iterations before to its own.
    edges = np.concatenate([[0], ends])
    below = np.zeros(len(ends))
    for number, source in enumerate(sources):
        above = below + mix[:, number]
        label = f"{source.indexed.prefix}, {float(source.share):.2%} asked for"
        axes.stairs(above, edges, baseline=below, fill=True, alpha=0.6, color=f"C{number}", label=label)
        below = above
    axes.set(title="Mix of data sets", xlabel="iteration", ylabel="share of the samples", ylim=(0, 1))
    axes.legend(loc="lower right")
