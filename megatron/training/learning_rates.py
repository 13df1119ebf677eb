"""``AnnealingLR``: sets the learning rates of an optimizer by an ``LRSchedule``, and continues that of a checkpoint."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import _LRScheduler

from megatron.common.errors import CheckpointError, ConfigError
from megatron.config import RunConfig
from megatron.config.training import LR_MULTIPLIER
from megatron.training.lr_schedule import LRSchedule


class AnnealingLR(_LRScheduler):
    """Learning-rate scheduler that sets every parameter group of an optimizer to the rate of an ``LRSchedule``.

    Args:
        optimizer: the optimizer; its parameter groups may change later.
        start_lr, warmup_iter, total_iters, decay_style, min_lr, wsd_decay_iters, wsd_decay_style:
            the fields of ``LRSchedule``, where ``total_iters`` is ``end_iter``.
        last_iter: iterations finished before this run; 0, or torch's -1, in a new run.
        position: maps finished iterations to consumed samples, if the schedule counts samples.
        use_checkpoint_lr_scheduler: ``load_state_dict`` takes the checkpoint's schedule.
        override_lr_scheduler: ``load_state_dict`` keeps the schedule given here. With neither flag, both schedules
            must be equal.
        classic: use the rates of Megatron-LM v1.1.5. Its states do not record this: they load, and continue with the
            rates that this argument chooses.

    Raises ConfigError for an invalid schedule, for both flags of resuming, for a classic schedule that counts samples,
    and without an optimizer.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        start_lr: float,
        warmup_iter: float,
        total_iters: int,
        decay_style: str,
        last_iter: int,
        min_lr: float = 0.0,
        use_checkpoint_lr_scheduler: bool = True,
        override_lr_scheduler: bool = False,
        *,
        wsd_decay_iters: int | None = None,
        wsd_decay_style: str = "exponential",
        position: Callable[[int], int] | None = None,
        classic: bool = False,
    ) -> None:
        if use_checkpoint_lr_scheduler and override_lr_scheduler:
            raise ConfigError(
                "--use-checkpoint-lr-scheduler and --override-lr-scheduler exclude each other: remove one"
            )
        if optimizer is None:
            raise ConfigError(
                "AnnealingLR got no optimizer (None): create the optimizer first, or pass deepspeed.initialize a "
                "function of the optimizer as lr_scheduler"
            )
        if classic and position is not None:
            raise ConfigError("--classic-lr-decay counts iterations: remove it, or let the schedule count iterations")
        self.schedule = LRSchedule(
            start_lr=start_lr,
            warmup_iter=warmup_iter,
            decay_style=decay_style,
            end_iter=total_iters,
            min_lr=min_lr,
            wsd_decay_iters=wsd_decay_iters,
            wsd_decay_style=wsd_decay_style,
            classic=classic,
        )
        self.position = position or (lambda iteration: iteration)
        self.use_checkpoint_lr_scheduler = use_checkpoint_lr_scheduler
        self.override_lr_scheduler = override_lr_scheduler
        super().__init__(optimizer)  # moves to iteration 0
        self._move_to(max(last_iter, 0))

    @property
    def num_iters(self) -> int:
        """Number of finished iterations."""
        return self.last_epoch

    def step(self, step_num: int | None = None, increment: int = 1) -> None:
        """Advance by ``increment`` iterations or samples (Megatron-LM 2), or move to ``step_num`` (v1.1.5)."""
        if step_num is None and increment == 1:
            super().step()  # warns if the optimizer has not stepped
        else:
            self._move_to(self.num_iters + increment if step_num is None else step_num)

    def get_lr(self) -> list[float | Tensor]:
        """The rate of the next step, for each current parameter group of the optimizer.

        The groups may have changed: DeepSpeed removes groups without parameters on a rank.
        """
        rate = self.schedule.learning_rate(self.position(self.num_iters), self.position(self.num_iters + 1))
        return [rate * group.get(LR_MULTIPLIER, 1) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """``num_iters`` and the schedule, with the keys of Megatron-LM v1.1.5, the ``wsd_`` fields and ``classic``."""
        return {"num_iters": self.num_iters, **self.schedule.settings()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue at the checkpoint's iteration, with ``chosen(state_dict)``."""
        self.schedule = self.chosen(state_dict)
        self._move_to(state_dict["num_iters"])

    def chosen(self, state_dict: Mapping[str, Any]) -> LRSchedule:
        """The schedule that the constructor's two flags choose.

        Raises CheckpointError if the state lacks a key or its schedule is invalid, and, with neither flag, if its
        schedule differs, with a line for each difference.
        """
        absent = [key for key in self.state_dict() if key not in state_dict and not key.startswith(("wsd_", "classic"))]
        if absent:
            raise CheckpointError(f"the checkpoint's learning-rate schedule lacks {', '.join(absent)}")
        return self.schedule if self.override_lr_scheduler else self._checkpoint_schedule(state_dict)

    def apply(self) -> None:
        """Set every parameter group to the rate of the next step."""
        for group, lr in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = lr
        self._last_lr = self.get_lr()

    def _move_to(self, iteration: int) -> None:
        self.last_epoch = iteration
        self.apply()

    def _checkpoint_schedule(self, state: Mapping[str, Any]) -> LRSchedule:
        """The schedule in ``state``. Raises CheckpointError if it is invalid, or differs and must not."""
        state = {"classic": self.schedule.classic, **state}
        try:
            loaded = LRSchedule(
                **{field.name: state[field.name] for field in fields(LRSchedule) if field.name in state}
            )
        except ConfigError as error:
            raise CheckpointError(
                f"the checkpoint's learning-rate schedule is broken: {message}" for message in error.messages
            ) from error
        ours, theirs = self.schedule.settings(), loaded.settings()
        differing = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
        if differing and not self.use_checkpoint_lr_scheduler:
            raise CheckpointError(
                f"learning-rate schedule: {name} is {ours.get(name)} on the command line but {theirs.get(name)} in "
                "the checkpoint; give --override-lr-scheduler or --use-checkpoint-lr-scheduler to choose"
                for name in differing
            )
        return loaded


def annealing_lr(run: RunConfig) -> Callable[[Optimizer], AnnealingLR]:
    """A function from an optimizer to the learning-rate scheduler that the flags of ``run`` select.

    It counts iterations, or consumed samples if the batch size varies. ``--override`` also overrides the schedule of a
    loaded checkpoint.
    """
    optim, train = run.optim, run.train
    overrides = run.checkpoint.override and not optim.use_checkpoint_lr_scheduler
    return partial(
        AnnealingLR,
        start_lr=optim.lr,
        warmup_iter=optim.warmup_steps(train),
        total_iters=optim.decay_steps(train),
        decay_style=optim.lr_decay_style,
        last_iter=0,
        min_lr=optim.min_lr,
        use_checkpoint_lr_scheduler=optim.use_checkpoint_lr_scheduler,
        override_lr_scheduler=optim.override_lr_scheduler or overrides,
        wsd_decay_iters=optim.wsd_decay_steps(train),
        wsd_decay_style=optim.lr_wsd_decay_style,
        position=train.consumed_samples if train.batches.varies else None,
        classic=optim.classic_lr_decay,
    )
