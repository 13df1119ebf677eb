"""Lists the documents and texts of a global batch, and how often the run was trained on each document."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.checkpoint.sample_history import Segment
from megatron.common.errors import ConfigError, counted
from megatron.data.datasets import (
    BlendedDataset,
    PretrainingSamples,
    rank_sample_indices,
    sample_at,
)
from megatron.data.gpt2_dataset import GPT2Dataset
from megatron.data.indexed_dataset import Span
from megatron.data.sentence_dataset import SentenceDataset
from megatron.tokenizer import Tokenizer
from megatron.tools.audit.case import Case


def batch_of(case: Case, iteration: int, rank: int | None) -> dict[str, Any]:
    """The samples of ``iteration``, in order, each with its spans of documents and their text.

    Args:
        rank: list only the samples of this rank of the run at that iteration; None lists all.

    Raises:
        ConfigError: no such iteration, or rank.
        CheckpointError, DataError: the samples are unknown, or the data have changed.
    """
    segment = case.segment(iteration)
    data_ranks = range(segment.layout["DP"]) if rank is None else [data_rank_of(segment, rank)]
    first_index = segment.sample_indices(iteration).start
    samples = case.training_samples(case.samples_up_to(iteration))
    part = samples.parts[0] if isinstance(samples, BlendedDataset) else samples
    has_sentences, tokenizer = isinstance(part, SentenceDataset), case.tokenizer
    rows = []
    for data_rank in data_ranks:
        for index in rank_sample_indices(first_index, segment.global_batch_size, data_rank, segment.layout["DP"]):
            sample = sample_at(index, case.saved.skipped_samples)
            with samples.reading_maps():
                pieces = [_piece(span, tokenizer, has_sentences) for span in samples.spans(sample)]
            rows.append({"sample": sample, "data_rank": data_rank, "pieces": pieces})
    return {
        "iteration": iteration,
        "global_batch_size": segment.global_batch_size,
        "layout": dict(segment.layout),
        "rank": rank,
        "samples": rows,
    }


def _piece(span: Span, tokenizer: Tokenizer, has_sentences: bool) -> dict[str, Any]:
    sentences = span.sequences()
    return {
        "data": span.indexed.prefix,
        "document": span.document,
        **({"sentences": [sentences.start, sentences.stop]} if has_sentences else {}),
        "tokens": [span.start, span.stop],
        "text": tokenizer.detokenize(span.tokens().tolist()),
    }


def data_rank_of(segment: Segment, rank: int) -> int:
    """The data-parallel rank of ``rank`` in a segment of the run. Raises ConfigError if there was no such rank."""
    sizes = segment.layout
    ranks = sizes["PP"] * sizes["DP"] * sizes["SP"] * sizes["TP"]
    if not 0 <= rank < ranks:
        raise ConfigError(f"--rank {rank}: the run had ranks 0 to {ranks - 1} then")
    return rank // (sizes["SP"] * sizes["TP"]) % sizes["DP"]


def batch_as_text(batch: dict[str, Any], characters: int) -> Iterator[str]:
    """The batch as lines of text, with at most ``characters`` of each text; 0 for no limit."""
    sizes = ", ".join(f"{axis} {size}" for axis, size in batch["layout"].items())
    rank_text = "" if batch["rank"] is None else f", samples of rank {batch['rank']}"
    yield f"iteration {batch['iteration']}: {counted(batch['global_batch_size'], 'sample')} on {sizes}{rank_text}"
    for row in batch["samples"]:
        yield f"sample {row['sample']}, data-parallel rank {row['data_rank']}"
        for piece in row["pieces"]:
            start, stop = piece["tokens"]
            text = piece["text"]
            excerpt = text if not characters or len(text) <= characters else text[:characters] + " ..."
            where = f"document {piece['document']}, {_sentences(piece)}tokens {start} to {stop - 1}"
            yield f"  {piece['data']} {where}: {excerpt!r}"


def _sentences(piece: dict[str, Any]) -> str:
    """Text about the sentences of a piece; empty if its data have no sentences."""
    if "sentences" not in piece:
        return ""
    first, stop = piece["sentences"]
    return f"sentence {first}, " if stop - first == 1 else f"sentences {first} to {stop - 1}, "


BANDS = ((0, 0, "never"), (0, 1, "in part"), (1, 1, "once"), (1, np.inf, "more than once"))


@dataclass(frozen=True)
class Seen:
    """How much of a data set the run was trained on."""

    prefix: str
    first_document: int
    lengths: np.ndarray
    """Tokens of each document of the training split, int64 [documents]."""
    tokens: np.ndarray
    """Tokens of each document read as input, before masking, with repetitions, int64 [documents]."""

    @property
    def times(self) -> np.ndarray:
        """How often each document was seen, float64 [documents]; 0 if it is empty."""
        return self.tokens / np.maximum(self.lengths, 1)

    @property
    def epochs(self) -> float:
        """How often the data set was seen on average."""
        return float(self.tokens.sum() / max(self.lengths.sum(), 1))


def seen_up_to(case: Case, iteration: int) -> Iterator[Seen]:
    """Yield for each data set how much of it was read up to ``iteration``.

    Raises:
        ConfigError: no such iteration.
        CheckpointError: the samples are unknown.
        DataError: the data have changed.
    """
    stop = case.samples_up_to(iteration)
    samples = case.training_samples(stop)
    blend = samples if isinstance(samples, BlendedDataset) else None
    parts = samples.parts if isinstance(samples, BlendedDataset) else [samples]
    counts = blend.order.counts(stop) if blend else [stop]
    skipped = defaultdict[int, list[int]](list)
    for span in case.saved.skipped_samples:
        for sample in range(span.start, min(span.stop, stop)):
            source, index = blend.order[sample] if blend else (0, sample)
            skipped[source].append(index)
    for source, part in enumerate(parts):
        assert isinstance(part, PretrainingSamples)
        lengths = part.indexed.lengths_of(np.arange(part.documents.start, part.documents.stop))
        read = counts[source], skipped[source]
        with part.reading_maps():
            if isinstance(part, GPT2Dataset):
                tokens = _gpt2_tokens_read(part, lengths, *read)
            else:
                tokens = _span_tokens_read(part, lengths, *read)
        yield Seen(part.indexed.prefix, part.documents.start, lengths, tokens)


def _span_tokens_read(part: PretrainingSamples, lengths: np.ndarray, count: int, skipped: Sequence[int]) -> np.ndarray:
    """Tokens of each document in the first ``count`` samples, without the samples ``skipped``, int64 [documents]."""
    tokens = np.zeros_like(lengths)
    for index in sorted({*range(count)} - {*skipped}):
        for span in part.spans(index):
            tokens[span.document - part.documents.start] += span.stop - span.start
    return tokens


def _gpt2_tokens_read(part: GPT2Dataset, lengths: np.ndarray, count: int, skipped: Sequence[int]) -> np.ndarray:
    """As ``_span_tokens_read`` for samples of GPT-2, without the last token of each sample, which is only a label."""
    stream, tokens = part.stream, np.zeros_like(lengths)
    for epoch in range(stream.epoch_of(count - 1) + 1 if count else 0):
        first, end = stream.first_sample(epoch), stream.first_sample(epoch + 1)
        maps, is_read = part.maps(epoch), np.zeros(end - first + 1, np.int64)
        is_read[maps.shuffle[np.setdiff1d(np.arange(first, min(end, count)), skipped) - first]] = 1
        # Ends of documents, counted from the start of the first sample, and the number of tokens read up to each end.
        before = first * stream.seq_length - epoch * stream.tokens
        ends = np.cumsum(np.append(0, lengths[maps.documents])) - before
        sample, rest = np.divmod(np.clip(ends, 0, (end - first) * stream.seq_length), stream.seq_length)
        read = (np.cumsum(is_read) - is_read)[sample] * stream.seq_length + is_read[sample] * rest
        tokens += np.bincount(maps.documents, np.diff(read), len(lengths)).astype(np.int64)
    return tokens


def seen_as_dict(seen: Seen) -> dict[str, Any]:
    """The statistics of a data set, for JSON and for ``seen_as_text``."""
    times = seen.times[seen.lengths > 0]
    return {
        "data": seen.prefix,
        "documents": len(seen.lengths),
        "tokens_seen": int(seen.tokens.sum()),
        "tokens": int(seen.lengths.sum()),
        "epochs": seen.epochs,
        "most": float(times.max(initial=0)),
        **{label: _within(times, low, high) for low, high, label in BANDS},
    }


def _within(times: np.ndarray, low: float, high: float) -> int:
    inside = times == low if low == high else (times > low) & (times < high)
    return int(np.count_nonzero(inside))


def seen_as_text(rows: Sequence[dict[str, Any]], iteration: int) -> Iterator[str]:
    """The rows of ``seen_as_dict`` as lines of text."""
    for row in rows:
        bands = ", ".join(f"{row[label]:,} {label}" for *_, label in BANDS)
        yield (
            f"{row['data']}: {row['epochs']:.4f} epochs up to iteration {iteration} ({row['tokens_seen']:,} of "
            f"{row['tokens']:,} tokens); of {row['documents']:,} documents {bands}; {row['most']:.2f} times at most"
        )


HEADING = "data\tdocument\ttokens\tseen"


def seen_as_table(seen: Seen) -> Iterator[str]:
    """A tab-separated line for each document: data set, number, tokens, and how often it was seen."""
    for number, (length, times) in enumerate(zip(seen.lengths.tolist(), seen.times.tolist(), strict=True)):
        yield f"{seen.prefix}\t{seen.first_document + number}\t{length}\t{times:.6g}"
