"""Bring the snapshots of hosts that the next start leaves idle to the shared disk, where its ranks find them."""

import shlex
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron.checkpoint.snapshot_files import brought_folder, snapshot_folder
from megatron.config import RunConfig
from megatron.tools.cluster.elastic import announce
from megatron.tools.cluster.hostfile import Host
from megatron.tools.cluster.remote import ssh_command

_SECONDS = 600.0
"""For the copy. Afterwards the run starts without it, and resumes from what there is."""


def bring_snapshots(hosts: Sequence[Host], run: RunConfig, port: int | None) -> None:
    """Move the snapshots of ``run`` on ``hosts``, if there are any, from memory to disk, as far as that is possible."""
    folder, save = snapshot_folder(run.checkpoint), Path(str(run.checkpoint.save)).absolute()
    if hosts:
        with ThreadPoolExecutor(len(hosts)) as pool:
            list(pool.map(lambda host: _bring(host.name, moving(folder, save, host.name), port), hosts))


def moving(folder: Path, save: Path, host: str) -> list[str]:
    """The command that moves ``folder`` of the memory of ``host`` to ``save``; if that fails, it stays there."""
    here, there = (shlex.quote(str(path)) for path in (folder, brought_folder(save, host)))
    move = f"rm -rf {there}; if cp -r {here} {there}; then rm -r {here}; else rm -rf {there}; false; fi"
    return ["sh", "-c", f"test ! -d {here} || {{ {move}; }}"]


def _bring(host: str, command: Sequence[str], port: int | None) -> None:
    try:
        done = subprocess.run(ssh_command(host, command, port), capture_output=True, text=True, timeout=_SECONDS)
        problem = " ".join(done.stderr.split()[-20:]) or f"exit code {done.returncode}" if done.returncode else None
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    if problem is not None:
        announce(f"the snapshots of {host}, which is idle, cannot be brought to the disk: {problem}")
