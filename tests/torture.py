"""Kill a training run at random times, again and again, and check that it loses nothing.

    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 python tests/torture.py --kills 50

Two ranks train with a checkpoint after each iteration. A third of the kills (SIGKILL) come at any time, a third while
a checkpoint is written, and a third hit one rank up to half a second before the other. After each of them the newest
checkpoint must be whole, bit by bit, and no older than before; in the end each loss must be that of an undisturbed
run, to the last bit.
"""

import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.programs import TINY_MODEL, Programs  # noqa: E402
from support.warm import exit_code, start_ranks  # noqa: E402

from megatron.checkpoint.files import check_content, read_manifest  # noqa: E402
from megatron.checkpoint.tracker import LATEST, newest  # noqa: E402
from megatron.common.errors import CheckpointError  # noqa: E402
from megatron.tools.command_line import ToolParser, run_tool  # noqa: E402

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


def main() -> None:
    """Round after round, until there were enough kills; every other round with --async-save."""
    arguments = _parser().parse_args()
    chance = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        programs = Programs(ROOT, _made(Path(folder, "data")))
        whole = Victim(programs, _made(Path(folder, "whole")), arguments.iterations)
        whole.run()
        kills, rounds, start = 0, 0, time.monotonic()
        while kills < arguments.kills:
            words = ["--keep-last", "2", *(["--async-save"] if rounds % 2 else [])]
            victim = Victim(programs, _made(Path(folder, f"round{rounds}")), arguments.iterations, *words)
            found = torture(victim, whole, min(arguments.kills - kills, arguments.kills_of_round), chance)
            kills, rounds = kills + sum(found.kills.values()), rounds + 1
            print(f"{kills} kills, {time.monotonic() - start:.0f} s, {' '.join(words)}: {_told(found)}", flush=True)
            if found.differing:
                sys.exit(f"losses differ at iterations {found.differing}")


def _told(found: Found) -> str:
    return (
        f"{dict(found.kills)}; {found.left_unfinished} left half a checkpoint; resumed at {found.resumed_at}; "
        f"{len(found.differing)} losses differ"
    )


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _parser() -> ToolParser:
    parser = ToolParser(__doc__)
    parser.add_argument("--kills", type=int, default=50, metavar="N", help="kills in all")
    parser.add_argument(
        "--kills-of-round", type=int, default=13, metavar="N", help="kills of one training run, at most"
    )
    parser.add_argument("--iterations", type=int, default=40, metavar="N", help="iterations of each training run")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="equal seeds choose equal instants")
    return parser


if __name__ == "__main__":
    run_tool(main)
