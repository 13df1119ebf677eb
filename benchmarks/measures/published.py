"""Tokens a second of a GPU that the planner expects, beside what others published: Llama 3.1 8B, 70B and 405B.

benchmarks/published.csv has the rows: facts of tables in the repositories it names, with the layout as arguments, and
the share of the layers that recompute all or, selectively, every second matmul. No constant of the planner is fitted to
them here. Trained with another vocabulary: the 405B of 25.03.
"""

import csv
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.comparing import Quantity
from megatron.tools.planning.machine import DEVICES, Machine
from megatron.tools.planning.request import make_request
from megatron.tools.planning.search import Candidate, search

ROWS = Path(__file__).parents[1] / "published.csv"


class Row(NamedTuple):
    """A published throughput, and its layout as the planner sees it."""

    source: str
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

    @property
    def expected(self) -> float:
        """Tokens a second of a GPU."""
        run, kept, again = self.planned.run, self.planned.timing.total, self.recomputing.timing.total
        seconds = kept + self.recomputed * (again - kept)
        return run.train.global_batch_size * run.data.seq_length / seconds / run.parallel.world_size


def measure(rounds: int) -> list[Quantity]:
    """A row for each published one, and the errors; they are computed once."""
    rows = list(read_rows())
    found = [Quantity(row.what, row.source, [row.expected], [row.published], "tokens/s") for row in rows]
    errors = [100 * abs(row.expected / row.published - 1) for row in rows]
    found.append(Quantity(f"{len(rows)} rows: mean error", "largest", [statistics.mean(errors)], [max(errors)], "%"))
    return found


def read_rows() -> Iterator[Row]:
    """The published rows, each with the layout that the planner sees in it."""
    with ROWS.open(newline="") as file:
        for row in csv.DictReader(file):
            both = _planned(row["model"], row["device"], int(row["gpus"]), row["arguments"].split())
            published, recomputed = float(row["tokens_per_second_of_a_gpu"]), float(row["recomputed"])
            yield Row(row["source"], row["model"], row["device"], published, *both, recomputed)


def _planned(model: str, device: str, gpus: int, arguments: list[str]) -> tuple[Candidate, Candidate]:
    """The one layout of ``arguments``, without and with recomputation."""
    machine = Machine(DEVICES[device]._replace(memory=math.inf), DEVICES[device].per_node)
    plan = search(make_request([*arguments], machine, gpus, model=model))
    found = {
        one.run.activation.recompute_granularity: one
        for one in (*plan.fitting, *plan.superseded, *plan.too_large)
        if one.run.parallel.sequence_parallel is ("--sequence-parallel" in arguments)
    }
    return found[None], found["full"]
