"""What travels between layers: in which order of dimensions, and in which type."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from support.programs import read_metrics
from support.training import RankTraining
from torch import Tensor
from torch.testing import assert_close

from megatron.config import ActivationConfig, ModelConfig, ParallelConfig
from megatron.engines.containers import SequentialModel, sequential_model
from megatron.model.transformer import ParallelTransformerLayer, unpack
from megatron.mpu import ParallelLayout

B, S = 2, 12
CONFIG = ModelConfig(
    num_layers=3,
    hidden_size=16,
    ffn_hidden_size=64,
    num_attention_heads=4,
    max_position_embeddings=S,
    vocab_size=21,
    padded_vocab_size=24,
    eod_token=4,
    attention_dropout=0.0,
    hidden_dropout=0.0,
    init_method_std=0.3,
)
TOKENS = torch.randint(0, 21, (B, S), generator=torch.Generator().manual_seed(2))
TARGETS = (TOKENS.roll(-1, 1), torch.full((B, S), 1 / (B * S)))
DOCUMENTS = {"reset_attention_mask": True, "reset_position_ids": True}


def _model(config: ModelConfig) -> SequentialModel:
    size = dist.get_world_size()
    layout = ParallelLayout.create(ParallelConfig(model_parallel_size=size, world_size=size))
    return sequential_model(config, ActivationConfig(), layout)


def _streams(model: SequentialModel) -> list[Tensor]:
    """Filled with the hidden states that each layer gives, as the model runs."""
    found: list[Tensor] = []
    for layer in model.modules():
        if isinstance(layer, ParallelTransformerLayer):
            layer.register_forward_hook(lambda _, inputs, output: found.append(unpack(output)[0].detach()))
    return found


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("changes", [{}, DOCUMENTS, {"reset_position_ids": True}, {"pre_tokens": 3}])
def test_both_shape_orders_compute_the_same(run_ranks, size, changes):
    run_ranks(size, both_shape_orders, changes)


def both_shape_orders(changes: dict):
    results = []
    for order in ("BSH", "SBH"):
        model = _model(replace(CONFIG, shape_order=order, **changes))
        hidden = _streams(model)
        loss = model(TOKENS, TARGETS)
        loss.backward()
        logits = model(TOKENS)
        assert logits.shape == (B, S, 24 // dist.get_world_size())
        results.append((hidden[:3], loss.detach(), logits.detach(), [p.grad for p in model.parameters()]))
    (batch_first, *one), (sequence_first, *other) = results
    assert {hidden.shape for hidden in sequence_first} == {(S, B, 16)}
    assert_close(batch_first, [hidden.transpose(0, 1) for hidden in sequence_first])
    assert_close(one, other)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("changes", [{}, {"apply_residual_connection_post_layernorm": True}, {"shape_order": "SBH"}])
def test_the_residual_stream_is_fp32_and_closer_to_fp32(run_ranks, size, changes):
    run_ranks(size, residual_stream, changes)


def residual_stream(changes: dict):
    """In bf16 with and without it, on weights that bf16 holds exactly, against fp32."""
    exact, errors = None, {}
    for dtype, in_fp32 in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)):
        config = replace(CONFIG, num_layers=8, fp32_residual_connection=in_fp32, **changes)
        model = _model(config).bfloat16().to(dtype)
        streams = _streams(model)
        logits = model(TOKENS)
        assert logits.dtype == dtype
        assert {hidden.dtype for hidden in streams} == {torch.float32 if in_fp32 else dtype}
        logits.float().logsumexp(-1).sum().backward()
        assert all(parameter.grad.dtype == dtype for parameter in model.parameters())
        if exact is None:
            exact = streams[-1]
        errors[in_fp32] = (streams[-1].float() - exact).square().mean().sqrt().item()
    assert errors[True] < 0.8 * errors[False]


def test_the_flag_changes_nothing_in_fp32(run_ranks):
    run_ranks(1, nothing_in_fp32)


def nothing_in_fp32():
    assert torch.equal(_model(replace(CONFIG, fp32_residual_connection=True))(TOKENS), _model(CONFIG)(TOKENS))


@pytest.fixture(scope="module")
def train_in_bf16(train_in_ranks: RankTraining, tmp_path_factory: pytest.TempPathFactory):
    """The losses of three steps with bf16 weights and an fp32 residual stream, on so many processes."""
    words = (
        "--train-iters 3 --batch-size 2 --global-batch-size 4 --attention-dropout 0 --hidden-dropout 0 --eval-iters 0"
        " --bf16 --fp32-residual-connection --metrics-file"
    ).split()

    def run(processes: int, layout: str) -> list[float]:
        metrics = tmp_path_factory.mktemp("bf16") / "metrics"
        train_in_ranks(processes, *words, metrics, *layout.split())
        return [line["lm_loss"] for line in read_metrics(metrics)]

    return run


@pytest.fixture(scope="module")
def one_process(train_in_bf16) -> list[float]:
    return train_in_bf16(1, "")


@pytest.mark.parametrize(
    "processes, layout",
    [
        (2, "--model-parallel-size 2"),
        (2, "--pipe-parallel-size 2"),
        (4, "--model-parallel-size 2 --pipe-parallel-size 2"),
    ],
)
def test_an_fp32_residual_stream_trains_on_every_layout(train_in_bf16, one_process, processes, layout):
    assert len(one_process) == 3 and one_process[2] < one_process[0]
    assert train_in_bf16(processes, layout) == pytest.approx(one_process, rel=1e-3)  # bf16's own rounding
