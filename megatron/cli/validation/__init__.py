"""Checks of a run, all made before torch is imported: each value on its own, then the rules about combinations.

The rules register themselves when the modules below are imported; ``RULES`` also feeds ``--explain``
and docs/layouts.md.
"""

from collections.abc import Mapping

from megatron.cli.validation.rules import RULES, Rule
from megatron.common.errors import counted
from megatron.config import RunConfig, flag_fields
from megatron.config.fields import Provided, flag_name, inside, interval_as_text
from megatron.model.spec import ArchitectureSpec

# The order of RULES.
from megatron.cli.validation import layout, pipeline, memory, model, training  # noqa: F401, I001  # isort: skip
from megatron.cli.validation import experts, data, encoder_decoder, output  # noqa: F401, I001  # isort: skip

__all__ = ["RULES", "Rule", "broken_rule", "size_problems", "value_problems", "violations", "warnings"]

EXCLUSIVE = (
    ("train_iters", "train_samples"),
    ("lr_decay_iters", "lr_decay_samples"),
    ("lr_warmup_fraction", "lr_warmup_iters", "lr_warmup_samples"),
    ("lr_wsd_decay_iters", "lr_wsd_decay_samples"),
    ("rampup_batch_size", "step_batch_size_schedule"),
    ("global_batch_size", "step_batch_size_schedule"),
    ("data_path", "train_data_path"),
    ("mock_data", "data_path"),
    ("mock_data", "train_data_path"),
    ("mock_data", "sft"),
    ("split", "train_data_path"),
    ("tokenizer_model", "vocab_file"),
    ("tokenizer_model", "merge_file"),
)
"""Fields with the same meaning, of which only one per row may be provided."""

_TRIAL = 10
"""Shorter runs are trials, whose warm-up does not matter."""
_YEAR = 365 * 24 * 60
SIZES: Mapping[str, tuple[float, float]] = {
    "num_layers": (1, 20_000),
    "hidden_size": (1, 2**20),
    "ffn_hidden_size": (1, 2**23),
    "num_query_groups": (1, 2**20),
    "num_experts": (1, 2**16),
    "moe_ffn_hidden_size": (1, 2**23),
    "moe_router_topk": (1, 2**16),
    "moe_shared_expert_intermediate_size": (1, 2**23),
    "expert_model_parallel_size": (1, 2**20),
    "expert_tensor_parallel_size": (1, 2**20),
    "kv_channels": (1, 2**20),
    "num_attention_heads": (1, 2**20),
    "seq_length": (1, 2**30),
    "decoder_num_layers": (1, 20_000),
    "decoder_seq_length": (1, 2**30),
    "vocab_extra_ids": (0, 2**20),
    "relative_attention_num_buckets": (4, 2**20),
    "relative_attention_max_distance": (2, 2**30),
    "max_position_embeddings": (1, 2**30),
    "vocab_size": (1, 2**30),
    "make_vocab_size_divisible_by": (1, 2**30),
    "micro_batch_size": (1, 2**20),
    "gradient_accumulation_steps": (1, 2**20),
    "global_batch_size": (1, 2**30),
    "train_iters": (1, 10**10),
    "train_samples": (1, 10**13),
    "eval_iters": (0, 10**7),
    "num_workers": (0, 1024),
    "model_parallel_size": (1, 2**20),
    "pipe_parallel_size": (0, 2**20),
    "ds_sequence_parallel_size": (1, 2**20),
    "context_parallel_size": (1, 2**20),
    "world_size": (1, 2**20),
    "distributed_timeout_minutes": (0.01, _YEAR),
    "watchdog_minutes": (0.01, _YEAR),
}
"""The largest values that are no mistake: a run beyond them would not fit on any computer, or take centuries. The
shortest time limits are those within which a rank can still report."""

ZERO_ONLY = (
    "zero_reduce_scatter",
    "zero_contiguous_gradients",
    "zero_reduce_bucket_size",
    "zero_allgather_bucket_size",
)
"""Fields without effect at ZeRO 0, which are no error there: the classic scripts provide them at every stage."""


def violations(run: RunConfig) -> list[str]:
    """A message for each rule that ``run`` breaks and that is an error."""
    return [message for rule in RULES if not rule.only_warns and (message := rule.check(run)) is not None]


def broken_rule(run: RunConfig) -> tuple[str, str] | None:
    """The name of the first rule that ``run`` breaks and that is an error, and the message; None without one."""
    for rule in RULES:
        if not rule.only_warns and (message := rule.check(run)) is not None:
            return rule.name, message
    return None


def warnings(run: RunConfig, provided: Mapping[str, Provided]) -> list[str]:
    """A message for each rule that ``run`` breaks without harm, one for all ZeRO settings at stage 0, and one for a
    stage 0 that runs as stage 1."""
    messages = [message for rule in RULES if rule.only_warns and (message := rule.check(run)) is not None]
    settings = [provided[name].source for name in ZERO_ONLY if name in provided]
    if settings and run.zero.zero_stage == 0:
        verb, them = ("has", "it") if len(settings) == 1 else ("have", "them")
        messages.append(
            f"{', '.join(settings)} {verb} no effect at --zero-stage 0: remove {them}, or use --zero-stage 1 or more"
        )
    if "lr_warmup_fraction" in provided and run.train.global_batch_size > 0:
        steps, source = run.optim.decay_steps(run.train), provided["lr_warmup_fraction"].source
        if steps >= _TRIAL and provided["lr_warmup_fraction"].value > 0 == run.optim.warmup_steps(run.train):
            messages.append(f"{source} of {counted(steps, run.train.lr_unit)} is less than one: there is no warm-up")
    if "zero_stage" in provided and provided["zero_stage"].value == 0 < run.zero.zero_stage:
        messages.append(
            f"{provided['zero_stage'].source} in {run.precision.dtype} runs as --zero-stage 1, which makes the updates "
            "of a correct stage 0; DeepSpeed's is wrong in half precision"
        )
    return messages


def size_problems(provided: Mapping[str, Provided]) -> list[str]:
    """A message for each value beyond ``SIZES``. Rules are not checked with such values: some count in them."""
    problems = []
    for name, (smallest, largest) in SIZES.items():
        value, within = (
            provided[name].value if name in provided else None,
            flag_fields()[name].metadata["flag"]["within"],
        )
        if value is not None and inside(value, within) and not smallest <= value <= largest:
            limit = f"{largest:,} at most" if value > largest else f"{smallest:,} or more"
            problems.append(f"{provided[name].source} must be {limit}")
    return problems


def value_problems(provided: Mapping[str, Provided], architecture: ArchitectureSpec) -> list[str]:
    """A message for each required value that is missing, each out of its range, and each provided in two ways.

    The required values are those of the program that trains ``architecture``.
    """
    problems = []
    for name, field in flag_fields().items():
        metadata = field.metadata["flag"]
        if name not in provided:
            if metadata["required"]:
                problems.append(f"{flag_name(field)} is required")
        elif metadata["within"] and provided[name].value is not None:
            if not inside(provided[name].value, metadata["within"]):
                problems.append(f"{provided[name].source} must be {interval_as_text(metadata['within'])}")
    for row in EXCLUSIVE:
        sources = [provided[name].source for name in row if name in provided]
        if len(sources) > 1:
            problems.append(f"{' and '.join(sources)} exclude each other: give one")
    if "train_iters" not in provided and "train_samples" not in provided:
        problems.append("--train-iters is required (or --train-samples)")
    needs_data = architecture.is_language_model and architecture.provider is None
    if needs_data and not {"data_path", "train_data_path", "mock_data"} & provided.keys():
        problems.append("--data-path is required (or --train-data-path, or --mock-data)")
    return problems
