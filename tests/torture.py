"""Kill a training run at random times, again and again, and check that it loses nothing.

    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 python tests/torture.py --kills 50
    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 python tests/torture.py --hosts 4 --faults 100 --seed 1

Two ranks train with a checkpoint after each iteration. A third of the kills (SIGKILL) come at any time, a third while
a checkpoint is written, and a third hit one rank up to half a second before the other. After each of them the newest
checkpoint must be whole, bit by bit, and no older than before; in the end each loss must be that of an undisturbed
run, to the last bit.

With --hosts an elastic run over so many hosts (network namespaces, as root) is hit by faults of hosts: ranks killed or
stopped, hosts lost, links cut, disks full, checkpoints damaged, clocks that jump; at any time, while a checkpoint is
saved, while the run restarts, or on two hosts at once; with --take-over the supervisor is cut off, too. The time from
each fault to the next iteration is printed. In the end the losses must be those of one process within 1e-4, and every
sample used once. Ctrl-C or SIGTERM lets the present fault be the last one; a second signal ends the program.
"""

import random
import shutil
import signal
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from types import FrameType

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.host_torture import FAULTS, SUPERVISOR, ElasticVictim, Recovery, torture_hosts  # noqa: E402
from support.programs import Programs  # noqa: E402
from support.torture import Found, Victim, torture  # noqa: E402

from megatron.tools.cluster.supervise import PREEMPTED  # noqa: E402
from megatron.tools.command_line import ToolParser, run_tool  # noqa: E402


def main() -> None:
    """Round after round, until there were enough kills; every other round with --async-save."""
    arguments = _parser().parse_args()
    chance = random.Random(arguments.seed)
    if arguments.hosts:
        return _torture_hosts(arguments, chance)
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


def _torture_hosts(arguments: Namespace, chance: random.Random) -> None:
    """Fault after fault on the hosts of one run."""
    is_stopped = _stopped_by_signal()
    survived: list[Recovery] = []
    kinds = (SUPERVISOR, *FAULTS) if arguments.take_over else FAULTS
    start = time.monotonic()

    def report(recovery: Recovery) -> None:
        survived.append(recovery)
        place = f"fault {len(survived)} of {arguments.faults}, after {time.monotonic() - start:.0f} s"
        what = f"{recovery.fault} {recovery.instant} ({' '.join(recovery.hosts)})"
        again = " (the run had ended)" * recovery.new_supervisor
        print(
            f"{place}: {recovery.seconds:.1f} s  {what}{again}\n    {recovery.start}\n    {recovery.shares}", flush=True
        )

    with tempfile.TemporaryDirectory() as folder:
        programs = Programs(ROOT, _made(Path(folder, "data")))
        # A run that waits for the lease of its supervisor trains meanwhile.
        iterations = arguments.iterations + (1500 if arguments.take_over else 150) * arguments.faults
        place = _made(Path(folder, "run"))
        victim = ElasticVictim(programs, place, arguments.hosts, iterations, chance, arguments.snapshots)
        try:
            outcome = torture_hosts(victim, arguments.faults, report, is_stopped, kinds)
        finally:
            if arguments.log and victim.log.exists():
                shutil.copy(victim.log, arguments.log)
            print(_summary(survived), flush=True)
    print(
        f"{len(survived)} faults survived in {outcome.iterations} iterations; largest difference of a loss from one "
        f"process without faults {outcome.largest_difference:.1e}; {outcome.proof}; "
        f"ended by a signal with exit code {outcome.code}"
    )
    if outcome.largest_difference > 1e-4:
        sys.exit("losses differ")
    if outcome.code != PREEMPTED:
        sys.exit("the run did not save at its end")


def _stopped_by_signal() -> Callable[[], bool]:
    """Whether Ctrl-C or SIGTERM has come; the second one raises KeyboardInterrupt."""
    received: list[int] = []

    def handle(number: int, _: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1:
            raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)
    return lambda: bool(received)


def _summary(survived: Sequence[Recovery]) -> str:
    """A line for each kind of fault: how often, and the seconds to the next iteration."""
    lines = []
    for fault in dict.fromkeys(recovery.fault for recovery in survived):
        seconds = [recovery.seconds for recovery in survived if recovery.fault == fault]
        lines.append(f"{fault}: {len(seconds)}, median {median(seconds):.1f} s, at most {max(seconds):.1f} s")
    return "\n".join(lines)


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
    parser.add_argument(
        "--iterations",
        type=int,
        default=40,
        metavar="N",
        help="iterations of each training run; with --hosts, besides those for each fault",
    )
    parser.add_argument("--hosts", type=int, default=0, metavar="N", help="hosts of an elastic run, 3 to 5")
    parser.add_argument("--faults", type=int, default=7, metavar="N", help="with --hosts: faults in all")
    parser.add_argument(
        "--snapshots", action="store_true", help="with --hosts: snapshots in memory, and a tenth of the checkpoints"
    )
    parser.add_argument(
        "--take-over",
        action="store_true",
        help="with --hosts: one more kind of fault, before the others: another supervisor takes over",
    )
    parser.add_argument("--log", type=Path, metavar="FILE", help="with --hosts: keep what the supervisor printed")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="equal seeds choose equal instants")
    return parser


if __name__ == "__main__":
    run_tool(main)
