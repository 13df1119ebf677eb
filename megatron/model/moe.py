"""Mixture of experts: a router chooses a few experts for each token (arXiv 1701.06538).

b batch, s sequence, h hidden, E experts of the layer, e experts of this rank, k chosen experts, f hidden size of an
expert, t tensor-parallel ranks, n rows of the experts of this rank: one for each token and chosen expert

The layer is one tensor-parallel region: each rank has the entire input, a shard of each expert's hidden size, and a
partial sum of the output. Gradients inside the region are therefore partial sums, including the router's, and each
rank adds 1/t of the gradient of the auxiliary loss, which balances the load of the experts.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from megatron.config import ModelConfig
from megatron.model.transformer import ParallelMLP, ParallelTransformerLayer
from megatron.model.weights import residual_weight, weight
from megatron.ops.activation import expert_activation
from megatron.ops.linear import StackedLinearKernel, stacked_linear, stacked_linear_kernel
from megatron.parallel.expert import ROUTES, Route, local_experts, mark_expert
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.sequence import sequence_parallel_dim
from megatron.parallel.tensor.deferred import DeferringModule
from megatron.parallel.tensor.layers import WeightInit, all_reduce_gradient, reduce_output, sharded_parameter
from megatron.parallel.tensor.mappings import (
    all_reduce,
    copy_to_model_parallel_region,
    gather_from_sequence_parallel_region,
)


class ParallelMoE(nn.Module):
    """MoE layer, hidden [b, s, h] -> hidden [b, s, h]: for each token the weighted sum of its k experts' outputs."""

    def __init__(self, config: ModelConfig, layout: ParallelLayout, *, layer_number: int):
        super().__init__()
        name = f"layers.{layer_number}.mlp"
        self.num_experts = config.num_experts  # DeepSpeed reads this attribute
        self.group, self.fills_capacity = layout.tensor_group, config.moe_pad_expert_input_to_capacity
        self.sequence_dim = sequence_parallel_dim(config, layout)
        self.has_sequence_first = config.sequence_dim == 0
        self.expert_group = layout.expert_group
        self.route_class = ROUTES[config.moe_token_dispatcher_type] if layout.expert_group is not None else Route
        self.router = Router(config, layout, name=f"{name}.router")
        self.router.layer_number = layer_number
        self.experts = Experts(config, layout, name=f"{name}.experts")
        size = config.moe_shared_expert_intermediate_size
        self.shared_expert = ParallelMLP(config, layout, name=f"{name}.shared_expert", size=size) if size else None
        if config.compile:  # the number of rows of an expert depends on the data
            self.forward = torch.compiler.disable(self.forward)  # type: ignore[method-assign]

    def forward(self, hidden: Tensor) -> Tensor:
        if self.sequence_dim is None:
            x = copy_to_model_parallel_region(hidden, self.group)
        else:
            x = gather_from_sequence_parallel_region(hidden, self.group, self.sequence_dim)
        if self.has_sequence_first:
            x = x.transpose(0, 1)
        route, shared = self._route(x), self.shared_expert
        arriving = route.send(x.flatten(0, 1))
        inner = shared.activation(shared.dense_h_to_4h(hidden)) if shared is not None else None
        returning = route.send_back(self.experts(arriving(), route.ends))
        shared_output = shared.dense_4h_to_h(inner) if shared is not None else None
        y = returning().view(x.shape)
        if self.has_sequence_first:
            y = y.transpose(0, 1)
        y = reduce_output(y, self.group, self.sequence_dim, overwrites=True)
        return y if shared_output is None else y + shared_output

    def _route(self, x: Tensor) -> Route:
        """x [b, s, h] -> the route of its tokens to their experts and back."""
        weights, chosen = (choices.flatten(0, 1) for choices in self.router(x))
        capacity = x.size(0) * self.router.capacity(x.size(1)) if self.fills_capacity else 0
        drops = self.router.capacity_factor > 0
        return self.route_class(weights.to(x.dtype), chosen, self.num_experts, self.expert_group, drops, capacity)


class Experts(nn.Module):
    """The MLPs of this rank's experts: x [n, h] sorted by expert, ends of their rows [e] -> partial sums [n, h]."""

    def __init__(self, config: ModelConfig, layout: ParallelLayout, *, name: str):
        super().__init__()
        h, f, group = config.hidden_size, config.expert_size, layout.tensor_group
        numbers = local_experts(config.num_experts, layout)
        rows = (2, f) if config.is_gated else (f,)

        def parameter(matrix: str, init: Any, shape: tuple[int, ...], dim: int) -> nn.Parameter:
            inits: list[WeightInit] = [init(config, f"{name}.{number}.{matrix}") for number in numbers]
            full = torch.stack([init.draw(shape) for init in inits])
            return mark_expert(sharded_parameter(full, dim=dim, group=group), layout)

        self.kernel = kernel = stacked_linear_kernel(config, h, f // group.size())
        self.dense_h_to_4h = StackedLinear(parameter("dense_h_to_4h", weight, (*rows, h), len(rows)), kernel)
        self.dense_4h_to_h = StackedLinear(parameter("dense_4h_to_h", residual_weight, (h, f), 2), kernel)
        self.activation = expert_activation(config)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        rows = self.kernel.rows_of(ends)
        return self.dense_4h_to_h(self.activation(self.dense_h_to_4h(x, rows)), rows)


class StackedLinear(DeferringModule):
    """A linear layer per expert, y = x W^T with W [e, o, i] or [e, parts, o, i], and x [n, i] sorted by expert."""

    def __init__(self, weight: nn.Parameter, kernel: StackedLinearKernel):
        super().__init__()
        self.weight, self.kernel = weight, kernel

    def forward(self, x: Tensor, rows: Any) -> Tensor:
        return stacked_linear(x, self.weight, rows, self.kernel, self.defer)


class MoEParallelTransformerLayer(ParallelTransformerLayer):
    """A transformer layer with a mixture of experts in place of its MLP."""

    mlp_class = ParallelMoE


class Router(nn.Module):
    """x [b, s, h] -> weights and indices [b, s, k] of the k experts of each token; index E means dropped.

    The gradients of the auxiliary losses are injected where the weights are computed, so that pipeline stages exchange
    only hidden states.
    """

    def __init__(self, config: ModelConfig, layout: ParallelLayout, *, name: str):
        super().__init__()
        self.group, self.sequence_group = layout.tensor_group, layout.sequence_group
        self.replica_group = layout.get_sequence_data_parallel_group()
        self.experts, self.chosen = config.num_experts, config.moe_router_topk
        self.pre_softmax = config.moe_router_pre_softmax
        self.dtype = {"fp32": torch.float32, "fp64": torch.float64}[config.moe_router_dtype]
        self.balances = config.moe_router_load_balancing_type
        self.aux_coeff, self.z_coeff = config.moe_aux_loss_coeff, config.moe_z_loss_coeff
        self.capacity_factor = config.moe_expert_capacity_factor
        self.weight = nn.Parameter(weight(config, name).draw((config.num_experts, config.hidden_size)))
        all_reduce_gradient(self.weight, self.group)
        self.gradient_scale: float | Tensor = 1.0
        self._fractions: list[Tensor] = []
        self.layer_number = 0
        """Number of its transformer layer in the model, from 1."""
        self.measured: dict[str, Tensor] = {}
        """Sums over the micro-batches since the last ``take_measured``."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(x.to(self.dtype), self.weight.to(self.dtype))  # [b, s, E]
        scores = logits.softmax(-1)
        if self.pre_softmax:
            weights, chosen = scores.topk(self.chosen, dim=-1)
        else:
            top, chosen = logits.topk(self.chosen, dim=-1)
            weights = top.softmax(-1)
        is_chosen = torch.zeros_like(scores).scatter_(-1, chosen, 1.0)
        is_measured = self.training and torch.is_grad_enabled()  # with recomputation: only in the second pass
        if is_measured:
            balance = self._load_balancing_loss(scores, is_chosen)
            z = logits.logsumexp(-1).square().mean()
            loss = self.aux_coeff * balance + self.z_coeff * z
            if loss.requires_grad and (self.aux_coeff or self.z_coeff):
                weights = _InjectLoss.apply(weights, loss, self.gradient_scale / self.group.size())
            self._measure(scores, is_chosen, balance, z)
        if self.capacity_factor:
            kept = self._within_capacity(weights.detach(), chosen)
            weights, chosen = weights * kept, chosen.masked_fill(~kept, self.experts)
            if is_measured:
                self._add("dropped", 1 - kept.double().mean())
        return weights, chosen

    def begin_step(self, gradient_scale: float | Tensor) -> None:
        """Begin a global batch; the engine multiplies the loss of each micro-batch by ``gradient_scale``."""
        self.gradient_scale, self._fractions = gradient_scale, []

    def _load_balancing_loss(self, scores: Tensor, is_chosen: Tensor) -> Tensor:
        """E x sum over experts of (fraction of choices x mean score) (arXiv 2101.03961); 1 for equal load.

        With ``global_aux_loss`` the fraction is averaged over all data-parallel ranks and the micro-batches so far.
        """
        if self.balances == "seq_aux_loss":
            fraction, score = is_chosen.mean(1), scores.mean(1)  # [b, E]
        else:
            fraction, score = is_chosen.mean((0, 1)), scores.mean((0, 1))  # [E]
        if self.balances == "global_aux_loss":
            self._fractions.append(_mean(fraction, self.replica_group))
            fraction = torch.stack(self._fractions).mean(0)
        elif self.sequence_group is not None:  # this rank has a part of each sample
            fraction = _mean(fraction, self.sequence_group)
        return self.experts / self.chosen * (fraction * score).sum(-1).mean()

    def capacity(self, s: int) -> int:
        """Maximum number of tokens per expert for a sample of ``s`` tokens."""
        return min(s, -int(-self.capacity_factor * s * self.chosen // self.experts))

    def _within_capacity(self, weights: Tensor, chosen: Tensor) -> Tensor:
        """Mask [b, s, k]: whether the token has one of the highest weights of its sample for the expert."""
        b, s, _ = chosen.shape
        all_weights = weights.new_full((b, s, self.experts), -1.0).scatter_(-1, chosen, weights)
        first = all_weights.topk(self.capacity(s), dim=1).indices  # [b, capacity, E]
        fits = torch.zeros_like(all_weights, dtype=torch.bool).scatter_(1, first, True)
        return fits.gather(-1, chosen)

    @torch.no_grad()
    def _measure(self, scores: Tensor, is_chosen: Tensor, balance: Tensor, z: Tensor) -> None:
        self._add("share", is_chosen.mean((0, 1)) / self.chosen)
        self._add("entropy", -(scores * scores.clamp(min=1e-9).log()).sum(-1).mean())
        self._add("balance", balance)
        self._add("z", z)
        self._add("micro_batches", torch.ones((), device=z.device))

    def _add(self, name: str, value: Tensor) -> None:
        value = value.detach().double()
        self.measured[name] = self.measured[name] + value if name in self.measured else value

    def take_measured(self) -> dict[str, Tensor]:
        """Take the sums over the micro-batches since the last call, [] each, ``share`` [E]; empty without any."""
        measured, self.measured = self.measured, {}
        return measured


def _mean(x: Tensor, group: ProcessGroup) -> Tensor:
    """The mean of ``x`` over the ranks."""
    return all_reduce(x, group) / group.size()


class _InjectLoss(torch.autograd.Function):
    """Identity on ``x`` that adds ``loss`` to the backward pass with gradient ``scale``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: float | Tensor) -> Tensor:
        ctx.scale, ctx.loss_kind = scale, (loss.dtype, loss.device)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        dtype, device = ctx.loss_kind
        return grad, torch.ones((), dtype=dtype, device=device).mul_(ctx.scale), None


def routers(module: nn.Module) -> list[Router]:
    """All routers in ``module``, in order."""
    return [part for part in module.modules() if isinstance(part, Router)]
