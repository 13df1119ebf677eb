"""Learning-rate schedules: linear warm-up, then a decay to the minimum.

Step n, counted from 0, has the rate ``learning_rate(n)``; w is the number of warm-up iterations:

- warm-up, n < w: ``start_lr * (n + 1) / w``. The first step has 1/w of the peak, not 0; the last step of the warm-up
  has the peak.
- decay from iteration w (WSD: for the last ``wsd_decay_iters``) to the end iteration: a curve of ``DECAYS`` from
  ``start_lr`` to exactly ``min_lr``; only inverse-square-root may still be above it before the end.
- after the end: ``min_lr``, or ``start_lr`` with the constant style.

If the batch size varies, the schedule counts samples: the step from ``n`` to ``m`` consumed samples has the rate
``learning_rate(n, m)``, which in the warm-up is ``start_lr * m / w``, and at most ``start_lr``.

A classic schedule reproduces Megatron-LM v1.1.5 bit for bit instead: see ``LRSchedule.classic_rate``.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from megatron.common.errors import ConfigError

EXPONENTIAL_FLOOR = 1e-3
"""Smallest fraction of the peak at which the exponential curve ends, since a geometric curve never reaches 0."""

_LATEST = 1 << 53
"""The last iteration or sample that a float counts exactly."""


@dataclass(frozen=True, kw_only=True)
class LRSchedule:
    """The learning rate as a function of the iteration. The fields have the same names as in a checkpoint.

    Raises ConfigError, with a line for each problem, if the values are inconsistent.
    """

    start_lr: float
    """Peak, at the end of the warm-up."""
    warmup_iter: float
    """Iterations of linear warm-up; may be fractional in v1.1.5, which computes it as a share of the decay."""
    decay_style: str
    """A key of ``DECAYS``, or WSD: warm-up, stable, decay (arXiv 2404.06395)."""
    end_iter: int
    """Iteration at which the decay ends, warm-up included."""
    min_lr: float
    """Learning rate at the end; the warm-up may be below it."""
    wsd_decay_iters: int | None = None
    """Iterations of the decay of WSD; other styles ignore it."""
    wsd_decay_style: str = "exponential"
    """Curve of the decay of WSD: a key of ``WSD_DECAYS``."""
    classic: bool = False
    """Whether to compute the same rates as the class ``AnnealingLR`` of Megatron-LM v1.1.5."""

    def __post_init__(self) -> None:
        if problems := list(self._problems()):
            raise ConfigError(problems)

    @property
    def is_wsd(self) -> bool:
        """Whether the style is WSD; other styles ignore the two ``wsd_`` fields."""
        return self.decay_style == "WSD"

    def learning_rate(self, iteration: int, following: int | None = None) -> float:
        """The rate of the step from ``iteration`` to ``following``, by default ``iteration + 1``."""
        if self.classic:
            return self.classic_rate(iteration)
        if iteration < self.warmup_iter:
            following = iteration + 1 if following is None else following
            return self.start_lr * min(following, self.warmup_iter) / self.warmup_iter
        curve = WSD_DECAYS[self.wsd_decay_style] if self.is_wsd else DECAYS[self.decay_style]
        fraction = curve(self._progress(iteration), self)
        # This form is exact at both ends of the curve.
        return self.start_lr * (1 - fraction) + self.min_lr * fraction

    def classic_rate(self, iteration: int) -> float:
        """The rate of Megatron-LM v1.1.5, with the same order of operations.

        The first step has rate 0. The curve starts after the warm-up, is ``end_iter`` long, and stops two warm-ups
        before its end; ``min_lr`` is a lower bound of the curve, but not of the warm-up.
        """
        counted = min(iteration, self.end_iter - self.warmup_iter)
        if self.warmup_iter > 0 and iteration <= self.warmup_iter:
            return self.start_lr * counted / self.warmup_iter
        curve = CLASSIC_DECAYS[self.decay_style]
        return max(curve(self.start_lr, counted - self.warmup_iter, self.end_iter), self.min_lr)

    def settings(self) -> dict[str, Any]:
        """The fields that the style uses, as saved in a checkpoint."""
        return {name: value for name, value in asdict(self).items() if self.is_wsd or not name.startswith("wsd_")}

    def _progress(self, iteration: int) -> float:
        """The finished fraction of the decay, 0 to 1."""
        if iteration >= self.end_iter:
            return 1.0
        length = self.wsd_decay_iters if self.is_wsd else self.end_iter - self.warmup_iter
        return max(0.0, 1 - (self.end_iter - iteration) / length) if length else 0.0

    def _problems(self) -> Iterator[str]:
        """One message for each invalid value."""
        if not 0 <= self.start_lr < math.inf:
            yield f"--lr {self.start_lr} must be a number of 0 or more"
        elif not 0 <= self.min_lr <= self.start_lr:
            yield f"--min-lr {self.min_lr} must be between 0 and --lr {self.start_lr}"
        if not 0 <= self.end_iter <= _LATEST:
            yield f"--lr-decay-iters {self.end_iter} must be between 0 and 2^53"
        elif not 0 <= self.warmup_iter <= self.end_iter:
            yield (
                f"--warmup: {self.warmup_iter} iterations of warm-up must be between 0 and the {self.end_iter} of "
                "--lr-decay-iters"
            )
        yield from _unknown("--lr-decay-style", self.decay_style, (*DECAYS, "WSD"))
        if self.classic and self.decay_style not in CLASSIC_DECAYS:
            yield f"--classic-lr-decay has no --lr-decay-style {self.decay_style}: use {', '.join(CLASSIC_DECAYS)}"
        if self.classic and self.end_iter == 0:
            yield "--classic-lr-decay needs --lr-decay-iters of 1 or more"
        if self.is_wsd:
            length = self.end_iter - self.warmup_iter
            if self.wsd_decay_iters is None:
                yield "--lr-decay-style WSD needs --lr-wsd-decay-iters, the iterations of its last part"
            elif not 0 <= self.wsd_decay_iters <= length:
                yield (
                    f"--lr-wsd-decay-iters {self.wsd_decay_iters} must be between 0 and the {length} iterations "
                    "between warm-up and --lr-decay-iters"
                )
            yield from _unknown("--lr-wsd-decay-style", self.wsd_decay_style, WSD_DECAYS)


def _unknown(flag: str, style: str, styles: Iterable[str]) -> Iterator[str]:
    if style not in styles:
        yield f"{flag} {style} is unknown: choose one of {', '.join(styles)}"


Decay = Callable[[float, LRSchedule], float]
"""(progress in [0, 1], schedule) -> fraction of the way from ``start_lr`` to ``min_lr``, 1 at progress 1."""


def linear(progress: float, schedule: LRSchedule) -> float:
    """Linear decay."""
    return progress


def cosine(progress: float, schedule: LRSchedule) -> float:
    """Cosine decay over half a period (arXiv 1608.03983, without restarts)."""
    return (1 - math.cos(math.pi * progress)) / 2


def exponential(progress: float, schedule: LRSchedule) -> float:
    """Exponential decay by a constant factor per iteration: ``start_lr * (min_lr / start_lr) ** progress``.

    If ``min_lr`` is below ``EXPONENTIAL_FLOOR`` of the peak, which includes 0, the curve that ends at the floor is
    scaled to end at ``min_lr``.
    """
    if schedule.min_lr == schedule.start_lr:
        return progress  # nothing to decay
    ratio = max(schedule.min_lr / schedule.start_lr, EXPONENTIAL_FLOOR)
    return (1 - ratio**progress) / (1 - ratio)


def inverse_square_root(progress: float, schedule: LRSchedule) -> float:
    """Inverse square root decay: ``start_lr * sqrt(w / n)`` at iteration n after a warm-up of w iterations
    (arXiv 1706.03762, 5.3), and at least ``min_lr``. Without a warm-up w is 1, and n is counted from 1.
    """
    if progress == 1 or schedule.min_lr == schedule.start_lr:
        return 1.0
    periods = (schedule.end_iter - schedule.warmup_iter) / max(schedule.warmup_iter, 1)
    rest = 1 - schedule.min_lr / schedule.start_lr
    return min((1 - (1 + progress * periods) ** -0.5) / rest, 1.0)


DECAYS: dict[str, Decay] = {
    "constant": lambda progress, schedule: 0.0,
    "linear": linear,
    "cosine": cosine,
    "exponential": exponential,
    "inverse-square-root": inverse_square_root,
}
"""Curves of --lr-decay-style, in addition to WSD."""

WSD_DECAYS: dict[str, Decay] = {
    "linear": linear,
    "cosine": cosine,
    "exponential": lambda progress, schedule: 2 - 2 * 0.5**progress,  # as in Megatron-LM
    "minus_sqrt": lambda progress, schedule: math.sqrt(progress),  # arXiv 2405.18392: steep at first
}
"""Curves of --lr-wsd-decay-style."""


CLASSIC_DECAYS: dict[str, Callable[[float, float, int], float]] = {
    "constant": lambda start, n, end: start,
    "linear": lambda start, n, end: start * (end - n) / end,
    "cosine": lambda start, n, end: start / 2.0 * (math.cos(math.pi * n / end) + 1),
    "exponential": lambda start, n, end: start * math.exp(-0.693 * n / end),  # to half of the peak
}
"""Decay curves of a classic schedule: (peak, iterations after the warm-up, length of the curve) -> rate."""
