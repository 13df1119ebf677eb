"""Started on each rank by ``rehearsal.py``: the real steps of a program, then the operations of a rehearsed rank."""

import json
import os
import statistics
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from megatron.launch.environment import prepare_environment

REPEATED = 20


def main() -> None:
    """Leave what ``rehearse`` reports, of real ranks, in a folder; or report seconds of the operations in a file."""
    prepare_environment(os.environ)
    place, steps, *words = sys.argv[1:]

    import torch.distributed as dist

    from benchmarks.measures.ranks import report
    from megatron.cli import parse_run
    from megatron.launch.distributed import distributed
    from megatron.parallel.process_groups import new_group

    if Path(place).is_dir():
        found = _of_program(words, int(steps))
        Path(place, os.environ["RANK"]).write_text(json.dumps(found))
        if os.environ["RANK"] == "0":
            report(True)
        return
    with distributed(parse_run(words, os.environ).parallel):
        issued, between = json.loads(Path(place).read_text())
        group = new_group(timeout=timedelta(minutes=5))  # as the groups of a layout
        compute = _computation(between)
        of_ranks = [[{**one, "seconds": _seconds(one, group, compute)} for one in rank] for rank in issued]
        if dist.get_rank() == 0:
            report(of_ranks)


def _of_program(words: list[str], steps: int) -> dict[str, Any]:
    """The figures of this rank, which trains with another one."""
    from megatron.model.architectures import GPT2
    from megatron.tools.one_rank.run import run_program
    from megatron.tools.rehearsal.observer import Observer
    from megatron.tools.rehearsal.rank import described, observed
    from megatron.tools.rehearsal.request import Rehearsal
    from megatron.tools.verify.request import PROGRAM

    rehearsal = Rehearsal(words, GPT2, 2, 2, steps, fake=False)
    engines: list[Any] = []
    observer = Observer(lambda: engines[0], rehearsal.timed)
    with observed(observer, engines, rehearsal.iterations):
        assert run_program(PROGRAM, words) == 0
    return described(observer)


def _seconds(one: Mapping[str, Any], group: Any, compute: Callable[[], Any]) -> dict[str, float]:
    """Of an operation over ``group``, on this rank: what it adds to the computation before each, by medians.

    So it is as in a step, where the other rank comes sooner or later, threads have slept, and caches hold other data.
    """
    operation = _operation(one["kind"], one["size"], group)

    def both() -> None:
        compute()
        operation()

    alone, together = _median(compute), _median(both)
    return {clock: max(getattr(together, clock) - getattr(alone, clock), 0.0) for clock in together._fields}


def _median(work: Callable[[], Any]) -> Any:
    from megatron.tools.rehearsal.observer import Clocks

    times = []
    for _ in range(REPEATED + 1):
        begin = Clocks.now()
        work()
        times.append(Clocks.now() - begin)
    return Clocks(*(statistics.median(values) for values in zip(*times[1:], strict=True)))


def _computation(seconds: float) -> Callable[[], Any]:
    """Matrix products of about so many seconds."""
    import time

    import torch

    x, weights = torch.randn(512, 256), torch.randn(16, 256, 1024)

    def multiply(times: int) -> None:
        for number in range(times):
            x @ weights[number % len(weights)]

    multiply(50)
    begin = time.perf_counter()
    multiply(50)
    times = round(seconds / ((time.perf_counter() - begin) / 50))
    return lambda: multiply(times)


def _operation(kind: str, size: int, group: Any) -> Callable[[], Any]:
    """The operation on so many bytes."""
    import torch
    import torch.distributed as dist

    whole = torch.zeros(max(size // 4, 2) // 2 * 2)
    part = torch.zeros(whole.numel() // 2)
    rank = dist.get_rank(group)

    def to_the_other() -> None:
        if rank == 0:
            dist.send(whole, group_dst=1, group=group)
        else:
            dist.recv(whole, group_src=0, group=group)

    table: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole, group=group),
        "send": to_the_other,
        "recv": lambda: None,
    }
    return table.get(kind, lambda: dist.broadcast(whole, group_src=0, group=group))


main()
