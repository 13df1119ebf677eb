"""Validates a run before torch is imported: single values first, then the rules about combinations.

``RULES`` also feeds ``--explain``, the planner and docs/layouts.md.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from megatron.cli.batch_sizes import ACCUMULATION, GLOBAL, MICRO
from megatron.cli.provided import Provided
from megatron.cli.validation.rules import FUNCTIONS, Rule, relation_rules
from megatron.common.errors import counted
from megatron.config import RunConfig, flag_fields, flag_value
from megatron.config.fields import flag_name, flag_of, has_flag, inside, interval_as_text, is_above, is_decimal
from megatron.model.spec import ArchitectureSpec

# Importing these modules registers their rules, in this order.
from megatron.cli.validation import layout, training, model  # noqa: F401, I001  # isort: skip

RULES: list[Rule] = [*FUNCTIONS, *relation_rules()]

_TRIAL = 10
"""Iterations below which a run counts as a trial, whose warm-up does not matter."""


def violations(run: RunConfig, *, only_warns: bool = False) -> Iterator[tuple[str, str]]:
    """Name and message of each rule that ``run`` breaks: of the rules that only warn, or of all others."""
    for rule in RULES:
        if rule.only_warns == only_warns and (message := rule.check(run)) is not None:
            yield rule.name, message


def warnings(run: RunConfig, provided: Mapping[str, Provided]) -> list[str]:
    """Warnings: rules that ``run`` breaks without harm, and provided values that have no effect or are replaced."""
    messages = [message for _, message in violations(run, only_warns=True)]
    if "lr_warmup_fraction" in provided and run.train.global_batch_size > 0:
        steps, source = run.optim.decay_steps(run.train), provided["lr_warmup_fraction"].source
        if steps >= _TRIAL and provided["lr_warmup_fraction"].value > 0 == run.optim.warmup_steps(run.train):
            messages.append(f"{source} of {counted(steps, run.train.lr_unit)} is less than one: there is no warm-up")
    if {GLOBAL, MICRO, ACCUMULATION} <= provided.keys() and provided[GLOBAL].value != run.train.global_batch_size > 0:
        messages.append(
            f"{provided[GLOBAL].source} has no effect: {provided[MICRO].source} x {provided[ACCUMULATION].source} x "
            f"data-parallel size {run.parallel.data_parallel_size} is a global batch of {run.train.global_batch_size}"
        )
    if "zero_stage" in provided and provided["zero_stage"].value == 0 < run.zero.zero_stage:
        messages.append(
            f"{provided['zero_stage'].source} in {run.precision.dtype} runs as --zero-stage 1 with the same result: "
            "DeepSpeed's stage 0 computes wrong updates in half precision"
        )
    return messages


def oversized(provided: Mapping[str, Provided]) -> bool:
    """Whether a value exceeds a practical limit. Rules are not checked then, since some loop up to the value."""
    return any(
        (within := flag_of(flag_fields()[name]).within) and given.value and is_above(given.value, within)
        for name, given in provided.items()
    )


def value_problems(provided: Mapping[str, Provided], architecture: ArchitectureSpec) -> list[str]:
    """Messages for missing required values, values out of range, and values provided in two ways.

    The program that trains ``architecture`` determines which values are required.
    """
    problems = []
    is_own, free = architecture.provider is not None, set[str]()
    if is_own:  # such a model (``pretrain``) may interpret sizes differently
        stages = provided.get("pipe_parallel_size")
        free = {*_TRANSFORMER_SIZES, *(() if stages and stages.value else ("num_layers",))}
    for name, field in flag_fields().items():
        flag = flag_of(field)
        if name not in provided:
            if flag.required and has_flag(field, architecture.kinds) and name not in free:
                problems.append(f"{flag_name(field)} is required")
            continue
        value, source, within = provided[name].value, provided[name].source, flag.within
        if within and value is not None and not ((is_own and name == "vocab_size") or inside(value, within)):
            problems.append(f"{source} must be {interval_as_text(within, value)}")
        for other in flag.instead_of:
            if other in provided:
                problems.append(f"{provided[other].source} and {source} exclude each other: give one")
    if not {"train_iters", "train_samples", "epochs"} & provided.keys():
        problems.append("--train-iters is required (or --train-samples, or --epochs with --sft)")
    needs_data = architecture.is_language_model and not is_own
    if needs_data and not {"data_path", "train_data_path", "mock_data"} & provided.keys():
        problems.append("--data-path is required (or --train-data-path, or --mock-data)")
    return problems


_TRANSFORMER_SIZES = ("hidden_size", "num_attention_heads", "seq_length")
_ACCELERATE_SETTINGS = {
    "DEEPSPEED_ZERO_STAGE": "zero_stage",
    "GRADIENT_ACCUMULATION_STEPS": "gradient_accumulation_steps",
    "GRADIENT_CLIPPING": "clip_grad",
    "DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "offload_optimizer",
    "DEEPSPEED_OFFLOAD_PARAM_DEVICE": "offload_param",
}
"""Settings of ``accelerate launch`` (suffix of the variable ACCELERATE_*) to config fields of the same meaning."""


def accelerate_conflicts(run: RunConfig, environ: Mapping[str, str], config_file: str | None) -> Iterator[str]:
    """A message for each setting of ``accelerate launch`` that contradicts ``run`` or its JSON ``config_file``.

    These settings configure ``accelerate.Accelerator``, which the programs here do not use.
    """
    for mode in ("megatron_lm", "fsdp", "parallelism_config"):
        if environ.get(f"ACCELERATE_USE_{mode.upper()}", "").lower() in ("true", "1"):
            yield f"accelerate launch --use_{mode} has no effect here: use --use_deepspeed, and flags of the program"
    flagged = {
        name: (flag_name(flag_fields()[field]), flag_value(run, field)) for name, field in _ACCELERATE_SETTINGS.items()
    }
    for name, (flags, ours) in {"MIXED_PRECISION": ("--bf16 and --fp16", run.precision.dtype), **flagged}.items():
        theirs = environ.get(f"ACCELERATE_{name}", "").lower()
        same = float(theirs) == ours if is_decimal(theirs) else theirs == ours
        if theirs not in ("", "no", "auto") and not same:
            name = name.removeprefix("DEEPSPEED_").lower()
            yield f"{name} {theirs} of accelerate and {flags} of this run, {ours}, contradict each other: change one"
    file = environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "")
    if file.lower() not in ("", "none") and Path(file).resolve() != Path(config_file or "").resolve():
        yield f"deepspeed_config_file {file} of accelerate is not read here: add --deepspeed_config {file}"
