"""How many logits the loss takes at a time. No torch here: memory is planned by it."""

ELEMENTS_AT_ONCE = {"cpu": 1 << 21}
"""Logits that are in the loss's type at one time, by kind of device: on a CPU what fits its caches."""
MOST_AT_ONCE = 1 << 27
"""The same on every other device."""


def rows_at_once(columns: int, device: str) -> int:
    """Rows of so many logits that are taken together."""
    return max(1, ELEMENTS_AT_ONCE.get(device, MOST_AT_ONCE) // columns)
