"""Every rule about what a run may be. All are checked before torch is imported, and all broken ones reported at once.

``RULES`` is a table, so that it can be printed as well as applied.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from megatron.config import RunConfig, flag_fields
from megatron.config.fields import flag_name
from megatron.config.validation import (
    activation,
    pipeline,
    sizes,
    training,
    zero,
)
from megatron.config.validation import (
    activation as kernels,
)
from megatron.config.validation import (
    training as data,
)
from megatron.config.validation import (
    training as observe,
)
from megatron.config.validation import (
    zero as precision,
)


class Rule(NamedTuple):
    """What a run has to keep to, why, and how one sees that it does not."""

    name: str
    why: str
    check: Callable[[RunConfig], str | None]
    """The message for a run that breaks it, else None."""
    otherwise: str = ""
    """What DeepSpeed would do with such a run, where it is DeepSpeed's rule."""


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


def _excludes(path: str, other: str, why: str, otherwise: str = "") -> Rule:
    """A rule for two settings that cannot both be on."""
    flag, rival = (flag_name(flag_fields()[name.split(".")[1]]) for name in (path, other))

    def check(run: RunConfig) -> str | None:
        if _of(run, path) and _of(run, other):
            return f"{flag} and {rival} exclude each other: remove one"
        return None

    return Rule(f"{flag} excludes {rival}", why, check, otherwise)


RULES: tuple[Rule, ...] = (
    Rule(
        "heads divide the hidden size",
        "Each attention head has an equal part of the hidden states.",
        sizes.hidden_size,
    ),
    Rule("tensor-parallel ranks divide the heads", "A rank computes whole attention heads.", sizes.heads),
    Rule("tensor-parallel ranks divide the MLP", "A rank holds an equal part of its columns.", sizes.ffn_hidden_size),
    Rule(
        "sequence parallelism needs tensor parallelism",
        "It cuts over the tensor-parallel ranks; one rank alone has nothing to cut.",
        sizes.sequence_parallel,
    ),
    Rule("ranks divide a cut sequence", "Each holds an equal part of it.", sizes.sequence_length),
    Rule(
        "sequence-parallel ranks divide the heads",
        "Around attention they exchange their parts of the sequence for whole heads.",
        sizes.sequence_heads,
    ),
    Rule(
        "DeepSpeed's sequence parallelism runs on the plain engine",
        "The pipeline's grid of ranks has no axis for it.",
        sizes.ulysses_with_pipeline,
    ),
    Rule("positions cover the sequence", "Each token of a sample needs a learned position.", sizes.positions),
    Rule("a layer for each stage", "A stage without a layer would only pass tensors on.", pipeline.pieces),
    Rule(
        "the partition fits the model",
        "Each stage has its part, and all parts together are the model.",
        pipeline.partition_fits,
    ),
    Rule(
        "embeddings alone are a stage in fp32 at ZeRO 0 only",
        "DeepSpeed reduces the gradient norm once for each group of parameters, and drops an empty group; a stage with "
        "fewer of them than the others waits for ever.",
        pipeline.embeddings_alone,
        "waits for ever",
    ),
    Rule(
        "a partition needs a pipeline",
        "The plain engine has the model in one piece.",
        pipeline.partition_needs_pipeline,
    ),
    Rule(
        "a schedule needs a pipeline",
        "The plain engine has no stages to put in order.",
        pipeline.schedule_needs_pipeline,
    ),
    Rule(
        "DualPipeV has micro-batches for both ways",
        "Each stage runs forward and backward on both of its pieces at a time, and DeepSpeed asserts that there are "
        "enough micro-batches to fill them.",
        pipeline.micro_batches_for_dualpipev,
        "AssertionError: DualPipeV needs gradient_accumulation_steps >= 2 * stages",
    ),
    Rule(
        "processes = TP x PP x SP x DP",
        "Processes form a grid of whole replicas.",
        sizes.world_size,
        "AssertionError: Invalid Grid",
    ),
    Rule(
        "the pipeline runs at ZeRO 0 or 1",
        "It accumulates gradients over micro-batches, so sharded ones would be reduced for each of them.",
        zero.zero_with_pipeline,
        "AssertionError: ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism",
    ),
    Rule(
        "half precision with tensor parallelism needs ZeRO",
        "At stage 0 DeepSpeed leaves the shards of the other ranks out of the gradient norm, so it clips wrongly.",
        precision.half_precision_norm,
        "clips by a wrong norm, or stops with: stack expects a non-empty TensorList",
    ),
    Rule(
        "bf16 weights have an fp32 copy",
        "What an update adds to a weight is often less than bf16 can tell apart there, and would be lost.",
        precision.bf16_master_weights,
        "updates the bf16 weights themselves, silently",
    ),
    Rule(
        "fp16 needs a GPU",
        "DeepSpeed has no fp16 on the CPU; bf16 needs no loss scale either.",
        precision.device_precision,
        "ValueError: Type fp16 is not supported on your device.",
    ),
    _excludes(
        "precision.fp16",
        "precision.bf16",
        "Weights have one type.",
        "AssertionError: bfloat16 and fp16 modes cannot be simultaneously enabled",
    ),
    Rule("the initial loss scale is a power of two", "DeepSpeed keeps its exponent.", precision.initial_loss_scale),
    Rule("the smallest loss scale is whole", "DeepSpeed keeps it as an integer.", precision.min_scale),
    Rule(
        "a patient loss scale needs ZeRO",
        "Without it DeepSpeed steps with another optimizer wrapper, whose loss scale halves at the first overflow.",
        precision.hysteresis,
    ),
    _needs("precision.loss_scale", "precision.fp16"),
    Rule(
        "a half-precision loss needs half precision",
        "In fp32 there is nothing to save.",
        precision.half_precision_loss,
    ),
    Rule(
        "an fp32 residual stream needs half precision",
        "In fp32 it is fp32 already.",
        precision.half_precision_residual,
    ),
    Rule("NCCL needs GPUs", "On the CPU, gloo is the backend.", training.backend),
    Rule("apex is there when it is asked for", "Only auto may fall back to torch.", training.apex),
    Rule(
        "compiled layers hold their weights",
        "ZeRO 3 brings each part of a layer its weights between the operations that are compiled together.",
        kernels.compiled_layers,
        "compiles every fragment between two of its hooks anew, until torch gives up",
    ),
    Rule(
        "gradients that accumulate in place stay in place",
        "The product of a micro-batch is added to the gradient of those before it.",
        kernels.gradients_in_place,
    ),
    _excludes(
        "model.gradient_accumulation_fusion",
        "model.compile",
        "torch's compiler cannot see a gradient change that it does not compute.",
    ),
    Rule(
        "the fused causal attention is possible",
        "The fused kernel knows one mask and one arithmetic.",
        training.fused_attention,
    ),
    Rule(
        "an offloaded optimizer needs ZeRO",
        "DeepSpeed offloads only what ZeRO has partitioned.",
        zero.offloaded_optimizer,
        "leaves it on the device, silently",
    ),
    Rule(
        "an optimizer on NVMe needs ZeRO 3",
        "Stages 1 and 2 would keep it in CPU memory, silently.",
        zero.optimizer_on_nvme,
        "keeps it in CPU memory, silently",
    ),
    Rule(
        "offloaded weights need ZeRO 3", "The other stages keep the weights whole on each rank.", zero.offloaded_param
    ),
    Rule("NVMe has a folder", "What is offloaded there goes into files.", zero.nvme_path),
    Rule(
        "settings of offload need offload",
        "Without something offloaded they would do nothing, silently.",
        zero.offload_settings,
    ),
    Rule(
        "overlapped reduction needs ZeRO on the plain engine",
        "Without ZeRO there is nothing to overlap, and in a pipeline DeepSpeed switches it off.",
        zero.overlap_comm,
        "ignores it, silently",
    ),
    Rule(
        "round-robin gradients need ZeRO 1 or 2",
        "At stage 3 each gradient is cut over all ranks already.",
        zero.round_robin_gradients,
    ),
    Rule(
        "gradients accumulate in fp32 or in the weights' type",
        "DeepSpeed has no other mix, and none without ZeRO.",
        precision.grad_accum_dtype,
        "NotImplementedError: unsupported mix of model_dtype and grad_accum_dtype",
    ),
    _needs("activation.partition_activations", "activation.checkpoint_activations"),
    _needs("activation.contiguous_checkpointing", "activation.checkpoint_activations"),
    _needs("activation.checkpoint_in_cpu", "activation.checkpoint_activations"),
    _needs("activation.synchronize_each_layer", "activation.checkpoint_activations"),
    _needs("activation.profile_backward", "activation.checkpoint_activations"),
    Rule(
        "groups of recomputed layers need recomputation", "Nothing is grouped otherwise.", activation.recomputed_layers
    ),
    Rule(
        "selective recomputation takes no other form",
        "It keeps query, key and value of each layer, and no two tensor-parallel ranks hold equal ones to cut.",
        activation.selective_recomputation,
    ),
    Rule(
        "partitioned activations are whole before",
        "DeepSpeed cuts what all tensor-parallel ranks hold alike, and puts it together again: of parts of the "
        "sequence it would make a tensor that no rank had.",
        activation.partitioned_sequence,
        "computes with mixed-up activations, silently",
    ),
    Rule(
        "activations in one buffer, or in CPU memory, are partitioned",
        "DeepSpeed has these two forms for partitioned activations only.",
        activation.partitioned_activations,
        "AssertionError: Contiguous Checkpointing is only available with partitioned activations; for those in CPU "
        "memory, an error in the middle of the backward pass",
    ),
    Rule(
        "a mean of means needs a mask",
        "Without --eod-mask-loss every micro-batch counts as many tokens, and both means are the same.",
        training.loss_normalization,
    ),
    Rule("the learning rate falls", "The decay goes from --lr down to --min-lr.", training.min_lr),
    Rule("warm-up and decay fit", "Both are counted in the same iterations.", training.warmup),
    Rule("WSD says how long it decays", "Its last part has no natural length.", training.wsd),
    _excludes(
        "optim.override_lr_scheduler",
        "optim.use_checkpoint_lr_scheduler",
        "On resume, one of command line and checkpoint decides.",
    ),
    Rule(
        "the tokenizer is one of the model's",
        "GPT-2 needs a token that ends documents, BERT those that frame, pad and mask.",
        training.tokenizer,
    ),
    Rule("a pair of sentences fits", "BERT's samples are pairs, with three tokens around them.", training.pairs),
    Rule(
        "a blend has a weight before each prefix",
        "The share of each data set is its weight over the sum of all.",
        data.blends,
    ),
    _needs("data.valid_data_path", "data.train_data_path"),
    _needs("data.test_data_path", "data.train_data_path"),
    Rule("BPE has merges", "The vocabulary alone does not say how text is cut.", training.merges),
    _needs("checkpoint.save_interval", "checkpoint.save"),
    _needs("checkpoint.async_save", "checkpoint.save"),
    _needs("checkpoint.keep_last", "checkpoint.save"),
    _needs("checkpoint.keep_every", "checkpoint.keep_last"),
    _needs("checkpoint.auto_resume", "checkpoint.save"),
    _needs("checkpoint.finetune", "checkpoint.load"),
    _needs("train.rewind_on_spike", "checkpoint.save_interval"),
    Rule("a spike is told by those who look for it", "Nobody does otherwise.", training.spike_factor),
    _excludes(
        "checkpoint.auto_resume",
        "checkpoint.finetune",
        "A run that was stopped would begin at iteration 0 again.",
    ),
    Rule("an error of a save needs a save", "Without --save nothing is written.", training.on_save_error),
    Rule("strict loading loads", "Without a checkpoint nothing can be broken.", training.load_strict),
    _needs("checkpoint.override", "checkpoint.load"),
    Rule("closer looks are at iterations of the run", "Nothing would be seen otherwise.", observe.step_ranges),
    Rule("traced iterations are traced", "Without --trace nothing is.", observe.trace_steps),
    Rule("a profile has a folder", "It is written to files, and nothing else is.", observe.profile_folder),
    Rule(
        "operations are counted on the plain engine",
        "DeepSpeed writes the profile in a function that its pipeline engine does not call.",
        observe.flops_on_plain_engine,
        "counts, and shows nothing",
    ),
    Rule(
        "a partition by measured times needs a pipeline",
        "A plain engine has no stages.",
        observe.repartition_needs_pipeline,
    ),
    _needs("logging.rank", "logging.dry_run"),
    Rule("ranks of a dry run are among the processes", "Another has nothing to build.", training.dry_ranks),
    _excludes("logging.explain", "logging.dry_run", "One prints rules, the other builds layers."),
)
