"""Every valid layout of a model on a machine, with memory, traffic and time; and the reasons against the others.

A candidate is the same command line with the flags of a layout, so ``resolve_run`` and the validation rules decide
which layouts are valid. What the candidates of a grid share is computed once.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

from megatron.cli.resolve import resolve_run
from megatron.cli.validation import broken_rule
from megatron.config import ModelConfig, ParallelConfig, RunConfig, TrainConfig
from megatron.config.fields import Provided
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
    candidates, choices = Candidates(request), list(_choices(request))
    found = [
        candidates.make(run, given)
        for shape in _shapes(request)
        for run, given in _valid(request, shape, choices, rejected)
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


def _shapes(request: Request) -> Iterator[dict[str, Provided]]:
    """Tensor-parallel size and stages of every grid, with one stage on either engine; of long sequences the size of
    context parallelism, and with experts the size of expert parallelism."""
    seq_length = request.given["seq_length"].value if "seq_length" in request.given else 0
    sizes = [size for size in _divisors(request.devices) if size <= seq_length // LONG]
    experts = request.given["num_experts"].value if "num_experts" in request.given else 1
    shares = [size for size in _divisors(request.devices) if experts % size == 0]
    for t in _axis(request, "model_parallel_size", _divisors(request.devices)):
        stages = (0, *_divisors(request.devices // t.value or 1))
        for p in _axis(request, "pipe_parallel_size", stages):
            for c in _axis(request, "context_parallel_size", [None, *sizes[1:]]):
                for e in _axis(request, "expert_model_parallel_size", [None, *shares[1:]]):
                    shape = {"model_parallel_size": t, "pipe_parallel_size": p, "context_parallel_size": c}
                    shape["expert_model_parallel_size"] = e
                    yield {name: given for name, given in shape.items() if given}


class _Choice(NamedTuple):
    """The settings of a layout that do not depend on its shape, and the run with these settings only."""

    given: Mapping[str, Provided]
    run: RunConfig

    def of(self, shaped: RunConfig) -> RunConfig:
        """``shaped``, which has the sizes of a shape, with these settings."""
        chosen, parallel = self.run, shaped.parallel
        if parallel.sequence_parallel is not chosen.parallel.sequence_parallel:
            parallel = replace(parallel, sequence_parallel=chosen.parallel.sequence_parallel)
        return replace(shaped, parallel=parallel, model=chosen.model, zero=chosen.zero, activation=chosen.activation)


def _choices(request: Request) -> Iterator[_Choice]:
    """The settings of each layout of a grid, without the micro-batch."""
    recompute = (None,) if "checkpoint_activations" in request.given else RECOMPUTE
    half_precision = any(request.given[name].value for name in ("fp16", "bf16") if name in request.given)
    axes = {
        "zero_stage": _axis(request, "zero_stage", range(1 if half_precision else 0, 4)),  # there 0 runs as 1
        "sequence_parallel": _axis(request, "sequence_parallel", (None, True)),
        "recompute_granularity": _axis(request, "recompute_granularity", recompute),
    }
    for values in itertools.product(*axes.values()):
        given = {name: value for name, value in zip(axes, values, strict=True) if value is not None}
        yield _Choice(given, resolve_run({**request.given, **given}, request.environ, request.architecture)[0])


def _axis(request: Request, name: str, values: Sequence[object]) -> list[Any]:
    """The values of a field to search: the given one, or each of ``values``; None leaves the default."""
    if name in request.given:
        return [request.given[name]]
    return [None if value is None else as_flag(name, value) for value in values]


def _valid(
    request: Request, shape: Mapping[str, Provided], choices: Sequence[_Choice], rejected: dict[str, Rejection]
) -> Iterator[tuple[RunConfig, dict[str, Provided]]]:
    """The valid layouts of one shape with their flags; the reasons against the others are counted in ``rejected``."""
    settled = bool({"micro_batch_size", "gradient_accumulation_steps"} & request.given.keys())
    shaped = {**request.given, **shape}
    # The smallest micro-batch breaks the fewest rules.
    smallest = shaped if settled else {**shaped, "micro_batch_size": as_flag("micro_batch_size", 1)}
    of_shape, problems = resolve_run(smallest, request.environ, request.architecture)
    batches = [of_shape.train] if settled else []
    for choice in choices:
        run = choice.of(of_shape)
        broken = ("the global batch falls into equal parts", problems[0]) if problems else broken_rule(run)
        if broken:
            _count(rejected, *broken)
            continue
        run = replace(run, model=_with_vocabulary(run.model, request.vocab_size, run.parallel.model_parallel_size))
        batches = batches or list(_with_micro_batches(of_shape))
        for train in batches:
            sized = replace(run, train=train)
            if rules_count_micro_batches(sized) and (broken := broken_rule(sized)):
                _count(rejected, *broken)
                continue
            yield (
                sized,
                {**shaped, **choice.given, "micro_batch_size": as_flag("micro_batch_size", train.micro_batch_size)},
            )


def _count(rejected: dict[str, Rejection], reason: str, example: str) -> None:
    earlier = rejected.get(reason, Rejection(reason, 0, example))
    rejected[reason] = replace(earlier, layouts=earlier.layouts + 1)


def rules_count_micro_batches(run: RunConfig) -> bool:
    """Whether another micro-batch may break a rule that ``run`` keeps; otherwise all sizes break the same rules."""
    return run.parallel.pipeline_schedule in ("interleaved", "dualpipev") or bool(run.train.batch_steps)


@lru_cache(maxsize=64)
def _with_vocabulary(model: ModelConfig, size: int, tensor_parallel_size: int) -> ModelConfig:
    padded = padded_vocabulary(size, tensor_parallel_size, model.make_vocab_size_divisible_by)
    return replace(model, vocab_size=size, padded_vocab_size=padded)


def _with_micro_batches(run: RunConfig) -> Iterator[TrainConfig]:
    """The batch of ``run`` with each micro-batch that divides a replica's samples."""
    samples = run.train.global_batch_size // run.parallel.data_parallel_size
    for size in _divisors(samples):
        yield replace(run.train, micro_batch_size=size, gradient_accumulation_steps=samples // size)


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
