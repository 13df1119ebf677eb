"""Training that is killed again and again loses nothing. ``tests/torture.py`` does the same at greater length."""

import random
from pathlib import Path

from support.programs import Programs
from torture import Victim, torture


def test_killed_training_has_the_losses_of_an_undisturbed_run(programs: Programs, tmp_path: Path) -> None:
    """A kill at each kind of instant; then each loss is the same, to the last bit."""
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole = Victim(programs, tmp_path / "whole", 40)
    whole.run()
    victim = Victim(programs, tmp_path / "killed", 40, "--async-save", "--keep-last", "2")
    found = torture(victim, whole, kills=3, chance=random.Random(3))
    assert sum(found.kills.values()) == 3
    assert found.differing == []
