"""Every valid layout of a model on a machine, with memory, traffic and time; and the reasons against the others.

A candidate is the same command line with the flags of a layout, so ``resolve_run`` and the validation rules decide
which layouts are valid. What the candidates of a grid share is computed once.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import inf
from typing import Any

from megatron.config import RunConfig, flag_fields
from megatron.config.command_line.resolve import resolve_run
from megatron.config.fields import Provided, flag_name
from megatron.config.model import padded_vocabulary
from megatron.config.validation import RULES
from megatron.model.spec import model_flops
from megatron.parallel.pipeline.partition import Stage, explicit, plan
from megatron.parallel.pipeline.schedule import has_order, schedule_of
from megatron.tools.planning.activations import activations
from megatron.tools.planning.memory import Memory, working
from megatron.tools.planning.request import Request, words
from megatron.tools.planning.states import States, numel, stage_weights, states, trained
from megatron.tools.planning.timing import Timing, Traffic, idle_ratio, timing, traffic

RECOMPUTE = (None, "selective", "full")
LONG = 8192
"""Tokens: context parallelism is searched of sequences of which each rank has as many or more."""


@dataclass(frozen=True)
class Candidate:
    """A valid layout with its memory, traffic and time."""

    request: Request
    run: RunConfig
    given: Mapping[str, Provided]
    """All flags of it."""
    memory: Memory
    """Of the rank that needs most."""
    traffic: Traffic
    """Of the rank that sends most."""
    timing: Timing

    @property
    def fits(self) -> bool:
        """Whether it fits in memory."""
        return self.memory.total <= self.request.room

    @property
    def bubble(self) -> float:
        """Share of the time that a stage waits for others."""
        idle = self.timing.bubble
        return idle / (self.timing.total - self.timing.data)

    @property
    def flops_per_device(self) -> float:
        """FLOP/s of each device, without recomputation."""
        return model_flops(self.run) / self.timing.total / self.request.devices

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: the same over the device's peak."""
        return self.flops_per_device / self.request.machine.device.flops(self.run.precision.dtype)

    @property
    def days(self) -> float:
        """Days for the request's tokens."""
        per_token = model_flops(self.run) / (self.run.train.global_batch_size * self.run.data.seq_length)
        return self.request.tokens * per_token / (self.request.devices * self.flops_per_device) / 86400

    @cached_property
    def command(self) -> list[str]:
        """Arguments of the entry script."""
        return words(self.given)


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
    found = [candidate for shape in _shapes(request) for candidate in _candidates(request, shape, rejected)]
    if any_schedule and "pipeline_schedule" not in request.given:
        grids: dict[tuple, _Grid] = {}
        found = [_with_schedule(candidate, grids) for candidate in found]
    fitting = [candidate for candidate in found if candidate.fits]
    too_large = [candidate for candidate in found if not candidate.fits]
    return Plan(
        sorted(fitting, key=lambda candidate: (candidate.timing.total, candidate.memory.total)),
        sorted(too_large, key=lambda candidate: candidate.memory.total),
        sorted(rejected.values(), key=lambda rejection: -rejection.layouts),
    )


def _shapes(request: Request) -> Iterator[dict[str, Provided]]:
    """Tensor-parallel size and stages of every grid, with one stage on either engine; of long sequences the size of
    context parallelism, and of experts that of expert parallelism."""
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


def _choices(request: Request) -> Iterator[dict[str, Provided]]:
    """The settings of each layout of a grid, without the micro-batch."""
    recompute = (None,) if "checkpoint_activations" in request.given else RECOMPUTE
    half_precision = any(request.given[name].value for name in ("fp16", "bf16") if name in request.given)
    axes = {
        "zero_stage": _axis(request, "zero_stage", range(1 if half_precision else 0, 4)),  # there 0 runs as 1
        "sequence_parallel": _axis(request, "sequence_parallel", (None, True)),
        "recompute_granularity": _axis(request, "recompute_granularity", recompute),
    }
    for values in itertools.product(*axes.values()):
        yield {name: value for name, value in zip(axes, values, strict=True) if value is not None}


def _axis(request: Request, name: str, values: Sequence[object]) -> list[Any]:
    """The values of a field to search: the given one, or each of ``values``; None leaves the default."""
    if name in request.given:
        return [request.given[name]]
    return [None if value is None else _flag(name, value) for value in values]


def _flag(name: str, value: object) -> Provided:
    flag = flag_name(flag_fields()[name])
    return Provided(value, flag if value is True else f"{flag} {value}")


def _candidates(request: Request, shape: Mapping[str, Provided], rejected: dict[str, Rejection]) -> Iterator[Candidate]:
    """The valid candidates of one grid; the reasons against the others are counted in ``rejected``."""
    grid: _Grid | None = None
    settled = bool({"micro_batch_size", "gradient_accumulation_steps"} & request.given.keys())
    for choice in _choices(request):
        given = {**request.given, **shape, **choice}
        # The smallest micro-batch breaks the fewest rules.
        smallest = given if settled else {**given, "micro_batch_size": _flag("micro_batch_size", 1)}
        run, problems = resolve_run(smallest, request.environ, request.architecture)
        broken = ("the global batch falls into equal parts", problems[0]) if problems else _broken(run)
        if broken:
            _count(rejected, *broken)
            continue
        run = _with_vocabulary(run, request.vocab_size)
        grid = grid or _Grid(run)
        for sized in [run] if settled else _with_micro_batches(run):
            depends_on_size = sized.parallel.uses_dualpipev or sized.train.batch_steps
            if depends_on_size and (broken := _broken(sized)):
                _count(rejected, *broken)
                continue
            whole = {**given, "micro_batch_size": _flag("micro_batch_size", sized.train.micro_batch_size)}
            yield _candidate(request, sized, whole, grid)


def _broken(run: RunConfig) -> tuple[str, str] | None:
    """The first rule that ``run`` breaks, and its message."""
    checked = ((rule.name, rule.check(run)) for rule in RULES if not rule.only_warns)
    return next(((name, message) for name, message in checked if message is not None), None)


def _count(rejected: dict[str, Rejection], reason: str, example: str) -> None:
    earlier = rejected.get(reason, Rejection(reason, 0, example))
    rejected[reason] = replace(earlier, layouts=earlier.layouts + 1)


def _with_vocabulary(run: RunConfig, size: int) -> RunConfig:
    model = run.model
    padded = padded_vocabulary(size, run.parallel.model_parallel_size, model.make_vocab_size_divisible_by)
    return replace(run, model=replace(model, vocab_size=size, padded_vocab_size=padded))


def _with_micro_batches(run: RunConfig) -> Iterator[RunConfig]:
    """``run`` with each micro-batch that divides a replica's samples."""
    samples = run.train.global_batch_size // run.parallel.data_parallel_size
    for size in _divisors(samples):
        yield replace(run, train=replace(run.train, micro_batch_size=size, gradient_accumulation_steps=samples // size))


@lru_cache(maxsize=1024)
def _divisors(number: int) -> tuple[int, ...]:
    return tuple(size for size in range(1, number + 1) if number % size == 0)


class _Grid:
    """What the candidates of one grid share: its distinct stages and their parameters."""

    def __init__(self, run: RunConfig):
        kinds: dict[tuple[int, int], tuple[int, Stage]] = {}
        for number, stage in enumerate(plan(run)):
            # Of equal stages the first keeps most: more micro-batches are in flight there.
            kinds.setdefault((stage.num_blocks, stage.parameters), (number, stage))
        self.stages = list(kinds.values())
        self.weights = [stage_weights(run, stage) for _, stage in self.stages]
        self.parameters = [(numel(weights), numel(trained(weights))) for weights in self.weights]
        self._states: dict[tuple[int, bool], list[States]] = {}

    def states(self, run: RunConfig) -> list[States]:
        """Model states of each kind of stage: they depend on the ZeRO stage, and on when gradients are reduced."""
        key = run.zero.zero_stage, run.coalesces_grad_reduction
        if key not in self._states:
            self._states[key] = [states(run, weights) for weights in self.weights]
        return self._states[key]


_GAIN = 0.01
"""Share of the time of an iteration for which the planner leaves 1F1B."""


def _with_schedule(plain: Candidate, grids: dict[tuple, _Grid]) -> Candidate:
    """``plain`` with the pipeline schedule that makes it fastest and lets it fit in memory; 1F1B if none does.

    ``grids`` keeps what layouts with the same model chunks share.
    """
    if not plain.fits or plain.timing.bubble < _GAIN * plain.timing.total:
        return plain
    for run in sorted(_other_schedules(plain.run), key=lambda run: _estimate(plain, run)):
        if _estimate(plain, run) < (1 - _GAIN) * plain.timing.total:
            found = _scheduled(plain, run, grids)
            if found.fits and found.timing.total < (1 - _GAIN) * plain.timing.total and _broken(run) is None:
                return found
    return plain


def _other_schedules(run: RunConfig) -> Iterator[RunConfig]:
    """``run`` with each pipeline schedule but 1F1B that its layers and micro-batches allow."""
    parallel, layers, micro_batches = run.parallel, run.model.num_layers, run.train.gradient_accumulation_steps
    stages = parallel.pipe_stages
    if stages == 1 or run.model.encoder_num_layers or explicit(parallel.pipeline_partition):
        return
    for name in ("zbh1", "zbv", "dualpipev"):
        yield replace(run, parallel=replace(parallel, pipeline_schedule=name))
    for chunks in range(2, layers // stages + 1):
        if layers % (stages * chunks) == 0 and micro_batches % stages == 0:
            virtual = replace(parallel, num_virtual_stages_per_pipeline_rank=chunks)
            yield replace(run, parallel=replace(virtual, pipeline_schedule="interleaved"))


def _estimate(plain: Candidate, run: RunConfig) -> float:
    """About the seconds of an iteration of ``run``, in which each chunk sends as much as a stage of ``plain`` did."""
    parallel, spent = run.parallel, plain.timing
    possible = has_order(parallel.pipeline_schedule, parallel.pipe_stages, run.train.gradient_accumulation_steps,
                         parallel.chunks_per_stage)  # fmt: skip
    if not possible or parallel.model_chunks > run.model.num_layers:
        return inf
    useful = spent.compute + spent.tensor + parallel.chunks_per_stage * spent.pipeline
    return useful * (1 + idle_ratio(schedule_of(run), spent.passes)) + spent.data


def _scheduled(plain: Candidate, run: RunConfig, grids: dict[tuple, _Grid]) -> Candidate:
    """``plain`` as ``run``, which differs by its schedule."""
    parallel, given = run.parallel, dict(plain.given)
    for name in ("pipeline_schedule", "num_virtual_stages_per_pipeline_rank"):
        if (value := getattr(parallel, name)) is not None:
            given[name] = _flag(name, value)
    sizes = (parallel.model_parallel_size, parallel.pipe_stages, parallel.data_parallel_size, run.zero.zero_stage)
    key = (*sizes, parallel.chunks_per_stage, parallel.is_v_shaped)
    if key not in grids:
        grids[key] = _Grid(run)
    return _candidate(plain.request, run, given, grids[key])


def _candidate(request: Request, run: RunConfig, given: Mapping[str, Provided], grid: _Grid) -> Candidate:
    micro_batch, memories, sent = activations(run), [], []
    for (number, stage), counts, held in zip(grid.stages, grid.parameters, grid.states(run), strict=True):
        memories.append(Memory(*counts, held, working(run, stage, number, micro_batch, held)))
        sent.append((stage, traffic(run, stage, memories[-1], micro_batch.hidden)))
    return Candidate(
        request,
        run,
        given,
        max(memories, key=lambda memory: memory.total),
        max((one for _, one in sent), key=lambda one: one.total),
        timing(run, request.machine, sent),
    )
