"""The documents and the text in a global batch, or in a rank's part of it."""

from collections.abc import Iterator
from typing import Any

from megatron.checkpoint.sample_history import Segment
from megatron.config.errors import ConfigError
from megatron.data.index_maps import rank_sample_indices, sample_at
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
    tokenizer = case.tokenizer
    rows = []
    for data_rank in data_ranks:
        for index in rank_sample_indices(first_index, segment.global_batch_size, data_rank, segment.layout["DP"]):
            sample = sample_at(index, case.saved.skipped_samples)
            pieces = [
                {
                    "data": span.indexed.prefix,
                    "document": span.document,
                    "tokens": [span.start, span.stop],
                    "text": tokenizer.detokenize(span.tokens().tolist()),
                }
                for span in samples.spans(sample)
            ]
            rows.append({"sample": sample, "data_rank": data_rank, "pieces": pieces})
    return {
        "iteration": iteration,
        "global_batch_size": segment.global_batch_size,
        "layout": dict(segment.layout),
        "rank": rank,
        "samples": rows,
    }


def data_rank_of(segment: Segment, rank: int) -> int:
    """The data-parallel rank of a rank. Raises ConfigError if there was no such rank."""
    sizes = segment.layout
    ranks = sizes["PP"] * sizes["DP"] * sizes["SP"] * sizes["TP"]
    if not 0 <= rank < ranks:
        raise ConfigError(f"--rank {rank}: the run had ranks 0 to {ranks - 1} then")
    return rank // (sizes["SP"] * sizes["TP"]) % sizes["DP"]


def as_text(batch: dict[str, Any], characters: int) -> Iterator[str]:
    """The batch in lines, with at most ``characters`` of each text; 0 for all of it."""
    sizes = ", ".join(f"{axis} {size}" for axis, size in batch["layout"].items())
    of_rank = "" if batch["rank"] is None else f", those of rank {batch['rank']}"
    yield f"iteration {batch['iteration']}: {batch['global_batch_size']} samples on {sizes}{of_rank}"
    for row in batch["samples"]:
        yield f"sample {row['sample']}, data-parallel rank {row['data_rank']}"
        for piece in row["pieces"]:
            start, stop = piece["tokens"]
            text = piece["text"]
            shown = text if not characters or len(text) <= characters else text[:characters] + " ..."
            yield f"  {piece['data']} document {piece['document']}, tokens {start} to {stop - 1}: {shown!r}"
