"""Started on each rank by ``rehearsal.py``: rehearsed steps of a program, its real ones, or the rehearsed ones replayed
with real communication."""

import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from megatron.launch.environment import prepare_environment


def main() -> None:
    """Leave what this rank has found in a folder, in a file with its number."""
    what, place, steps, *words = sys.argv[1:]
    own = Path(place, os.environ["RANK"])
    prepare_environment(os.environ)
    if what == "replayed":
        found = _replayed(words, _mean(json.loads(own.read_text())["timeline"]), int(steps))
    else:
        found = (_rehearsed if what == "rehearsed" else _trained)(words, int(steps))
    own.write_text(json.dumps(found))
    if own.name == "0":
        from benchmarks.measures.ranks import report

        report(True)


def _rehearsed(words: Sequence[str], steps: int) -> dict[str, Any]:
    """The figures of this rank without the other one, and its ``timeline``."""
    from megatron.tools.one_rank.group import OneRankGroup
    from megatron.tools.rehearsal.rank import Observer, rehearse
    from megatron.tools.verify.request import PROGRAM

    rehearsal, number, timeline = _rehearsal(words, steps), int(os.environ["RANK"]), Timeline()
    os.environ.update(rehearsal.environ(number))
    with (
        patch.object(OneRankGroup, "do", timeline.noting(OneRankGroup.do)),
        patch.object(Observer, "around_iteration", timeline.within(Observer.around_iteration)),
    ):
        return rehearse(rehearsal, number, PROGRAM) | {"timeline": timeline.iterations[-steps:]}


def _trained(words: Sequence[str], steps: int) -> dict[str, Any]:
    """The same of this rank, which trains with the other one."""
    from megatron.tools.one_rank.run import run_program
    from megatron.tools.rehearsal.rank import Observer, as_dict, observing
    from megatron.tools.verify.request import PROGRAM

    rehearsal = _rehearsal(words, steps)
    engines: list[Any] = []
    observer = Observer(lambda: engines[0], rehearsal.timed)
    with observing(observer, engines, rehearsal.iterations):
        assert run_program(PROGRAM, words) == 0
    return as_dict(observer)


def _rehearsal(words: Sequence[str], steps: int) -> Any:
    from megatron.model.architectures import GPT2
    from megatron.tools.rehearsal.rehearse import Rehearsal

    return Rehearsal(words, GPT2, 2, 2, steps, fake=False)


class Timeline:
    """What a rank issues and waits for in each timed iteration, and its seconds of CPU time before each."""

    def __init__(self) -> None:
        self.iterations: list[list[dict[str, Any]]] = []
        self._is_open = False
        self._issued = 0
        self._begin = 0.0

    @contextmanager
    def _outside(self, **event: Any) -> Iterator[None]:
        """Note ``event``; what happens inside is not computed in a real run."""
        import time

        if self._is_open:
            self.iterations[-1].append({"after": time.process_time() - self._begin, **event})
        yield
        self._begin = time.process_time()

    def noting(self, do: Callable[..., Any]) -> Callable[..., Any]:
        """``OneRankGroup.do``, of whose operations those with the other rank are noted."""
        from megatron.tools.one_rank.group import FinishedWork

        def noted(group: Any, deliver: Any, kind: str, *arguments: Any) -> Any:
            written, read, peer = (*arguments, *((), (), None)[len(arguments) :])[:3]
            size = max(sum(x.nbytes for x in written), sum(x.nbytes for x in read))
            if group.size() == 1 or not size:
                return do(group, deliver, kind, *arguments)
            self._issued += 1
            number = self._issued
            with self._outside(kind=kind, size=size, peer=peer, number=number):
                work = do(group, deliver, kind, *arguments)

            def wait() -> None:
                with self._outside(kind="wait", number=number):
                    work.wait()

            return FinishedWork(wait)

        return noted

    def within(self, around: Callable[..., Any]) -> Callable[..., Any]:
        """``Observer.around_iteration``: a timed iteration ends where the next begins."""
        from megatron.tools.rehearsal.rehearse import WARM_UP

        @contextmanager
        def noted(observer: Any, iteration: int) -> Iterator[Any]:
            number = iteration - WARM_UP - 1
            with self._outside(kind="end"):
                self._is_open = 0 <= number < observer._steps
                if self._is_open:
                    self.iterations.append([])
            with around(observer, iteration) as hooks:
                yield hooks

        return noted


def _mean(timeline: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The first iteration, with the mean of all of them for the seconds before each operation.

    Two rehearsed ranks are disturbed at different places. In a real run the ranks go through the same layers at the
    same time, and disturb each other equally, so that neither waits.
    """
    first = timeline[0]
    assert all([event["kind"] for event in other] == [event["kind"] for event in first] for other in timeline)
    means = [statistics.fmean(event["after"] for event in events) for events in zip(*timeline, strict=True)]
    return [event | {"after": mean} for event, mean in zip(first, means, strict=True)]


def _replayed(words: Sequence[str], iteration: Sequence[dict[str, Any]], steps: int) -> dict[str, Any]:
    """Seconds of an iteration of this rank, which computes as long as it did alone, and communicates with the other."""
    import torch.distributed as dist

    from megatron.cli import parse_run
    from megatron.launch.distributed import distributed
    from megatron.parallel.process_groups import new_group
    from megatron.tools.rehearsal.rank import Clocks

    with distributed(parse_run(list(words), os.environ).parallel):
        found = []
        group = new_group(timeout=timedelta(minutes=1))  # of the backend that the layout's groups have, too
        for _ in range(steps + 1):
            compute = _computation()
            dist.barrier()
            begin = Clocks.now()
            _replay(iteration, compute, group)
            found.append(Clocks.now() - begin)
        del found[0]  # connections are made in it
    return {"seconds": {clock: statistics.median(getattr(one, clock) for one in found) for clock in Clocks._fields}}


def _replay(iteration: Sequence[dict[str, Any]], compute: Callable[[float], None], group: Any) -> None:
    works: dict[int, Any] = {}
    for event in iteration:
        compute(event["after"])
        if event["kind"] == "wait":
            works.pop(event["number"]).wait() if event["number"] in works else None
        elif event["kind"] != "end":
            works[event["number"]] = _issued(event["kind"], event["size"], event["peer"], group)
    for work in works.values():
        work.wait()


_WARM_UP, _TIMED = 500, 5000
"""Matrix products."""


def _computation() -> Callable[[float], None]:
    """Matrix products for so many seconds of CPU time, as fast as they are while the other rank computes, too."""
    import time

    import torch
    import torch.distributed as dist

    x, weights = torch.randn(32, 256), torch.randn(128, 256, 128)

    def multiply(times: int) -> None:
        for number in range(times):
            x @ weights[number % len(weights)]

    multiply(_WARM_UP)
    dist.barrier()
    begin = time.process_time()
    multiply(_TIMED)
    each = (time.process_time() - begin) / _TIMED
    return lambda seconds: multiply(round(seconds / each))


def _issued(kind: str, size: int, peer: int | None, group: Any) -> Any:
    """The work of the operation on so many bytes, with the other rank; transfers have the default group."""
    import torch
    import torch.distributed as dist

    whole, part = _buffers(max(size // 4, 2) // 2 * 2)
    table: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group, async_op=True),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=group, async_op=True),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group, async_op=True),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole, group=group, async_op=True),
        "send": lambda: dist.isend(whole, peer),
        "recv": lambda: dist.irecv(whole, peer),
    }
    return table.get(kind, lambda: dist.broadcast(whole, peer or 0, group=group, async_op=True))()


@cache
def _buffers(elements: int) -> tuple[Any, Any]:
    """What a rank sends or receives, and half of it; allocating it is part of what was rehearsed."""
    import torch

    return torch.zeros(elements), torch.zeros(elements // 2)


main()
