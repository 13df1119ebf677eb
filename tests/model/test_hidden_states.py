"""The residual stream in fp32."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from support.programs import read_metrics
from support.whole_models import SMALL_GPT2
from torch import Tensor

from megatron.config import ActivationConfig, ModelConfig, ParallelConfig
from megatron.engines.containers import SequentialModel, sequential_model
from megatron.model.transformer import ParallelTransformerLayer, unpack
from megatron.parallel.layout import ParallelLayout

B, S = 2, 12
CONFIG = SMALL_GPT2
TOKENS = torch.randint(0, 21, (B, S), generator=torch.Generator().manual_seed(2))
TARGETS = (TOKENS.roll(-1, 1), torch.full((B, S), 1 / (B * S)))


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


@pytest.mark.parametrize("changes", [{}, {"apply_residual_connection_post_layernorm": True}, {"shape_order": "SBH"}])
@pytest.mark.ranks(1, 2)
def test_the_residual_stream_is_fp32_and_closer_to_fp32(changes: dict) -> None:
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


def test_an_fp32_residual_stream_trains_on_stages_and_tensor_parallel_ranks(train_in_ranks, tmp_path) -> None:
    words = (
        "--train-iters 3 --batch-size 2 --global-batch-size 4 --attention-dropout 0 --hidden-dropout 0 --eval-iters 0"
        " --bf16 --fp32-residual-connection --metrics-file"
    ).split()
    train_in_ranks(1, *words, tmp_path / "one")
    train_in_ranks(4, *words, tmp_path / "four", "--model-parallel-size", 2, "--pipe-parallel-size", 2)
    one, four = ([line["lm_loss"] for line in read_metrics(tmp_path / name)] for name in ("one", "four"))
    assert len(one) == 3 and one[2] < one[0]
    assert four == pytest.approx(one, rel=1e-3)  # bf16's own rounding
