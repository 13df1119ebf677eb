"""All-reduce test: a program that is sent to each host, where it starts a process for each slot.

Needs torch, and nothing of this project. Rank 0 prints the bandwidth; every process has a time limit.
"""

import datetime
import json
import os
import signal
import socket
import subprocess
import sys
import time

MARK = "megatron-allreduce "
MIB = 1 << 20


def start_host(source: str, request: dict) -> None:
    """Run ``source`` in a process for each slot of this host, and exit with the highest of their exit codes.

    Args:
        source: this program, including the call to make; ``REQUEST`` in the environment has its arguments.
        request: ``address`` and ``port`` of the first host, ``world_size``, ``first_rank``, ``slots``, ``device``,
            ``seconds``, and ``environ``, which the launcher will set here.
    """
    os.environ.update(request["environ"])
    ranks = []
    for place, slot in enumerate(request["slots"]):
        arguments = {**request, "rank": request["first_rank"] + place, "slot": slot}
        environ = {**os.environ, "REQUEST": json.dumps(arguments), "OMP_NUM_THREADS": "1"}
        ranks.append(subprocess.Popen([sys.executable, "-c", source], env=environ, stdin=subprocess.DEVNULL))
    sys.exit(max(abs(rank.wait()) for rank in ranks))


def run_rank() -> None:
    """Join the other ranks, reduce a megabyte and then more, and let rank 0 print the bandwidth."""
    request = json.loads(os.environ["REQUEST"])
    signal.alarm(int(request["seconds"]) + 5)  # a rank that torch cannot stop

    import torch
    import torch.distributed as dist

    on_gpu = request["device"] == "cuda"
    if on_gpu:
        torch.accelerator.set_device_index(request["slot"])
    rank, world_size, address, port = (request[name] for name in ("rank", "world_size", "address", "port"))
    timeout = datetime.timedelta(seconds=request["seconds"])
    # Otherwise the store would listen on every interface.
    listener = _listen(os.environ.get("MASTER_LISTEN", address), port).detach() if rank == 0 else None
    store = dist.TCPStore(address, port, world_size, rank == 0, timeout, master_listen_fd=listener)
    backend = "nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    size = (256 if on_gpu else 16) * MIB
    tensor = torch.ones(size // 4, device="cuda" if on_gpu else "cpu")
    for _ in range(2):
        dist.all_reduce(tensor[: MIB // 4].fill_(1))
    if int(tensor[0]) != world_size:
        sys.exit(f"the sum over {world_size} ranks was {int(tensor[0])}")
    best = min(_seconds(dist, tensor.fill_(1), on_gpu) for _ in range(3))
    if rank == 0:
        others = 2 * (world_size - 1) / world_size
        print(MARK + json.dumps({"bytes_per_second": others * size / best, "bytes": size}), flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def _listen(address: str, port: int) -> socket.socket:
    family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(place, family=family)


def _seconds(dist, tensor, on_gpu: bool) -> float:
    start = time.monotonic()
    dist.all_reduce(tensor)
    if on_gpu:
        tensor[0].item()
    return time.monotonic() - start
