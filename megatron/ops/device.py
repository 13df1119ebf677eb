"""What operations are chosen by. No torch here: ``--explain`` and the planner ask, too."""

from typing import NamedTuple


class DeviceFacts(NamedTuple):
    """What the kernel of an operation depends on besides the model."""

    kind: str
    """cpu, cuda, rocm or another type of torch's devices."""
    capability: tuple[int, int] | None = None
    """CUDA's compute capability, such as (8, 0); None if it is not known, which counts as a new one."""
    has_fused_kernels: bool = True
    """Whether torch was built with them for this device."""
    has_varlen: bool = True
    """Whether torch has a ``varlen_attn`` with windows: 2.11 or later."""


ELEMENTS_AT_ONCE = {"cpu": 1 << 19}
"""Logits that the loss converts at a time, by kind of device; on a CPU as many as fit its caches."""
MOST_AT_ONCE = 1 << 27
"""The same on every other device."""


def rows_at_once(columns: int, device: str) -> int:
    """Rows of ``columns`` logits that the loss converts together."""
    return max(1, ELEMENTS_AT_ONCE.get(device, MOST_AT_ONCE) // columns)
