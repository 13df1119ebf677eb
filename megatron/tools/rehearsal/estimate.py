"""Estimates the step time of a run from rehearsed ranks, with its parts and their uncertainties. No torch here."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any, NamedTuple

from megatron.config import RunConfig
from megatron.model.partition import plan
from megatron.model.spec import model_flops
from megatron.parallel.pipeline.schedule import schedule_of
from megatron.parallel.pipeline.simulation import PassSeconds
from megatron.tools.planning.machine import Machine
from megatron.tools.planning.schedule_costs import pipeline_seconds
from megatron.tools.planning.timing import ring_all_reduce, ring_gather

_SENT_BYTES = {
    "all_reduce": ring_all_reduce,
    "all_gather": ring_gather,
    "reduce_scatter": ring_gather,
    "all_to_all": ring_gather,
    "gather": ring_gather,
    "scatter": ring_gather,
    "recv": lambda n, ranks: 0.0,
}
"""Functions (bytes, ranks) -> bytes that a rank sends; all other operations send the size of the tensor."""
_PASSES = {
    "ForwardPass": "forward", "BackwardPass": "backward", "BackwardInputPass": "inputs", "BackwardWeightPass": "weights"
}  # fmt: skip
_TRANSFERS = ("send", "recv")
_LATENCY = 20e-6
"""Maximum latency of a collective in seconds."""
_LINKS_VARY = 0.25
"""Relative uncertainty of the bandwidth of links."""


class Uncertainty(NamedTuple):
    """An uncertain part of the step."""

    name: str
    low: float
    """Seconds by which the step may be shorter."""
    high: float
    """Seconds by which it may be longer."""
    why: str


class Communicated(NamedTuple):
    """Seconds of a rank's communication in a phase of one iteration."""

    exposed: float
    """Seconds during which the rank waits."""
    overlapped: float
    """Seconds that can overlap with computation."""


@dataclass(frozen=True)
class Expected:
    """Expected step time of the run."""

    run: RunConfig
    machine: Machine
    ranks: Sequence[Mapping[str, Any]]
    """The results of ``rank.rehearse``."""
    clock: str = "wall"
    """The measured seconds to use: wall or cpu."""

    @cached_property
    def parts(self) -> dict[str, float]:
        """Seconds of a step by purpose."""
        computed, communicated = self._makespan(with_communication=False), self._makespan(with_communication=True)
        ideal = max(sum(self._passes(rank).values()) for rank in self.ranks)
        outside = max(self._outside(rank) for rank in self.ranks)
        sent = max(sum(self._exposed(self._phases(rank), rank, _is_outside)) for rank in self.ranks)
        return {
            "passes": min(ideal, computed),
            "bubble": max(computed - ideal, 0.0),
            "optimizer and host": outside,
            "communication": communicated - computed + sent,
        }

    @property
    def seconds(self) -> float:
        """Expected seconds of a step."""
        return sum(self.parts.values())

    @cached_property
    def uncertainties(self) -> list[Uncertainty]:
        """The uncertainties of the step, the largest first."""
        uncertain = (part for part in self._uncertain() if part.low or part.high)
        return sorted(uncertain, key=lambda part: -part.low - part.high)

    @property
    def between(self) -> tuple[float, float]:
        """Shortest and longest step in seconds, with all uncertainties at their limits."""
        low, high = (sum(getattr(part, end) for part in self.uncertainties) for end in ("low", "high"))
        return max(self.seconds - low, 0.0), self.seconds + high

    @property
    def tokens_per_second(self) -> float:
        """Throughput of the run."""
        return self.run.train.global_batch_size * self.run.data.seq_length / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: FLOPs without recomputation over the peak of the devices."""
        peak = self.machine.device.flops(self.run.precision.dtype) * self.run.parallel.world_size
        return model_flops(self.run) / self.seconds / peak

    @property
    def days(self) -> float:
        """Days that all iterations of the run take."""
        return self.run.train.train_iters * self.seconds / 86400

    def _uncertain(self) -> Iterator[Uncertainty]:
        times = [iteration[self.clock] for rank in self.ranks for iteration in rank["rounds"]]
        middle = median(times)
        yield Uncertainty("measurement", middle - min(times), max(times) - middle, "the timed iterations differ")
        ranks_phases = [self._phases(rank) for rank in self.ranks]
        sent = max(sum(phase.exposed for phase in phases.values()) for phases in ranks_phases)
        yield Uncertainty(
            "links", _LINKS_VARY * sent, _LINKS_VARY * sent, "their bandwidth is given, not measured here"
        )
        hidden = max(sum(phase.overlapped for phase in phases.values()) for phases in ranks_phases)
        yield Uncertainty("overlap", 0.0, hidden, "communication may slow down concurrent computation")
        operations = max(sum(operation["times"] for operation in rank["communication"]) for rank in self.ranks)
        yield Uncertainty("latency", 0.0, operations * _LATENCY, f"{operations:,} collectives and transfers")
        if others := set(range(self.run.parallel.pipe_stages)) - set(map(self._stage, self.ranks)):
            seconds = sum(self._passes(self.ranks[0]).values()) if len(self.ranks) == 1 else 0.0
            most = max(seconds * abs(self._scale(stage, 0) - 1) for stage in others)
            yield Uncertainty("other stages", most, most, f"{len(others)} stages are scaled by their FLOPs")

    def _stage(self, rank: Mapping[str, Any]) -> int:
        return stage_of(self.run, rank["rank"])

    @cached_property
    def _flops(self) -> list[int]:
        """FLOPs of each stage."""
        return [stage.flops(self.run.data.seq_length) for stage in plan(self.run)]

    def _nearest(self, stage: int) -> int:
        """Index of the rehearsed rank of ``stage``, or of the stage with the most similar number of FLOPs."""
        stages = [self._stage(rank) for rank in self.ranks]
        if stage in stages:
            return stages.index(stage)
        return min(range(len(stages)), key=lambda number: abs(self._flops[stages[number]] - self._flops[stage]))

    def _scale(self, stage: int, number: int) -> float:
        """FLOPs of ``stage`` divided by the FLOPs of the stage of rehearsed rank ``number``."""
        flops = self._flops[self._stage(self.ranks[number])]
        return self._flops[stage] / flops if flops else 1.0

    def _makespan(self, *, with_communication: bool) -> float:
        """Seconds from the start of the first pass to the end of the last, in the pipeline schedule."""
        schedule, seconds, transfer = schedule_of(self.run), [], 0.0
        for stage in range(schedule.stages):
            number = self._nearest(stage)
            rank, scale = self.ranks[number], self._scale(stage, number)
            times, phases = self._passes(rank), self._phases(rank)
            if with_communication:
                for name in times:
                    times[name] += sum(self._exposed(phases, rank, lambda phase, name=name: _PASSES.get(phase) == name))
                transfer = max(transfer, self._transfer(rank))
            passes = schedule.micro_batches * schedule.chunks
            per_pass = {name: scale * spent / passes for name, spent in times.items()}
            half = per_pass["backward"] / 2
            seconds.append(PassSeconds(per_pass["forward"], per_pass["inputs"] + half, per_pass["weights"] + half))
        return pipeline_seconds(schedule, seconds, transfer)

    def _passes(self, rank: Mapping[str, Any]) -> dict[str, float]:
        """Seconds that ``rank`` computes in each kind of pass in an iteration."""
        micro_batches = self.run.train.gradient_accumulation_steps
        seconds = dict.fromkeys(_PASSES.values(), 0.0)
        for measured in rank["passes"]:
            if name := _PASSES.get(measured["instruction"]):
                seconds[name] += micro_batches * measured[self.clock]
        with_waits = sum(phase[self.clock] for phase in rank["phases"].values())
        return {name: spent * rank["seconds"][self.clock] / with_waits for name, spent in seconds.items()}

    def _outside(self, rank: Mapping[str, Any]) -> float:
        """Seconds of an iteration outside of forward and backward passes."""
        return max(rank["seconds"][self.clock] - sum(self._passes(rank).values()), 0.0)

    def _phases(self, rank: Mapping[str, Any]) -> dict[str, Communicated]:
        """Seconds of the collectives of ``rank`` by the pipeline instruction in which they are issued."""
        phases: dict[str, Communicated] = {}
        for operation in rank["communication"]:
            if operation["kind"] in _TRANSFERS:
                continue
            phase, seconds = operation["phase"], operation["times"] * self._link_seconds(operation)
            earlier, hidden = phases.get(phase, Communicated(0.0, 0.0)), seconds if operation["is_overlapped"] else 0.0
            phases[phase] = Communicated(earlier.exposed + seconds - hidden, earlier.overlapped + hidden)
        return phases

    def _exposed(self, phases: Mapping[str, Communicated], rank: Mapping[str, Any], chosen: Any) -> Iterator[float]:
        """Seconds of communication in the ``chosen`` phases that are not hidden by computation."""
        for phase, communicated in phases.items():
            if chosen(phase):
                # Outside of passes, communication overlaps with the forward passes of the next iteration.
                computed = self._passes(rank)[_PASSES.get(phase, "forward")]
                yield communicated.exposed + max(communicated.overlapped - computed, 0.0)

    def _transfer(self, rank: Mapping[str, Any]) -> float:
        """Seconds of a transfer between stages."""
        sends = (operation for operation in rank["communication"] if operation["kind"] == "send")
        return max(map(self._link_seconds, sends), default=0.0)

    def _link_seconds(self, operation: Mapping[str, Any]) -> float:
        """Seconds of one collective or transfer."""
        sent = _SENT_BYTES.get(operation["kind"], lambda n, ranks: n)(operation["size"], operation["ranks"])
        return sent / self.machine.bandwidth(operation["span"]) if operation["ranks"] > 1 else 0.0


def stage_of(run: RunConfig, rank: int) -> int:
    """The pipeline stage of ``rank``."""
    return rank // (run.parallel.world_size // run.parallel.pipe_stages)


def _is_outside(phase: str) -> bool:
    return phase not in _PASSES
