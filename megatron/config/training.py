"""Settings of optimizer, learning rate, batch sizes, validation and exit conditions."""

from dataclasses import dataclass
from functools import cached_property, partial

from megatron.config.batch_schedule import BatchSchedule, Steps
from megatron.config.fields import count, derived, flag, positive, size

LR_MULTIPLIER = "lr_mult"
"""Key of a parameter group for its learning-rate multiplier, as in Megatron-LM; groups with 1 do not have it."""
_muon_flag = partial(flag, needs="optimizer=muon")
_wsd_flag = partial(count, needs="lr_decay_style=WSD")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Optimizer and learning rate."""

    optimizer: str = flag(
        "adam",
        "Optimizer: AdamW (adam), SGD, Lion, Muon for matrices with AdamW for the rest, or Adafactor.",
        choices=("adam", "sgd", "lion", "muon", "adafactor"),
        excludes={
            "muon: zero_stage=3": "it needs full matrices, which ZeRO 3 divides",
            "muon: offload_optimizer": "its matmuls are too slow on the CPU",
            "sgd|lion: offload_optimizer=nvme": "DeepSpeed tests its exchange of states with NVMe for Adam only",
        },
    )
    lr: float = positive(0.0, "Peak learning rate.", required=True)
    min_lr: float = flag(0.0, "Learning rate at the end of the decay.", within="[0, inf)")
    lr_decay_style: str = flag(
        "linear",
        "Style of the learning-rate decay from --lr to --min-lr.",
        choices=("constant", "linear", "cosine", "exponential", "inverse-square-root", "WSD"),
        needs="WSD: lr_wsd_decay_iters or lr_wsd_decay_samples",
    )
    classic_lr_decay: bool = flag(
        False,
        "The learning rates of Megatron-LM v1.1.5, to continue a run that began there.",
        excludes={
            "lr_decay_style=inverse-square-root|WSD": "v1.1.5 does not have it",
            **dict.fromkeys(
                ("lr_decay_samples", "lr_warmup_samples", "rampup_batch_size", "step_batch_size_schedule"),
                "v1.1.5's schedule counts iterations",
            ),
        },
    )
    lr_decay_iters: int | None = count(None, "Number of iterations of the decay (default: all).")
    lr_decay_samples: int | None = count(
        None, "Samples of the decay, instead of iterations.", instead_of=("lr_decay_iters",)
    )
    lr_warmup_fraction: float = flag(
        0.01, "Share of the decay that is warm-up.", name="warmup", aliases=("lr-warmup-fraction",), within="[0, 1]"
    )
    lr_warmup_iters: int | None = flag(
        None, "Warm-up iterations, instead of a fraction.", within="[0, inf)", instead_of=("lr_warmup_fraction",)
    )
    lr_warmup_samples: int | None = flag(
        None, "Number of warm-up samples.", within="[0, inf)", instead_of=("lr_warmup_fraction", "lr_warmup_iters")
    )
    lr_wsd_decay_style: str = flag(
        "exponential", "Style of the decay phase of WSD.", choices=("linear", "cosine", "exponential", "minus_sqrt")
    )
    lr_wsd_decay_iters: int | None = _wsd_flag(None, "Number of iterations of WSD's decay phase.")
    lr_wsd_decay_samples: int | None = _wsd_flag(
        None, "Number of samples of WSD's decay phase, instead of iterations.", instead_of=("lr_wsd_decay_iters",)
    )
    weight_decay: float = flag(0.01, "Weight decay of matrices; biases and norms have none.", within="[0, inf)")
    clip_grad: float = flag(1.0, "Clip gradients to this global norm; 0 disables it.", within="[0, inf)")
    adam_beta1: float = flag(
        0.9, "Decay rate of Adam's first moment; for Lion, the weight of the momentum in an update.", within="[0, 1)"
    )
    adam_beta2: float = flag(0.999, "Decay rate of Adam's second moment; for Lion, of its momentum.", within="[0, 1)")
    adam_eps: float = positive(1e-8, "Epsilon of Adam.")
    sgd_momentum: float = flag(0.9, "Momentum of SGD.", within="[0, 1)", needs="optimizer=sgd")
    muon_momentum: float = _muon_flag(0.95, "Momentum of Muon.", within="[0, 1)")
    muon_nesterov: bool = _muon_flag(
        True,
        "Nesterov momentum in Muon (default: true).",
        aliases=("muon-use-nesterov",),
        switches={"muon-no-use-nesterov": False, "muon-no-nesterov": False},
    )
    muon_num_ns_steps: int = _muon_flag(5, "Number of Newton-Schulz iterations of Muon.", within="[1, 100)")
    muon_coefficient_type: str = _muon_flag(
        "quintic",
        "Coefficients of Muon's iterations: others in each iteration (quintic), or the same (simple).",
        choices=("simple", "quintic"),
    )
    muon_scale_mode: str = _muon_flag(
        "spectral",
        "Factor of Muon's update [out, in]: sqrt(max(out, in)), sqrt(out / in), or at least 1.",
        choices=("spectral", "unit_rms_norm", "shape_scaling"),
    )
    muon_extra_scale_factor: float = _muon_flag(
        1.0, "Another factor of Muon's update; 0.2 makes a spectral one as large as Adam's.", within="(0, inf)"
    )
    muon_split_qkv: bool = _muon_flag(
        True, "Orthogonalize queries, keys, values separately (default: true).", switches={"muon-no-split-qkv": False}
    )
    override_lr_scheduler: bool = flag(
        False,
        "On resume, use the learning-rate schedule of the command line instead of the checkpoint's.",
        aliases=("override-opt_param-scheduler",),
        excludes=("use_checkpoint_lr_scheduler",),
    )
    use_checkpoint_lr_scheduler: bool = flag(
        False, "Resume with the checkpoint's learning-rate schedule.", aliases=("use-checkpoint-opt_param-scheduler",)
    )

    def decay_steps(self, train: "TrainConfig") -> int:
        """Length of the decay to ``min_lr`` in units of ``train.lr_unit``."""
        if train.batches.varies:
            return self.lr_decay_samples or train.train_samples or 0
        if self.lr_decay_samples is not None:
            return max(self.lr_decay_samples // train.global_batch_size, 1)
        return self.lr_decay_iters or train.train_iters

    def warmup_steps(self, train: "TrainConfig") -> float:
        """Length of the warm-up to ``lr`` in units of ``train.lr_unit``: an integer unless ``classic_lr_decay``."""
        if self.lr_warmup_iters is not None:
            return self.lr_warmup_iters
        if self.lr_warmup_samples is not None:
            return self.lr_warmup_samples // (1 if train.batches.varies else train.global_batch_size)
        steps = self.lr_warmup_fraction * self.decay_steps(train)
        return steps if self.classic_lr_decay else int(steps)

    def wsd_decay_steps(self, train: "TrainConfig") -> int | None:
        """Length of WSD's decay phase; None if it is not set."""
        if self.lr_wsd_decay_samples is None or train.batches.varies:
            return self.lr_wsd_decay_samples or self.lr_wsd_decay_iters
        return max(self.lr_wsd_decay_samples // train.global_batch_size, 1)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Training, batch sizes and validation."""

    micro_batch_size: int = size(
        0,
        "Micro-batch size per data-parallel rank; this or --global-batch-size is required.",
        name="batch-size",
        aliases=("micro-batch-size",),
    )
    gradient_accumulation_steps: int = size(
        1, "Micro-batches per iteration.", name="gas", aliases=("gradient-accumulation-steps",)
    )
    global_batch_size: int = flag(
        0, "Samples per iteration: micro-batch size x gas x data-parallel size.", within="[1, 1073741824]"
    )
    rampup_batch_size: tuple[int, ...] = flag(
        (),
        "Ramp up the global batch size from START by INCR at a time over the first SAMPLES samples.",
        metavar="START INCR SAMPLES",
        needs="train_samples",
        excludes=("lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters"),
    )
    step_batch_size_schedule: str | None = flag(
        None,
        'Change the global batch size in steps, such as "0:768 250B:1536": samples from a number of tokens on.',
        metavar="TOKENS:SIZE",
        needs="train_samples",
        excludes=("lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters"),
        instead_of=("rampup_batch_size", "global_batch_size"),
    )
    train_iters: int = flag(
        0, "Number of training iterations; this, --train-samples or --epochs is required.", within="[1, 10000000000]"
    )
    loss_normalization: str = flag(
        "global-batch",
        "Average the loss over the unmasked tokens of the global batch, or of each micro-batch (classic).",
        choices=("global-batch", "micro-batch"),
        models="gpt bert t5",
    )
    epochs: float | None = flag(
        None,
        "Epochs of instruction tuning, instead of iterations.",
        within="(0, 100000]",
        models="gpt",
        needs="sft",
        instead_of=("train_iters", "train_samples"),
    )
    train_samples: int | None = flag(
        None, "Training samples, instead of iterations.", within="[1, 10000000000000]", instead_of=("train_iters",)
    )
    exit_interval: int | None = count(None, "Save and exit after an iteration divisible by this value.")
    exit_duration_in_mins: float | None = positive(
        None, "Save and exit after the first iteration that ends this many minutes after the start."
    )
    max_consecutive_bad_steps: int = count(
        10, "Stop, or rewind, after this many consecutive iterations with a loss or norm that is not finite."
    )
    rewind_on_spike: bool = flag(
        False,
        "After a loss spike or bad steps, go back to the newest checkpoint, and skip the data.",
        needs="save_interval",
        excludes=dict.fromkeys(("no_save_optim", "no_save_rng"), "the run continues from its own checkpoints"),
    )
    spike_factor: float = flag(
        2.0, "A loss of this many times the mean of the last 20 is a spike.", within="(1, inf)", needs="rewind_on_spike"
    )
    eval_iters: int = flag(
        100, "Batches per evaluation; 0: none (default: a tenth of --train-iters, 1 to 100).", within="[0, 10000000]"
    )
    eval_interval: int = count(1000, "Number of iterations between evaluations.")
    skip_train: bool = flag(
        False,
        "Evaluate the loaded weights on the validation and test splits, save nothing, and exit.",
        models="gpt bert t5",
    )
    seed: int = flag(1234, "Random seed of weights, dropout and the order of samples.", within="[0, 4294967295]")
    batch_steps: Steps = derived(())
    """Steps of a varying batch size, from the ramp-up or the step schedule."""
    resumed_after: int = derived(0)
    """Iteration of the checkpoint that training continues from; 0 for a new run."""
    start_iteration: int = derived(0)
    start_sample: int = derived(0)
    """Samples consumed after ``start_iteration``; both are 0 unless the run began with another batch size."""

    @cached_property
    def batches(self) -> BatchSchedule:
        """The global batch size of each iteration."""
        steps = self.batch_steps or ((0, self.global_batch_size),)
        return BatchSchedule(steps, self.start_iteration, self.start_sample)

    @property
    def evaluation_batches(self) -> BatchSchedule:
        """The batch schedule of evaluations, of constant size."""
        return BatchSchedule(((0, self.global_batch_size),))

    @property
    def length_flag(self) -> str:
        """The flag that gives the length of the run."""
        length = "--train-iters" if self.train_samples is None else "--train-samples"
        return length if self.epochs is None else "--epochs"

    @property
    def lr_unit(self) -> str:
        """Unit of the lengths of the learning-rate schedule: ``iteration`` or ``sample``."""
        return "sample" if self.batches.varies else "iteration"

    def consumed_samples(self, iteration: int) -> int:
        """Samples consumed after ``iteration`` iterations."""
        return self.batches.consumed(iteration)

    def micro_batches(self, iteration: int) -> int:
        """Micro-batches of ``iteration`` on each data-parallel rank."""
        return self.gradient_accumulation_steps * self.batches.size(iteration) // self.global_batch_size
