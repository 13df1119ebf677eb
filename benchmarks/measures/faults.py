"""Time until a run of two ranks ends when one of them is killed or stopped.

Killed (SIGKILL): until the launcher exits, with torchrun and with tools/launch.py, compared with torchrun and a plain
script that only runs all-reduces. Stopped (SIGSTOP), with --watchdog-minutes: until the other rank has reported the
hung rank and exited, and until the launcher, torchrun, has exited. The limit of the latter is torchrun itself, with the
plain script: one rank is stopped, and the other one killed.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import psutil

from benchmarks.comparing import Quantity
from megatron.common.errors import LaunchError
from megatron.tools.preprocess.indexed_dataset_builder import IndexedDatasetBuilder

ROOT = Path(__file__).parents[2]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
TINY = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --batch-size 2 --train-iters 1000000"
    " --lr 1e-3 --eval-iters 0 --num-workers 0 --log-interval 1 --tokenizer-type WhitespaceTokenizer --split 1,0,0"
).split()
WATCHDOG_MINUTES, CRASH_LIMIT, HANG_LIMIT, START_LIMIT, END_LIMIT = 0.1, 2.0, 5.0, 240.0, 120.0
MOST_ROUNDS = 3
"""Every start of a run takes seconds. The end of a stopped one takes half a minute, and is waited for once."""


def measure(rounds: int) -> list[Quantity]:
    """Every way once a round, in at most ``MOST_ROUNDS``; those that stop a rank once."""
    rounds = min(rounds, MOST_ROUNDS)
    with tempfile.TemporaryDirectory() as name:
        log = Path(name) / "log"
        words = ("pretrain_gpt2.py", *TINY, *_data(Path(name)))
        plain = (*TORCHRUN, "-m", "benchmarks.measures.plain_ranks")
        kills = {
            "torchrun": (*TORCHRUN, *words),
            "tools/launch.py": ("tools/launch.py", "--num_gpus", "2", *words),
            "a plain script": plain,
        }
        killed: dict[str, list[float]] = {way: [] for way in kills}
        for _ in range(rounds):
            for way, command in kills.items():
                with _running(command, log) as run:
                    killed[way].append(run.seconds_to_answer(signal.SIGKILL))
        watched = (*TORCHRUN, *words, "--watchdog-minutes", str(WATCHDOG_MINUTES), "--save", str(Path(name) / "ck"))
        with _running(watched, log) as run:
            stopped = run.seconds_to_leave(signal.SIGSTOP), run.seconds_to_answer()
        with _running(plain, log) as run:
            alone = run.seconds_to_answer(signal.SIGSTOP, then_killed=0)
    return [*_of_kills(killed), *_of_stops(*stopped, alone)]


def _of_kills(seconds: dict[str, list[float]]) -> Iterator[Quantity]:
    plain = seconds.pop("a plain script")
    for way, ours in seconds.items():
        limit = [CRASH_LIMIT] * len(ours)
        yield Quantity(f"SIGKILL, {way}: time until it exits", f"{CRASH_LIMIT:g} s", ours, limit, "s", most=1.0)
    what = "SIGKILL, compared with a plain script: time until torchrun exits"
    yield Quantity(what, "a plain script", seconds["torchrun"], plain, "s")


def _of_stops(other: float, launcher: float, alone: float) -> Iterator[Quantity]:
    watchdog = 60 * WATCHDOG_MINUTES
    limit = watchdog + HANG_LIMIT
    held_to = f"the watchdog's limit of {watchdog:g} s plus {HANG_LIMIT:g} s"
    for name, seconds in {"the other rank has reported it and exited": other, "torchrun has exited": launcher}.items():
        what = f"SIGSTOP, {name}: {seconds - watchdog:.1f} s after the limit"
        yield Quantity(what, held_to, [seconds], [limit], "s", most=1.0)
    what = "SIGSTOP, torchrun has exited: the same"
    yield Quantity(what, "the watchdog's, and torchrun's end", [launcher], [watchdog + alone], "s", is_limit=True)


class _Run:
    """A launcher whose two ranks are in their iterations."""

    def __init__(self, launcher: subprocess.Popen):
        self._launcher = launcher
        self._ranks = _ranks_below(launcher.pid)
        self._begin = 0.0

    def seconds_to_answer(self, number: signal.Signals | None = None, then_killed: int | None = None) -> float:
        """Until the launcher ends, from ``number`` to rank 1 on, or from the signal that it was sent before.

        Another rank may be killed right after the signal.
        """
        if number is not None:
            self._hit(number)
        if then_killed is not None:
            self._ranks[then_killed].kill()
        self._launcher.wait(END_LIMIT)
        return time.perf_counter() - self._begin

    def seconds_to_leave(self, number: signal.Signals) -> float:
        """Until rank 0 ends, from ``number`` to rank 1 on."""
        self._hit(number)
        while _lives(self._ranks[0]) and time.perf_counter() - self._begin < END_LIMIT:
            time.sleep(0.01)
        return time.perf_counter() - self._begin

    def _hit(self, number: signal.Signals) -> None:
        self._begin = time.perf_counter()
        self._ranks[1].send_signal(number)


@contextmanager
def _running(command: tuple[str, ...], log: Path) -> Iterator[_Run]:
    """Run ``python COMMAND`` until its ranks have finished some iterations; its processes are ended after the block."""
    with open(log, "w") as file:
        words = [sys.executable, "-W", "ignore", *command]
        launcher = subprocess.Popen(words, cwd=ROOT, env=os.environ, stdout=file, stderr=subprocess.STDOUT)
    below: list[psutil.Process] = []
    try:
        _await_iteration(3, log, launcher)
        below = psutil.Process(launcher.pid).children(recursive=True)
        yield _Run(launcher)
    finally:
        for process in [*below, launcher]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        launcher.wait()


def _await_iteration(number: int, log: Path, launcher: subprocess.Popen) -> None:
    """Raises LaunchError where the run ends before, or does not come so far."""
    deadline = time.monotonic() + START_LIMIT
    while not re.search(rf"^iteration +{number}\b", log.read_text(), re.MULTILINE):
        if launcher.poll() is not None or time.monotonic() > deadline:
            raise LaunchError(f"the run that was to be hit did not come so far:\n{log.read_text()[-2000:]}")
        time.sleep(0.05)


def _ranks_below(launcher: int) -> dict[int, psutil.Process]:
    """The processes of ranks 0 and 1: those that have a rank and no process below them that has one."""
    found = {}
    for process in psutil.Process(launcher).children(recursive=True):
        with suppress(psutil.Error):
            if not process.children() and "LOCAL_RANK" in process.environ():
                found[int(process.environ()["RANK"])] = process
    return found


def _lives(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def _data(folder: Path) -> list[str]:
    """Flags that name a made-up data set and its vocabulary."""
    prefix, vocabulary = str(folder / "text"), folder / "vocab.json"
    with IndexedDatasetBuilder(prefix, np.dtype("u2")) as builder:
        builder.add_sequence(np.arange(10_000) % 100)
        builder.end_document()
    words = ["<|endoftext|>", "<unk>", *(f"w{number}" for number in range(98))]
    vocabulary.write_text("{" + ", ".join(f'"{word}": {number}' for number, word in enumerate(words)) + "}")
    return ["--data-path", prefix, "--vocab-file", str(vocabulary)]
