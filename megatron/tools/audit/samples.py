"""The documents and the text in a global batch, and how often the run has seen each document."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.checkpoint.sample_history import Segment
from megatron.common.errors import ConfigError, DataError, counted
from megatron.data.datasets import BlendedDataset, IndexedSamples
from megatron.data.gpt2_dataset import GPT2Dataset
from megatron.data.index_maps import IndexMaps, rank_sample_indices, sample_at
from megatron.data.indexed_dataset import Span
from megatron.data.sentence_dataset import SentenceDataset
from megatron.tokenizer import Tokenizer
from megatron.tools.audit.case import Case


def batch_of(case: Case, iteration: int, rank: int | None) -> dict[str, Any]:
    """The samples of ``iteration``, in order, each with its spans of documents and their text.

    Args:
        rank: a rank of the run at that iteration, for its samples; None for all.

    Raises:
        ConfigError: no such iteration, or rank.
        CheckpointError, DataError: the samples are unknown, or the data are not the same.
    """
    segment = case.segment(iteration)
    data_ranks = range(segment.layout["DP"]) if rank is None else [data_rank_of(segment, rank)]
    first_index = segment.sample_indices(iteration).start
    samples = case.training_samples(case.samples_up_to(iteration))
    part = samples.parts[0] if isinstance(samples, BlendedDataset) else samples
    of_sentences, tokenizer = isinstance(part, SentenceDataset), case.tokenizer
    rows = []
    for data_rank in data_ranks:
        for index in rank_sample_indices(first_index, segment.global_batch_size, data_rank, segment.layout["DP"]):
            sample = sample_at(index, case.saved.skipped_samples)
            pieces = [_piece(span, tokenizer, of_sentences) for span in samples.spans(sample)]
            rows.append({"sample": sample, "data_rank": data_rank, "pieces": pieces})
    return {
        "iteration": iteration,
        "global_batch_size": segment.global_batch_size,
        "layout": dict(segment.layout),
        "rank": rank,
        "samples": rows,
    }


def _piece(span: Span, tokenizer: Tokenizer, of_sentences: bool) -> dict[str, Any]:
    sentences = span.sequences()
    return {
        "data": span.indexed.prefix,
        "document": span.document,
        **({"sentences": [sentences.start, sentences.stop]} if of_sentences else {}),
        "tokens": [span.start, span.stop],
        "text": tokenizer.detokenize(span.tokens().tolist()),
    }


def data_rank_of(segment: Segment, rank: int) -> int:
    """The data-parallel rank of a rank. Raises ConfigError if there was no such rank."""
    sizes = segment.layout
    ranks = sizes["PP"] * sizes["DP"] * sizes["SP"] * sizes["TP"]
    if not 0 <= rank < ranks:
        raise ConfigError(f"--rank {rank}: the run had ranks 0 to {ranks - 1} then")
    return rank // (sizes["SP"] * sizes["TP"]) % sizes["DP"]


def batch_as_text(batch: dict[str, Any], characters: int) -> Iterator[str]:
    """The batch in lines, with at most ``characters`` of each text; 0 for all of it."""
    sizes = ", ".join(f"{axis} {size}" for axis, size in batch["layout"].items())
    of_rank = "" if batch["rank"] is None else f", those of rank {batch['rank']}"
    yield f"iteration {batch['iteration']}: {counted(batch['global_batch_size'], 'sample')} on {sizes}{of_rank}"
    for row in batch["samples"]:
        yield f"sample {row['sample']}, data-parallel rank {row['data_rank']}"
        for piece in row["pieces"]:
            start, stop = piece["tokens"]
            text = piece["text"]
            shown = text if not characters or len(text) <= characters else text[:characters] + " ..."
            where = f"document {piece['document']}, {_sentences(piece)}tokens {start} to {stop - 1}"
            yield f"  {piece['data']} {where}: {shown!r}"


def _sentences(piece: dict[str, Any]) -> str:
    """The words for the sentences of a piece; none if its data have no sentences."""
    if "sentences" not in piece:
        return ""
    first, stop = piece["sentences"]
    return f"sentence {first}, " if stop - first == 1 else f"sentences {first} to {stop - 1}, "


BANDS = ((0, 0, "never"), (0, 1, "in part"), (1, 1, "once"), (1, np.inf, "more than once"))


@dataclass(frozen=True)
class Seen:
    """How much of one data set training has read."""

    prefix: str
    first_document: int
    lengths: np.ndarray
    """Tokens of each document of the training split, int64 [documents]."""
    tokens: np.ndarray
    """Tokens of each document that were read as input, counted each time, int64 [documents]."""

    @property
    def times(self) -> np.ndarray:
        """How often each document was seen, float64 [documents]; 0 if it is empty."""
        return self.tokens / np.maximum(self.lengths, 1)

    @property
    def epochs(self) -> float:
        """How often the data set was seen on average."""
        return float(self.tokens.sum() / max(self.lengths.sum(), 1))


def seen_up_to(case: Case, iteration: int) -> list[Seen]:
    """How much of each data set the iterations up to ``iteration`` have read.

    Raises:
        ConfigError: no such iteration.
        CheckpointError: the samples are unknown.
        DataError: the data are not the same, or their index maps contain a sample twice.
    """
    stop = case.samples_up_to(iteration)
    samples = case.training_samples(stop)
    taken = np.ones(stop, bool)
    for span in case.saved.skipped_samples:
        taken[span.start : span.stop] = False
    parts = samples.parts if isinstance(samples, BlendedDataset) else [samples]
    own = [taken]
    if isinstance(samples, BlendedDataset):
        sources = samples.order.sources(stop)
        own = [taken[sources == source] for source in range(len(parts))]
    return [_count(part, mask, case.data.seq_length) for part, mask in zip(parts, own, strict=True)]


def _count(part: IndexedSamples, taken: np.ndarray, seq_length: int) -> Seen:
    """How much of a data set is read by those of its first samples that are ``taken``, bool [n]."""
    assert isinstance(part, GPT2Dataset | SentenceDataset)
    starts = part.indexed.document_starts[part.documents.start : part.documents.stop + 1]
    lengths = np.diff(starts)
    tokens = np.zeros(len(lengths), np.int64)
    if isinstance(part, SentenceDataset):
        _add_runs(tokens, taken, part)
    else:
        _add_windows(tokens, lengths, taken, seq_length, part)
    return Seen(part.indexed.prefix, part.documents.start, lengths, tokens)


def _add_runs(tokens: np.ndarray, taken: np.ndarray, part: SentenceDataset) -> None:
    """Add to ``tokens`` those of each document that are in the first samples that are ``taken``, before any mask."""
    runs = part.maps.spans
    times = np.zeros(len(runs), np.int64)
    first = number = 0
    while first < len(taken):
        order = part.order(number)
        times += np.bincount(order[: len(taken) - first][taken[first : first + len(order)]], minlength=len(runs))
        first, number = first + len(order), number + 1
    bounds = part.indexed.doc_idx[part.documents.start : part.documents.stop + 1]
    sizes = part.indexed.sizes[bounds[0] : bounds[-1]]
    before = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])  # tokens before each sentence, and in all
    read = np.minimum(before[runs[:, 1]] - before[runs[:, 0]], runs[:, 2])
    np.add.at(tokens, np.searchsorted(bounds - bounds[0], runs[:, 0], "right") - 1, times * read)


def _add_windows(
    tokens: np.ndarray, lengths: np.ndarray, taken: np.ndarray, seq_length: int, part: GPT2Dataset
) -> None:
    """Add to ``tokens`` those of each document that are read by the first samples that are ``taken``."""
    first = number = 0
    while first < len(taken):
        maps = part.maps.window(number)
        _add_window(tokens, lengths, maps, taken[first : first + len(maps.shuffle)], seq_length, part)
        first, number = first + len(maps.shuffle), number + 1


def _add_window(
    tokens: np.ndarray, lengths: np.ndarray, maps: IndexMaps, taken: np.ndarray, seq_length: int, part: GPT2Dataset
) -> None:
    """Add to ``tokens`` those of each document that are read by the first samples of a window that are ``taken``."""
    numbers = maps.shuffle[: len(taken)].astype(np.int64)
    if len(np.unique(numbers)) != len(numbers):
        raise DataError(
            f"the index maps of {part.indexed.prefix} contain a sample twice: remove them to build new ones"
        )
    # Sample j has seq_length tokens as input, from offset + j * seq_length on of the stream of documents.
    covered = np.zeros(len(maps.samples), np.int64)
    covered[numbers[taken] + 1] = seq_length
    before = np.cumsum(covered)
    offset = int(maps.samples[0, 1] + lengths[maps.documents[: maps.samples[0, 0]]].sum())
    ends = np.cumsum(lengths[maps.documents])
    seen = _seen_before(np.maximum(ends - offset, 0), before, covered, seq_length)
    np.add.at(tokens, maps.documents, np.diff(seen, prepend=0))


def _seen_before(position: np.ndarray, before: np.ndarray, covered: np.ndarray, seq_length: int) -> np.ndarray:
    """Tokens read before each position of the stream, int64 like ``position``."""
    sample, offset = np.divmod(position, seq_length)
    beyond = sample >= len(before) - 1
    sample = np.minimum(sample, len(before) - 2)
    inside = np.where(covered[sample + 1] > 0, offset, 0)
    return np.where(beyond, before[-1], before[sample] + inside)


def seen_as_dict(found: Sequence[Seen]) -> list[dict[str, Any]]:
    """The figures of each data set, for JSON and for ``seen_as_text``."""
    rows = []
    for seen in found:
        times = seen.times[seen.lengths > 0]
        rows.append(
            {
                "data": seen.prefix,
                "documents": len(seen.lengths),
                "tokens_seen": int(seen.tokens.sum()),
                "tokens": int(seen.lengths.sum()),
                "epochs": seen.epochs,
                "most": float(times.max(initial=0)),
                **{words: _within(times, low, high) for low, high, words in BANDS},
            }
        )
    return rows


def _within(times: np.ndarray, low: float, high: float) -> int:
    inside = times == low if low == high else (times > low) & (times < high)
    return int(np.count_nonzero(inside))


def seen_as_text(found: Sequence[Seen], iteration: int) -> Iterator[str]:
    """In lines."""
    for row in seen_as_dict(found):
        bands = ", ".join(f"{row[words]:,} {words}" for *_, words in BANDS)
        yield (
            f"{row['data']}: {row['epochs']:.4f} epochs up to iteration {iteration} ({row['tokens_seen']:,} of "
            f"{row['tokens']:,} tokens); of {row['documents']:,} documents {bands}; {row['most']:.2f} times at most"
        )


def seen_as_table(found: Sequence[Seen]) -> Iterator[str]:
    """A line for each document: data set, number, tokens, and how often it was seen; divided by tabs."""
    yield "data\tdocument\ttokens\tseen"
    for seen in found:
        for number, (length, times) in enumerate(zip(seen.lengths.tolist(), seen.times.tolist(), strict=True)):
            yield f"{seen.prefix}\t{seen.first_document + number}\t{length}\t{times:.6g}"
