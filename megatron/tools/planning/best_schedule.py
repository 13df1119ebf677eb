"""The pipeline schedule that makes a layout fastest."""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from operator import itemgetter

from megatron.config import ParallelConfig
from megatron.model.partition import explicit
from megatron.parallel.pipeline.schedule import has_order, schedule_with
from megatron.tools.planning.candidates import Candidate, Candidates
from megatron.tools.planning.request import as_flag
from megatron.tools.planning.timing import idle_ratio

_FLAGS = ("pipeline_schedule", "num_virtual_stages_per_pipeline_rank")
_GAIN = 0.01
"""Share of the time of an iteration for which the planner leaves 1F1B."""


def with_schedule(plain: Candidate, candidates: Candidates) -> Candidate:
    """``plain`` with the pipeline schedule that makes it fastest and lets it fit in memory; 1F1B if none does."""
    if not plain.fits or plain.timing.bubble < _GAIN * plain.timing.total or plain.run.model.encoder_num_layers:
        return plain
    enough = (1 - _GAIN) * plain.timing.total
    for estimate, parallel in sorted(_other_schedules(plain), key=itemgetter(0)):
        if estimate >= enough:
            break
        run = replace(plain.run, parallel=parallel)
        given = {name: as_flag(name, value) for name in _FLAGS if (value := getattr(parallel, name)) is not None}
        found = candidates.make_if_fits(run, {**plain.given, **given})
        if found and found.timing.total < enough and candidates.is_legal(run):
            return found
    return plain


def _other_schedules(plain: Candidate) -> Iterator[tuple[float, ParallelConfig]]:
    """The layout of ``plain`` with each pipeline schedule but 1F1B that its layers and micro-batches allow.

    With about the seconds of an iteration, in which each chunk sends as much as a stage of ``plain`` did.
    """
    micro_batches, spent = plain.run.train.gradient_accumulation_steps, plain.timing
    for parallel in _with_other_schedules(plain.run.parallel, plain.run.model.num_layers):
        chunks = parallel.chunks_per_stage
        is_round = parallel.pipeline_schedule != "interleaved" or micro_batches % parallel.pipe_stages == 0
        if is_round and has_order(parallel.pipeline_schedule, parallel.pipe_stages, micro_batches, chunks):
            useful = spent.compute + spent.tensor + chunks * spent.pipeline
            idle = idle_ratio(schedule_with(parallel, micro_batches), spent.passes)
            yield useful * (1 + idle) + spent.data, parallel


@lru_cache(maxsize=1024)
def _with_other_schedules(parallel: ParallelConfig, layers: int) -> tuple[ParallelConfig, ...]:
    """``parallel`` with each schedule for which there are enough of the model's ``layers``."""
    stages = parallel.pipe_stages
    if stages == 1 or explicit(parallel.pipeline_partition):
        return ()
    names = ("zbh1", "zbv", "dualpipev")
    found = [replace(parallel, pipeline_schedule=name) for name in names]
    for chunks in range(2, layers // stages + 1):
        if layers % (stages * chunks) == 0:
            virtual = replace(parallel, num_virtual_stages_per_pipeline_rank=chunks)
            found.append(replace(virtual, pipeline_schedule="interleaved"))
    return tuple(one for one in found if one.model_chunks <= layers)
