"""Errors of the rendezvous: a port that is taken, ranks that never arrive."""

import socket
from pathlib import Path

from support.bare_ranks import BareRanks

SETTINGS = "--train-iters 1 --batch-size 2 --gas 4 --eval-iters 0".split()


def test_the_port_is_taken(programs) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ended = programs.pretrain(1, *SETTINGS, **place)
    assert ended.returncode == 6
    (line,) = ended.output.splitlines()
    assert f"port {port} of the rendezvous cannot be opened (Address already in use" in line
    assert f"ss -ltnp 'sport = :{port}'" in line


def test_ranks_that_never_arrive(programs, tmp_path: Path) -> None:
    words = (*SETTINGS, "--distributed-timeout-minutes", "0.1")
    some = BareRanks(programs, tmp_path / "some", "none 0 0", *words, size=4, ranks=(0, 2))
    alone = BareRanks(programs, tmp_path / "alone", "none 0 0", *words, size=2, ranks=(1,))
    assert [some.ended(), alone.ended()] == [[6, 6], [6]]
    assert (
        "2 of 4 ranks did not connect within 0.1 minutes (--distributed-timeout-minutes): ranks 1, 3" in some.errors[-1]
    )
    assert "no answer at 127.0.0.1:" in alone.errors[-1] and "check that rank 0 is started" in alone.errors[-1]
