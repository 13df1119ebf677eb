"""Which ranks of which run are rehearsed, and how long. No torch here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatron.cli import read_run
from megatron.common.errors import ConfigError
from megatron.config import RunConfig
from megatron.config.output import CheckpointConfig, ObserveConfig
from megatron.launch.environment import free_port
from megatron.model.partition import plan
from megatron.model.spec import ArchitectureSpec

WARM_UP = 3
"""Iterations before the timed ones: buffers are made, and DeepSpeed records the order of layers."""
PHASED = 3
"""Iterations whose phases are timed, with a wait for the device around each."""
MEASURED = 1
"""Iterations whose peak of memory is measured."""
COUNTED = 1
"""Iterations whose operations are counted: the last, since layers are not compiled in it."""


@dataclass(frozen=True)
class Rehearsal:
    """A run of which single ranks are rehearsed."""

    words: Sequence[str]
    """Arguments of the training program."""
    architecture: ArchitectureSpec
    world_size: int
    per_node: int
    """Ranks of a host."""
    steps: int
    """Timed iterations."""
    fake: bool
    """Whether tensors are fake: without memory and computation, so nothing is timed."""

    def environ(self, rank: int) -> dict[str, str]:
        """The environment variables of ``rank`` of the run, on the first device of this host."""
        return {
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(min(self.per_node, self.world_size)),
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),  # nothing connects
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # so that rank 0 listens for no other host
        }

    def run(self, environ: Mapping[str, str]) -> RunConfig:
        """The run, as ``environ(..)`` configures it. Raises ConfigError."""
        run = read_run(self.words, environ, self.architecture).checked()
        if run.logging.explain or run.logging.dry_run:
            raise ConfigError("--explain and --dry-run start nothing, and there is nothing to rehearse: remove them")
        if run.train.train_iters <= self.iterations:
            raise ConfigError(
                f"--train-iters {run.train.train_iters} must be more than the {self.iterations} that are rehearsed"
            )
        return run

    @property
    def timed(self) -> int:
        """Timed iterations."""
        return 0 if self.fake else self.steps

    @property
    def iterations(self) -> int:
        """All iterations of a rehearsal."""
        return WARM_UP + (self.timed and self.timed + PHASED) + MEASURED + COUNTED


def shortened(run: RunConfig, iterations: int) -> RunConfig:
    """``run`` for the first iterations, without evaluations, checkpoints and reports.

    The schedule of the learning rate, the order of the data and everything that an iteration does stay the same. That
    numbers become too large does not end it: without the other ranks' parts, norms of deep models divide by little.
    """
    return replace(
        run,
        train=replace(
            run.train, exit_interval=iterations, exit_duration_in_mins=None, eval_iters=0, skip_train=False,
            rewind_on_spike=False, max_consecutive_bad_steps=iterations + 1,
        ),
        checkpoint=CheckpointConfig(),
        logging=replace(
            run.logging, log_interval=10**9, tensorboard_dir=None, metrics_file=None, straggler_report=None,
            watchdog_minutes=None,
        ),
        observe=ObserveConfig(),
    )  # fmt: skip


def representative_ranks(run: RunConfig) -> list[int]:
    """A rank of each class: of the first, the last, and of stages between them one of each with other layers.

    Of a stage it is the last rank of the first replica, which like most has others before it in each group.
    """
    stages = run.parallel.pipe_stages
    of_stage = run.parallel.world_size // stages
    seen: dict[tuple, int] = {}
    for number, stage in enumerate(plan(run)):
        place = "first" if number == 0 else "last" if number == stages - 1 else "middle"
        seen.setdefault((place, stage.parameters, stage.num_blocks), number)
    return [number * of_stage for number in seen.values()]


def ranks_of_text(text: str, run: RunConfig) -> list[int]:
    """The ranks of ``--ranks``. Raises ConfigError."""
    if text == "representative":
        return representative_ranks(run)
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts):
        raise ConfigError(f"--ranks {text}: write numbers such as 0,9, or representative")
    return check_ranks(list(map(int, parts)), run)


def check_ranks(ranks: list[int], run: RunConfig) -> list[int]:
    """``ranks`` without repetition. Raises ConfigError for one that is not in the run."""
    if absent := [rank for rank in ranks if not 0 <= rank < run.parallel.world_size]:
        raise ConfigError(f"rank {absent[0]} is not in a run of --world-size {run.parallel.world_size}")
    return list(dict.fromkeys(ranks))
