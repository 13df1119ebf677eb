"""What a run says of itself before it begins."""

import dataclasses
import json

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

from megatron.config import RunConfig
from megatron.mpu.layout import ParallelLayout
from megatron.partition import Stage, plan


def describe_run(run: RunConfig) -> str:
    """Layout, model, batch, schedule, device and the finished DeepSpeed config, a line each."""
    parallel, train, model = run.parallel, run.train, run.model
    engine = f"pipeline engine, {parallel.pipe_stages} stages" if parallel.uses_pipeline else "plain engine"
    accelerator = get_accelerator()
    device = accelerator.device_name()
    if device != "cpu":
        device = f"{device} ({torch.get_device_module(device).get_device_name()})"
    rows = {
        "layout": f"{parallel.world_size} processes = TP {parallel.model_parallel_size} x PP {parallel.pipe_stages}"
        f"{_sequence_ranks(run)} x DP {parallel.data_parallel_size}, {engine}, ZeRO {run.zero.zero_stage}",
        "model": f"{model.num_layers} layers, hidden {model.hidden_size}, {model.num_attention_heads} heads,"
        f" sequence {run.data.seq_length}, vocabulary {model.vocab_size:,} padded to {model.padded_vocab_size:,}",
        "batch": f"{train.global_batch_size} samples = micro {train.micro_batch_size}"
        f" x accumulation {train.gradient_accumulation_steps} x DP {parallel.data_parallel_size}"
        f" = {train.global_batch_size * run.data.seq_length:,} tokens an iteration",
        "training": f"{train.train_iters:,} iterations, lr {run.optim.lr:g} to {run.optim.min_lr:g}"
        f" ({run.optim.lr_decay_style}, {run.optim.warmup_iters(train)} to warm up), clip {run.optim.clip_grad:g}",
        "device": f"{device}, {run.precision.dtype}, torch {torch.__version__}, {_recomputation(run)}",
    }
    rows["deepspeed"] = json.dumps(run.ds_config)
    return "\n".join(f"> {name:9} {text}" for name, text in rows.items())


def describe_stages(run: RunConfig) -> str:
    """What each pipeline stage holds and how much of the forward pass is its, a line each."""
    stages = plan(run)
    flops = sum(stage.flops for stage in stages)
    rows = [("stage", "holds", "parameters", "forward FLOPs")] + [
        (str(number), _pieces(stage, run.model.num_layers), f"{stage.parameters:,}", f"{stage.flops / flops:.1%}")
        for number, stage in enumerate(stages)
    ]
    number, holds, parameters, share = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = [f"> {a:>{number}}  {b:{holds}}  {c:>{parameters}}  {d:>{share}}" for a, b, c, d in rows]
    imbalance = [
        f"{max(costs) * len(costs) / sum(costs):.2f}"
        for costs in ([stage.parameters for stage in stages], [stage.flops for stage in stages])
    ]
    return "\n".join([*lines, f"> largest stage over the mean: parameters {imbalance[0]}, FLOPs {imbalance[1]}"])


def describe_model(module: nn.Module, layout: ParallelLayout) -> str:
    """Parameters in all, each counted once, and on each rank of the first data-parallel replica."""
    held = sum(_numel(p) for p in module.parameters())
    unique = sum(
        _numel(p)
        for p in module.parameters()
        if not getattr(p, "ds_pipe_replicated", False)
        and (getattr(p, "model_parallel", False) or layout.tensor_group.rank() == 0)
        and (layout.sequence_group is None or layout.sequence_group.rank() == 0)
    )
    counts = torch.tensor([held, unique], device=get_accelerator().current_device_name())
    everyone = [torch.empty_like(counts) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, counts)
    replica = [rank for rank in range(len(everyone)) if layout.topology.get_coord(rank).data == 0]
    total = sum(int(everyone[rank][1]) for rank in replica)
    ranks = ", ".join(f"rank {rank} {int(everyone[rank][0]):,}" for rank in replica[:8])
    more = f", and {len(replica) - 8} more" if len(replica) > 8 else ""
    return f"> parameters {total:,} in all, padding included; {ranks}{more}"


def full_config(run: RunConfig) -> str:
    """Everything the run was made from, as JSON."""
    return json.dumps(dataclasses.asdict(run), indent=2)


def _pieces(stage: Stage, layers: int) -> str:
    """The pieces of a stage in words, such as ``embeddings, layers 1-3``."""
    return " and ".join(_piece(piece, layers) for piece in stage.pieces)


def _piece(piece: range, layers: int) -> str:
    own = [number for number in piece if 1 <= number <= layers]
    words = ["embeddings"] if 0 in piece else []
    if own:
        words.append(f"layer {own[0]}" if len(own) == 1 else f"layers {own[0]}-{own[-1]}")
    return ", ".join([*words, "head"] if layers + 1 in piece else words)


def _numel(parameter: nn.Parameter) -> int:
    return getattr(parameter, "ds_numel", parameter.numel())  # ZeRO-3 leaves an empty shell of each parameter


def _sequence_ranks(run: RunConfig) -> str:
    size = run.parallel.ds_sequence_parallel_size
    return f" x SP {size}" if size > 1 else ""


def _recomputation(run: RunConfig) -> str:
    if not run.activation.checkpoint_activations:
        return "activations kept"
    return f"activations recomputed every {run.activation.checkpoint_num_layers} layer(s)"
