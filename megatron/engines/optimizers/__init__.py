"""Parameter groups of all optimizers, and optimizers that DeepSpeed does not create: Muon, Lion, apex's Adam."""

from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.moe.utils import is_moe_param
from torch import nn
from torch.optim import Optimizer

from megatron.config import ModelConfig, RunConfig
from megatron.config.training import LR_MULTIPLIER
from megatron.config.vision import PARTS
from megatron.engines.optimizers.muon import Matrix, Muon
from megatron.engines.optimizers.skipping import SkippingOptimizer
from megatron.model.architectures import architecture_of
from megatron.model.spec import ArchitectureSpec, part_of
from megatron.ops.norm import uses_apex
from megatron.parallel.layout import ParallelLayout

Groups = list[dict[str, Any]]
QKV = "attention.query_key_value.weight"
"""Suffix of the names of fused QKV weights."""


def parameter_groups(module: nn.Module, run: RunConfig) -> Groups:
    """Parameter groups by weight decay, split into buckets for ZeRO 1 and 2; for Muon, its matrices come first."""
    groups = weight_decay_groups(module, run.model)
    if run.optim.optimizer != "muon":
        return [bucket for group in groups for bucket in _buckets(group, run.gradient_bucket)]
    names = block_matrices(architecture_of(run.model), run.model)
    matrices = [parameter for name, parameter in module.named_parameters() if name in names]
    numbers = set(map(id, matrices))
    rest = [{**group, "params": [p for p in group["params"] if id(p) not in numbers]} for group in groups]
    return [group for group in ({"params": matrices, "orthogonalize": True}, *rest) if group["params"]]


def _buckets(group: dict[str, Any], elements: int | None) -> Groups:
    """Split ``group`` into groups of consecutive parameters with at least ``elements`` elements, except the last."""
    buckets: list[list[nn.Parameter]] = [[]]
    for parameter in group["params"]:
        if elements is not None and sum(p.numel() for p in buckets[-1]) >= elements:
            buckets.append([])
        buckets[-1].append(parameter)
    return [{**group, "params": bucket} for bucket in buckets]


def weight_decay_groups(module: nn.Module, model: ModelConfig) -> Groups:
    """Parameter groups with and without weight decay, by the spec of ``model``; expert parallelism adds one of experts.

    Frozen parameters are left out. Parts with a learning-rate multiplier have separate groups. Without a spec, vectors
    and scalars such as biases have no weight decay, and empty groups are left out.
    """
    architecture = architecture_of(model)
    if architecture.provider is not None:
        return _groups_by_shape(module)
    specs = architecture.named_parameters(model)
    trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    experts = [parameter for _, parameter in trained if is_moe_param(parameter)]
    groups: Groups = []
    for multiplier in dict.fromkeys(map(model.learning_rate_of, reversed(PARTS))):  # of the language model first
        part_parameters = [
            (specs[name].weight_decay, parameter)
            for name, parameter in trained
            if not is_moe_param(parameter) and model.learning_rate_of(part_of(model, name)) == multiplier
        ]
        settings = {} if multiplier == 1 else {LR_MULTIPLIER: multiplier}
        groups += [
            {"params": [parameter for decays, parameter in part_parameters if decays], **settings},
            {"params": [p for decays, p in part_parameters if not decays], "weight_decay": 0.0, **settings},
        ]
    if model.lora_rank or model.vision_num_layers:  # adapters are matrices; parts may be frozen, or on other stages
        groups = [group for group in groups if group["params"]]
    if experts:  # sharded over data-parallel ranks
        groups.append({"params": experts, "moe": True, "name": experts[0].group_name})  # type: ignore[attr-defined]
    return groups


def block_matrices(architecture: ArchitectureSpec, model: ModelConfig) -> set[str]:
    """Names of the matrices in transformer layers, which Muon updates; not embeddings, heads and vectors."""
    return {
        prefix + spec.name
        for prefix, layer in architecture.prefixed_layers(model)
        for spec in layer.parameters
        if layer.is_block and len(spec.shape) > 1
    }


def _groups_by_shape(module: nn.Module) -> Groups:
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for parameter in module.parameters():
        shape = getattr(parameter, "ds_shape", parameter.shape)  # under zero.Init the parameter itself is flat
        (matrices if len(shape) > 1 else vectors).append(parameter)
    groups: Groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def client_optimizer(run: RunConfig, module: nn.Module, groups: Groups, layout: ParallelLayout) -> Optimizer | None:
    """The optimizer of ``run`` if DeepSpeed has no suitable one: Muon, Lion, apex's fused Adam.

    None for other optimizers, which DeepSpeed creates from its config.
    """
    optimizer = run.ds_config.get("optimizer", {})
    kind, params = optimizer.get("type"), optimizer.get("params", {})
    if kind == "Muon":
        return _muon(run, module, groups, layout, params)
    if kind == "Lion":
        return Lion(groups, **params)
    if kind in ("Adam", "AdamW"):
        return _apex_adam(run, groups, kind, params)
    return None


class Lion(SkippingOptimizer):
    """Lion (arXiv 2302.06675) on any device. DeepSpeed's FusedLion needs nvcc; its CPU Lion wastes a second moment.

    The state has the same names as in DeepSpeed: ``exp_avg``, the momentum, and ``step``, which is only a counter.
    """

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: Sequence[float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update each parameter that has a gradient."""
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], self.unless_skipped(group["lr"], 0.0)
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, gradient = self.state[parameter], self.scaled(parameter.grad)
                if not state:
                    state |= {"step": 0, "exp_avg": torch.zeros_like(parameter)}
                state["step"] += 1
                update = state["exp_avg"].lerp(gradient, 1 - beta1).sign_()
                parameter.mul_(1 - lr * group["weight_decay"]).sub_(update.mul_(lr))
                state["exp_avg"].mul_(self.unless_skipped(beta2, 1.0)).add_(gradient, alpha=1 - beta2)


def _muon(
    run: RunConfig, module: nn.Module, groups: Groups, layout: ParallelLayout, params: dict[str, Any]
) -> Optimizer:
    model, optim = run.model, run.optim
    names = block_matrices(architecture_of(model), model)
    rows = (model.query_groups, model.num_attention_heads // model.query_groups, model.head_size)
    matrices = [
        Matrix(parameter, qkv=rows if name.endswith(QKV) and optim.muon_split_qkv else None)
        for name, parameter in module.named_parameters()
        if name in names
    ]
    return Muon(
        groups,
        matrices,
        **params,
        nesterov=optim.muon_nesterov,
        ns_steps=optim.muon_num_ns_steps,
        coefficients=optim.muon_coefficient_type,
        scale_mode=optim.muon_scale_mode,
        scale_factor=optim.muon_extra_scale_factor,
        dtype=torch.bfloat16 if run.precision.bf16 else torch.float32,
        tensor_group=layout.tensor_group,
        data_group=layout.get_sequence_data_parallel_group(),
    )


def _apex_adam(run: RunConfig, groups: Groups, kind: str, params: dict[str, Any]) -> Optimizer | None:
    """apex's fused Adam if apex is enabled, the optimizer is not offloaded, and apex supports all settings."""
    if not uses_apex(run.model.fused_kernels) or run.zero.offloads_optimizer or params.get("amsgrad"):
        return None
    from apex.optimizers import FusedAdam

    names = ("lr", "betas", "eps", "weight_decay", "bias_correction")
    known = {name: value for name, value in params.items() if name in names}
    # DeepSpeed's meaning: Adam decouples weight decay as well, unless adam_w_mode is false.
    return FusedAdam(groups, adam_w_mode=kind == "AdamW" or params.get("adam_w_mode", True), **known)
