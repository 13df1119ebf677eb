"""Memory of a rank: freed blocks stay with the process."""

import subprocess
import sys

import pytest

FAULTS_OF_A_STEP = """
import ctypes, os, resource
from megatron.launch.environment import keep_freed_memory
keep_freed_memory(os.environ)
libc, block = ctypes.CDLL(None), ctypes.c_void_p()
def step():  # as torch's allocator for CPUs
    assert libc.posix_memalign(ctypes.byref(block), 64, 1 << 26) == 0
    ctypes.memset(block, 1, 1 << 26)
    libc.free(block)
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.parametrize(
    "variables, kept", [({}, True), ({"MALLOC_TOP_PAD_": "0", "THP_MEM_ALLOC_ENABLE": "0"}, False)]
)
def test_freed_block_is_reused(variables: dict[str, str], kept: bool):
    """64 MiB are 16,384 pages, each a fault where the block is new; a user's own setting stands."""
    done = subprocess.run(
        [sys.executable, "-c", FAULTS_OF_A_STEP], env={"PATH": "", **variables}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (int(done.stdout) < 16_384) == kept  # of 49,152
