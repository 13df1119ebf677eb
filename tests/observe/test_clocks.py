"""Ranks whose clocks differ get one."""

import time

import torch.distributed as dist

from megatron.observe.trace.clocks import seconds_ahead


def differences() -> tuple[float, float]:
    """With clocks that are a thousand seconds apart, and with one clock."""
    return seconds_ahead(lambda: time.perf_counter() + 1000 * dist.get_rank()), seconds_ahead(time.perf_counter)


def test_clocks_that_differ_are_brought_together(run_ranks) -> None:
    (first, same), (second, near) = run_ranks(2, differences)
    assert (first, same) == (0, 0)
    assert abs(second - 1000) < 10 and abs(near) < 10
