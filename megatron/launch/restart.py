"""Start a run again that has died, as long as that leads somewhere."""

from collections.abc import Callable

from megatron.errors import CheckpointError, ConfigError, DataError, NumericsError, ResourceError
from megatron.launch.rank import say
from megatron.launch.supervise import End

FRUITLESS = 93
"""Exit code of a run that dies at the same place again and again: starting it once more changes nothing."""

_MOST_FRUITLESS = 3
_LEFT_SAVED = 75
_MISTAKES = (ConfigError, DataError, CheckpointError, NumericsError, ResourceError)
_FINAL = {0, _LEFT_SAVED, *(mistake.exit_code for mistake in _MISTAKES)}
"""Exit codes that a new start would not change, or that ask for it to be made by somebody else."""


def run_again(start: Callable[[], End], progress: Callable[[], object], most: int) -> int:
    """Call ``start`` until the run ends for good, and where it dies, up to ``most`` times more.

    Args:
        start: runs it to its end.
        progress: how far its checkpoints are; anything that is another thing when there is a newer one.
        most: how often it may be started again.

    Returns the exit code of the last start; or 93, where it has died three times in a row without a new checkpoint.
    """
    fruitless, reached = 0, progress()
    for number in range(most + 1):
        code, was_asked = start()
        if was_asked or code in _FINAL:
            return code
        before, reached = reached, progress()
        fruitless = fruitless + 1 if reached == before else 0
        if fruitless == _MOST_FRUITLESS:
            say(f"the run has died {fruitless} times in a row without a new checkpoint: it is not started again")
            return FRUITLESS
        if number == most:
            return code
        say(f"the run died with exit code {code} and is started again, time {number + 1} of {most} (--max-restarts)")
    raise AssertionError("the last start returns")
