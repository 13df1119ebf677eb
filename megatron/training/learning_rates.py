"""Learning rates: linear warm-up, then a curve that ends at the minimum.

Step n, counted from 0 by the iterations finished before it, is taken at ``learning_rate(n)``:

- warm-up, n < w: ``start_lr * (n + 1) / w``. The first step is taken at a w-th of the peak, not at
  0, and the last of the warm-up at the peak.
- decay from iteration w (with WSD: from the last ``wsd_decay_iters``) to the end iteration: by one
  of ``DECAYS``, from ``start_lr`` to exactly ``min_lr``.
- from the end on: ``min_lr``, or ``start_lr`` with the constant style.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from megatron.config.errors import CheckpointError, ConfigError

EXPONENTIAL_FLOOR = 1e-3
"""Least fraction of the peak that the exponential curve aims at, for a geometric curve never reaches 0."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The learning rate as a function of the iteration. The fields are named as in a checkpoint.

    Raises ConfigError, with a line for each broken rule, if no schedule has these values.
    """

    start_lr: float
    """Peak, at the end of the warm-up."""
    warmup_iter: int
    """Iterations of linear warm-up."""
    decay_style: str
    """A key of ``DECAYS``, or WSD: warm-up, stable, decay (arXiv 2404.06395)."""
    end_iter: int
    """Iteration of the end of the decay, the warm-up counted in."""
    min_lr: float
    """Learning rate at the end; no floor under the warm-up."""
    wsd_decay_iters: int | None = None
    """Iterations of the last part of WSD; the other styles ignore it."""
    wsd_decay_style: str = "exponential"
    """Curve of the last part of WSD: a key of ``WSD_DECAYS``."""

    def __post_init__(self):
        problems = schedule_problems(self)
        if problems:
            raise ConfigError(problems)

    def learning_rate(self, iteration: int) -> float:
        """The rate of the step that follows ``iteration`` finished ones."""
        if iteration < self.warmup_iter:
            return self.start_lr * (iteration + 1) / self.warmup_iter
        fraction = self._curve(self._progress(iteration), self)
        # In this form both ends of the curve are exact.
        return self.start_lr * (1 - fraction) + self.min_lr * fraction

    def _progress(self, iteration: int) -> float:
        """The part of the decay that is done, 0 to 1."""
        if iteration >= self.end_iter:
            return 1.0
        length = self.wsd_decay_iters if self.decay_style == "WSD" else self.end_iter - self.warmup_iter
        return max(0.0, 1 - (self.end_iter - iteration) / length) if length else 0.0

    @property
    def _curve(self) -> "Decay":
        return WSD_DECAYS[self.wsd_decay_style] if self.decay_style == "WSD" else DECAYS[self.decay_style]


Decay = Callable[[float, Schedule], float]
"""(progress in [0, 1], schedule) -> the fraction of the way from ``start_lr`` to ``min_lr``, 1 at progress 1."""


def constant(progress: float, schedule: Schedule) -> float:
    """Stays at the peak."""
    return 0.0


def linear(progress: float, schedule: Schedule) -> float:
    """A straight line."""
    return progress


def cosine(progress: float, schedule: Schedule) -> float:
    """Half a period of the cosine (arXiv 1608.03983, without restarts)."""
    return (1 - math.cos(math.pi * progress)) / 2


def exponential(progress: float, schedule: Schedule) -> float:
    """The rate falls by one factor each iteration: ``start_lr * (min_lr / start_lr) ** progress``.

    Below ``EXPONENTIAL_FLOOR`` of the peak, and so for 0, there is no such curve, or none of use:
    it is then the one that ends at the floor, stretched downwards until it ends at ``min_lr``.
    """
    if schedule.min_lr == schedule.start_lr:
        return progress  # nothing to decay
    ratio = max(schedule.min_lr / schedule.start_lr, EXPONENTIAL_FLOOR)
    return (1 - ratio**progress) / (1 - ratio)


def inverse_square_root(progress: float, schedule: Schedule) -> float:
    """``start_lr * sqrt(w / n)`` at iteration n after a warm-up of w (arXiv 1706.03762, 5.3), stretched
    downwards until it ends at ``min_lr``. Without a warm-up w is 1, counted from iteration 1.
    """
    periods = (schedule.end_iter - schedule.warmup_iter) / max(schedule.warmup_iter, 1)
    if periods == 0:
        return progress  # there is only a warm-up
    return (1 - (1 + progress * periods) ** -0.5) / (1 - (1 + periods) ** -0.5)


def minus_sqrt(progress: float, schedule: Schedule) -> float:
    """One minus the square root (arXiv 2405.18392): steep at first."""
    return math.sqrt(progress)


DECAYS: dict[str, Decay] = {
    "constant": constant,
    "linear": linear,
    "cosine": cosine,
    "exponential": exponential,
    "inverse-square-root": inverse_square_root,
}
"""Curves of --lr-decay-style, in addition to WSD."""

WSD_DECAYS: dict[str, Decay] = {
    "linear": linear,
    "cosine": cosine,
    "exponential": exponential,
    "minus_sqrt": minus_sqrt,
}
"""Curves of --lr-wsd-decay-style."""


def schedule_problems(schedule: Schedule) -> list[str]:
    """One line for each rule that the values break."""
    problems = []
    styles = (*DECAYS, "WSD")
    if not (0 <= schedule.start_lr < math.inf):
        problems.append(f"--lr {schedule.start_lr} must be a number of 0 or more")
    elif not 0 <= schedule.min_lr <= schedule.start_lr:
        problems.append(f"--min-lr {schedule.min_lr} must be between 0 and --lr {schedule.start_lr}")
    if schedule.end_iter < 0:
        problems.append(f"--lr-decay-iters {schedule.end_iter} must not be negative")
    elif not 0 <= schedule.warmup_iter <= schedule.end_iter:
        problems.append(
            f"--warmup: {schedule.warmup_iter} iterations of warm-up must be between 0 and the "
            f"{schedule.end_iter} of --lr-decay-iters"
        )
    if schedule.decay_style not in styles:
        problems.append(f"--lr-decay-style {schedule.decay_style} is unknown: choose one of {', '.join(styles)}")
    if schedule.decay_style == "WSD":
        problems += wsd_problems(schedule)
    return problems


def wsd_problems(schedule: Schedule) -> list[str]:
    """A line for each rule of WSD that the values break."""
    problems = []
    room = schedule.end_iter - schedule.warmup_iter
    if schedule.wsd_decay_iters is None:
        problems.append("--lr-decay-style WSD needs --lr-wsd-decay-iters, the iterations of its last part")
    elif not 0 <= schedule.wsd_decay_iters <= room:
        problems.append(
            f"--lr-wsd-decay-iters {schedule.wsd_decay_iters} must be between 0 and the {room} iterations "
            "between warm-up and --lr-decay-iters"
        )
    if schedule.wsd_decay_style not in WSD_DECAYS:
        problems.append(
            f"--lr-wsd-decay-style {schedule.wsd_decay_style} is unknown: choose one of {', '.join(WSD_DECAYS)}"
        )
    return problems


class AnnealingLR(LRScheduler):
    """Sets every group of an optimizer to the learning rate of a ``Schedule``.

    Args:
        optimizer: the optimizer, whose groups may still come and go.
        start_lr, warmup_iter, total_iters, decay_style, min_lr, wsd_decay_iters, wsd_decay_style:
            the fields of ``Schedule``, where ``total_iters`` is ``end_iter``.
        last_iter: iterations finished before this run; 0, or torch's -1, in a new one.
        use_checkpoint_lr_scheduler: ``load_state_dict`` takes the checkpoint's schedule.
        override_lr_scheduler: ``load_state_dict`` keeps the schedule given here. With neither, the
            two must be equal.

    The arithmetic of Megatron-LM v1.1.5-3D_parallelism is another: there the first step has rate 0,
    the decay stops ``2 * warmup_iter / total_iters`` before the end of its curve, and ``min_lr`` is a
    floor under all of it. Its states load, and continue with this arithmetic.

    Raises ConfigError for values that make no schedule, and for both ways to resume at once.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        start_lr: float,
        warmup_iter: int,
        total_iters: int,
        decay_style: str,
        last_iter: int,
        min_lr: float = 0.0,
        use_checkpoint_lr_scheduler: bool = True,
        override_lr_scheduler: bool = False,
        *,
        wsd_decay_iters: int | None = None,
        wsd_decay_style: str = "exponential",
    ):
        if use_checkpoint_lr_scheduler and override_lr_scheduler:
            raise ConfigError("--use-checkpoint-lr-scheduler and --override-lr-scheduler exclude each other: drop one")
        self.schedule = Schedule(
            start_lr=start_lr,
            warmup_iter=warmup_iter,
            decay_style=decay_style,
            end_iter=total_iters,
            min_lr=min_lr,
            wsd_decay_iters=wsd_decay_iters,
            wsd_decay_style=wsd_decay_style,
        )
        self.use_checkpoint_lr_scheduler = use_checkpoint_lr_scheduler
        self.override_lr_scheduler = override_lr_scheduler
        super().__init__(optimizer)
        self._move_to(max(last_iter, 0))

    @property
    def num_iters(self) -> int:
        """Iterations finished."""
        return self.last_epoch

    def get_lr(self) -> list[float | Tensor]:
        """The rate of the next step, once for each group the optimizer has now.

        Not for each that it had at first: DeepSpeed removes the groups without parameters on a rank.
        """
        return [self.schedule.learning_rate(self.num_iters)] * len(self.optimizer.param_groups)

    def state_dict(self) -> dict[str, Any]:
        """``num_iters`` and the schedule, under the names of Megatron-LM v1.1.5-3D_parallelism (and WSD's)."""
        return {"num_iters": self.num_iters, **settings(self.schedule)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue at the checkpoint's iteration, with the schedule that the constructor's two flags choose.

        Raises CheckpointError if the state lacks a key or holds no schedule, and, with neither flag,
        if its schedule is another one, with a line for each difference.
        """
        absent = [key for key in self.state_dict() if key not in state_dict and not key.startswith("wsd_")]
        if absent:
            raise CheckpointError(f"the checkpoint's learning-rate schedule lacks {', '.join(absent)}")
        if not self.override_lr_scheduler:
            loaded = schedule_from(state_dict)
            if not self.use_checkpoint_lr_scheduler:
                check_equal(self.schedule, loaded)
            self.schedule = loaded
        self._move_to(state_dict["num_iters"])

    def _move_to(self, iteration: int) -> None:
        """Set the groups as after ``iteration`` iterations."""
        self.last_epoch = iteration
        self.apply()

    def apply(self) -> None:
        """Give every group the rate of the next step."""
        for group, lr in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = lr
        self._last_lr = self.get_lr()


def settings(schedule: Schedule) -> dict[str, Any]:
    """The fields that matter to a schedule of its style."""
    return {
        name: value
        for name, value in asdict(schedule).items()
        if schedule.decay_style == "WSD" or not name.startswith("wsd_")
    }


def schedule_from(state: Mapping[str, Any]) -> Schedule:
    """The schedule of a checkpoint's state. Raises CheckpointError if its values make none."""
    names = [name for name in Schedule.__dataclass_fields__ if name in state]
    try:
        return Schedule(**{name: state[name] for name in names})
    except ConfigError as error:
        raise CheckpointError(
            f"the checkpoint's learning-rate schedule is broken: {message}" for message in error.messages
        ) from error


def check_equal(given: Schedule, loaded: Schedule) -> None:
    """Raises CheckpointError, with a line for each field in which the schedules differ."""
    ours, theirs = settings(given), settings(loaded)
    differing = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    if differing:
        raise CheckpointError(
            f"learning-rate schedule: {name} is {ours.get(name)} on the command line but {theirs.get(name)} in the "
            "checkpoint; give --override-lr-scheduler or --use-checkpoint-lr-scheduler to choose"
            for name in differing
        )
