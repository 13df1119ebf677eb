"""Rules about mixtures of experts and expert parallelism."""

import itertools

from megatron.cli.validation.pipeline import partition_fits, stages_have_layers
from megatron.cli.validation.rules import Messages, enabled, rule
from megatron.common.errors import nearest_multiples
from megatron.config import RunConfig
from megatron.config.experts import layers_of_runs
from megatron.model import partition
from megatron.parallel.pipeline.schedule import chunks_of


@rule("the router chooses from the experts", why="It cannot choose more than there are.")
def chosen_experts(run: RunConfig) -> Messages:
    experts, chosen = run.model.num_experts, run.model.moe_router_topk
    if 0 < experts < chosen:
        yield f"--moe-router-topk {chosen} is more than --num-experts {experts}: lower it"


@rule("a list of layers with experts is of all layers", why="Each layer has experts or an MLP.")
def listed_layers(run: RunConfig) -> Messages:
    model, listed = run.model, run.model.moe_layer_freq
    if not isinstance(listed, str) or not model.has_experts:
        return
    if (count := len(layers_of_runs(listed))) != model.num_layers > 0:
        yield f"--moe-layer-freq {listed} is of {count} layers, not of --num-layers {model.num_layers}: give one each"
    elif not any(layers_of_runs(listed)):
        yield f"--moe-layer-freq {listed} leaves no layer with experts: write 1 for some"


@rule("tensor-parallel ranks divide each expert", why="Each rank holds an equal share of its columns.")
def expert_size(run: RunConfig) -> Messages:
    ranks, model = run.parallel.model_parallel_size, run.model
    sizes = {
        "--moe-ffn-hidden-size": model.expert_size,
        "--moe-shared-expert-intermediate-size": model.moe_shared_expert_intermediate_size,
    }
    for name, size in sizes.items():
        if ranks > 0 and size % ranks:
            yield (
                f"{name} {size} is not a multiple of --model-parallel-size {ranks}: use "
                f"{nearest_multiples(size, ranks)}"
            )


@rule(
    "experts are split as the other layers are",
    why="Tokens are sent to the rank with the same part of another expert: the ranks of tensor parallelism correspond.",
)
def expert_tensor_parallel_size(run: RunConfig) -> Messages:
    size, ranks = run.parallel.expert_tensor_parallel_size, run.parallel.model_parallel_size
    if size > 1 and not run.model.has_experts:
        yield f"--expert-tensor-parallel-size {size} has no effect without --num-experts: add it, or remove the flag"
    elif size not in (0, ranks) and run.model.has_experts:
        yield f"--expert-tensor-parallel-size {size} differs from --model-parallel-size {ranks}: use {ranks}"


@rule("expert-parallel ranks divide the experts", why="Each rank holds as many experts.")
def experts_over_ranks(run: RunConfig) -> Messages:
    experts, ranks = run.model.num_experts, run.parallel.expert_model_parallel_size
    if ranks > 0 and experts % ranks:
        yield (
            f"--num-experts {experts} is not a multiple of --expert-model-parallel-size {ranks}: use "
            f"{nearest_multiples(experts, ranks)}"
        )


@rule(
    "expert-parallel ranks divide the data-parallel ranks",
    why="Ranks that read other samples divide the experts among them.",
)
def experts_over_data_ranks(run: RunConfig) -> Messages:
    ranks, parallel = run.parallel.expert_model_parallel_size, run.parallel
    if ranks < 1 or parallel.replica_size < 1 or parallel.world_size % parallel.replica_size:
        return
    if parallel.data_parallel_size % ranks:
        yield (
            f"--expert-model-parallel-size {ranks} does not divide the data-parallel size "
            f"{parallel.data_parallel_size}: use a divisor of it, or more processes"
        )


@rule(
    "with expert parallelism ZeRO reduces and scatters gradients",
    why="DeepSpeed has no other code for the gradients of experts that is tested.",
    otherwise="AssertionError: Reduce Scatter in ZeRO Stage 2 must be set to True for MoE",
)
def expert_gradients(run: RunConfig) -> Messages:
    zero, stage = run.zero, run.zero.zero_stage
    given = enabled(
        {
            "--no-zero-reduce-scatter": stage in (1, 2) and not zero.zero_reduce_scatter,
            "--no-zero-contiguous-gradients": stage == 2 and not zero.zero_contiguous_gradients,
        }
    )
    if given and run.parallel.expert_model_parallel_size > 1:
        yield f"--expert-model-parallel-size does not work with {given} at --zero-stage {stage}: remove it"


@rule(
    "with expert parallelism each stage has a layer with experts",
    why="DeepSpeed reduces the gradient norm once for each parameter group, and a stage without experts has no "
    "group of them. By parameters and FLOPs the stages depend on the vocabulary, which is not read yet.",
    otherwise="hangs in an all-reduce",
)
def experts_on_each_stage(run: RunConfig) -> Messages:
    model, parallel = run.model, run.parallel
    method = parallel.pipeline_partition
    if not (model.has_experts and parallel.expert_model_parallel_size > 1 and parallel.pipe_stages > 1):
        return
    if model.num_layers < 1 or any(stages_have_layers(run)) or any(partition_fits(run)):
        return
    if method in ("parameters", "flops"):
        yield (
            f"--pipeline-partition {method} may leave a stage without a layer with experts: remove it, or give the "
            "number of layers of each stage"
        )
        return
    ends = list(itertools.accumulate(partition.layers_per_chunk(run), initial=0))
    has_experts = [
        any(model.layer_has_experts(number + 1) for number in range(*part)) for part in itertools.pairwise(ends)
    ]
    for stage in range(parallel.pipe_stages):
        chunks = chunks_of(parallel.pipeline_schedule, stage, parallel.pipe_stages, parallel.chunks_per_stage)
        if not any(has_experts[chunk] for chunk in chunks):
            yield (
                f"--pipeline-partition {method} leaves stage {stage} without a layer with experts "
                f"(--moe-layer-freq {model.moe_layer_freq}): divide the layers otherwise"
            )


@rule(
    "a global batch is balanced in one micro-batch",
    why="The choices of later micro-batches are not known when the first one is differentiated: as in Megatron-LM, "
    "each counts itself and those before it, so that the loss depends on their number.",
    only_warns=True,
)
def global_balance(run: RunConfig) -> Messages:
    model, steps = run.model, run.train.gradient_accumulation_steps
    if model.moe_router_load_balancing_type == "global_aux_loss" and model.moe_aux_loss_coeff and steps > 1:
        yield (
            f"--moe-router-load-balancing-type global_aux_loss with {steps} micro-batches a step depends on their "
            "number: --gas 1 with a larger --batch-size does not, nor does seq_aux_loss"
        )
