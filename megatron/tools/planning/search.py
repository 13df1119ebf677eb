"""Searches all valid layouts of a model on a machine, with memory, traffic and time, and reasons against the others.

A candidate is the given command line with the flags of a layout, so that ``resolve_run`` and the validation rules
decide which layouts are valid.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from operator import attrgetter, itemgetter
from typing import Any

from megatron.cli.provided import Provided
from megatron.cli.resolve import resolve_run
from megatron.cli.validation import violations
from megatron.config import ParallelConfig, RunConfig, flag_fields
from megatron.config.fields import flag_of, with_reasons
from megatron.config.model import padded_vocabulary
from megatron.model.partition import Stage, explicit
from megatron.model.spec import model_flops
from megatron.parallel.pipeline.schedule import has_order, schedule_with
from megatron.tools.planning.machine import Machine
from megatron.tools.planning.memory import Memory, distinct_stage_memory
from megatron.tools.planning.request import Request, arguments_of, as_flag
from megatron.tools.planning.timing import Timing, Traffic, idle_ratio, timing, traffic

RECOMPUTE: tuple[Mapping[str, object], ...] = (
    {},
    {"recompute_mlp_activation": True},
    {"recompute_granularity": "selective"},
    {"recompute_granularity": "full"},
)
"""Flags of recomputation, the cheapest first."""
LONG = 8192
"""Minimum number of tokens per rank for which context parallelism is searched."""


@dataclass(frozen=True)
class Candidate:
    """A valid layout with its memory, traffic and time."""

    request: Request
    run: RunConfig
    given: Mapping[str, Provided]
    """All flags of the layout."""

    @cached_property
    def memory(self) -> Memory:
        """Memory of the rank that needs most."""
        return max((memory for _, memory in self._stages), key=attrgetter("total"))

    @cached_property
    def traffic(self) -> Traffic:
        """Traffic of the rank that sends most."""
        return max((sent for _, sent in self._sent), key=attrgetter("total"))

    @cached_property
    def timing(self) -> Timing:
        """Time of an iteration, determined by the slowest stage."""
        return self.timing_on(self.request.machine)

    def timing_on(self, machine: Machine) -> Timing:
        """Time of an iteration on another machine."""
        return timing(self.run, machine, self._sent)

    @cached_property
    def _stages(self) -> list[tuple[Stage, Memory]]:
        return list(distinct_stage_memory(self.run))

    @cached_property
    def _sent(self) -> list[tuple[Stage, Traffic]]:
        return [(stage, traffic(self.run, stage, memory)) for stage, memory in self._stages]

    @property
    def fits(self) -> bool:
        """Whether the layout fits in memory."""
        return self.memory.total <= self.request.room

    @property
    def bubble(self) -> float:
        """Share of the time that a stage idles in the pipeline."""
        return self.timing.bubble / (self.timing.total - self.timing.data)

    @property
    def flops_per_device(self) -> float:
        """FLOP/s of each device, without recomputation."""
        return model_flops(self.run) / self.timing.total / self.request.devices

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: ``flops_per_device`` divided by the device's peak."""
        return self.flops_per_device / self.request.machine.device.flops(self.run.precision.dtype)

    @property
    def days(self) -> float:
        """Days to train on the request's number of tokens."""
        tokens = self.run.train.global_batch_size * self.run.data.seq_length
        return self.request.tokens / tokens * self.timing.total / 86400

    @cached_property
    def command(self) -> list[str]:
        """Arguments of the entry script."""
        return arguments_of(self.given)


@dataclass(frozen=True)
class Rejection:
    """Layouts that break the same rule."""

    reason: str
    layouts: int
    example: str
    """The message for the first of these layouts."""


@dataclass(frozen=True)
class Plan:
    """The result of a search."""

    fitting: list[Candidate]
    """Layouts that fit, without ``superseded``: the fastest first, and the simplest first among about equal times."""
    superseded: list[Candidate]
    """Layouts that fit, but are not faster than one with the same parallel sizes, and need hardly less memory."""
    too_large: list[Candidate]
    """Valid layouts that do not fit in memory, the smallest first."""
    rejections: list[Rejection]
    """Invalid layouts, the most frequent reason first."""

    @property
    def every(self) -> list[Candidate]:
        """All valid layouts."""
        return [*self.fitting, *self.superseded, *self.too_large]

    @property
    def looked_at(self) -> int:
        """Number of all layouts, invalid ones included."""
        broken = sum(rejection.layouts for rejection in self.rejections)
        return len(self.every) + broken


def search(request: Request, *, any_schedule: bool = False) -> Plan:
    """Search all layouts of ``request``; ``any_schedule`` selects the fastest pipeline schedule for each of them.

    A schedule that is given is kept.
    """
    rejected: dict[str, Rejection] = {}
    candidates = [layout for flags in _layouts(request) for layout in _with_micro_batches(request, flags, rejected)]
    if any_schedule and "pipeline_schedule" not in request.given:
        candidates = list(map(with_schedule, candidates))
    fitting = sorted(
        (layout for layout in candidates if layout.fits),
        key=lambda layout: (layout.timing.total, layout.memory.total, len(layout.given)),
    )
    return Plan(
        *_listed(fitting),
        sorted((layout for layout in candidates if not layout.fits), key=lambda layout: layout.memory.total),
        sorted(rejected.values(), key=lambda rejection: -rejection.layouts),
    )


ALIKE = 0.05
"""Relative time difference between layouts that is below the error of the estimate."""


def _simplest_first(fastest_first: Sequence[Candidate]) -> list[Candidate]:
    """Candidates about as fast as the first one, the simplest first; then the others by time."""
    enough = (1 + ALIKE) * fastest_first[0].timing.total if fastest_first else 0.0
    return sorted(fastest_first, key=lambda layout: _parts(layout.run) if layout.timing.total <= enough else math.inf)


def _parts(run: RunConfig) -> int:
    """Complexity of a layout: number of techniques beyond data parallelism with ZeRO 1, such as TP or recomputation."""
    parallel = run.parallel
    switches = (
        run.zero.zero_stage > 1,
        parallel.sequence_parallel,
        parallel.pipeline_schedule != "1f1b",
        run.activation.checkpoint_activations or run.model.recompute_mlp_activation,
    )
    return sum(size > 1 for size in _sizes(parallel)) + sum(switches)


_LESS = 0.8
"""A slower or more complex layout is listed if it needs less than this share of another layout's memory."""


def _listed(fastest_first: Sequence[Candidate]) -> tuple[list[Candidate], list[Candidate]]:
    """Split candidates into listed ones, in the order of ``Plan.fitting``, and superseded ones.

    Listed are, for the same parallel sizes, the simplest of the fastest, and others with clearly less memory.
    """
    by_sizes, listed, others = defaultdict[tuple, list[Candidate]](list), list[Candidate](), list[Candidate]()
    for candidate in fastest_first:
        by_sizes[_sizes(candidate.run.parallel)].append(candidate)
    for same_sizes in by_sizes.values():
        least = math.inf
        for candidate in _simplest_first(same_sizes):
            if candidate.memory.total < _LESS * least:
                least = candidate.memory.total
                listed.append(candidate)
            else:
                others.append(candidate)
    return _simplest_first(sorted(listed, key=lambda candidate: candidate.timing.total)), others


def _sizes(parallel: ParallelConfig) -> tuple[int, ...]:
    sizes = (parallel.model_parallel_size, parallel.pipe_stages, parallel.sequence_ranks)
    return (*sizes, parallel.expert_model_parallel_size)


def _layouts(request: Request) -> Iterator[dict[str, Provided]]:
    """The flags of all layouts, without micro-batch sizes.

    A single stage runs without DeepSpeed's pipeline engine, which would gain nothing. Context parallelism is searched
    for long sequences, and expert parallelism for models with experts.
    """
    given = {name: value.value for name, value in request.given.items()}
    sizes = _divisors(request.devices)
    contexts = [size for size in sizes[1:] if size <= given.get("seq_length", 0) // LONG]
    experts = [size for size in sizes[1:] if given.get("num_experts", 1) % size == 0]
    is_half = given.get("fp16") or given.get("bf16")
    axes = {
        "context_parallel_size": _axis(request, "context_parallel_size", [None, *contexts]),
        "expert_model_parallel_size": _axis(request, "expert_model_parallel_size", [None, *experts]),
        "zero_stage": _axis(request, "zero_stage", range(1 if is_half else 0, 4)),  # half precision runs at 1 or higher
        "sequence_parallel": _axis(request, "sequence_parallel", (None, True)),
    }
    recomputations = [{name: as_flag(name, value) for name, value in flags.items()} for flags in _recomputations(given)]
    for t in _axis(request, "model_parallel_size", sizes):
        stages = _axis(request, "pipe_parallel_size", (0, *_divisors(request.devices // t.value or 1)[1:]))
        for flags, p, *values in itertools.product(recomputations, stages, *axes.values()):
            chosen = {
                "model_parallel_size": t,
                "pipe_parallel_size": p,
                **dict(zip(axes, values, strict=True)),
                **flags,
            }
            yield {**request.given, **{name: value for name, value in chosen.items() if value is not None}}


def _recomputations(given: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    """The recomputations in ``RECOMPUTE`` that are compatible with the given flags."""
    mlp_only = "recompute_mlp_activation"
    is_open = not {"checkpoint_activations", "recompute_granularity"} & given.keys()
    excluded = with_reasons(flag_of(flag_fields()[mlp_only]).excludes)
    for flags in RECOMPUTE:
        if not flags or (is_open and not (mlp_only in flags and any(given.get(name) for name in excluded))):
            yield flags


def _axis(request: Request, name: str, values: Sequence[object]) -> list[Any]:
    """The values of a field to search: the given value, or all ``values``; None keeps the default."""
    if name in request.given:
        return [request.given[name]]
    return [None if value is None else as_flag(name, value) for value in values]


def _with_micro_batches(
    request: Request, flags: Mapping[str, Provided], rejected: dict[str, Rejection]
) -> Iterator[Candidate]:
    """The valid layouts with these ``flags``, one for each micro-batch size; invalid ones are added to ``rejected``."""

    def reject(reason: str, example: str) -> None:
        earlier = rejected.get(reason, Rejection(reason, 0, example))
        rejected[reason] = replace(earlier, layouts=earlier.layouts + 1)

    is_given = bool({"micro_batch_size", "gradient_accumulation_steps"} & flags.keys())
    smallest = {} if is_given else {"micro_batch_size": as_flag("micro_batch_size", 1)}
    run, problems = resolve_run({**flags, **smallest}, request.environ, request.architecture)
    if problems:
        reject("the global batch falls into equal parts", problems[0])
        return
    padded = padded_vocabulary(
        request.vocab_size, run.parallel.model_parallel_size, run.model.make_vocab_size_divisible_by
    )
    samples = run.train.micro_batch_size * run.train.gradient_accumulation_steps
    for size in [run.train.micro_batch_size] if is_given else _divisors(samples):
        train = replace(run.train, micro_batch_size=size, gradient_accumulation_steps=samples // size)
        sized = replace(run, train=train).with_image_slots(size)
        if broken := next(violations(sized), None):
            reject(*broken)
            if size == 1:  # larger sizes break the same rules
                return
        else:
            given = {**flags, "micro_batch_size": as_flag("micro_batch_size", size)}
            model = replace(sized.model, vocab_size=request.vocab_size, padded_vocab_size=padded)
            yield Candidate(request, replace(sized, model=model), given)


@lru_cache(maxsize=1024)
def _divisors(number: int) -> tuple[int, ...]:
    return tuple(size for size in range(1, number + 1) if number % size == 0)


_SCHEDULE_FLAGS = ("pipeline_schedule", "num_virtual_stages_per_pipeline_rank", "pipeline_partition")
_GAIN = 0.01
"""Minimum gain, as a share of the iteration time, for which the planner prefers another schedule to 1F1B."""


def with_schedule(plain: Candidate) -> Candidate:
    """``plain`` with the fastest pipeline schedule that fits in memory; unchanged (1F1B) if none gains enough."""
    if not plain.fits or plain.timing.bubble < _GAIN * plain.timing.total or plain.run.model.encoder_num_layers:
        return plain
    enough = (1 - _GAIN) * plain.timing.total
    for estimate, parallel in sorted(_other_schedules(plain), key=itemgetter(0)):
        if estimate >= enough:
            break
        flags = {
            name: value
            for name in _SCHEDULE_FLAGS
            if (value := getattr(parallel, name)) != getattr(plain.run.parallel, name)
        }
        given = {**plain.given, **{name: as_flag(name, value) for name, value in flags.items()}}
        scheduled = replace(plain, run=replace(plain.run, parallel=parallel), given=given)
        if scheduled.fits and scheduled.timing.total < enough and not any(violations(scheduled.run)):
            return scheduled
    return plain


def _other_schedules(plain: Candidate) -> Iterator[tuple[float, ParallelConfig]]:
    """(estimated seconds of an iteration, layout) for each possible pipeline schedule other than 1F1B.

    The estimate assumes that each chunk sends as much as a stage of ``plain``.
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
    """``parallel`` with each schedule other than 1F1B for which the model has enough ``layers``."""
    stages = parallel.pipe_stages
    if stages == 1 or explicit(parallel.pipeline_partition):
        return ()
    layouts = [replace(parallel, pipeline_schedule=name) for name in ("zbh1", "zbv", "dualpipev")]
    for chunks in range(2, -(-layers // stages) + 1):
        virtual = replace(parallel, pipeline_schedule="interleaved", num_virtual_stages_per_pipeline_rank=chunks)
        if stages * chunks == layers + 2:  # like Llama 3 405B: the first chunk has only embeddings, the last the head
            layouts.append(replace(virtual, pipeline_partition=",".join(map(str, (0, *[1] * layers, 0)))))
        elif chunks * -(-layers // (stages * chunks)) == -(-layers // stages):  # most chunks are equal
            layouts.append(virtual)
    return tuple(layout for layout in layouts if layout.model_chunks <= layers or explicit(layout.pipeline_partition))
