"""GPT-2 against a plain account of it, and its two containers against each other."""

from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support.whole_models import SMALL_GPT2
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from megatron.config import ActivationConfig, ModelConfig, ParallelConfig
from megatron.engines.containers import SequentialModel, sequential_model
from megatron.model.loss import lm_loss
from megatron.model.transformer import ParallelTransformerLayer
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.tensor.random import model_parallel_manual_seed

EOD = SMALL_GPT2.eod_token
CONFIG = SMALL_GPT2
TOKENS = torch.randint(0, 21, (2, 12), generator=torch.Generator().manual_seed(2))
TARGETS = (TOKENS.roll(-1, 1), torch.full((2, 12), 1 / 24))
KEEP, RECOMPUTE = ActivationConfig(), ActivationConfig(checkpoint_activations=True)


def _layout(tensor: int = 1, pipe: int = 0) -> ParallelLayout:
    return ParallelLayout.create(
        ParallelConfig(model_parallel_size=tensor, pipe_parallel_size=pipe, world_size=dist.get_world_size())
    )


def _model(config: ModelConfig = CONFIG, activation: ActivationConfig = KEEP) -> SequentialModel:
    return sequential_model(config, activation, _layout(dist.get_world_size()))


def plain_gpt2(weights: dict[str, Tensor], tokens: Tensor, config: ModelConfig) -> Tensor:
    """tokens [b, s] -> logits [b, s, v]: the formulae of the GPT-2 paper, with no parallelism anywhere."""
    b, s = tokens.shape
    heads, size = config.num_attention_heads, config.head_size

    def norm(x: Tensor, name: str) -> Tensor:
        weight, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
        return F.layer_norm(x, weight.shape, weight, bias, config.layernorm_epsilon)

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    table = weights["tied_modules.embed.word_embeddings.weight"]
    x = table[tokens] + weights["1.position_embeddings.weight"][:s]
    for layer in range(2, 2 + config.num_layers):
        q, k, v = (
            linear(norm(x, f"{layer}.input_layernorm"), f"{layer}.attention.query_key_value")
            .view(b, s, heads, 3, size)
            .permute(3, 0, 2, 1, 4)
        )
        scores = (q @ k.transpose(-1, -2) / size**0.5).masked_fill(torch.ones(s, s).triu(1).bool(), -torch.inf)
        x = x + linear((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, s, -1), f"{layer}.attention.dense")
        inner = F.gelu(linear(norm(x, f"{layer}.post_attention_layernorm"), f"{layer}.mlp.dense_h_to_4h"))
        x = x + linear(inner, f"{layer}.mlp.dense_4h_to_h")
    return norm(x, str(config.num_layers + 3)) @ table.T


@pytest.mark.ranks(1)
def test_logits_equal_a_reference_implementation() -> None:
    model = _model()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or parameter.dim() == 1:
                parameter.add_(torch.linspace(-0.2, 0.3, parameter.numel()))
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    logits = plain_gpt2(weights, TOKENS, CONFIG)
    assert_close(model(TOKENS), logits)
    model(TOKENS, TARGETS).backward()
    F.cross_entropy(logits[..., :21].reshape(-1, 21), TARGETS[0].view(-1)).backward()
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, weights[name].grad, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.ranks(1, 2)
def test_attention_does_not_cross_documents() -> None:
    """Packed into one sample with both resets, each document gets the logits that it gets as a sample of its own."""
    model = _model(replace(CONFIG, reset_attention_mask=True, reset_position_ids=True))
    first, second, third = [1, 2, 3, EOD], [EOD], [7, 8, 9, 10, 11, 12, 13]
    packed = model(torch.tensor([first + second + third]))
    alone = [model(torch.tensor([document])) for document in (first, second, third)]
    assert_close(packed, torch.cat(alone, 1))
    only_mask = _model(replace(CONFIG, reset_attention_mask=True))(torch.tensor([first + second + third]))
    assert_close(only_mask[:, :4], packed[:, :4])
    assert not torch.allclose(only_mask[:, 5:], packed[:, 5:])
    only_positions = _model(replace(CONFIG, reset_position_ids=True))(torch.tensor([first + second + third]))
    assert not torch.allclose(only_positions[:, 5:], packed[:, 5:])


EQUAL_VARIANTS = [
    {"attention_softmax_in_fp32": True},
    {"apply_query_key_layer_scaling": True},
    {"attention_softmax_in_fp32": True, "reset_attention_mask": True},
    {"bias_gelu_fusion": True, "bias_dropout_fusion": True},
    {"use_cpu_initialization": True},
]
OTHER_VARIANTS = [{"openai_gelu": True}, {"apply_residual_connection_post_layernorm": True}, {"seed": 5}]


@pytest.mark.ranks(1)
def test_variants() -> None:
    """Other ways to compute the same give the same; flags that change the model change it."""
    not_lowered = patch("megatron.ops.activation._compiled", partial(torch.compile, backend="aot_eager"))
    for changes in EQUAL_VARIANTS:
        plain = _model(replace(CONFIG, reset_attention_mask=changes.get("reset_attention_mask", False)))
        with not_lowered:  # the compiler's graphs, without the kernels that it would make of them
            model = _model(replace(CONFIG, **changes))
        losses = [m.train()(TOKENS, TARGETS) for m in (plain, model)]
        assert_close(*losses, msg=str(changes))
        sum(losses).backward()
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            assert_close(one.grad, other.grad, msg=str(changes))
    for changes in OTHER_VARIANTS:
        assert not torch.allclose(_model(replace(CONFIG, **changes))(TOKENS), _model()(TOKENS)), changes


@pytest.mark.parametrize("together", [1, 2, 3])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.ranks(2)
def test_recomputation_recomputes_every_layer_and_changes_nothing(together: int, documents: bool) -> None:
    """With dropout on, under tensor parallelism: equal losses and gradients, and each layer runs twice."""
    config = replace(CONFIG, attention_dropout=0.2, hidden_dropout=0.2, reset_attention_mask=documents)
    layout = _layout(2)
    results = []
    for activation in (KEEP, replace(RECOMPUTE, checkpoint_num_layers=together)):
        model = sequential_model(config, activation, layout).train()
        runs = []
        for layer in model.modules():
            if isinstance(layer, ParallelTransformerLayer):
                layer.register_forward_hook(lambda *_, runs=runs: runs.append(1))
        model_parallel_manual_seed(3, layout)
        loss = model(TOKENS, TARGETS)
        loss.backward()
        results.append((len(runs), loss.detach(), [p.grad for p in model.parameters()]))
    (runs, loss, grads), (runs_again, loss_again, grads_again) = results
    assert (runs, runs_again) == (3, 6)
    assert torch.equal(loss, loss_again)
    assert all(torch.equal(one, other) for one, other in zip(grads, grads_again, strict=True))


@pytest.mark.ranks(1)
def test_evaluation_recomputes_and_drops_nothing() -> None:
    model = _model(replace(CONFIG, attention_dropout=0.5, hidden_dropout=0.5), RECOMPUTE).eval()
    assert_close(model(TOKENS), _model()(TOKENS))


@pytest.mark.ranks(1)
def test_an_infinite_loss_leaves_no_finite_gradient() -> None:
    """A label whose logit is minus infinity has an infinite loss; only its softmax has a finite gradient."""
    logits = torch.zeros(1, 2, 8).index_fill_(-1, torch.tensor(3), -torch.inf).requires_grad_()
    loss_fn = lm_loss(replace(CONFIG, vocab_size=8), _layout())
    for label, finite in ((2, True), (3, False)):
        loss = loss_fn(logits, (torch.full((1, 2), label), torch.full((1, 2), 0.5)))
        (gradient,) = torch.autograd.grad(loss, logits)
        assert loss.isfinite() == finite
        assert gradient.isfinite().all() if finite else not gradient.isfinite().any()
