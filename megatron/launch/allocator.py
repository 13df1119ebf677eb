"""Memory of the CPU that is asked for once and kept, since a step frees and takes the same sizes again and again.

Every block that glibc maps anew is filled with zeros page by page when it is first touched, which can be a third of
a step. See mallopt(3), and "Transparent Hugepage Support" in Linux's documentation.
"""

import ctypes
from collections.abc import MutableMapping

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Names of glibc's malloc.h."""
_KEPT_BYTES = 2**31 - 1
_LARGEST_KEPT_BLOCK = 2**30


def keep_freed_memory(environ: MutableMapping[str, str]) -> None:
    """Let this process keep what it frees, in huge pages; before torch is imported.

    What the user has set himself, by glibc's or torch's variables, stays; so does another allocator than glibc's.
    """
    environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    tuned = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")) for name in environ)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not tuned:
        mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT_BLOCK)
