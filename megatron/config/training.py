"""Optimizer, learning rate, batch and when a run ends."""

from dataclasses import dataclass

from megatron.config.fields import derived, flag


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Optimizer and learning rate."""

    lr: float = flag(0.0, "Peak learning rate.", within="(0, inf)", required=True)
    min_lr: float = flag(0.0, "Learning rate at the end of the decay.", within="[0, inf)")
    lr_decay_style: str = flag(
        "linear",
        "Curve from --lr to --min-lr.",
        choices=("constant", "linear", "cosine", "exponential", "inverse-square-root", "WSD"),
    )
    lr_decay_iters: int | None = flag(None, "Iterations to decay over (default: all).", within="[1, inf)")
    lr_decay_samples: int | None = flag(None, "Samples to decay over, instead of iterations.", within="[1, inf)")
    lr_warmup_fraction: float = flag(
        0.01,
        "Fraction of the decay iterations that warm up linearly.",
        name="warmup",
        aliases=("lr-warmup-fraction",),
        within="[0, 1]",
    )
    lr_warmup_iters: int | None = flag(None, "Iterations that warm up, instead of a fraction.", within="[0, inf)")
    lr_warmup_samples: int | None = flag(None, "Samples that warm up, instead of iterations.", within="[0, inf)")
    lr_wsd_decay_style: str = flag(
        "exponential",
        "Last part of WSD (warmup, stable, decay).",
        choices=("linear", "cosine", "exponential", "minus_sqrt"),
    )
    lr_wsd_decay_iters: int | None = flag(None, "Iterations of WSD's last part.", within="[1, inf)")
    weight_decay: float = flag(0.01, "Weight decay of matrices; biases and norms have none.", within="[0, inf)")
    clip_grad: float = flag(1.0, "Clip gradients to this global norm; 0 is off.", within="[0, inf)")
    adam_beta1: float = flag(0.9, "Decay of Adam's first moment.", within="[0, 1)")
    adam_beta2: float = flag(0.999, "Decay of Adam's second moment.", within="[0, 1)")
    adam_eps: float = flag(1e-8, "Epsilon of Adam.", within="(0, inf)")
    override_lr_scheduler: bool = flag(
        False,
        "On resume take the schedule from the command line, whatever the checkpoint says.",
        aliases=("override-opt_param-scheduler",),
    )
    use_checkpoint_lr_scheduler: bool = flag(
        False,
        "On resume take the schedule from the checkpoint, whatever the command line says.",
        aliases=("use-checkpoint-opt_param-scheduler",),
    )

    def decay_iters(self, train: "TrainConfig") -> int:
        """Iterations over which the learning rate falls to ``min_lr``."""
        if self.lr_decay_samples is not None:
            return max(self.lr_decay_samples // train.global_batch_size, 1)
        return self.lr_decay_iters or train.train_iters

    def warmup_iters(self, train: "TrainConfig") -> int:
        """Iterations over which the learning rate rises to ``lr``."""
        if self.lr_warmup_iters is not None:
            return self.lr_warmup_iters
        if self.lr_warmup_samples is not None:
            return self.lr_warmup_samples // train.global_batch_size
        return int(self.lr_warmup_fraction * self.decay_iters(train))


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Training, validation and the batch."""

    micro_batch_size: int = flag(
        0,
        "Samples a data-parallel rank takes at a time; this or --global-batch-size is required.",
        name="batch-size",
        aliases=("micro-batch-size",),
        within="[1, inf)",
    )
    gradient_accumulation_steps: int = flag(
        1,
        "Micro-batches a rank accumulates in one iteration.",
        name="gas",
        aliases=("gradient-accumulation-steps",),
        within="[1, inf)",
    )
    global_batch_size: int = flag(
        0, "Samples of one iteration: micro-batch size x gas x data-parallel size.", within="[1, inf)"
    )
    train_iters: int = flag(0, "Iterations to train; this or --train-samples is required.", within="[1, inf)")
    loss_normalization: str = flag(
        "global-batch",
        "With --eod-mask-loss, the loss is the mean over the global batch's tokens that count, which does not depend "
        "on how the batch is split; or the mean of each micro-batch's own mean, as it was in the beginning.",
        choices=("global-batch", "micro-batch"),
    )
    train_samples: int | None = flag(None, "Samples to train on, instead of iterations.", within="[1, inf)")
    exit_interval: int | None = flag(None, "Save and leave after an iteration divisible by this.", within="[1, inf)")
    exit_duration_in_mins: float | None = flag(
        None, "Save and leave after the first iteration that ends so many minutes behind the start.", within="(0, inf)"
    )
    max_consecutive_bad_steps: int = flag(
        10,
        "Stop, or go back, at so many iterations in a row whose loss or gradient norm is not finite. None of them "
        "changes a weight; fp16's are not counted while its loss scale can fall.",
        within="[1, inf)",
    )
    rewind_on_spike: bool = flag(
        False,
        "At a spike of the loss, or at that many bad iterations, go back to the newest checkpoint in --save and leave "
        "out the samples that did it.",
    )
    spike_factor: float = flag(
        2.0, "With --rewind-on-spike: a loss so many times the mean of the last 20 is a spike.", within="(1, inf)"
    )
    eval_iters: int = flag(100, "Global batches of one evaluation; 0 evaluates never.", within="[0, inf)")
    eval_interval: int = flag(1000, "Iterations between evaluations.", within="[1, inf)")
    seed: int = flag(1234, "Seed of weights, dropout and the order of samples.", within="[0, 4294967295]")
    samples_ahead: int = derived(0)
    """Samples consumed beyond iterations x batch, where the run began with another batch."""

    def consumed_samples(self, iteration: int) -> int:
        """Samples behind which iteration ``iteration`` + 1 begins."""
        return iteration * self.global_batch_size + self.samples_ahead
