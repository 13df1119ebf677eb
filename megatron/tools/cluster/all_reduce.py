"""The all-reduce test over all slots of all hosts. This module is also the program that runs on each host."""

import datetime
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from megatron.common.errors import first_line
from megatron.launch.environment import listen
from megatron.tools.cluster.hostfile import runs_here_alone
from megatron.tools.cluster.probe_hosts import PROJECT, Examination, HostReport
from megatron.tools.cluster.remote import forwarded_variables, ssh_command

_MIB = 1 << 20
_MARK = "megatron-allreduce "
"""Prefix of the line of output of rank 0, and of the errors of ranks."""
_IN_PROJECT = 'cd "$0" && exec "$@"'


class AllReduceResult(NamedTuple):
    """Bandwidth or failures of the all-reduce test."""

    bytes_per_second: float | None
    """Bus bandwidth, which does not depend on the number of ranks; None if the test failed."""
    failures: Mapping[str, str]
    """The first error of a rank of each failed host, or else the last line of its stderr."""


def all_reduce(examination: Examination, reports: Sequence[HostReport]) -> AllReduceResult:
    """Run an all-reduce over all slots of all hosts. All hosts must have passed the checks."""
    common = {
        "address": examination.master_address or _own_address(reports[0], examination),
        "port": examination.master_port,
        "device": examination.device,
        "environ": forwarded_variables(examination.environ, examination.device, Path.cwd()),
        "seconds": examination.seconds,
        "world_size": sum(len(report.host.slots) for report in reports),
    }
    first_rank, requests = 0, []
    for report in reports:
        requests.append({**common, "first_rank": first_rank, "slots": report.host.slots})
        first_rank += len(report.host.slots)

    def start(report: HostReport, request: Mapping[str, Any]) -> subprocess.CompletedProcess:
        local = ["sh", "-c", _IN_PROJECT, str(PROJECT), sys.executable, "-m", __name__]
        command = local if report.without_ssh else ssh_command(report.host.name, local, examination.ssh_port)
        limit = 2 * examination.seconds + 10
        try:
            return subprocess.run(
                command, input=json.dumps(request), capture_output=True, text=True, errors="replace", timeout=limit
            )
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, 1, "", "it did not end")

    with ThreadPoolExecutor(len(reports)) as pool:
        ended = list(pool.map(start, reports, requests))
    failures = {
        report.host.name: _cause(done.stderr) for report, done in zip(reports, ended, strict=True) if done.returncode
    }
    printed = [line.removeprefix(_MARK) for line in ended[0].stdout.splitlines() if line.startswith(_MARK)]
    return AllReduceResult(float(printed[0]) if printed and not failures else None, failures)


def _own_address(first: HostReport, examination: Examination) -> str:
    """The address for the rendezvous: as in DeepSpeed, the first address that the first host lists."""
    if not examination.uses_ssh or runs_here_alone(examination.hosts):
        return "127.0.0.1"
    return first.fact("network")["address"] or first.host.name


def _cause(errors: str) -> str:
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    of_ranks = [line.removeprefix(_MARK) for line in lines if line.startswith(_MARK)]
    return next(iter(of_ranks or reversed(lines)), "it ended without output")


def main() -> None:
    """Start a rank for each slot of this host, and exit with their highest exit code."""
    request = json.load(sys.stdin)
    os.environ.update(request["environ"], OMP_NUM_THREADS="1")
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=_run_rank, args=(request, rank, slot))
        for rank, slot in enumerate(request["slots"], request["first_rank"])
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in ranks))


def _run_rank(request: Mapping[str, Any], rank: int, slot: int) -> None:
    """Measure as one rank. An error is one line: torch adds stack frames of C++ to its own."""
    try:
        _measure(request, rank, slot)
    except Exception as error:
        sys.exit(f"{_MARK}rank {rank}: {first_line(error)}")


def _measure(request: Mapping[str, Any], rank: int, slot: int) -> None:
    """Join the process group, warm up, time the all-reduce, and print the bandwidth on rank 0."""
    signal.alarm(int(request["seconds"]) + 5)  # ends a rank that hangs in spite of the timeouts

    import torch
    import torch.distributed as dist

    world_size, address, port = (request[name] for name in ("world_size", "address", "port"))
    on_gpu = request["device"] == "cuda"
    timeout = datetime.timedelta(seconds=request["seconds"])
    environ = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world_size)}
    environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    # Otherwise the store would listen on every interface.
    listener = listen(environ).detach() if rank == 0 else None
    store = dist.TCPStore(address, port, world_size, rank == 0, timeout, master_listen_fd=listener)
    if on_gpu:
        torch.accelerator.set_device_index(slot)
    backend = "nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    size = (256 if on_gpu else 16) * _MIB
    tensor = torch.ones(size // 4, device="cuda" if on_gpu else "cpu")
    for _ in range(2):
        dist.all_reduce(tensor[: _MIB // 4].fill_(1))
    if int(tensor[0]) != world_size:
        raise ArithmeticError(f"the sum over {world_size} ranks was {int(tensor[0])}")
    best = min(_seconds(dist, tensor.fill_(1), on_gpu) for _ in range(3))
    if rank == 0:
        print(f"{_MARK}{2 * (world_size - 1) / world_size * size / best}", flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def _seconds(dist: Any, tensor: Any, on_gpu: bool) -> float:
    start = time.monotonic()
    dist.all_reduce(tensor)
    if on_gpu:
        tensor[0].item()
    return time.monotonic() - start


if __name__ == "__main__":
    main()
