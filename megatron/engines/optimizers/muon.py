"""Muon: SGD with orthogonalized momentum for matrices (kellerjordan.github.io/posts/muon, arXiv 2502.16982).

Updates are computed from full matrices, so that they do not depend on the layout: a matrix is gathered over the
tensor-parallel ranks, and at ZeRO 1 and 2 first from the partitions of the data-parallel ranks, one matrix at a time.
A fused parameter contains several matrices, which are orthogonalized separately: queries, keys and values, or the two
of SwiGLU. DeepSpeed's Muon orthogonalizes the shard of a tensor-parallel rank.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim.adamw import adamw

from megatron.engines.optimizers.skipping import SkippingOptimizer
from megatron.parallel.tensor.mappings import all_gather

COEFFICIENTS = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}
"""Coefficients (a, b, c) of x -> a x + b x x' x + c x x' x x' x for successive Newton-Schulz iterations."""
_SCALES = {
    "spectral": lambda rows, columns: max(rows, columns),
    "unit_rms_norm": lambda rows, columns: rows / columns,
    "shape_scaling": lambda rows, columns: max(1.0, rows / columns),
}
_SMALLEST_NORM = 1e-7


def orthogonalized(matrix: Tensor, steps: int = 5, coefficients: str = "simple") -> Tensor:
    """Approximate U V' of the singular value decomposition U S V' of ``matrix`` [rows, columns], in its dtype."""
    is_tall = matrix.size(0) > matrix.size(1)
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=_SMALLEST_NORM)  # singular values of at most 1
    sets = COEFFICIENTS[coefficients]
    for step in range(steps):
        a, b, c = sets[step % len(sets)]
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


class Matrix(NamedTuple):
    """A parameter that Muon updates: [rows, columns], or [matrices, rows, columns]."""

    parameter: nn.Parameter
    """This tensor-parallel rank's shard along ``partition_dim``, or the full parameter."""
    qkv: tuple[int, int, int] | None = None
    """For fused QKV rows, [groups, queries per group + 2, head size]: (groups, queries per group, head size)."""

    @property
    def shape(self) -> torch.Size:
        """Shape of the shard."""
        return self.parameter.shape

    def parts(self, full: Tensor) -> list[Tensor]:
        """The matrices in ``full``, as views if their rows are consecutive."""
        if self.qkv is not None:
            groups, queries, size = self.qkv
            rows = full.view(groups, queries + 2, size, -1).split((queries, 1, 1), dim=1)
            return [part.reshape(-1, full.size(-1)) for part in rows]
        return list(full.unbind()) if full.dim() > 2 else [full]

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """The inverse of ``parts``."""
        if self.qkv is not None:
            groups, _, size = self.qkv
            return torch.cat([part.view(groups, -1, size, part.size(-1)) for part in parts], dim=1).flatten(0, 2)
        return torch.stack(list(parts)) if len(self.shape) > 2 else parts[0]


class Part(NamedTuple):
    """Elements ``begin`` to ``begin + length`` of a matrix's shard, at ``start`` in a tensor of the optimizer."""

    matrix: Matrix
    start: int = 0
    begin: int = 0
    length: int = 0


class Muon(SkippingOptimizer):
    """Muon for groups with ``orthogonalize``, and AdamW for the others.

    The state of a tensor is ``momentum_buffer``, or AdamW's ``exp_avg``, ``exp_avg_sq`` and ``step``. ``step`` is a
    collective call of all ranks of ``tensor_group`` and ``data_group``.
    """

    def __init__(
        self,
        params: Any,
        matrices: Sequence[Matrix],
        *,
        lr: float,
        weight_decay: float = 0.01,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        coefficients: str = "quintic",
        scale_mode: str = "spectral",
        scale_factor: float = 1.0,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float32,
        tensor_group: ProcessGroup | None = None,
        data_group: ProcessGroup | None = None,
    ) -> None:
        """``matrices`` are the parameters of groups with ``orthogonalize``; iterations run in ``dtype``."""
        muon_defaults = {
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "coefficients": coefficients,
            "scale_mode": scale_mode,
            "scale_factor": scale_factor,
        }
        adam_defaults = {"betas": tuple(betas), "eps": eps}
        super().__init__(
            params, {"lr": lr, "weight_decay": weight_decay, "orthogonalize": False, **muon_defaults, **adam_defaults}
        )
        self._matrices, self._dtype = tuple(matrices), dtype
        self._tensor_group, self._data_group = tensor_group, data_group
        self._parts: dict[Tensor, list[Part]] = {}
        self.use_partitions({})

    def use_partitions(self, partitions: Mapping[nn.Parameter, tuple[Tensor, int, int, int]]) -> None:
        """Use ZeRO partitions: parameter to (flat tensor with a part of it, start, begin, length).

        A missing parameter has no part on this rank. An empty mapping means that tensors are full parameters.
        """
        if not partitions:
            self._parts = {m.parameter: [Part(m, length=m.parameter.numel())] for m in self._matrices}
            self._is_partitioned = False
            return
        (flat,) = (tensor for group in self.param_groups if group["orthogonalize"] for tensor in group["params"])
        here = {parameter: span for parameter, (tensor, *span) in partitions.items() if tensor is flat}
        parts = [Part(matrix, *here.get(matrix.parameter, ())) for matrix in self._matrices]
        self._parts, self._is_partitioned = {flat: parts}, True

    def is_matrix(self, tensor: Tensor) -> bool:
        """Whether ``tensor``, a parameter or what is updated for several, is orthogonalized."""
        return tensor in self._parts or any(tensor is matrix.parameter for matrix in self._matrices)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update each parameter that has a gradient."""
        for group in self.param_groups:
            for tensor in group["params"]:
                if tensor.grad is not None:
                    (self._muon if group["orthogonalize"] else self._adamw)(tensor, group)

    def _muon(self, tensor: Tensor, group: Mapping[str, Any]) -> None:
        state = self.state[tensor]
        assert tensor.grad is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(tensor)
        weight, gradient, buffer = (t.view(-1) for t in (tensor, self.scaled(tensor.grad), state["momentum_buffer"]))
        lr = self.unless_skipped(group["lr"], 0.0)
        weight.mul_(1 - lr * group["weight_decay"])
        buffer.mul_(self.unless_skipped(group["momentum"], 1.0)).add_(gradient)
        for part in self._parts[tensor]:
            span = slice(part.start, part.start + part.length)
            momentum = buffer[span]
            if group["nesterov"]:
                momentum = gradient[span].add(momentum, alpha=group["momentum"])
            update = self._update(part, momentum, group).reshape(-1)[part.begin : part.begin + part.length]
            weight[span].sub_(update * lr)

    def _update(self, part: Part, momentum: Tensor, group: Mapping[str, Any]) -> Tensor:
        """The orthogonalized update of a matrix's shard, from this rank's part of its momentum."""
        shard = momentum
        if self._is_partitioned:
            shard = momentum.new_zeros(part.matrix.parameter.numel())
            shard[part.begin : part.begin + part.length] = momentum
            dist.all_reduce(shard, group=self._data_group)  # a gather, since each element has one owner
        shard = shard.view(part.matrix.shape)
        dim, ranks = getattr(part.matrix.parameter, "partition_dim", None), self._tensor_group
        if dim is None or ranks is None or ranks.size() == 1:
            return self._full_update(part.matrix, shard, group)
        update = self._full_update(part.matrix, all_gather(shard, ranks, dim), group)
        return update.chunk(ranks.size(), dim)[ranks.rank()]

    def _full_update(self, matrix: Matrix, momentum: Tensor, group: Mapping[str, Any]) -> Tensor:
        return matrix.joined([self._orthogonal(part, group) for part in matrix.parts(momentum)])

    def _orthogonal(self, matrix: Tensor, group: Mapping[str, Any]) -> Tensor:
        scale = group["scale_factor"] * math.sqrt(_SCALES[group["scale_mode"]](*matrix.shape))
        return orthogonalized(matrix.to(self._dtype), group["ns_steps"], group["coefficients"]).to(matrix.dtype) * scale

    def _adamw(self, tensor: Tensor, group: Mapping[str, Any]) -> None:
        state, (beta1, beta2) = self.state[tensor], group["betas"]
        if not state:
            state |= {"step": 0, "exp_avg": torch.zeros_like(tensor), "exp_avg_sq": torch.zeros_like(tensor)}
        # Checkpoints have a number, or a tensor in host memory.
        state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=tensor.device)
        assert tensor.grad is not None
        adamw(
            [tensor],
            [tensor.grad],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [],
            [state["step"]],
            fused=True,
            grad_scale=self.grad_scale,
            found_inf=self.found_inf,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
