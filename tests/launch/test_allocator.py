"""Memory of a rank: freed blocks stay with the process; the collector leaves alone what is imported."""

import contextlib
import gc
import subprocess
import sys

import pytest

from megatron.launch.environment import import_backend

FAULTS_OF_A_STEP = """
import os, resource
from megatron.launch.environment import keep_freed_memory
keep_freed_memory(os.environ)
import torch
for _ in range(3):
    torch.ones(1 << 24)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    torch.ones(1 << 24)
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


@pytest.mark.parametrize(("end", "error"), [("", None), ("raise ImportError", ImportError)])
def test_nothing_is_collected_while_torch_is_imported(monkeypatch, tmp_path, end: str, error: type | None) -> None:
    """Afterwards the collector is on again, also where a module cannot be imported."""
    monkeypatch.syspath_prepend(tmp_path)
    frozen: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(gc.isenabled()))
    (tmp_path / f"probe{len(end)}.py").write_text(f"import gc\nassert not gc.isenabled()\n{end}")
    with pytest.raises(error) if error else contextlib.nullcontext():
        import_backend(f"probe{len(end)}")
    import_backend("gc")  # long imported
    assert frozen == [False] and gc.isenabled()
