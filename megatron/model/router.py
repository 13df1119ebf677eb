"""The router of a mixture of experts: which experts compute a token, and the losses that keep them equally used.

b batch, s sequence, h hidden, E experts of the layer, k chosen experts, t tensor-parallel ranks

Every tensor-parallel rank routes the entire input. Gradients inside the layer are summed over the ranks, so each rank
adds only 1/t of the gradient of an auxiliary loss.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from megatron.config import ModelConfig
from megatron.model.weights import weight
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.tensor.layers import all_reduce_gradient
from megatron.parallel.tensor.mappings import all_reduce


class Router(nn.Module):
    """x [b, s, h] -> weights [b, s, k] of the k experts chosen for each token, their numbers, and which are kept.

    The gradients of the auxiliary losses are added where the weights are computed, so that nothing but hidden states
    travels between stages.
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
        self.gradient_scale = 1.0
        self._fractions: list[Tensor] = []
        self.layer_number = 0
        """Of its transformer layer in the model, from 1 on."""
        self.measured: dict[str, Tensor] = {}
        """Sums over the micro-batches since the last ``take_measured``."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        logits = F.linear(x.to(self.dtype), self.weight.to(self.dtype))  # [b, s, E]
        scores = logits.softmax(-1)
        if self.pre_softmax:
            weights, chosen = scores.topk(self.chosen, dim=-1)
        else:
            top, chosen = logits.topk(self.chosen, dim=-1)
            weights = top.softmax(-1)
        is_chosen = torch.zeros_like(scores).scatter_(-1, chosen, 1.0)
        is_measured = self.training and torch.is_grad_enabled()  # not in the first pass of recomputation
        if is_measured:
            balance = self._load_balancing_loss(scores, is_chosen)
            z = logits.logsumexp(-1).square().mean()
            loss = self.aux_coeff * balance + self.z_coeff * z
            if loss.requires_grad and (self.aux_coeff or self.z_coeff):
                weights = _WithLoss.apply(weights, loss, self.gradient_scale / self.group.size())
            self._measure(scores, is_chosen, balance, z)
        kept = self._within_capacity(is_chosen, scores, chosen) if self.capacity_factor else None
        if kept is not None:
            weights = weights * kept
            if is_measured:
                self._add("dropped", 1 - kept.double().mean())
        return weights, chosen, kept

    def begin_step(self, gradient_scale: float) -> None:
        """Begin a global batch, of each of whose micro-batches the engine multiplies the loss by ``gradient_scale``."""
        self.gradient_scale, self._fractions = gradient_scale, []

    def _load_balancing_loss(self, scores: Tensor, is_chosen: Tensor) -> Tensor:
        """E x sum of (fraction of choices x mean score) of each expert (arXiv 2101.03961), 1 if all are equal.

        In a global batch the fraction is of this micro-batch and those before it, of all data-parallel ranks.
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

    def _within_capacity(self, is_chosen: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        """[b, s, k]: whether the token is among the tokens of its sample with the largest scores for the expert."""
        s = scores.size(1)
        capacity = min(s, -int(-self.capacity_factor * s * self.chosen // self.experts))
        first = scores.masked_fill(is_chosen == 0, -1.0).topk(capacity, dim=1).indices  # [b, capacity, E]
        fits = torch.zeros_like(is_chosen).scatter_(1, first, 1.0) * is_chosen
        return fits.gather(-1, chosen) > 0

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
        """The sums over the micro-batches since the last call, [] each, and ``share`` [E]; empty if there was none."""
        measured, self.measured = self.measured, {}
        return measured


def _mean(x: Tensor, group: ProcessGroup) -> Tensor:
    """The mean of ``x`` over the ranks."""
    return all_reduce(x, group) / group.size()


class _WithLoss(torch.autograd.Function):
    """``x``, whose gradient passes on to it, while ``loss`` gets the gradient ``scale``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.scale, ctx.of_loss = scale, (loss.dtype, loss.device)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        dtype, device = ctx.of_loss
        return grad, torch.full((), ctx.scale, dtype=dtype, device=device), None


def routers(module: nn.Module) -> list[Router]:
    """The routers of this rank's part of a model, in order."""
    return [part for part in module.modules() if isinstance(part, Router)]
