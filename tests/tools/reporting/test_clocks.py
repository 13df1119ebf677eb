"""Events of ranks whose clocks differ are put on one clock."""

import time

import torch.distributed as dist

from megatron.tools.reporting.tracing import machine, seconds_ahead


def differences() -> tuple[float, float]:
    """On machines whose clocks are a thousand seconds apart, and on this one."""
    rank = dist.get_rank()
    apart = seconds_ahead(lambda: time.perf_counter() + 1000 * rank, f"machine {rank}")
    return apart, seconds_ahead(time.perf_counter, machine())


def test_clock_offsets_are_estimated(run_ranks) -> None:
    (first, same), (second, also_same) = run_ranks(2, differences)
    assert (first, same, also_same) == (0, 0, 0)
    assert abs(second - 1000) < 10
