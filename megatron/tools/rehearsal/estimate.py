"""From rehearsed ranks to the run: the expected step, its parts, and how far off each of them may be. No torch here."""

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

_SENT = {
    "all_reduce": ring_all_reduce,
    "all_gather": ring_gather,
    "reduce_scatter": ring_gather,
    "all_to_all": ring_gather,
    "gather": ring_gather,
    "scatter": ring_gather,
    "recv": lambda n, ranks: 0.0,
}
"""Bytes that a rank sends in operations on so many bytes; the tensor itself in all others."""
_PASSES = {
    "ForwardPass": "forward", "BackwardPass": "backward", "BackwardInputPass": "inputs", "BackwardWeightPass": "weights"
}  # fmt: skip
_TRANSFERS = ("send", "recv")
_LATENCY = 20e-6
"""Seconds that a collective may take beyond its bytes: a launch, and a round through a group."""
_LINKS_VARY = 0.25
"""Share by which collectives may be faster or slower than the machine's bandwidth says."""


class Uncertainty(NamedTuple):
    """A part of the step that is not known exactly."""

    name: str
    low: float
    """Seconds by which the step may be shorter."""
    high: float
    """Seconds by which it may be longer."""
    why: str


class Communicated(NamedTuple):
    """Seconds of a rank's communication in one iteration, in a phase."""

    exposed: float
    """The rank waits for it."""
    overlapped: float
    """The rank computes meanwhile, as far as there is something to compute."""


@dataclass(frozen=True)
class Expected:
    """A step of the run."""

    run: RunConfig
    machine: Machine
    ranks: Sequence[Mapping[str, Any]]
    """What ``rank.rehearse`` returned of each."""
    clock: str = "wall"
    """Or cpu: which of the measured seconds count."""

    @cached_property
    def parts(self) -> dict[str, float]:
        """Seconds of a step by what they are for."""
        computed, communicated = self._makespan(with_communication=False), self._makespan(with_communication=True)
        ideal = max(sum(self._passes(one).values()) for one in self.ranks)
        outside = max(self._outside(one) for one in self.ranks)
        sent = max(sum(self._waited(self._phases(one), one, _is_outside)) for one in self.ranks)
        return {
            "passes": min(ideal, computed),
            "bubble": max(computed - ideal, 0.0),
            "optimizer and host": outside,
            "communication": communicated - computed + sent,
        }

    @property
    def seconds(self) -> float:
        """Of a step."""
        return sum(self.parts.values())

    @cached_property
    def uncertainties(self) -> list[Uncertainty]:
        """What may make it shorter or longer, by the most first."""
        return sorted((one for one in self._uncertain() if one.low or one.high), key=lambda one: -one.low - one.high)

    @property
    def between(self) -> tuple[float, float]:
        """The step if all of them were at their lowest, or highest."""
        low, high = (sum(getattr(one, end) for one in self.uncertainties) for end in ("low", "high"))
        return max(self.seconds - low, 0.0), self.seconds + high

    @property
    def tokens_per_second(self) -> float:
        """Of the run."""
        return self.run.train.global_batch_size * self.run.data.seq_length / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: without recomputation, over the peak of the devices."""
        peak = self.machine.device.flops(self.run.precision.dtype) * self.run.parallel.world_size
        return model_flops(self.run) / self.seconds / peak

    @property
    def days(self) -> float:
        """Of the whole run."""
        return self.run.train.train_iters * self.seconds / 86400

    def _uncertain(self) -> Iterator[Uncertainty]:
        times = [one[self.clock] for rank in self.ranks for one in rank["rounds"]]
        usual = median(times)
        yield Uncertainty("measurement", usual - min(times), max(times) - usual, "the timed iterations differ")
        phases = [self._phases(one) for one in self.ranks]
        sent = max(sum(both.exposed for both in of_rank.values()) for of_rank in phases)
        yield Uncertainty(
            "links", _LINKS_VARY * sent, _LINKS_VARY * sent, "their bandwidth is given, not measured here"
        )
        hidden = max(sum(both.overlapped for both in of_rank.values()) for of_rank in phases)
        yield Uncertainty("overlap", 0.0, hidden, "communication may slow down what is computed meanwhile")
        operations = max(sum(one["times"] for one in rank["communication"]) for rank in self.ranks)
        yield Uncertainty("latency", 0.0, operations * _LATENCY, f"{operations:,} collectives and transfers")
        if others := set(range(self.run.parallel.pipe_stages)) - set(map(self._stage, self.ranks)):
            seconds = sum(self._passes(self.ranks[0]).values()) if len(self.ranks) == 1 else 0.0
            most = max(seconds * abs(self._scale(one, 0) - 1) for one in others)
            yield Uncertainty("other stages", most, most, f"{len(others)} stages are scaled by their FLOPs")

    def _stage(self, rank: Mapping[str, Any]) -> int:
        return stage_of(self.run, rank["rank"])

    @cached_property
    def _flops(self) -> list[int]:
        """Of each stage."""
        return [stage.flops(self.run.data.seq_length) for stage in plan(self.run)]

    def _nearest(self, stage: int) -> int:
        """The rehearsed rank of that stage, or of one that has about as many FLOPs."""
        places = [self._stage(one) for one in self.ranks]
        if stage in places:
            return places.index(stage)
        return min(range(len(places)), key=lambda number: abs(self._flops[places[number]] - self._flops[stage]))

    def _scale(self, stage: int, number: int) -> float:
        """FLOPs of ``stage`` over those of the rehearsed rank."""
        flops = self._flops[self._stage(self.ranks[number])]
        return self._flops[stage] / flops if flops else 1.0

    def _makespan(self, *, with_communication: bool) -> float:
        """Seconds from the first pass to the last."""
        schedule, seconds, transfer = schedule_of(self.run), [], 0.0
        for stage in range(schedule.stages):
            number = self._nearest(stage)
            rank, scale = self.ranks[number], self._scale(stage, number)
            times, phases = self._passes(rank), self._phases(rank)
            if with_communication:
                for name in times:
                    times[name] += sum(self._waited(phases, rank, lambda phase, name=name: _PASSES.get(phase) == name))
                transfer = max(transfer, self._transfer(rank))
            passes = schedule.micro_batches * schedule.chunks
            of_pass = {name: scale * spent / passes for name, spent in times.items()}
            half = of_pass["backward"] / 2
            seconds.append(PassSeconds(of_pass["forward"], of_pass["inputs"] + half, of_pass["weights"] + half))
        return pipeline_seconds(schedule, seconds, transfer)

    def _passes(self, rank: Mapping[str, Any]) -> dict[str, float]:
        """Seconds that ``rank`` computes in each kind of pass in an iteration."""
        micro_batches = self.run.train.gradient_accumulation_steps
        found = dict.fromkeys(_PASSES.values(), 0.0)
        for one in rank["passes"]:
            if name := _PASSES.get(one["instruction"]):
                found[name] += micro_batches * one[self.clock]
        with_waits = sum(one[self.clock] for one in rank["phases"].values())
        return {name: spent * rank["seconds"][self.clock] / with_waits for name, spent in found.items()}

    def _outside(self, rank: Mapping[str, Any]) -> float:
        """Seconds of an iteration that are in no pass."""
        return max(rank["seconds"][self.clock] - sum(self._passes(rank).values()), 0.0)

    def _phases(self, rank: Mapping[str, Any]) -> dict[str, Communicated]:
        """Seconds of communication of ``rank`` by the instruction in which it starts, without transfers."""
        found: dict[str, Communicated] = {}
        for one in rank["communication"]:
            if one["kind"] in _TRANSFERS:
                continue
            seconds, earlier = one["times"] * self._link_seconds(one), found.get(one["phase"], Communicated(0.0, 0.0))
            hidden = seconds if one["is_overlapped"] else 0.0
            found[one["phase"]] = Communicated(earlier.exposed + seconds - hidden, earlier.overlapped + hidden)
        return found

    def _waited(self, phases: Mapping[str, Communicated], rank: Mapping[str, Any], chosen: Any) -> Iterator[float]:
        """Seconds of the ``chosen`` phases that computation does not hide."""
        for phase, both in phases.items():
            if chosen(phase):
                name = _PASSES.get(phase)
                hides = self._passes(rank)[name] if name else self._passes(rank)["forward"]  # of the next iteration
                yield both.exposed + max(both.overlapped - hides, 0.0)

    def _transfer(self, rank: Mapping[str, Any]) -> float:
        """Seconds of a transfer between stages."""
        return max((self._link_seconds(one) for one in rank["communication"] if one["kind"] == "send"), default=0.0)

    def _link_seconds(self, one: Mapping[str, Any]) -> float:
        """Of one operation."""
        sent = _SENT.get(one["kind"], lambda n, ranks: n)(one["size"], one["ranks"])
        return sent / self.machine.bandwidth(one["span"]) if one["ranks"] > 1 else 0.0


def stage_of(run: RunConfig, rank: int) -> int:
    """The pipeline stage of ``rank``."""
    return rank // (run.parallel.world_size // run.parallel.pipe_stages)


def _is_outside(phase: str) -> bool:
    return phase not in _PASSES
