"""Training that is killed at random instants and resumed, until it is through; then compared with one that was not."""

import json
import os
import random
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

from support.programs import TINY_MODEL, Programs
from support.warm import exit_code, start_ranks

from megatron.checkpoint.files import check_content, read_manifest
from megatron.checkpoint.tracker import LATEST, newest
from megatron.common.errors import CheckpointError

RANKS = 2
TIME_LIMIT = 240.0
SETTINGS = (
    *TINY_MODEL,
    *"--batch-size 2 --gas 2 --eval-iters 0 --pipe-parallel-size 2 --zero-stage 1 --save-interval 1".split(),
)
INSTANTS = ("at any time", "while a checkpoint is written", "one rank first")


@dataclass
class Found:
    """What a round of torture has shown."""

    kills: Counter = field(default_factory=Counter)
    """By the kind of instant."""
    resumed_at: list[int] = field(default_factory=list)
    """The iteration of the checkpoint after each kill; 0 if there was none yet."""
    left_unfinished: int = 0
    """Kills that left half a checkpoint."""
    differing: list[int] = field(default_factory=list)
    """Iterations with another loss than without kills."""


class Victim:
    """A training run in ``folder``, started anew after each kill."""

    def __init__(self, programs: Programs, folder: Path, iterations: int, *words: str):
        self.programs, self.folder = programs, folder
        self.checkpoints, self.metrics, self.log = folder / "ck", folder / "metrics", folder / "log"
        self.words = [
            *("--train-iters", str(iterations), "--save", str(self.checkpoints), "--auto-resume"),
            *("--metrics-file", str(self.metrics), *words),
        ]
        self.ranks: list[BaseProcess] = []
        self.seconds = 0.0
        """That the run took which came to its end."""

    def start(self) -> None:
        """Start every rank as a process of its own."""
        self.log.write_text("")
        words = ("pretrain_gpt2.py", *SETTINGS, *self.programs.data_arguments, *self.words)
        self.ranks = start_ranks(RANKS, words, os.environ, self.programs.root, self.log)

    def is_training(self) -> bool:
        """Whether no rank has ended."""
        return all(rank.is_alive() for rank in self.ranks)

    def kill(self, first: int, seconds: float) -> None:
        """SIGKILL to a rank, and so many seconds later, as launchers do, to the others."""
        self.ranks[first].kill()
        time.sleep(seconds)
        for rank in self.ranks:
            rank.kill()
        self.wait()

    def wait(self) -> int:
        """0, or the exit code of the first rank that failed."""
        code = exit_code(self.ranks, TIME_LIMIT)
        assert code is not None, f"ranks did not end:\n{self.log.read_text()[-4000:]}"
        return code

    def run(self) -> None:
        """To the end, without a kill."""
        begin = time.monotonic()
        self.start()
        assert self.wait() == 0, self.log.read_text()[-4000:]
        self.seconds = time.monotonic() - begin

    def losses(self) -> list[tuple[int, float]]:
        """Iteration and loss, of whatever was trained; the last line may be half."""
        lines = self.metrics.read_text().splitlines() if self.metrics.exists() else []
        entries = [json.loads(line) for line in lines if line.endswith("}")]
        return [(entry["iteration"], entry["lm_loss"]) for entry in entries if "lm_loss" in entry]


def torture(victim: Victim, whole: Victim, kills: int, chance: random.Random) -> Found:
    """Kill ``victim`` so many times, let it end, and compare its losses with those of the undisturbed ``whole``."""
    found, is_named = Found(), False
    for _ in range(kills):
        instant = INSTANTS[sum(found.kills.values()) % len(INSTANTS)]
        before = _unfinished(victim.checkpoints)
        victim.start()
        _await(victim, instant, chance, whole.seconds / 6)
        if not victim.is_training():
            break
        victim.kill(chance.randrange(RANKS), chance.uniform(0, 0.5) if instant == "one rank first" else 0)
        found.kills[instant] += 1
        found.left_unfinished += bool(_unfinished(victim.checkpoints) - before)
        found.resumed_at.append(_whole_iteration(victim.checkpoints, is_named))
        is_named = is_named or (victim.checkpoints / LATEST).exists()
        assert found.resumed_at == sorted(found.resumed_at), "a checkpoint was lost"
    victim.wait()
    victim.run()
    expected = dict(whole.losses())
    found.differing = sorted({step for step, loss in victim.losses() if loss != expected[step]})
    assert {step for step, _ in victim.losses()} == set(expected)
    assert not list(victim.checkpoints.glob("*.partial"))
    return found


def _await(victim: Victim, instant: str, chance: random.Random, most: float) -> None:
    """Let it continue to the time of a kill, at random in ``most`` seconds from its start, or to its end."""
    if instant == "at any time":
        deadline = time.monotonic() + chance.uniform(0, most)
        while victim.is_training() and time.monotonic() < deadline:
            time.sleep(0.01)
        return
    last = _newest_step(victim.checkpoints) + chance.randrange(1, 8)
    while victim.is_training() and _newest_step(victim.checkpoints) < last:
        time.sleep(0.001)
    time.sleep(chance.uniform(0, 0.02))


def _newest_step(folder: Path) -> int:
    """The iteration of the newest checkpoint, whole or not; 0 if there is none."""
    names = [path.name.removeprefix("global_step").removesuffix(".partial") for path in folder.glob("global_step*")]
    return max(map(int, names), default=0)


def _unfinished(folder: Path) -> set[tuple[str, int]]:
    """What is being written, or was when it was cut short."""
    found = set()
    for path in folder.glob("global_step*.partial"):
        with suppress(FileNotFoundError):
            found.add((path.name, path.stat().st_ino))
    return found


def _whole_iteration(folder: Path, is_named: bool) -> int:
    """The newest checkpoint's, all of whose files are what was saved; 0 where there is none at all.

    A kill may come between the first checkpoint and the file that names it; once that ``is_named``, the file stays.
    """
    whole = [path for path in folder.glob("global_step*") if path.suffix != ".partial"]
    try:
        saved = newest(folder, strict=is_named or len(whole) != 1)
    except CheckpointError as error:
        assert "no checkpoint there" in str(error)
        return 0
    place = saved.path
    for name, record in read_manifest(place).items():
        check_content(place / name, record)
    return saved.iteration
