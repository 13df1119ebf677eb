"""Index maps of a data set: which tokens make sample j, against the compiled helper of megatron-core.

2 million documents of 665 tokens on average, and samples of 1,024. Both are given the order of the documents and
give the table of samples, which must be the same.
"""

import numpy as np

from benchmarks.comparing import Comparison, alternate
from benchmarks.measures.megatron_core import compiled_helpers, installed
from megatron.data.index_maps import sample_starts

DOCUMENTS, MEAN_LENGTH, SEQUENCE, GOAL = 2_000_000, 665, 1024, 0.4


def measure(rounds: int) -> list[Comparison]:
    """The table of samples of one epoch."""
    random = np.random.RandomState(1)
    lengths, order = random.geometric(1 / MEAN_LENGTH, DOCUMENTS).astype(np.int32), random.permutation(DOCUMENTS)
    order = order.astype(np.int32)
    tokens = int(lengths.sum(dtype=np.int64))
    samples = (tokens - 1) // SEQUENCE
    with installed() as folder:
        helpers = compiled_helpers(folder)
        made = {}

        def ours() -> None:
            made["suite"] = sample_starts(lengths[order], samples, SEQUENCE)

        def theirs() -> None:
            made["helper"] = helpers.build_sample_idx_int32(lengths, order, SEQUENCE, 1, tokens, True, 1)

        times = alternate({"suite": ours, "helper": theirs}, rounds)
    if not np.array_equal(made["suite"], made["helper"]):
        raise AssertionError("the two tables of samples differ")
    what = f"table of {samples:,} samples of {DOCUMENTS:,} documents, rows equal"
    return [Comparison(what, "megatron-core's C++", times["suite"], times["helper"], samples, "samples", GOAL)]
