"""``--compile``: a transformer layer is one graph, also with dropout, whose masks are those of the layer as it is."""

from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.testing import assert_close

from megatron.config import ModelConfig, ParallelConfig
from megatron.engines.build import freeze
from megatron.model.transformer import ParallelTransformerLayer
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.tensor.random import get_rng_tracker, model_parallel_manual_seed

S, H = 12, 16
CONFIG = ModelConfig(
    num_layers=2, hidden_size=H, ffn_hidden_size=4 * H, num_attention_heads=4, max_position_embeddings=S,
    attention_dropout=0.25, hidden_dropout=0.5, init_method_std=0.3,
)  # fmt: skip

WITH_ADAPTERS = replace(CONFIG, lora_rank=2, lora_dropout=0.25)
WITH_ROTATION = replace(CONFIG, position_embedding_type="rope", swiglu=True, normalization="RMSNorm")


@pytest.mark.parametrize(
    ("sequence_parallel", "config"),
    [(False, CONFIG), (True, CONFIG), (True, WITH_ADAPTERS), (False, WITH_ROTATION)],
    ids=["", "sp", "lora", "rope"],
)
@pytest.mark.ranks(2)
def test_a_compiled_layer_is_one_graph_with_the_masks_of_the_plain_one(
    sequence_parallel: bool, config: ModelConfig
) -> None:
    """Outputs, gradients, and both random streams afterwards; without sequence parallelism ranks agree on outputs."""
    size = dist.get_world_size()
    layout = ParallelLayout.create(
        ParallelConfig(model_parallel_size=size, sequence_parallel=sequence_parallel, world_size=size)
    )
    graphs: list[fx.GraphModule] = []

    def run_as_it_is(graph: fx.GraphModule, inputs: list[Tensor]) -> object:
        graphs.append(graph)
        return graph.forward  # what Inductor would make of it draws other numbers from the same streams

    torch._dynamo.reset()
    with patch("torch.compile", partial(torch.compile, backend=run_as_it_is)):
        compiled = run_layer(layout, replace(config, compile=True))
        assert len(graphs) == 1, "a graph break"
        run_layer(layout, replace(config, compile=True))
    assert len(graphs) == 1, "the next layer is compiled again"
    plain = run_layer(layout, config)
    assert_close(compiled, plain)
    outputs = [torch.empty_like(plain[0]) for _ in range(size)]
    dist.all_gather(outputs, compiled[0])
    shares = [bool(torch.equal(outputs[0], other)) for other in outputs[1:]]
    assert all(shares) if not sequence_parallel else not any(shares)


def run_layer(layout: ParallelLayout, config: ModelConfig) -> list[Tensor]:
    """Output, gradients, and the states of both random streams after two passes."""
    model_parallel_manual_seed(3, layout)
    layer = ParallelTransformerLayer(config, layout, layer_number=1)
    if config.lora_rank:
        freeze(layer, config)
    shard = S // layout.tensor_group.size() if layout.sequence_parallel else S
    hidden = torch.randn(2, shard, H, generator=torch.Generator().manual_seed(1)).requires_grad_()
    output = layer(hidden) + layer(hidden)
    output.sum().backward()
    gradients = [parameter.grad for parameter in layer.parameters() if parameter.grad is not None]
    states = [torch.get_rng_state(), *get_rng_tracker().get_states().values()]
    return [output.detach(), hidden.grad, *gradients, *states]
