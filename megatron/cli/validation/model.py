"""Rules about the model: kernels, activation, adapters, and positions."""

from dataclasses import replace
from importlib.util import find_spec

from megatron.cli.validation.rules import Messages, enabled, excludes, needs, rule
from megatron.config import ModelConfig, RunConfig
from megatron.config.adapters import LORA_TARGETS
from megatron.config.positions import ROTATION
from megatron.model.architectures import architecture_of
from megatron.model.spec import parameter_counts


@rule("--fused-kernels apex needs apex", why="Only auto falls back to torch.")
def apex(run: RunConfig) -> Messages:
    if run.model.fused_kernels != "apex":
        return
    if run.parallel.device == "cpu":
        yield "--fused-kernels apex needs CUDA, and this host has no GPU: use auto or torch"
    if find_spec("apex") is None:
        yield "--fused-kernels apex: apex is not installed; install it, or use auto or torch"


@rule(
    "--compile excludes ZeRO 3",
    why="ZeRO 3 gathers the weights of each module by hooks between the operations that are compiled together.",
    otherwise="recompiles every fragment between two hooks until torch gives up",
)
def compiled_layers(run: RunConfig) -> Messages:
    if run.model.compile and run.zero.zero_stage == 3:
        yield "--compile does not work at --zero-stage 3: use --zero-stage 2, or remove it"


@rule(
    "gradient accumulation fusion needs gradients that stay in place",
    why="It adds the gradient of a micro-batch to that of the micro-batches before it.",
)
def gradients_in_place(run: RunConfig) -> Messages:
    zero = run.zero
    if run.model.gradient_accumulation_fusion and run.train.gradient_accumulation_steps == 1:
        yield (
            "--gradient-accumulation-fusion has no effect with one micro-batch a step: raise --gas or "
            "--global-batch-size, or remove it"
        )
    half_to_fp32 = run.precision.dtype != "fp32" and run.precision.grad_accum_dtype == "fp32"
    remedies = {
        "--zero-stage 1": zero.zero_stage > 1,
        "no --zero-overlap-comm": bool(zero.zero_overlap_comm),
        "no --offload-optimizer": zero.offloads_optimizer,
        "no --grad-accum-dtype fp32": half_to_fp32,
    }
    if run.model.gradient_accumulation_fusion and any(remedies.values()):
        yield (
            "--gradient-accumulation-fusion has no effect if DeepSpeed moves gradients after each micro-batch: "
            f"use {enabled(remedies)}, or remove it"
        )


excludes(
    "model.gradient_accumulation_fusion",
    "model.compile",
    why="torch's compiler cannot see a gradient change that it does not compute.",
)


@rule(
    "the fused causal attention kernel is possible",
    why="It supports the plain causal mask only, and none of the options that change the precision of the scores.",
)
def fused_attention(run: RunConfig) -> Messages:
    model = run.model
    settings = {
        "--attention-softmax-in-fp32": model.attention_softmax_in_fp32,
        "--apply-query-key-layer-scaling": model.apply_query_key_layer_scaling,
        "--sft" if run.data.sft else "--reset-attention-mask": model.reset_attention_mask,
        f"--pre-tokens {model.pre_tokens}": model.pre_tokens < run.data.seq_length - 1,
    }
    if model.scaled_upper_triang_masked_softmax_fusion and (rivals := enabled(settings)):
        flag = "--scaled-upper-triang-masked-softmax-fusion"
        yield f"{flag} cannot be combined with {rivals}: remove {flag}, or remove {rivals}"


@rule("SwiGLU excludes GELU", why="An MLP has one activation.")
def swiglu(run: RunConfig) -> Messages:
    model = run.model
    if model.swiglu and (
        rivals := enabled({"--openai-gelu": model.openai_gelu, "--bias-gelu-fusion": model.bias_gelu_fusion})
    ):
        yield f"--swiglu and {rivals} exclude each other: remove one"


needs("model.lora_rank", "model.lora_alpha", "model.lora_dropout", "model.lora_target")


@rule("adapters belong to whole linear layers", why="Queries, keys and values are one matrix here, as are gate and up.")
def lora_targets(run: RunConfig) -> Messages:
    chosen = set(run.model.lora_target)
    known = {name for target, parts in LORA_TARGETS.items() for name in (target, *parts)}
    for name in sorted(chosen - known):
        yield f"--lora-target {name} is unknown: choose from {' '.join(LORA_TARGETS)}"
    for target, parts in LORA_TARGETS.items():
        given = chosen & set(parts)
        if given and target not in chosen and given != set(parts):
            yield f"--lora-target {' '.join(sorted(given))} needs all of {' '.join(parts)}: add the others"


@rule("adapters belong to layers of this suite", why="Another model has none, so that nothing would be trained.")
def lora_model(run: RunConfig) -> Messages:
    if not run.model.lora_rank:
        return
    adapted = replace(run.model, lora_target=(), num_layers=1)  # whether targets and layers exist is for other rules
    is_provided = architecture_of(run.model).provider is not None
    if is_provided or not parameter_counts(adapted)[1]:
        yield f"--lora-rank: {run.model.architecture} has no layer with adapters: remove it"


@rule("adapters exclude Muon", why="It orthogonalizes the update of a whole matrix; A and B are factors of one.")
def lora_optimizer(run: RunConfig) -> Messages:
    if run.model.lora_rank and run.optim.optimizer == "muon":
        yield "--lora-rank does not work with --optimizer muon: use --optimizer adam"


@rule("grouped-query attention has a number of groups", why="It has no default that fits every model.")
def group_query_attention(run: RunConfig) -> Messages:
    if run.model.group_query_attention and not run.model.num_query_groups:
        yield "--group-query-attention needs --num-query-groups: give the number of key and value heads"


@rule("rotation needs rotary position embeddings", why="It would be silently ignored otherwise.")
def rotation(run: RunConfig) -> Messages:
    model = run.model
    settings = {
        f"--rotary-base {model.rotary_base:g}": model.rotary_base != ModelConfig.rotary_base,
        f"--rotary-percent {model.rotary_percent:g}": model.rotary_percent != 1,
        "--use-rope-scaling": model.use_rope_scaling,
        "--rotary-seq-len-interpolation-factor": model.rotary_seq_len_interpolation_factor != 1,
    }
    if (given := enabled(settings)) and not model.has_rotary_embedding:
        yield f"{given} has no effect without --position-embedding-type rope: add it, or remove the flag"


@rule("YaRN has a factor and an original length", why="By them it extends a model that is trained already.")
def yarn(run: RunConfig) -> Messages:
    model = run.model
    names = [name for name in ROTATION if name.startswith("yarn_")]
    given = {"--" + name.replace("_", "-"): getattr(model, name) != getattr(ModelConfig, name) for name in names}
    if model.position_embedding_type != "yarn":
        if words := enabled(given):
            yield f"{words} has no effect without --position-embedding-type yarn: add it, or remove the flag"
        return
    required = ("--yarn-rotary-scaling-factor", "--yarn-original-max-position-embeddings")
    if missing := enabled({name: not given[name] for name in required}):
        yield f"--position-embedding-type yarn needs {missing}: add it"
    if model.yarn_beta_fast <= model.yarn_beta_slow:
        yield (
            f"--yarn-beta-fast {model.yarn_beta_fast:g} is no more than --yarn-beta-slow {model.yarn_beta_slow:g}: "
            "raise it"
        )
    if model.rotary_base <= 1:
        yield f"--position-embedding-type yarn needs waves that become longer: raise --rotary-base {model.rotary_base}"


@rule("one rule extends the rotation", why="Each computes the wavelengths from those of the original rotation.")
def one_extension(run: RunConfig) -> Messages:
    model = run.model
    rules = {
        "--position-embedding-type yarn": model.position_embedding_type == "yarn",
        "--use-rope-scaling": model.use_rope_scaling,
        "--rotary-seq-len-interpolation-factor": model.rotary_seq_len_interpolation_factor != 1,
    }
    if sum(rules.values()) > 1:
        yield f"{enabled(rules)} exclude each other: keep one"


@rule("rotation turns pairs of dimensions", why="A dimension of a head turns together with another one.")
def rotated_dimensions(run: RunConfig) -> Messages:
    model = run.model
    if not (model.has_rotary_embedding and model.num_attention_heads > 0):
        return
    dimensions = int(model.head_size * model.rotary_percent)
    if dimensions < 2 or dimensions % 2:
        yield (
            f"--rotary-percent {model.rotary_percent:g} of heads of {model.head_size} rotates {dimensions} dimensions, "
            "which is no even number: change --rotary-percent or --kv-channels"
        )


needs("model.use_rope_scaling", "model.rope_scaling_factor")


@rule("FlexAttention runs on GPUs without dropout", why="torch has no backward pass for it on CPUs, and no dropout.")
def flex_attention(run: RunConfig) -> Messages:
    model = run.model
    rivals = {
        f"--attention-dropout {model.attention_dropout:g}": bool(model.attention_dropout),
        "--attention-softmax-in-fp32": model.attention_softmax_in_fp32,
        "--apply-query-key-layer-scaling": model.apply_query_key_layer_scaling,
        f"--context-parallel-size {run.parallel.context_parallel_size} in a ring": run.parallel.ring_size > 1,
    }
    if model.flex_attention and run.parallel.device != "cuda":
        yield f"--flex-attention needs GPUs, and this run is on {run.parallel.device}: remove it"
    if model.flex_attention and (given := enabled(rivals)):
        yield f"--flex-attention cannot be combined with {given}: remove it, or set --attention-dropout 0"


needs("model.tiled_mlp", "model.tiled_mlp_num_shards")
excludes("model.tiled_mlp", "model.compile", why="torch's compiler cannot look into a backward pass inside another.")


@rule(
    "--tiled-mlp excludes the dropout of adapters",
    why="The forward pass of a part is repeated, and would draw another mask.",
)
def tiled_adapters(run: RunConfig) -> Messages:
    if run.model.tiled_mlp and run.model.lora_dropout and {"dense_h_to_4h", "dense_4h_to_h"} & {*run.model.adapted}:
        yield f"--tiled-mlp and --lora-dropout {run.model.lora_dropout:g} exclude each other: remove one"
