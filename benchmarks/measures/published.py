"""Tokens a second of a GPU that the planner expects, beside what others published: Llama 3.1 8B, 70B and 405B.

benchmarks/published.csv has the rows: facts of tables in the repositories it names, with the layout as arguments, and
the share of the layers that recompute all or, selectively, every second matmul. Kernels of others have other rates than
this project's, so that constants are fitted for each software, each on the rows of the set "fit" with its name: the
rate of 16-bit matmuls, that of FP8, and torchtitan's attention to keys of other ranks. The rows that are held out are
of other sizes, layouts, numbers of GPUs or versions. All else is the planner's, for all software alike, but for what
``SOFTWARE`` states. Trained with another vocabulary: the 405B of 25.03.

benchmarks/published_memory.csv has layouts that were published as fitting or not: planned bytes beside the device's.
"""

import csv
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.comparing import Quantity
from megatron.tools.planning.machine import DEVICES, Machine
from megatron.tools.planning.output import WITHIN
from megatron.tools.planning.request import make_request
from megatron.tools.planning.search import Candidate, search

ROWS = Path(__file__).parents[1] / "published.csv"
MEMORY = Path(__file__).parents[1] / "published_memory.csv"
GB = 10**9
HELD_OUT = "held out"
ALL_HELD_OUT = f"all {HELD_OUT}"
OF_TRANSFORMER_ENGINE = {"attention": 0.8, "quantized": 0.9}
"""NVIDIA's attention is faster than torch's, and its kernels quantize while they normalize; not fitted."""
OF_TORCHTITAN = {"joined": False}
"""Its linear layers are those of the paper: query, key and value have one each, gate and up projection, too."""
OF_LIMITED_H100 = {"memory_bandwidth": 2.4e12}
"""torchtitan's H100 have HBM2e, as its tables say, and 500 W instead of 700."""
NVIDIA, TORCHTITAN = "NVIDIA", "pytorch/torchtitan"
SOFTWARE: dict[str, dict[str, float]] = {
    NVIDIA: OF_TRANSFORMER_ENGINE,
    TORCHTITAN: {**OF_TORCHTITAN, **OF_LIMITED_H100},
    "arXiv 2407.21783": {},
}
"""By the beginning of a source: constants that are not fitted. For what has no row to fit, they are the planner's."""
FITTED = {"efficiency": (0.2, 0.95), "fp8_speedup": (1.01, 4.0), "remote": (1.0, 4.0)}
"""Constants that are fitted, one after the other, and between what."""


class Row(NamedTuple):
    """A published throughput, and its layout as the planner sees it."""

    source: str
    fits: str
    """The constant that is fitted on it; empty if it is held out."""
    model: str
    device: str
    published: float
    """Tokens a second of a GPU."""
    planned: Candidate
    recomputing: Candidate
    """The same with full recomputation."""
    recomputed: float
    """Share of the layers."""

    @property
    def software(self) -> str:
        """The entry of ``SOFTWARE``."""
        return next(name for name in SOFTWARE if self.source.startswith(name))

    @property
    def what(self) -> str:
        """Model, precision, GPUs and layout."""
        run, parallel = self.planned.run, self.planned.run.parallel
        sizes = {"TP": parallel.model_parallel_size, "PP": parallel.pipe_stages, "CP": parallel.context_parallel_size}
        parts = [
            f"{self.model.rpartition('-')[2].upper()} with {run.model.num_layers} layers",
            f"{run.model.fp8_recipe} FP8" if self.in_fp8 else "bf16",
            f"{parallel.world_size:,} {self.device.upper()}",
            *(f"{name} {size}" for name, size in sizes.items() if size > 1),
            f"{parallel.chunks_per_stage} chunks" if parallel.chunks_per_stage > 1 else "",
            f"ZeRO {run.zero.zero_stage}" if run.zero.zero_stage > 1 else "",
            f"{self.recomputed:.0%} recomputed" if self.recomputed else "",
            "overlapped" if parallel.tp_comm_overlap else "",
            f"{run.train.global_batch_size:,} x {run.data.seq_length:,} tokens",
        ]
        return ", ".join(filter(None, parts))

    @property
    def in_fp8(self) -> bool:
        """Whether the matmuls are in FP8."""
        return self.planned.run.model.fp8_format != "none"

    def expected(self, constants: dict[str, float]) -> float:
        """Tokens a second of a GPU on its device with these ``constants``."""
        run, device = self.planned.run, DEVICES[self.device]._replace(**constants)
        machine = Machine(device, device.per_node)
        kept, again = (one.timing_on(machine).total for one in (self.planned, self.recomputing))
        seconds = kept + self.recomputed * (again - kept)
        return run.train.global_batch_size * run.data.seq_length / seconds / run.parallel.world_size


def measure(rounds: int) -> list[Quantity]:
    """A row for each published one, and the errors of each software; they are computed once."""
    found, errors = list[Quantity](), defaultdict[str, list[float]](list)
    rows = list(read_rows())
    constants = {name: fitted([row for row in rows if row.software == name]) for name in SOFTWARE}
    for row in rows:
        expected, is_held_out = row.expected(of_device(row, constants)), not row.fits
        of_row = f"{row.source}, {HELD_OUT if is_held_out else 'fitted'}"
        found.append(Quantity(row.what, of_row, [expected], [row.published], "tokens/s"))
        kind = f"{row.software.removeprefix('pytorch/')}, {'FP8' if row.in_fp8 else 'bf16'}"
        for what in (ALL_HELD_OUT, f"{kind}, {HELD_OUT}") if is_held_out else ("all fitted",):
            errors[what].append(abs(expected / row.published - 1))
    for what, some in errors.items():
        found.append(Quantity(f"{what}: error", "largest", [100 * statistics.mean(some)], [100 * max(some)], "%"))
        below = [error for error in some if error <= WITHIN]
        found.append(Quantity(f"{what}: error at most {WITHIN:.0%}", "all", [len(below)], [len(some)], "rows"))
    return [*found, *_memory()]


def of_device(row: Row, constants: dict[str, dict[str, float]]) -> dict[str, float]:
    """The constants of a row, from those of each software.

    No limit of the power is stated for torchtitan's H200: their 16-bit matmuls are as fast as NVIDIA's.
    """
    own = constants[row.software]
    if row.software != TORCHTITAN or row.device == "h100":
        return own
    of_device = {name: value for name, value in own.items() if name not in OF_LIMITED_H100}
    return {**of_device, "efficiency": constants[NVIDIA]["efficiency"]}


def _memory() -> Iterator[Quantity]:
    with MEMORY.open(newline="") as file:
        for row in csv.DictReader(file):
            both = _planned(row["model"], row["device"], int(row["gpus"]), row["arguments"].split())
            kept, again = (one.memory.total for one in both)
            planned, room = kept + float(row["recomputed"]) * (again - kept), float(row["gigabytes"]) * GB
            what = f"memory of {row['model']}, {row['gpus']} {row['device'].upper()}, {row['what']}"
            outcome = "fits" if row["fits"] == "yes" else "does not fit"
            yield Quantity(what, f"{row['source']}: {outcome}", [planned], [room], "B")


def read_rows() -> Iterator[Row]:
    """The published rows, each with the layout that the planner sees in it."""
    with ROWS.open(newline="") as file:
        for row in csv.DictReader(file):
            both = _planned(row["model"], row["device"], int(row["gpus"]), row["arguments"].split())
            fits, published = row["set"].removeprefix("fit "), float(row["tokens_per_second_of_a_gpu"])
            recomputed = float(row["recomputed"])
            of_row = row["source"], "" if fits == HELD_OUT else fits, row["model"], row["device"]
            yield Row(*of_row, published, *both, recomputed)


def fitted(rows: Sequence[Row]) -> dict[str, float]:
    """The constants of the software of ``rows``."""
    constants = dict(SOFTWARE[rows[0].software])
    for name, between in FITTED.items():
        if some := [row for row in rows if row.fits == name]:
            constants[name] = _without_error(some, constants, name, *between)
    return constants


def _without_error(rows: Sequence[Row], constants: dict[str, float], name: str, low: float, high: float) -> float:
    """The value of a constant between ``low`` and ``high`` with which the errors of ``rows`` cancel, by bisection."""
    is_slower = name == "remote"  # with more of it
    for _ in range(20):
        middle = (low + high) / 2
        logs = (math.log(row.expected({**constants, name: middle}) / row.published) for row in rows)
        low, high = (low, middle) if (sum(logs) > 0) is not is_slower else (middle, high)
    return round(low, 3)


def _planned(model: str, device: str, gpus: int, arguments: list[str]) -> tuple[Candidate, Candidate]:
    """The one layout of ``arguments``, without and with recomputation."""
    machine = Machine(DEVICES[device]._replace(memory=math.inf), DEVICES[device].per_node)
    found = {
        (one.run.activation.recompute_granularity, one.run.model.recompute_mlp_activation): one
        for one in search(make_request([*arguments], machine, gpus, model=model)).every
        if one.run.parallel.sequence_parallel is ("--sequence-parallel" in arguments)
    }
    return found[None, False], found["full", False]
