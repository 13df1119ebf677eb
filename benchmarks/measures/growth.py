"""How time and memory grow with the size of the work, beside what theory says.

Each curve is fitted by a power law over its three largest sizes, in every round: the exponent is the slope in a
double-logarithmic picture. Theory's exponent is fitted the same way to the model FLOPs of a step with attention in
full, to the planner's bytes, or to the bytes, tokens and ranks themselves. The limit of a step is the exponent of
torch's operators by themselves (``operators.py``). Times are CPU time of one process; memory is of live tensors, of one
rank. ``write_figures.py`` draws the curves.
"""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.comparing import Growth, Quantity, alternate, exponent, fitted
from benchmarks.measures.live_memory import measured_memory
from benchmarks.measures.operators import operators_step
from benchmarks.measures.ranks import measured_by_ranks
from benchmarks.measures.shapes import Shape
from benchmarks.measures.suite import engine_step, run_of
from megatron.checkpoint.tensor_files import read_file, write_file
from megatron.data.index_maps import sample_starts
from megatron.data.loader import Batch
from megatron.engines import deepspeed_silenced, silence_known_warnings
from megatron.launch.distributed import distributed
from megatron.parallel.layout import ParallelLayout
from megatron.tools.planning.memory import stage_memory

SHAPE = Shape(layers=2, hidden=256, heads=4, sequence=128, batch=2, vocabulary=512)
SIZES: dict[str, tuple[int, ...]] = {
    "layers": (1, 2, 4, 8, 16),
    "hidden": (128, 256, 512, 1024),
    "sequence": (128, 256, 512, 1024, 2048),
}
RANKS, TOKENS, MEGABYTES = (1, 2, 4, 8), (10**5, 10**6, 10**7, 10**8, 10**9), (10, 30, 100, 300)
DOCUMENT, SAMPLE = 665, 1024


def measure(rounds: int) -> list[Quantity]:
    """Steps of training, memory of a rank, data sets, checkpoints."""
    silence_known_warnings()
    torch.manual_seed(1)
    found: list[Quantity] = [_index_maps(rounds), *_checkpoints(rounds)]
    with distributed(run_of(SHAPE).parallel) as layout, deepspeed_silenced(verbose=False):
        for axis in SIZES:
            found += [*_steps(axis, rounds, layout), _memory(axis, layout)]
    return [*found, _ranks()]


def _steps(axis: str, rounds: int, layout: ParallelLayout) -> list[Quantity]:
    """The growth of a step, and beside it that of its operators alone, in the same rounds."""
    shapes = {size: replace(SHAPE, **{axis: size}) for size in SIZES[axis]}
    ways = {size: engine_step(run_of(shape), layout, *_tokens(shape)) for size, shape in shapes.items()}
    alone = {f"{size} alone": operators_step(shape) for size, shape in shapes.items()}
    times = alternate({**ways, **alone}, rounds, warm_up=2)
    by_round, limits = ([[times[name].cpu[n] for name in names] for n in range(rounds)] for names in (ways, alone))
    found = fitted(tuple(ways), by_round, [shape.flops for shape in shapes.values()], axis, "a step, s")
    theirs = [exponent(tuple(ways), values) for values in limits]
    return [found, Quantity(found.what, "operators alone", found.ours, theirs, "exponent", is_limit=True)]


def _memory(axis: str, layout: ParallelLayout) -> Growth:
    measured, planned = [], []
    for size in SIZES[axis]:
        shape = replace(SHAPE, **{axis: size})
        run, (tokens, labels) = run_of(shape), _tokens(shape)
        batch = Batch(tokens, (labels, torch.full(labels.shape, 1 / labels.numel())))
        measured.append(measured_memory(run, layout, repeat(batch), steps=2)["total"])
        planned.append(stage_memory(run)[0].total)
    return fitted(SIZES[axis], [measured], planned, axis, "memory, bytes")


def _ranks() -> Growth:
    """Weights, gradients and optimizer of ZeRO 3, the largest of a run's ranks."""
    kinds = ("weights", "gradients", "optimizer")
    found = [measured_by_ranks(ranks, "memory_ranks", "--zero-stage", "3", OMP_NUM_THREADS="1") for ranks in RANKS]
    states = [max(sum(rank["measured"][kind] for kind in kinds) for rank in of_run) for of_run in found]
    return fitted(RANKS, [states], [states[0] / ranks for ranks in RANKS], "ranks", "ZeRO 3 states of a rank, bytes")


def _index_maps(rounds: int) -> Growth:
    lengths = {n: np.full(max(n // DOCUMENT, 1), min(DOCUMENT, n), dtype=np.int32) for n in TOKENS}

    def build(tokens: int) -> Callable[[], Any]:
        samples = (int(lengths[tokens].sum()) - 1) // SAMPLE
        return lambda: sample_starts(lengths[tokens], samples, SAMPLE)

    return _timed(
        {n: build(n) for n in TOKENS}, rounds, dict(zip(TOKENS, TOKENS, strict=True)), "tokens", "index map, s"
    )


def _checkpoints(rounds: int) -> list[Growth]:
    states = {size: {"model": torch.randn(size * 250_000)} for size in MEGABYTES}
    theory = dict(zip(MEGABYTES, MEGABYTES, strict=True))
    with tempfile.TemporaryDirectory() as folder:
        files = {size: Path(folder) / f"{size}.pt" for size in MEGABYTES}

        def write(size: int) -> None:
            files[size].unlink(missing_ok=True)
            write_file(files[size], states[size])

        save = {size: partial(write, size) for size in MEGABYTES}
        load = {size: partial(read_file, files[size]) for size in MEGABYTES}
        return [
            _timed(save, rounds, theory, "megabytes", "saving, s"),
            _timed(load, rounds, theory, "megabytes", "loading, s"),
        ]


def _timed(
    ways: Mapping[int, Callable[[], Any]], rounds: int, theory: Mapping[int, float], axis: str, amount: str
) -> Growth:
    times = alternate(ways, rounds, warm_up=2)
    by_round = [[times[size].cpu[n] for size in ways] for n in range(rounds)]
    return fitted(tuple(ways), by_round, [theory[size] for size in ways], axis, amount)


def _tokens(shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels [b, s]."""
    tokens, labels = torch.randint(shape.vocabulary, (2, shape.batch, shape.sequence))
    return tokens, labels
