"""A picture of what a run was trained on: how long documents are, and how much of each data set came when."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from megatron.audit.case import Case
from megatron.audit.statistics import document_lengths
from megatron.data.blended_dataset import BlendedDataset
from megatron.data.places import sample_number
from megatron.data.sources import Source, all_sources

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_POINTS = 200
"""Places along the run at which the mix is drawn."""


def draw(case: Case) -> "Figure":
    """Lengths of training documents above, the mix of data sets over the iterations below.

    Raises CheckpointError and DataError where checkpoint and data do not tell.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    sources = all_sources(case.data)["train"]
    ends, mix = source_mix(case)
    with rc_context({"font.size": 11, "axes.titlesize": 12, "axes.grid": True, "grid.alpha": 0.3}):
        figure = Figure(figsize=(12, 8), dpi=120, layout="constrained")
        figure.suptitle(f"What {case.place} was trained on", fontsize=15)
        above, below = figure.subplots(2)
        _draw_lengths(above, sources, case.data.seq_length)
        _draw_mix(below, sources, ends, mix)
    return figure


def source_mix(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """The part of each data set in the samples between some iterations of the run and the ones before them.

    Returns the iterations, int64 [n], and the parts, float64 [n, data sets].
    """
    last = case.saved.iteration
    case.stretch(1)
    ends = np.unique(np.linspace(0, last, min(last, _POINTS) + 1).astype(np.int64))[1:]
    stops = [sample_number(case.stretch(int(end)).places(int(end)).stop - 1, case.saved.left_out) + 1 for end in ends]
    samples = case.training_samples(stops[-1])
    if not isinstance(samples, BlendedDataset):
        return ends, np.ones((len(ends), 1))
    counts = np.array([samples.order.counts(stop) for stop in stops])
    steps = np.diff(counts, axis=0, prepend=0)
    return ends, steps / steps.sum(axis=1, keepdims=True)


def _draw_lengths(axes: "Axes", sources: Sequence[Source], seq_length: int) -> None:
    lengths = [np.maximum(document_lengths(source), 1) for source in sources]
    together = np.concatenate(lengths)
    bins = np.geomspace(together.min(), together.max() + 1, 60)
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
    axes.set(title="Mix of data sets", xlabel="iteration", ylabel="part of the samples", ylim=(0, 1))
    axes.legend(loc="lower right")
