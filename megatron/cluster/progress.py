"""How far a run is, as its launcher can see it."""

from collections.abc import Callable, Sequence
from pathlib import Path

from megatron.arguments.command_line import read_flags
from megatron.checkpoint.tracker import LATEST
from megatron.errors import ConfigError


def checkpoint_watch(arguments: Sequence[str]) -> Callable[[], str | None]:
    """A function that names the newest checkpoint of the run with these training arguments; None while there is none.

    Raises:
        ConfigError: started again, the run would not go on from its checkpoints.
    """
    given = {field: said.value for field, said in read_flags(arguments)[0].items()}
    save = given.get("save")
    if not save or not (given.get("auto_resume") or given.get("load") == save):
        raise ConfigError(
            "--max-restarts needs --save and --auto-resume among the training arguments: a run that is started again "
            "goes on from its newest checkpoint"
        )
    latest = Path(save) / LATEST
    return lambda: latest.read_text() if latest.is_file() else None
