"""Training that is killed at random times, again and again, loses nothing.

``TORTURE_KILLS=60 pytest --timeout 0 tests/test_torture.py`` kills more often than the suite. A third of the kills
(SIGKILL) come at any time, a third while a checkpoint is written, and a third hit one rank up to half a second before
the other.
"""

import json
import os
import random
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

from support.programs import TIME_LIMIT, TINY_MODEL, Programs
from support.warm import exit_code, start_ranks

from megatron.checkpoint.manifest import check_content, read_manifest
from megatron.checkpoint.tracker import LATEST, newest
from megatron.common.errors import CheckpointError

KILLS, KILLS_OF_RUN, ITERATIONS, RANKS = int(os.environ.get("TORTURE_KILLS", 3)), 7, 24, 2
SETTINGS = (
    *TINY_MODEL,
    *"--batch-size 2 --gas 2 --eval-iters 0 --pipe-parallel-size 2 --zero-stage 1 --save-interval 1".split(),
)
INSTANTS = ("at any time", "while a checkpoint is written", "one rank first")


class Victim:
    """A training run in ``folder``, started anew after each kill."""

    def __init__(self, programs: Programs, folder: Path, *words: str):
        folder.mkdir()
        self.programs, self.folder = programs, folder
        self.checkpoints, self.metrics, self.log = folder / "ck", folder / "metrics", folder / "log"
        self.words = [
            *("--train-iters", str(ITERATIONS), "--save", str(self.checkpoints), "--auto-resume"),
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
        """SIGKILL to a rank, and ``seconds`` later, as launchers do, to the others."""
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


def test_killed_training_has_the_losses_of_an_undisturbed_run(programs: Programs, tmp_path: Path) -> None:
    chance, kills = random.Random(3), 0
    whole = Victim(programs, tmp_path / "whole")
    whole.run()
    while kills < KILLS:
        words = ["--keep-last", "2", *([] if kills // KILLS_OF_RUN % 2 else ["--async-save"])]
        victim = Victim(programs, tmp_path / f"after{kills}", *words)
        kills += torture(victim, whole, min(KILLS - kills, KILLS_OF_RUN), chance)


def torture(victim: Victim, whole: Victim, most: int, chance: random.Random) -> int:
    """Kill ``victim`` up to ``most`` times, let it end, and compare its losses, to the last bit; the number of kills.

    After each the newest checkpoint must be whole, bit by bit, and no older than before.
    """
    resumed_at: list[int] = []
    is_named = False
    for number in range(most):
        instant = INSTANTS[number % len(INSTANTS)]
        victim.start()
        _await(victim, instant, chance, whole.seconds / 6)
        if not victim.is_training():
            break
        victim.kill(chance.randrange(RANKS), chance.uniform(0, 0.5) if instant == "one rank first" else 0)
        resumed_at.append(_whole_iteration(victim.checkpoints, is_named))
        is_named = is_named or (victim.checkpoints / LATEST).exists()
        assert resumed_at == sorted(resumed_at), "a checkpoint was lost"
    victim.wait()
    victim.run()
    expected = dict(whole.losses())
    assert {step for step, _ in victim.losses()} == set(expected)
    assert [step for step, loss in victim.losses() if loss != expected[step]] == []
    assert resumed_at and not list(victim.checkpoints.glob("*.partial"))
    return len(resumed_at)


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
