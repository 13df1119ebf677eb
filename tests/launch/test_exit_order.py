"""The rank that hosts the rendezvous store ends last."""

from datetime import timedelta
from threading import Thread

from torch.distributed import TCPStore

from megatron.launch.distributed import connect, leave_store
from megatron.launch.environment import free_port

TIMEOUT = timedelta(seconds=60)


def environment(rank: int, port: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def stores(port: int) -> list[TCPStore]:
    """The connections of three ranks; the first hosts the store."""
    return [connect(environment(rank, port), TIMEOUT) for rank in range(3)]


def test_the_host_waits_for_all_other_ranks() -> None:
    port = free_port()
    host, *others = stores(port)
    leaving = Thread(target=leave_store, args=(host, environment(0, port), TIMEOUT), daemon=True)
    leaving.start()
    for rank, store in enumerate(others, start=1):
        store.get("exits/0")  # the host is leaving
        leaving.join(0.2)
        assert leaving.is_alive(), f"rank {rank} has not left yet"
        leave_store(store, environment(rank, port), TIMEOUT)
    leaving.join(TIMEOUT.total_seconds())
    assert not leaving.is_alive()


def test_the_wait_is_bounded_and_a_lost_host_is_no_error() -> None:
    port = free_port()
    host, other, _ = stores(port)
    leave_store(host, environment(0, port), timedelta(milliseconds=10))
    del host
    leave_store(other, environment(1, port), TIMEOUT)
