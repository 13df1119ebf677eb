"""Files mapped into memory that another program truncates: an error with the file's name, not SIGBUS."""

import numpy as np

from megatron.common.errors import DataError


def check_mapped(*arrays: np.ndarray) -> None:
    """Raises DataError if the file of an array has become shorter than the array. Call it right before reading.

    Reading pages after the end of a file would end the process with SIGBUS. It costs one system call for each array
    that is a memory map, or a view of one; others are skipped.
    """
    for array in arrays:
        memory = array if isinstance(array, np.memmap) else array.base
        # numpy has no public way to the size of the mapped file.
        if isinstance(memory, np.memmap) and memory._mmap.size() < memory.offset + memory.nbytes:  # type: ignore[attr-defined]
            raise DataError(
                f"{memory.filename} was truncated while it is in use: it has {memory._mmap.size():,} bytes, and "  # type: ignore[attr-defined]
                f"{memory.offset + memory.nbytes:,} when it was opened: restore the file and start again"
            )
