"""A hung rank: the others exit and name it. The next start resumes exactly in test_lost_hosts.py."""

import pickle
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from support.bare_ranks import BareRanks
from support.command_lines import parse
from torch.distributed import HashStore

from megatron.launch import watchdog
from megatron.launch.progress import ProgressState
from megatron.launch.watchdog import describe_hang, group_names, hang_watchdog

SETTINGS = "--train-iters 5 --batch-size 2 --gas 4 --eval-iters 0 --pipe-parallel-size 2".split()
SAVES = "--save-interval 1 --watchdog-minutes 0.1".split()


def test_a_stopped_rank_is_named(programs, tmp_path: Path) -> None:
    words = (*SETTINGS, *SAVES, "--save", tmp_path / "ck")
    ranks = BareRanks(programs, tmp_path / "log", "signal 1 3 SIGSTOP", *words, size=2)
    assert ranks.ended(0) == [6], ranks.output
    limit, waiting, cause = ranks.errors
    assert "takes longer than --watchdog-minutes 0.1" in limit
    assert waiting.startswith("rank 0: training, iteration 3, RecvGrad of micro-batch 1, in wait, at ")
    assert cause.startswith("rank 1 is hung and does not respond")
    assert ranks.output.splitlines()[-1].endswith(cause)
    written = (tmp_path / "ck" / "hang-rank0.txt").read_text()
    assert "RecvGrad of micro-batch 1, in wait, at " in written and " in train_batch\n" in written
    assert limit.endswith(f"torchfrtrace --prefix flight-recorder-rank {tmp_path / 'ck'}")
    recorded = pickle.loads((tmp_path / "ck" / "flight-recorder-rank0").read_bytes())
    assert recorded["entries"] and recorded["pg_config"]


def test_the_stopped_rank_hosts_the_store(programs, tmp_path: Path) -> None:
    """Then only its silence shows that it is hung."""
    words = (*SETTINGS, *SAVES, "--save", tmp_path / "ck")
    ranks = BareRanks(programs, tmp_path / "log", "signal 0 2 SIGSTOP", *words, size=2)
    assert ranks.ended(1) == [6], ranks.output
    assert "RecvActivation of micro-batch 1, in wait, at " in ranks.errors[-1]
    assert "the rendezvous store does not respond: its host, rank 0 or torchrun" in ranks.errors[-1]


def test_a_rank_that_holds_pythons_lock(programs, tmp_path: Path) -> None:
    """None of its Python threads can run, and yet it exits, with its stack on the screen.

    A rank that waits for it in a schedule of this project's own says in which pass.
    """
    words = (*SETTINGS, *SAVES, "--save", tmp_path / "ck", "--pipeline-schedule", "zbv")
    ranks = BareRanks(programs, tmp_path / "log", "hold 1 2", *words, size=2)
    assert ranks.ended() == [6, 1], ranks.output
    assert ranks.errors[-1].startswith("rank 1 is hung and does not respond")
    waits = "rank 0: training, iteration 2, RecvActivation of micro-batch 1 in chunk 1 of its stage, in wait, at "
    assert ranks.errors[-2].startswith(waits) and "transfers.py" in ranks.errors[-2]
    assert "Timeout (" in ranks.output and "faulty_pretrain.py" in ranks.output.partition("Timeout (")[2]


def test_the_run_ends_although_the_disk_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a save that hangs with its disk, to which the report would go."""
    disk, exits, codes, others = threading.Event(), threading.Event(), [], threading.enumerate()

    def leave(code: int) -> None:
        codes.append(code)
        exits.set()

    monkeypatch.setattr(watchdog, "connect", lambda *_: HashStore())
    monkeypatch.setattr(watchdog, "replace_file", lambda *_, **__: disk.wait() and nullcontext(sys.stderr))
    monkeypatch.setattr(watchdog, "write_recorded", lambda *_: None)
    monkeypatch.setattr(watchdog, "_SETTLE", 0.1)
    monkeypatch.setattr("faulthandler.dump_traceback_later", lambda *_, **__: None)
    monkeypatch.setattr("os._exit", leave)
    run = parse(f"--watchdog-minutes 0.01 --save {tmp_path}")
    layout: Any = SimpleNamespace(rank=0, topology=PipeModelDataParallelTopology(num_pp=1, num_mp=1, num_dp=1))
    with hang_watchdog(run, layout, progress := ProgressState()):
        progress.enter("saving", 1)
        assert exits.wait(60)
    disk.set()
    for thread in {*threading.enumerate()}.difference(others):
        thread.join(60)  # also the timer, which would end this process
    assert set(codes) == {6}


def test_which_rank_is_hung() -> None:
    def report(entered: int, waits: bool, alarmed: bool = True) -> dict[str, Any]:
        return {"phases_entered": entered, "text": "here", "in_collective": waits, "alarmed": alarmed, "host": "h"}

    def hung(*ranks: dict[str, Any] | None) -> list[str]:
        lines = describe_hang(list(ranks), "--watchdog-minutes 1", Path("ck"))
        return [line for line in lines if "is hung" in line or "each other" in line]

    sleeps, waits = report(3, False), report(3, True)
    assert hung(waits, sleeps, waits) == ["rank 1 is hung: here (on h)"]
    assert hung(report(4, True), waits) == ["rank 1 is hung: here (on h)"], "an earlier part of the run"
    assert hung(waits, waits) == ["all ranks wait for each other"]
    assert hung(waits, report(2, False, alarmed=False)) == [
        "rank 1 is hung and does not respond, last seen: here (on h)"
    ]
    assert hung(waits, None) == ["rank 1 is hung and does not respond, last seen: an unknown position"]
    assert len(describe_hang([waits] * 1000 + [sleeps], "", Path("ck"))) < 12


def test_groups_have_names() -> None:
    names = group_names(PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1), rank=1)
    assert names == {(0, 1): "tensor-parallel", (1, 3): "pipeline"}
