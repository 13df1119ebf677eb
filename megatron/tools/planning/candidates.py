"""Layouts with their memory, traffic and time. What several layouts of a request share is computed once."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import attrgetter

from megatron.cli.validation import broken_rule
from megatron.config import RunConfig
from megatron.config.fields import Provided
from megatron.model.partition import Stage, plan
from megatron.model.spec import model_flops
from megatron.parallel.pipeline.in_flight import stages_that_keep_most
from megatron.parallel.pipeline.schedule import schedule_of
from megatron.tools.planning.activations import Activations, Sizes, activations, sizes
from megatron.tools.planning.memory import Memory, working
from megatron.tools.planning.request import Request, words
from megatron.tools.planning.states import States, states
from megatron.tools.planning.timing import Timing, Traffic, timing, traffic
from megatron.tools.planning.weights import stage_weights


@dataclass(frozen=True)
class Candidate:
    """A valid layout with its memory, traffic and time."""

    request: Request
    run: RunConfig
    given: Mapping[str, Provided]
    """All flags of it."""
    stages: Sequence[tuple[Stage, Memory]]
    """Its distinct pipeline stages, each with the memory of one of its ranks."""
    hidden: int
    """Bytes of hidden states between two stages."""

    @cached_property
    def memory(self) -> Memory:
        """Of the rank that needs most."""
        return max((memory for _, memory in self.stages), key=attrgetter("total"))

    @cached_property
    def traffic(self) -> Traffic:
        """Of the rank that sends most."""
        return max((sent for _, sent in self._sent), key=attrgetter("total"))

    @cached_property
    def timing(self) -> Timing:
        """Of the slowest stage."""
        return timing(self.run, self.request.machine, self._sent)

    @cached_property
    def _sent(self) -> list[tuple[Stage, Traffic]]:
        return [(stage, traffic(self.run, stage, memory, self.hidden)) for stage, memory in self.stages]

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


def rules_count_micro_batches(run: RunConfig) -> bool:
    """Whether another micro-batch may break a rule that ``run`` keeps; otherwise all sizes break the same ones."""
    return run.parallel.pipeline_schedule in ("interleaved", "dualpipev") or bool(run.train.batch_steps)


class Candidates:
    """Makes the candidates of a request."""

    def __init__(self, request: Request):
        self._request = request
        self._grids: dict[tuple[int | bool, ...], _Grid] = {}
        self._legal: dict[tuple[object, ...], bool] = {}
        self._activations: dict[tuple[Sizes, bool], Activations] = {}

    def make(self, run: RunConfig, given: Mapping[str, Provided]) -> Candidate:
        """The candidate that is ``run``, from the flags ``given``."""
        grid, micro_batch = self._grid(run), self._micro_batch(run)
        return Candidate(self._request, run, given, list(grid.stages_of(run, micro_batch)), micro_batch.hidden)

    def make_if_fits(self, run: RunConfig, given: Mapping[str, Provided]) -> Candidate | None:
        """The same; None as soon as a stage does not fit in memory."""
        grid, micro_batch, stages = self._grid(run), self._micro_batch(run), []
        for stage, memory in grid.stages_of(run, micro_batch):
            if memory.total > self._request.room:
                return None
            stages.append((stage, memory))
        return Candidate(self._request, run, given, stages, micro_batch.hidden)

    def is_legal(self, run: RunConfig) -> bool:
        """Whether ``run`` breaks no rule."""
        if rules_count_micro_batches(run):
            return broken_rule(run) is None
        key = run.parallel, run.zero, run.activation
        if key not in self._legal:
            self._legal[key] = broken_rule(run) is None
        return self._legal[key]

    def _grid(self, run: RunConfig) -> "_Grid":
        parallel = run.parallel
        sizes = parallel.model_parallel_size, parallel.pipe_stages, parallel.context_parallel_size
        key = (*sizes, parallel.expert_model_parallel_size, parallel.chunks_per_stage, parallel.is_v_shaped)
        if key not in self._grids:
            self._grids[key] = _Grid(run)
        return self._grids[key]

    def _micro_batch(self, run: RunConfig) -> Activations:
        """Bytes of a micro-batch: of one request they follow from the sizes, and whether attention is recomputed."""
        key = sizes(run), run.model.recomputes_attention
        if key not in self._activations:
            self._activations[key] = activations(run)
        return self._activations[key]


class _Grid:
    """What the layouts with the same sizes and model chunks share: distinct stages, their parameters and states."""

    def __init__(self, run: RunConfig):
        alike = groupby(enumerate(plan(run)), key=lambda one: one[1].layers_of_chunks)
        runs = [list(equal) for _, equal in alike]
        self._stages = [(equal[0][1], equal[0][0], equal[-1][0]) for equal in runs]
        self._weights = [stage_weights(run, stage) for stage, *_ in self._stages]
        self._parameters = [(weights.numel, weights.trained.numel) for weights in self._weights]
        self._states: dict[tuple[int, bool], list[States]] = {}

    def stages_of(self, run: RunConfig, micro_batch: Activations) -> Iterator[tuple[Stage, Memory]]:
        """The distinct stages with the memory of a rank of each."""
        schedule = schedule_of(run)
        for (stage, *ends), counts, held in zip(self._stages, self._parameters, self._states_of(run), strict=True):
            for number in stages_that_keep_most(schedule, *ends):
                yield stage, Memory(*counts, held, working(run, stage, number, micro_batch, held))

    def _states_of(self, run: RunConfig) -> list[States]:
        """Model states of each kind of stage: they depend on the ZeRO stage, and on when gradients are reduced."""
        key = run.zero.zero_stage, run.coalesces_grad_reduction
        if key not in self._states:
            self._states[key] = [states(run, weights) for weights in self._weights]
        return self._states[key]
