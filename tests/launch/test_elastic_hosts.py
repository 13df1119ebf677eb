"""An elastic run loses two of its three hosts: a spare one takes over, then the planner chooses another layout.

The first is lost as a whole. The second has rank 0, which is cut off and still reaches the disk, where it may not save.
Between two checkpoints it continues from the memory of the hosts that are left.

The hosts are network namespaces, see ``support/hosts.py``; they share their files, as over NFS.
"""

import re
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
from support.hosts import INTERFACE, Hosts, why_not
from support.programs import TINY_MODEL, Programs, read_metrics

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

ITERATIONS = 32
"""The second host is lost soon after the checkpoint that follows the loss of the first one, at whatever iteration."""
SETTINGS = "--batch-size 2 --gas 4 --eval-iters 0 --pipe-parallel-size 2 --zero-stage 1".split()
SETTINGS += ["--train-iters", str(ITERATIONS)]
WITHOUT_DROPOUT = "--hidden-dropout 0 --attention-dropout 0".split()  # whose masks depend on the layout


def losses(metrics: Path) -> dict[int, float]:
    """Of each iteration the last: one that was finished when a host was lost is trained, and logged, once more."""
    return {line["iteration"]: line["lm_loss"] for line in read_metrics(metrics)}


def await_iteration(metrics: Path, iteration: int, supervisor: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + 200
    while not metrics.exists() or f'"iteration": {iteration},' not in metrics.read_text():
        assert supervisor.poll() is None and time.monotonic() < deadline, log.read_text()[-6000:]
        time.sleep(0.02)


def test_lost_hosts(programs: Programs, train_in_ranks, warm_python: dict[str, str], tmp_path: Path) -> None:
    settings = [*SETTINGS, *WITHOUT_DROPOUT]
    train_in_ranks(2, *settings, "--metrics-file", tmp_path / "whole")
    sent = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE}
    (tmp_path / "sent").write_text("".join(f"{name}={value}\n" for name, value in sent.items()))
    (tmp_path / "hosts").mkdir()
    (tmp_path / "hostfile").write_text("host-1 slots=1\nhost-2 slots=1\nhost-3 slots=1 spare\n")
    metrics, log, save = tmp_path / "metrics", tmp_path / "log", tmp_path / "ck"
    words = ["--metrics-file", metrics, "--save", save, "--auto-resume", "--save-interval", "8", "--keep-last", "2"]
    words += ["--snapshot-interval", "1"]
    with Hosts(tmp_path / "hosts", 4) as hosts:
        command = [*hosts.on("host-4"), sys.executable, "tools/launch.py", "--elastic", "--hostfile"]
        program = ["pretrain_gpt2.py", *TINY_MODEL, *programs.data_arguments, *settings, *words]
        command += [tmp_path / "hostfile", *program]
        with programs.started(log, *command, DS_ENV_FILE=str(tmp_path / "sent"), **warm_python) as supervisor:
            await_iteration(metrics, 10, supervisor, log)
            hosts.kill("host-2")
            first = max(losses(metrics))
            await_iteration(metrics, 8 * (first // 8) + 10, supervisor, log)
            hosts.cut("host-1")
            hosts.await_end("host-1", str(save))
            assert supervisor.wait(timeout=200) == 0, log.read_text()[-6000:]
    starts = re.findall("launch.py: elastic: (.* ranks? on .*)", log.read_text())
    assert [start.split(":")[0].split(", without")[0] for start in starts] == [
        "2 ranks on host-1 host-2",
        "2 ranks on host-1 host-3",
        "1 rank on host-3",
    ]
    assert "without host-2 (" in starts[1] and "the layout as given; resuming from global_step" in starts[1]
    assert "TP 1 x PP 1 x DP 1, micro-batch" in starts[2]
    # At the end of the first start a snapshot of two hosts, at the end of the second one with a copy of the lost shard.
    recovered = re.findall("> the snapshot of iteration ([0-9]+): saved as global_step[0-9]+, from", log.read_text())
    trained = [line["iteration"] for line in read_metrics(metrics)]
    resumed = [later for earlier, later in pairwise(trained) if later != earlier + 1]
    assert len(recovered) == 2, "and a start that resumes after the last trained iteration repeats none"
    assert set(resumed) <= {int(iteration) + 1 for iteration in recovered} <= set(trained)
    assert len(trained) <= ITERATIONS + 2 * 2, "one was not yet complete in memory, and one was trained meanwhile"
    assert (
        len(re.findall("launch.py: elastic: training again .* s after the failure was noticed", log.read_text())) == 2
    )
    expected, found = losses(tmp_path / "whole"), losses(metrics)
    assert found == pytest.approx(expected, abs=1e-4) and len(found) == ITERATIONS
    proof = programs.warm(1, "tools/audit_data.py", "proof", "--load", save, "--metrics-file", metrics).ok()
    assert proof.output.endswith("proven: no sample was repeated, none was skipped\n")
