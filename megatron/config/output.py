"""Settings of a run's outputs: checkpoints, logs, timelines and profiles."""

import re
from dataclasses import dataclass

from megatron.config.fields import count, flag, folder, positive, whole_numbers


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints: saving, loading and resuming."""

    save: str | None = folder(None, "Folder to save checkpoints to.")
    save_interval: int | None = count(
        None,
        "Number of iterations between checkpoints (default: only at the end).",
        aliases=("persistent-save-interval",),
        ignored_without="save",
    )
    no_save_optim: bool = flag(False, "Do not save optimizer state.")
    no_save_rng: bool = flag(False, "Do not save random number generator states.")
    async_save: bool = flag(False, "Copy the state to host memory, and write it during training.", needs="save")
    snapshot_interval: int | None = count(
        None,
        "Iterations between snapshots of the state in host memory, from which a run resumes after a fault.",
        needs={"save": "", "auto_resume or load": "the next start uses the newest snapshot"},
        excludes={
            "no_save_optim": "a run that continues after a fault needs the state of the optimizer",
            "offload_optimizer=nvme or offload_param=nvme": "its state is in files of its host",
        },
    )
    snapshot_dir: str = folder("/dev/shm", "Folder in memory (tmpfs) for snapshots.", needs="snapshot_interval")
    keep_last: int | None = count(None, "Number of newest checkpoints to keep (default: all).", needs="save")
    keep_every: int | None = count(
        None, "Also keep checkpoints of iterations divisible by this value.", needs="keep_last"
    )
    on_save_error: str = flag(
        "stop", "What training does if a checkpoint cannot be written.", choices=("stop", "continue"), needs="save"
    )
    load: str | None = folder(
        None, "Folder to load a checkpoint from; if it is --save, and empty, training starts fresh."
    )
    load_hf: str | None = folder(
        None,
        "Hugging Face folder to train on from, at iteration 0: its weights, and the flags of its model.",
        models="gpt bert t5",
        excludes={"load": "weights have one source", "model_preset": "the folder describes its model"},
    )
    load_strict: bool = flag(
        False, "Reject a damaged checkpoint, instead of loading the newest complete one.", needs="load or auto_resume"
    )
    auto_resume: bool = flag(
        False,
        "Resume from --save if it has a checkpoint; otherwise start from --load, or from scratch.",
        needs="save",
        excludes={"finetune": "a resumed run would start at iteration 0 again"},
    )
    no_load_optim: bool = flag(False, "Do not load optimizer state; the learning-rate schedule continues.")
    no_load_rng: bool = flag(False, "Do not load random number generator states.")
    finetune: bool = flag(False, "Load weights only, and start at iteration 0.", needs="load")
    override: bool = flag(
        False, "Resume, or train, although data, tokenizer, batch size or others differ from the checkpoint's."
    )


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Logging, metrics, watchdog and dry runs."""

    log_interval: int | None = count(
        None, "Number of iterations between logged ones (default: 1 to 100, by the length of the run)."
    )
    tensorboard_dir: str | None = folder(None, "Folder for TensorBoard logs.")
    metrics_file: str | None = flag(None, "File for metrics: one JSON object per logged iteration.", metavar="FILE")
    wandb_project: str | None = flag(
        None, "Weights & Biases project for settings and metrics (pip install wandb).", metavar="NAME"
    )
    wandb_exp_name: str | None = flag(None, "Name of the Weights & Biases run.", metavar="NAME", needs="wandb_project")
    mlflow_experiment: str | None = flag(
        None, "MLflow experiment for settings and metrics (pip install mlflow).", metavar="NAME"
    )
    log_params_norm: bool = flag(False, "Log the 2-norm of all parameters.")
    log_num_zeros_in_grad: bool = flag(False, "Log the number of zeros in the gradient of the full model.")
    timing_log_level: int = flag(
        0,
        "Log the time of phases of an iteration: once each (1), or of each micro-batch (2).",
        within="[0, 2]",
        metavar="0|1|2",
    )
    straggler_report: float | None = positive(
        None,
        "Name the hosts whose ranks take longer than others by more than this share, such as 0.3.",
        metavar="SHARE",
    )
    straggler_window: int = count(50, "Iterations that are compared at a time.", needs="straggler_report")
    watchdog_minutes: float | None = flag(
        None,
        "End the run, with the stacks of all ranks, if an iteration, a save or an evaluation takes longer than this.",
        within="[0.01, 525600]",
    )
    verbose: bool = flag(False, "Show DeepSpeed's own output.")
    explain: bool = flag(
        False, "Print layout, rank groups, DeepSpeed config and the result of all rules; exit.", excludes=("dry_run",)
    )
    dry_run: bool = flag(False, "Print parameters, groups and memory of some ranks, and exit.")
    rank: str | None = flag(
        None, "Ranks to print, such as 0,513 (default: one per pipeline stage).", metavar="RANKS", needs="dry_run"
    )

    @property
    def ranks(self) -> list[int] | None:
        """The numbers in ``rank``. Raises ValueError if it is not a list of numbers."""
        return None if self.rank is None else whole_numbers(self.rank)


_STEPS = re.compile(r"([0-9]{1,15}):([0-9]{1,15})")


@dataclass(frozen=True, kw_only=True)
class ObserveConfig:
    """Timelines, profiles and reports."""

    trace: str | None = folder(
        None, "Folder for a timeline of each rank, for Perfetto and as an image with the measured bubble."
    )
    trace_steps: str = flag(
        "2:4", "First and last iteration to trace, from the start of this process.", metavar="A:B", needs="trace"
    )
    profile_steps: str | None = flag(
        None, "First and last iteration to profile with torch's profiler.", metavar="A:B", needs="profile_dir or trace"
    )
    flops_profile_step: int | None = count(
        None,
        "Iteration to profile with DeepSpeed's FLOPs profiler (not with a pipeline).",
        needs="profile_dir or trace",
        excludes={
            "pipe_parallel_size": "the pipeline engine writes no profile; --explain prints the FLOPs of each stage"
        },
    )
    profile_dir: str | None = folder(
        None, "Folder for profiles (default: --trace).", needs="profile_steps or flops_profile_step or trace"
    )
    run_dir: str | None = folder(None, "Folder for tools/report.py: configuration, environment and metrics of the run.")

    @property
    def profiles(self) -> bool:
        """Whether iterations are profiled."""
        return self.profile_steps is not None or self.flops_profile_step is not None


def steps(text: str) -> range:
    """The iterations of ``A:B``, both ends included; empty if the text is not such a range."""
    ends = _STEPS.fullmatch(text)
    return range(int(ends[1]), int(ends[2]) + 1) if ends and int(ends[1]) > 0 else range(0)
