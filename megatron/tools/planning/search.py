"""Every valid layout of a model on a machine, with memory, traffic and time; and the reasons against the others.

A candidate is the same command line with the flags of a layout, so ``resolve_run`` and the validation rules decide
which layouts are valid.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import itemgetter
from typing import Any

from megatron.cli.provided import Provided
from megatron.cli.resolve import resolve_run
from megatron.cli.validation import broken_rule
from megatron.config import ParallelConfig, RunConfig
from megatron.config.model import padded_vocabulary
from megatron.model.partition import explicit
from megatron.parallel.pipeline.schedule import has_order, schedule_with
from megatron.tools.planning.candidates import Candidate, Candidates
from megatron.tools.planning.request import Request, as_flag
from megatron.tools.planning.timing import idle_ratio

RECOMPUTE = (None, "selective", "full")
LONG = 8192
"""Tokens: context parallelism is searched of sequences of which each rank has as many or more."""


@dataclass(frozen=True)
class Rejection:
    """Layouts that break the same rule."""

    reason: str
    layouts: int
    example: str
    """The message for the first of them."""


@dataclass(frozen=True)
class Plan:
    """The result of a search."""

    fitting: list[Candidate]
    """The fastest first."""
    too_large: list[Candidate]
    """Valid layouts that do not fit in memory, the smallest first."""
    rejections: list[Rejection]
    """Invalid layouts, the most frequent reason first."""

    @property
    def looked_at(self) -> int:
        """Layouts of all kinds."""
        return len(self.fitting) + len(self.too_large) + sum(rejection.layouts for rejection in self.rejections)


def search(request: Request, *, any_schedule: bool = False) -> Plan:
    """All layouts of ``request``; with ``any_schedule`` each with the pipeline schedule that makes it fastest.

    A schedule that is given stays.
    """
    rejected: dict[str, Rejection] = {}
    candidates = Candidates(request)
    found = [
        candidates.make(run, given)
        for flags in _layouts(request)
        for run, given in _with_micro_batches(request, flags, rejected)
    ]
    if any_schedule and "pipeline_schedule" not in request.given:
        found = [with_schedule(candidate, candidates) for candidate in found]
    fitting = [candidate for candidate in found if candidate.fits]
    too_large = [candidate for candidate in found if not candidate.fits]
    return Plan(
        sorted(fitting, key=lambda candidate: (candidate.timing.total, candidate.memory.total)),
        sorted(too_large, key=lambda candidate: candidate.memory.total),
        sorted(rejected.values(), key=lambda rejection: -rejection.layouts),
    )


def _layouts(request: Request) -> Iterator[dict[str, Provided]]:
    """The flags of every layout, without the micro-batch.

    One pipeline stage runs on either engine. Context parallelism is searched for long sequences, and expert parallelism
    for models with experts.
    """
    seq_length = request.given["seq_length"].value if "seq_length" in request.given else 0
    contexts = [size for size in _divisors(request.devices) if size <= seq_length // LONG]
    num_experts = request.given["num_experts"].value if "num_experts" in request.given else 1
    experts = [size for size in _divisors(request.devices) if num_experts % size == 0]
    half_precision = any(request.given[name].value for name in ("fp16", "bf16") if name in request.given)
    axes = {
        "context_parallel_size": _axis(request, "context_parallel_size", [None, *contexts[1:]]),
        "expert_model_parallel_size": _axis(request, "expert_model_parallel_size", [None, *experts[1:]]),
        "zero_stage": _axis(request, "zero_stage", range(1 if half_precision else 0, 4)),  # with half precision 0 is 1
        "sequence_parallel": _axis(request, "sequence_parallel", (None, True)),
        "recompute_granularity": _axis(
            request, "recompute_granularity", (None,) if "checkpoint_activations" in request.given else RECOMPUTE
        ),
    }
    for t in _axis(request, "model_parallel_size", _divisors(request.devices)):
        stages = _axis(request, "pipe_parallel_size", (0, *_divisors(request.devices // t.value or 1)))
        for p, *values in itertools.product(stages, *axes.values()):
            chosen = {"model_parallel_size": t, "pipe_parallel_size": p, **dict(zip(axes, values, strict=True))}
            yield {**request.given, **{name: value for name, value in chosen.items() if value is not None}}


def _axis(request: Request, name: str, values: Sequence[object]) -> list[Any]:
    """The values of a field to search: the given one, or each of ``values``; None leaves the default."""
    if name in request.given:
        return [request.given[name]]
    return [None if value is None else as_flag(name, value) for value in values]


def _with_micro_batches(
    request: Request, flags: Mapping[str, Provided], rejected: dict[str, Rejection]
) -> Iterator[tuple[RunConfig, dict[str, Provided]]]:
    """The valid layouts with these ``flags``, a run for each micro-batch; the others are counted in ``rejected``."""
    if {"micro_batch_size", "gradient_accumulation_steps"} & flags.keys():
        if run := _resolved(request, flags, rejected):
            yield run, {**flags, "micro_batch_size": as_flag("micro_batch_size", run.train.micro_batch_size)}
        return

    def of_size(size: int) -> dict[str, Provided]:
        return {**flags, "micro_batch_size": as_flag("micro_batch_size", size)}

    smallest = _resolved(request, of_size(1), rejected)  # which breaks the fewest rules
    if smallest is None:
        return
    yield smallest, of_size(1)
    for size in _divisors(smallest.train.global_batch_size // smallest.parallel.data_parallel_size)[1:]:
        if run := _resolved(request, of_size(size), rejected):
            yield run, of_size(size)


def _resolved(request: Request, given: Mapping[str, Provided], rejected: dict[str, Rejection]) -> RunConfig | None:
    """The run of a command line, with its vocabulary; None if it breaks a rule, which is counted in ``rejected``."""
    run, problems = resolve_run(given, request.environ, request.architecture)
    broken = ("the global batch falls into equal parts", problems[0]) if problems else broken_rule(run)
    if broken:
        reason, example = broken
        earlier = rejected.get(reason, Rejection(reason, 0, example))
        rejected[reason] = replace(earlier, layouts=earlier.layouts + 1)
        return None
    model, size = run.model, request.vocab_size
    padded = padded_vocabulary(size, run.parallel.model_parallel_size, model.make_vocab_size_divisible_by)
    return replace(run, model=replace(model, vocab_size=size, padded_vocab_size=padded))


@lru_cache(maxsize=1024)
def _divisors(number: int) -> tuple[int, ...]:
    return tuple(size for size in range(1, number + 1) if number % size == 0)


_SCHEDULE_FLAGS = ("pipeline_schedule", "num_virtual_stages_per_pipeline_rank")
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
        flags = {name: value for name in _SCHEDULE_FLAGS if (value := getattr(parallel, name)) is not None}
        given = {name: as_flag(name, value) for name, value in flags.items()}
        found = candidates.make(run, {**plain.given, **given})
        if found.fits and found.timing.total < enough and broken_rule(run) is None:
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
    found = [replace(parallel, pipeline_schedule=name) for name in ("zbh1", "zbv", "dualpipev")]
    for chunks in range(2, layers // stages + 1):
        if layers % (stages * chunks) == 0:
            virtual = replace(parallel, num_virtual_stages_per_pipeline_rank=chunks)
            found.append(replace(virtual, pipeline_schedule="interleaved"))
    return tuple(one for one in found if one.model_chunks <= layers)
