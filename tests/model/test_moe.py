"""A mixture of experts against a loop over tokens: outputs, gradients and auxiliary losses, on one rank and on two."""

from dataclasses import replace

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from megatron.config import ModelConfig, ParallelConfig
from megatron.model.moe import ParallelMoE, Router
from megatron.parallel.layout import ParallelLayout

SIZES = {
    "hidden_size": 12, "num_attention_heads": 2, "num_layers": 1, "ffn_hidden_size": 16, "num_experts": 4,
    "init_method_std": 0.5,
}  # fmt: skip
MODELS = {
    "gelu": {},
    "swiglu": {"swiglu": True, "moe_ffn_hidden_size": 8, "moe_router_topk": 3},
    "all scores": {"moe_router_pre_softmax": True, "moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.2},
    "balanced batch": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.3},
    "balanced global batch": {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.3},
    "all of it": {
        "swiglu": True,
        "disable_bias_linear": True,
        "moe_shared_expert_intermediate_size": 6,
        "moe_aux_loss_coeff": 0.3,
        "moe_z_loss_coeff": 0.2,
        "moe_expert_capacity_factor": 0.8,
        "shape_order": "SBH",
    },
}
MODELS["filled up"] = {**MODELS["all of it"], "moe_pad_expert_input_to_capacity": True}
B, S = 4, 6


def plain_moe(x: Tensor, p: dict[str, Tensor], config: ModelConfig) -> tuple[Tensor, Tensor]:
    """x [b, s, h] -> output, and the sum of the weighted auxiliary losses: a loop over tokens and their experts."""
    k, experts = config.moe_router_topk, config.num_experts
    logits = x @ p["router.weight"].T
    scores = logits.softmax(-1)
    per_sample = config.moe_router_load_balancing_type == "seq_aux_loss"
    capacity = -int(-config.moe_expert_capacity_factor * S * k // experts) if config.moe_expert_capacity_factor else S
    chosen = logits.topk(k).indices.tolist()
    groups = [[b] for b in range(len(x))] if per_sample else [list(range(len(x)))]
    balance = torch.zeros(())
    for samples in groups:
        tokens = len(samples) * S
        for e in range(experts):
            share = sum(e in chosen[b][s] for b in samples for s in range(S)) / tokens / k
            balance = balance + experts * share * sum(scores[b, :, e].sum() for b in samples) / tokens / len(groups)
    rows = []
    for b in range(len(x)):
        among = [(scores if config.moe_router_pre_softmax else logits)[b, s, chosen[b][s]] for s in range(S)]
        weights = among if config.moe_router_pre_softmax else [logits.softmax(0) for logits in among]
        for s in range(S):
            y = torch.zeros_like(x[b, s])
            for weight, e in zip(weights[s], chosen[b][s], strict=True):
                rivals = [weights[t][chosen[b][t].index(e)].item() for t in range(S) if e in chosen[b][t]]
                if sorted(rivals, reverse=True).index(weight.item()) < capacity:
                    y = y + weight * mlp(x[b, s], p, "experts.", e)
            if config.moe_shared_expert_intermediate_size:
                y = y + mlp(x[b, s], p, "shared_expert.", slice(None))
            rows.append(y)
    z = logits.logsumexp(-1).square().mean()
    return torch.stack(rows).view_as(x), config.moe_aux_loss_coeff * balance + config.moe_z_loss_coeff * z


def mlp(x: Tensor, p: dict[str, Tensor], name: str, place) -> Tensor:
    inner = p[f"{name}dense_h_to_4h.weight"][place] @ x
    inner = F.silu(inner[0]) * inner[1] if inner.dim() == 2 else F.gelu(inner)
    return p[f"{name}dense_4h_to_h.weight"][place] @ inner


def inputs() -> tuple[Tensor, Tensor]:
    """x and the weights of a linear loss, [b, s, h]."""
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randn(B, S, 12, generator=generator) for _ in range(2))


def expected(config: ModelConfig) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Output, gradient of x, and gradients of the parameters, by the loop."""
    layout = ParallelLayout.create(ParallelConfig(world_size=dist.get_world_size(), model_parallel_size=1))
    p = {
        n: q.detach().clone().requires_grad_()
        for n, q in ParallelMoE(config, layout, layer_number=1).named_parameters()
    }
    x, loss_weights = inputs()
    x.requires_grad_()
    y, auxiliary = plain_moe(x, p, config)
    ((y * loss_weights).sum() / B + auxiliary).backward()
    return y.detach(), x.grad, {name: q.grad for name, q in p.items()}


@pytest.mark.ranks(1, 2)
def test_experts_compute_what_a_loop_computes() -> None:
    torch.use_deterministic_algorithms(True)  # which also writes NaN where nothing has been computed
    ranks = dist.get_world_size()
    kinds = (
        [{}]
        if ranks == 1
        else [
            {"model_parallel_size": 2},
            {"model_parallel_size": 2, "sequence_parallel": True},
            {"expert_model_parallel_size": 2},
        ]
    )
    for name, settings in MODELS.items():
        config = ModelConfig(**SIZES, **settings)
        reference = expected(config)
        for kind in kinds if name != "balanced batch" else kinds[:1]:
            layout = ParallelLayout.create(ParallelConfig(world_size=ranks, **kind))
            for dispatcher in ("alltoall", "allgather") if layout.expert_group else ("alltoall",):
                config = replace(config, moe_token_dispatcher_type=dispatcher)
                check(config, layout, reference, f"{name}, {kind}, {dispatcher}")
    torch.use_deterministic_algorithms(False)


def check(config: ModelConfig, layout: ParallelLayout, reference: tuple, what: str):
    """Each data-parallel rank has its part of the batch; x is in the order of --shape-order, and perhaps a shard."""
    y, of_x, gradients = reference
    layer, rows = ParallelMoE(config, layout, layer_number=1), slice(None)
    x, loss_weights = inputs()
    parts = layout.data_group.size()
    rows = slice(B // parts * layout.data_group.rank(), B // parts * (layout.data_group.rank() + 1))
    order = (lambda t: t[rows].transpose(0, 1)) if config.shape_order == "SBH" else (lambda t: t[rows])
    x, loss_weights, y, of_x = (order(tensor) for tensor in (x, loss_weights, y, of_x))
    if layout.sequence_parallel:
        size, rank = layout.tensor_group.size(), layout.tensor_group.rank()
        x, loss_weights, y, of_x = (t.chunk(size, config.sequence_dim)[rank] for t in (x, loss_weights, y, of_x))
    x = x.clone().requires_grad_()
    found = layer(x)
    assert_close(found, y, msg=lambda text: f"{what}: {text}")
    # The mean over data-parallel ranks is that of the batch; so are those of the auxiliary losses.
    ((found * loss_weights).sum() / (B / parts)).backward()
    assert_close(x.grad / parts, of_x, msg=lambda text: f"{what}, x: {text}")
    for name, parameter in layer.named_parameters():
        grad, whole = parameter.grad / parts, gradients[name]
        experts = getattr(parameter, "expert_group", None)
        if experts is None:
            dist.all_reduce(grad, group=layout.data_group)
        else:
            whole = whole.chunk(experts.size())[experts.rank()]
        dim = getattr(parameter, "partition_dim", None)
        if dim is not None:
            whole = whole.chunk(layout.tensor_group.size(), dim)[layout.tensor_group.rank()]
        assert_close(grad, whole, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{what}, {name}: {text}")


@pytest.mark.ranks(1)
def test_a_global_batch_is_balanced_over_its_micro_batches() -> None:
    """Each micro-batch has the shares of itself and of those before it in the step, whose mean they are."""
    config = ModelConfig(**SIZES, moe_router_load_balancing_type="global_aux_loss", moe_aux_loss_coeff=0.3)
    router = Router(config, ParallelLayout.create(ParallelConfig()), name="router")
    x, _ = inputs()
    weight = router.weight.detach().clone().requires_grad_()
    shares, loss, k = [], torch.zeros(()), config.moe_router_topk
    for micro_batch in x.split(1):
        logits = micro_batch.flatten(0, 1) @ weight.T  # [s, E]
        shares.append(torch.stack([(logits.topk(k).indices == e).sum() / (S * k) for e in range(4)]))
        share = sum(shares) / len(shares)
        loss = loss + 4 * (share * logits.softmax(-1).mean(0)).sum() / len(x)
    (0.3 * loss).backward()
    for _ in range(2):  # the second step begins anew
        router.weight.grad = None
        router.begin_step(1 / len(x))
        for micro_batch in x.split(1):
            (router(micro_batch)[0].sum() * 0).backward()
        assert_close(router.weight.grad, weight.grad)
        assert_close(router.take_measured()["balance"], loss.detach().double() * len(x), rtol=1e-5, atol=1e-6)


@pytest.mark.ranks(1)
def test_memory_does_not_grow_with_each_number_of_rows() -> None:
    """While experts compute 600 different numbers of rows, after the first 100."""
    experts = ParallelMoE(ModelConfig(**SIZES), ParallelLayout.create(ParallelConfig()), layer_number=1).experts
    held = []
    for n in range(1, 701):
        experts(torch.ones(n, 12), torch.tensor([n, n, n, n])).sum().backward()
        held += [psutil.Process().memory_info().rss] if n in (100, 700) else []
    assert held[1] - held[0] < 4e6, "a kernel of some KB for each number of rows?"


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("pre_softmax", "kept", "weights"),
    [
        (False, [[True, True], [False, True]], [[0.731, 0.269], [0.0, 0.378]]),  # of the weights 0.731 and 0.622
        (True, [[False, True], [True, True]], [[0.0, 0.178], [0.622, 0.378]]),  # of 0.484 and 0.622
    ],
)
def test_a_full_expert_drops_the_token_with_the_smallest_weight(pre_softmax: bool, kept, weights) -> None:
    """Both tokens choose expert 0, which has room for one; each has another second choice."""
    config = ModelConfig(**SIZES, moe_expert_capacity_factor=1.0, moe_router_pre_softmax=pre_softmax)
    router = Router(config, ParallelLayout.create(ParallelConfig()), name="router")
    router.weight.data = torch.eye(4, 12)
    x = torch.zeros(1, 2, 12)
    x[0, :, :4] = torch.tensor([[3.0, 2.0, 1.99, 1.9], [1.0, -90.0, 0.5, -90.0]])
    found, chosen = router(x)
    assert (chosen[0] < 4).tolist() == kept
    assert_close(found[0], torch.tensor(weights), rtol=0, atol=1e-3)


@pytest.mark.ranks(1)
def test_router_keeps_the_smallest_weights() -> None:
    layout = ParallelLayout.create(ParallelConfig())
    router = Router(ModelConfig(**SIZES, moe_expert_capacity_factor=1.0), layout, name="router")
    # The weight of the last token, the only one that chooses expert 0, is too small for a float.
    weights, chosen = torch.zeros(1, S, 2), torch.tensor([[[1, 2]] * (S - 1) + [[0, 1]]])
    assert router._within_capacity(weights, chosen)[0, -1, 0]
