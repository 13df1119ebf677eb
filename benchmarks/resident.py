"""Resident memory of this process, as Linux accounts for it."""

from pathlib import Path

RETURNED_AT_ONCE = {
    "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "THP_MEM_ALLOC_ENABLE": "0"
}  # fmt: skip
"""Environment in which large blocks go back to the system when they are freed, so that what is resident is in use."""


def resident_now() -> int:
    """Bytes."""
    return _status("VmRSS")


def highest_since_lowered() -> int:
    """The most bytes since ``lower_mark()``."""
    return _status("VmHWM")


def lower_mark() -> None:
    """Bring the high-water mark down to what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{name}:"))) * 1024
