"""Which documents, and what text, made a global batch, or a rank's part of it."""

from collections.abc import Iterator
from typing import Any

from megatron.checkpoint.sample_history import Stretch
from megatron.config.errors import ConfigError
from megatron.data.index_maps import rank_sample_indices, sample_at
from megatron.tools.audit.case import Case


def batch_of(case: Case, iteration: int, rank: int | None) -> dict[str, Any]:
    """What iteration ``iteration`` took: its samples, in order, each with its pieces of documents and their text.

    Args:
        rank: a rank of the run as it was then, to have what that took; None for all.

    Raises:
        ConfigError: no such iteration, or rank.
        CheckpointError, DataError: the ledger or the data do not tell.
    """
    stretch = case.stretch(iteration)
    data_ranks = range(stretch.layout["DP"]) if rank is None else [data_rank_of(stretch, rank)]
    places = stretch.places(iteration)
    samples = case.training_samples(sample_at(places.stop - 1, case.saved.left_out) + 1)
    tokenizer = case.tokenizer
    rows = []
    for data_rank in data_ranks:
        for place in rank_sample_indices(places.start, stretch.global_batch_size, data_rank, stretch.layout["DP"]):
            sample = sample_at(place, case.saved.left_out)
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
        "global_batch_size": stretch.global_batch_size,
        "layout": dict(stretch.layout),
        "rank": rank,
        "samples": rows,
    }


def data_rank_of(stretch: Stretch, rank: int) -> int:
    """The place of a rank among the data-parallel ones. Raises ConfigError where there was no such rank."""
    sizes = stretch.layout
    ranks = sizes["PP"] * sizes["DP"] * sizes["SP"] * sizes["TP"]
    if not 0 <= rank < ranks:
        raise ConfigError(f"--rank {rank}: the run had ranks 0 to {ranks - 1} then")
    return rank // (sizes["SP"] * sizes["TP"]) % sizes["DP"]


def as_text(batch: dict[str, Any], characters: int) -> Iterator[str]:
    """The batch in lines, with so many characters of each text; 0 for all of it."""
    sizes = ", ".join(f"{axis} {size}" for axis, size in batch["layout"].items())
    whose = "" if batch["rank"] is None else f", what rank {batch['rank']} took"
    yield f"iteration {batch['iteration']}: {batch['global_batch_size']} samples on {sizes}{whose}"
    for row in batch["samples"]:
        yield f"sample {row['sample']}, data-parallel rank {row['data_rank']}"
        for piece in row["pieces"]:
            start, stop = piece["tokens"]
            text = piece["text"]
            shown = text if not characters or len(text) <= characters else text[:characters] + " ..."
            yield f"  {piece['data']} document {piece['document']}, tokens {start} to {stop - 1}: {shown!r}"
