"""DualPipeV as DeepSpeed runs it: what each stage exchanges before which pass. No torch here.

DeepSpeed's ``DualPipeVSchedule`` does not divide backward passes. It collects transfers, starts them together before a
pass, and waits for all of them: for tensors that this pass does not need yet, and for neighbors to receive what is
sent. The output of a forward pass leaves only after the backward pass that is paired with it. This makes stages idle.
"""

from collections import Counter
from functools import lru_cache

from megatron.parallel.pipeline.schedule import BACKWARD, FORWARD, Action, Schedule

Output = tuple[int, bool, int]
"""What a pass hands on: its model chunk, whether it is a forward pass, and the micro-batch."""
Exchange = frozenset[Output]
"""Outputs that a stage sends and receives together. It waits for all of them."""
_Pass = tuple[int, str]
"""Model chunk and kind of a pass, which takes the next micro-batch of its chunk."""


@lru_cache(maxsize=256)
def exchanging_steps(schedule: Schedule, stage: int) -> tuple[Action | Exchange, ...]:
    """The passes of a stage and its exchanges, in the order of DeepSpeed's schedule."""
    order = _Order(schedule, stage)
    out, back = schedule.chunks_of(stage)
    f0, b0, f1, b1 = (out, FORWARD), (out, BACKWARD), (back, FORWARD), (back, BACKWARD)
    later = schedule.stages - 1 - stage
    for _ in range(2 * later):
        order.add(f0)
    order.receive(f0)
    for turn in range(stage + 1):
        order.run(f0)
        order.receive(f0, f1)
        order.run(f1)
        order.send(*([f1] if later or turn < stage else []), f0)
    for _ in range(later):
        order.add(b1)
        order.receive(f1)
        order.exchange()
        order.run(f1)
        order.send(f1)
    for turn in range(schedule.micro_batches - 2 * schedule.stages + stage + 1):
        if turn:
            order.add(f0, b1)
        elif later:  # the input of f0 is there
            order.receive(b1)
            order.run(f0, b1)
            order.send(f0, b1)
        else:
            order.run(f0)
            order.send(f1)
            order.receive(b1)
            order.run(b1)
            order.send(f0, b1)
        order.add(f1, b0)
    for _ in range(later):
        order.add(b1)
        order.add(f1, b0)
    for _ in range(stage + 1):
        order.add(b1)
        order.add(b0)
    for _ in range(later):
        order.exchange()
        order.add(b0)
    order.exchange()
    return tuple(order.steps)


class _Order:
    """Writes down the steps of a stage."""

    def __init__(self, schedule: Schedule, stage: int):
        self.steps: list[Action | Exchange] = []
        self._schedule, self._stage = schedule, stage
        self._collected: list[Output] = []
        self._done: Counter[tuple[str, _Pass]] = Counter()

    def add(self, *passes: _Pass) -> None:
        """Receive what ``passes`` need, run them, and send what they hand on."""
        self.receive(*passes)
        self.run(*passes)
        self.send(*passes)

    def receive(self, *passes: _Pass) -> None:
        """Collect the transfers of the inputs of ``passes``."""
        for chunk, kind in passes:
            before = chunk - 1 if kind == FORWARD else chunk + 1
            if self._is_elsewhere(before):
                self._collected.append((before, kind == FORWARD, self._next("received", (chunk, kind))))

    def send(self, *passes: _Pass) -> None:
        """Collect the transfers of what ``passes`` hand on."""
        for chunk, kind in passes:
            if self._is_elsewhere(chunk + 1 if kind == FORWARD else chunk - 1):
                self._collected.append((chunk, kind == FORWARD, self._next("sent", (chunk, kind))))

    def exchange(self) -> None:
        """Start what is collected, and wait for it."""
        if self._collected:
            self.steps.append(frozenset(self._collected))
            self._collected.clear()

    def run(self, *passes: _Pass) -> None:
        """Run ``passes`` after an exchange."""
        self.exchange()
        self.steps += [Action(chunk, kind, self._next("run", (chunk, kind))) for chunk, kind in passes]

    def _is_elsewhere(self, chunk: int) -> bool:
        """Whether there is such a model chunk, on another stage."""
        chunks = self._schedule.stages * self._schedule.chunks
        return 0 <= chunk < chunks and self._schedule.stage_of(chunk) != self._stage

    def _next(self, what: str, one: _Pass) -> int:
        self._done[what, one] += 1
        return self._done[what, one] - 1
