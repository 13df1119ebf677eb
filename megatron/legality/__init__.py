"""Every rule about what a run may be. All are checked before torch is imported, and all broken ones reported at once.

``RULES`` is a table, so that it can be printed as well as applied.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from megatron.config import RunConfig
from megatron.given import flag_fields, flag_name
from megatron.legality import checks


class Rule(NamedTuple):
    """What a run has to keep to, why, and how one sees that it does not."""

    name: str
    why: str
    check: Callable[[RunConfig], str | None]
    """The message for a run that breaks it, else None."""


def violations(run: RunConfig) -> list[str]:
    """A message for each rule that ``run`` breaks."""
    return [message for rule in RULES if (message := rule.check(run)) is not None]


def _of(run: RunConfig, path: str) -> Any:
    section, field = path.split(".")
    return getattr(getattr(run, section), field)


def _needs(path: str, other: str) -> Rule:
    """A rule for a setting that does nothing, or cannot work, unless another is on."""
    flag, needed = (flag_name(flag_fields()[name.split(".")[1]]) for name in (path, other))

    def check(run: RunConfig) -> str | None:
        if _of(run, path) and not _of(run, other):
            return f"{flag} has no effect without {needed}: add {needed}, or remove {flag}"
        return None

    return Rule(f"{flag} needs {needed}", "Without the other it would do nothing, silently.", check)


def _excludes(path: str, other: str, why: str) -> Rule:
    """A rule for two settings that cannot both be on."""
    flag, rival = (flag_name(flag_fields()[name.split(".")[1]]) for name in (path, other))

    def check(run: RunConfig) -> str | None:
        if _of(run, path) and _of(run, other):
            return f"{flag} and {rival} exclude each other: remove one"
        return None

    return Rule(f"{flag} excludes {rival}", why, check)


RULES: tuple[Rule, ...] = (
    Rule(
        "heads divide the hidden size",
        "Each attention head has an equal part of the hidden states.",
        checks.hidden_size,
    ),
    Rule("tensor-parallel ranks divide the heads", "A rank computes whole attention heads.", checks.heads),
    Rule("tensor-parallel ranks divide the MLP", "A rank holds an equal part of its columns.", checks.ffn_hidden_size),
    Rule("positions cover the sequence", "Each token of a sample needs a learned position.", checks.positions),
    Rule("a layer for each stage", "A stage without a layer would only pass tensors on.", checks.stages),
    Rule("processes = TP x PP x DP", "Processes form a grid of whole replicas.", checks.world_size),
    Rule(
        "the pipeline runs at ZeRO 0 or 1",
        "It accumulates gradients over micro-batches, so sharded ones would be reduced for each of them.",
        checks.zero_with_pipeline,
    ),
    Rule(
        "half precision with tensor parallelism needs ZeRO",
        "At stage 0 DeepSpeed leaves the shards of the other ranks out of the gradient norm, so it clips wrongly.",
        checks.half_precision_norm,
    ),
    Rule(
        "fp16 needs a GPU",
        "DeepSpeed has no fp16 on the CPU; bf16 needs no loss scale either.",
        checks.device_precision,
    ),
    _excludes("precision.fp16", "precision.bf16", "Weights have one type."),
    Rule("the initial loss scale is a power of two", "DeepSpeed keeps its exponent.", checks.initial_loss_scale),
    Rule("the smallest loss scale is whole", "DeepSpeed keeps it as an integer.", checks.min_scale),
    _needs("precision.loss_scale", "precision.fp16"),
    Rule(
        "a half-precision loss needs half precision",
        "In fp32 there is nothing to save.",
        checks.half_precision_loss,
    ),
    Rule("NCCL needs GPUs", "On the CPU, gloo is the backend.", checks.backend),
    Rule("apex is there when it is asked for", "Only auto may fall back to torch.", checks.apex),
    Rule(
        "the fused causal attention is possible",
        "The fused kernel knows one mask and one arithmetic.",
        checks.fused_attention,
    ),
    Rule("an offloaded optimizer needs ZeRO", "DeepSpeed offloads only what ZeRO has partitioned.", checks.offload),
    _needs("zero.cpu_torch_adam", "zero.cpu_optimizer"),
    _needs("activation.partition_activations", "activation.checkpoint_activations"),
    _needs("activation.contigious_checkpointing", "activation.checkpoint_activations"),
    _needs("activation.checkpoint_in_cpu", "activation.checkpoint_activations"),
    _needs("activation.synchronize_each_layer", "activation.checkpoint_activations"),
    _needs("activation.profile_backward", "activation.checkpoint_activations"),
    Rule("groups of recomputed layers need recomputation", "Nothing is grouped otherwise.", checks.recomputed_layers),
    Rule(
        "activations in one buffer, or in CPU memory, are partitioned",
        "DeepSpeed has these two forms for partitioned activations only.",
        checks.partitioned_activations,
    ),
    Rule("the learning rate falls", "The decay goes from --lr down to --min-lr.", checks.min_lr),
    Rule("warm-up and decay fit", "Both are counted in the same iterations.", checks.warmup),
    Rule("WSD says how long it decays", "Its last part has no natural length.", checks.wsd),
    _excludes(
        "optim.override_lr_scheduler",
        "optim.use_checkpoint_lr_scheduler",
        "On resume, one of command line and checkpoint decides.",
    ),
    Rule("BPE has merges", "The vocabulary alone does not say how text is cut.", checks.merges),
    _needs("checkpoint.save_interval", "checkpoint.save"),
    _needs("checkpoint.finetune", "checkpoint.load"),
)
