"""When what happened from a failure of an elastic run to its next trained iteration: for a line, and a picture."""

import json
import os
import time
from pathlib import Path
from typing import NamedTuple

from megatron.launch.rank import EXIT_CODE_FOLDER

_STARTED = "started"
"""File in the folder of the exit codes, by which rank 0 says that it has trained an iteration."""
SHARES = {
    "ended": "to end all ranks",
    "examined": "census",
    "chosen": "layout",
    "launched": "launcher",
    "joined": "imports and rendezvous",
    "loaded": "model and checkpoint",
    "trained": "first iteration",
}
"""What ends with each event of a recovery, in their order, which begins when the failure is noticed."""


class Ages(NamedTuple):
    """Seconds that rank 0 had run at some events."""

    joined: float
    """All ranks are connected."""
    loaded: float
    """Model, optimizer, data and checkpoint are there."""
    trained: float
    """The first iteration is trained."""


def write_started(ages: Ages) -> None:
    """Leave ``ages`` for whoever started this rank and asked for it. Raises OSError."""
    if folder := os.environ.get(EXIT_CODE_FOLDER):
        unfinished = Path(folder, f".{_STARTED}")
        unfinished.write_text(json.dumps(ages))
        unfinished.replace(Path(folder, _STARTED))


def read_started(folder: Path) -> Ages | None:
    """What rank 0 has left in ``folder``; None if it has not trained yet."""
    try:
        return Ages(*json.loads((folder / _STARTED).read_text()))
    except (OSError, ValueError, TypeError):
        return None


class Events(dict[str, float]):
    """When what happened, from "noticed", a failure, to "trained", in seconds since 1970.

    The first start has no failure.
    """

    def note(self, name: str) -> None:
        """It happens now, unless it has happened before."""
        self.setdefault(name, time.time())

    def note_training(self, ages: Ages) -> None:
        """Rank 0 has just left these ``ages``."""
        now = time.time()
        times = {name: now - ages.trained + age for name, age in ages._asdict().items()}
        self.update(launched=now - ages.trained, **times)

    def shares(self) -> dict[str, float]:
        """The seconds that ended with each event, without those of events that are not there."""
        known = [name for name in ("noticed", *SHARES) if name in self]
        return {name: max(self[name] - self[before], 0.0) for before, name in zip(known, known[1:], strict=False)}

    def __str__(self) -> str:
        shares = self.shares()
        told = ", ".join(f"{seconds:.1f} s {SHARES[name]}" for name, seconds in shares.items())
        return f"training again {sum(shares.values()):.1f} s after the failure was noticed: {told}"
