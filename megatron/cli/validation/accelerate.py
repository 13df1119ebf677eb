"""What Hugging Face's ``accelerate launch`` sets in the environment, compared with a run that it starts.

Its settings are for ``accelerate.Accelerator``, which the programs here do not use: they start with
``--use_deepspeed`` or ``--multi_gpu`` as under torchrun. A setting that contradicts the flags is an error.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from megatron.config import RunConfig

_MODES = {
    "ACCELERATE_USE_MEGATRON_LM": "--use_megatron_lm is for models of megatron-core: use --use_deepspeed, and set "
    "--model-parallel-size and --pipe-parallel-size of this program",
    "ACCELERATE_USE_FSDP": "--use_fsdp has no effect on this program: use --use_deepspeed, and set its --zero-stage",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "--use_parallelism_config has no effect on this program: set its flags "
    "--model-parallel-size, --pipe-parallel-size and --ds-sequence-parallel-size",
}
"""Modes of accelerate by the variable that is true in them, with what to do instead."""

_SETTINGS: dict[str, tuple[str, str, Callable[[RunConfig], object]]] = {
    "ACCELERATE_MIXED_PRECISION": ("mixed_precision", "--bf16 and --fp16", lambda run: run.precision.dtype),
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": ("zero_stage", "--zero-stage", lambda run: run.zero.zero_stage),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": (
        "gradient_accumulation_steps",
        "--gas",
        lambda run: run.train.gradient_accumulation_steps,
    ),
    "ACCELERATE_GRADIENT_CLIPPING": ("gradient_clipping", "--clip-grad", lambda run: run.optim.clip_grad),
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": (
        "offload_optimizer_device",
        "--offload-optimizer",
        lambda run: run.zero.offload_optimizer,
    ),
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": (
        "offload_param_device",
        "--offload-param",
        lambda run: run.zero.offload_param,
    ),
}
"""Settings of accelerate by variable: name, the flags of the same meaning, and the value that a run has."""

_UNSET = ("", "no", "auto")


def accelerate_conflicts(run: RunConfig, environ: Mapping[str, str], config_file: str | None) -> Iterator[str]:
    """A message for each setting of ``accelerate launch`` that contradicts ``run``, whose JSON is ``config_file``."""
    for variable, advice in _MODES.items():
        if environ.get(variable, "").lower() in ("true", "1"):
            yield f"accelerate launch {advice}"
    for variable, (name, flags, value) in _SETTINGS.items():
        theirs, ours = environ.get(variable, "").lower(), value(run)
        if theirs not in _UNSET and not _equal(theirs, ours):
            yield f"{name} {theirs} of accelerate and {flags} of this run, {ours}, contradict each other: change one"
    file = environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "")
    if file.lower() not in ("", "none") and Path(file).resolve() != Path(config_file or "").resolve():
        yield f"deepspeed_config_file {file} of accelerate is not read here: add --deepspeed_config {file}"


def _equal(text: str, value: object) -> bool:
    try:
        return float(text) == float(str(value))
    except ValueError:
        return text == str(value)
