"""Tensor parallelism: Megatron's layers and the communication between their ranks.

Here, without torch since the planner reads it: how many rows of logits the loss converts at a time.
"""

ELEMENTS_AT_ONCE = {"cpu": 1 << 19}
"""Logits in the loss's type at one time, by kind of device; on a CPU as many as fit its caches."""
MOST_AT_ONCE = 1 << 27
"""The same on every other device."""


def rows_at_once(columns: int, device: str) -> int:
    """Rows of ``columns`` logits that are converted together."""
    return max(1, ELEMENTS_AT_ONCE.get(device, MOST_AT_ONCE) // columns)
