"""``--straggler-report``: which hosts are slow for the work that they do."""

import json
import socket
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from support.programs import TINY_MODEL

from megatron.cli import parse_run
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.pipeline.schedule import Instruction
from megatron.training.measurements import STRAGGLERS, RankTime, StragglerReport, slow_hosts


def times(*rows: tuple[str, int, float, float]) -> list[RankTime]:
    return [RankTime(*row) for row in rows]


@pytest.mark.parametrize(
    ("measured", "slow"),
    [
        (times(("a", 0, 1.0, 1.0), ("b", 0, 1.2, 1.0), ("c", 0, 1.6, 1.0)), {"c"}),
        # A stage with more layers is no slow host: it is compared with the same stage, or by its FLOPs.
        (times(("a", 0, 1.0, 1.0), ("b", 1, 2.0, 2.0), ("c", 0, 1.0, 1.0), ("d", 1, 2.9, 2.0)), {"d"}),
        (times(("a", 0, 1.0, 1.0), ("b", 1, 2.0, 2.0), ("c", 2, 1.6, 1.0)), {"c"}),
        (times(("a", 0, 1.0, 1.0), ("b", 1, 3.0, 0.0)), set()),  # FLOPs that are not known
        (times(("a", 0, 9.0, 1.0), ("a", 1, 1.0, 1.0)), set()),  # one host
        (times(("a", 0, 0.0, 1.0), ("b", 0, 0.0, 1.0)), set()),
    ],
)
def test_hosts_are_compared_by_the_same_work(measured: list[RankTime], slow: set[str]) -> None:
    assert set(slow_hosts(measured, 0.3)) == slow


@pytest.mark.ranks(2)
def test_the_slow_host_is_named_once_per_window(tmp_path: Path) -> None:
    """Both ranks, on hosts of their own, measure over two windows; rank 1 computes for twice as long in the first."""
    (folder := tmp_path / "ck").mkdir(exist_ok=True)
    words = f"--save {folder} --straggler-report 0.5 --straggler-window 2 --train-iters 9 --batch-size 2 --mock-data"
    run = parse_run([*TINY_MODEL, *words.split()], {"DS_ACCELERATOR": "cpu", "WORLD_SIZE": "2"})
    rank, host = dist.get_rank(), socket.gethostname
    socket.gethostname = lambda: f"host-{rank}"
    try:
        callback, found = StragglerReport(run, ParallelLayout.create(run.parallel)), []
        for iteration in range(1, 5):
            with callback.around_iteration(iteration) as hooks:
                for name, seconds in (("ForwardPass", 0.1 + 0.1 * rank), ("ReduceGrads", 0.5 - 0.5 * rank)):
                    with hooks[0](Instruction(name)):
                        time.sleep(seconds if iteration < 3 or name == "ReduceGrads" else 0.1)
            found.append(dict(callback.metrics()))
    finally:
        socket.gethostname = host
    assert found == [{}, {"slow_hosts": 1}, {}, {"slow_hosts": 0}]
    if rank == 0:
        assert json.loads((folder / STRAGGLERS).read_text()) == {"hosts": {}, "ranks": []}
