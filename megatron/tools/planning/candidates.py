"""Layouts with their memory, traffic and time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import attrgetter

from megatron.cli.provided import Provided
from megatron.config import RunConfig
from megatron.model.partition import Stage, plan
from megatron.model.spec import model_flops
from megatron.parallel.pipeline.in_flight import stages_that_keep_most
from megatron.parallel.pipeline.schedule import schedule_of
from megatron.tools.planning.activations import Activations, Sizes, activations, sizes
from megatron.tools.planning.memory import Memory, rank_memory
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
    """All of its flags."""
    stages: Sequence[tuple[Stage, Memory]]
    """Its distinct pipeline stages, each with the memory of one of their ranks."""
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


class Candidates:
    """Makes the candidates of a request. What several of them share is computed once."""

    def __init__(self, request: Request):
        self._request = request
        self._stages: dict[tuple[object, ...], list[_Stages]] = {}
        self._activations: dict[tuple[Sizes, bool], Activations] = {}

    def make(self, run: RunConfig, given: Mapping[str, Provided]) -> Candidate:
        """The candidate that is ``run``, from the flags ``given``."""
        schedule, micro_batch = schedule_of(run), self._micro_batch(run)
        stages = [
            (equal.stage, rank_memory(run, equal.stage, number, micro_batch, equal.weights, equal.states(run)))
            for equal in self._distinct_stages(run)
            for number in stages_that_keep_most(schedule, equal.first, equal.last)
        ]
        return Candidate(self._request, run, given, stages, micro_batch.hidden)

    def _distinct_stages(self, run: RunConfig) -> "list[_Stages]":
        """The stages, which layouts with the same sizes and model chunks share."""
        parallel = run.parallel
        key = (
            parallel.model_parallel_size,
            parallel.pipe_stages,
            parallel.context_parallel_size,
            parallel.expert_model_parallel_size,
            parallel.chunks_per_stage,
            parallel.is_v_shaped,
        )
        if key not in self._stages:
            equal = groupby(enumerate(plan(run)), key=lambda one: one[1].layers_of_chunks)
            self._stages[key] = [_Stages(run, list(stages)) for _, stages in equal]
        return self._stages[key]

    def _micro_batch(self, run: RunConfig) -> Activations:
        """Bytes of a micro-batch: of one request they follow from the sizes, and whether attention is recomputed."""
        key = sizes(run), run.model.recomputes_attention
        if key not in self._activations:
            self._activations[key] = activations(run)
        return self._activations[key]


class _Stages:
    """Neighboring stages with equal layers."""

    def __init__(self, run: RunConfig, numbered: Sequence[tuple[int, Stage]]):
        self.first, self.stage = numbered[0]
        self.last, _ = numbered[-1]
        self.weights = stage_weights(run, self.stage)
        self._states: dict[tuple[int, bool], States] = {}

    def states(self, run: RunConfig) -> States:
        """Model states: of one request they depend on the ZeRO stage, and on when gradients are reduced."""
        key = run.zero.zero_stage, run.coalesces_grad_reduction
        if key not in self._states:
            self._states[key] = states(run, self.weights)
        return self._states[key]
