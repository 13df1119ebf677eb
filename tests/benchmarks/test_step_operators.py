"""The limit of a training step does all of its work: it has the loss and the gradients of autograd."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from benchmarks.measures import llama_operators
from benchmarks.measures.llama_operators import FusedLlama, llama_operators_step
from benchmarks.measures.llama_step import BareLlama
from benchmarks.measures.operators import loss_and_gradients, operators_step
from benchmarks.measures.peers import BareGPT2, Shape
from benchmarks.measures.shapes import LlamaShape

TINY = Shape(layers=2, hidden=32, heads=2, sequence=16, batch=3, vocabulary=64)
TINY_LLAMA = LlamaShape(**vars(TINY) | {"heads": 4}, groups=2, ffn=48)


def test_operators_by_themselves_have_the_gradients_of_autograd() -> None:
    torch.manual_seed(1)
    model = BareGPT2(TINY)
    tokens, labels = torch.randint(TINY.vocabulary, (2, TINY.batch, TINY.sequence))
    loss, gradients = loss_and_gradients(model, tokens, labels)
    expected = model(tokens, labels)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    assert gradients.keys() == set(model.parameters())
    for name, weight in model.named_parameters():
        torch.testing.assert_close(gradients[weight], weight.grad, msg=lambda text, name=name: f"{name}: {text}")


def test_those_of_a_llama_have_the_gradients_of_autograd() -> None:
    """Of the plain model, whose products are not fused."""
    torch.manual_seed(1)
    model, plain = FusedLlama(TINY_LLAMA), BareLlama(TINY_LLAMA)
    for norm in (plain.norm, *(norm for block in plain.blocks for norm in (block.norm_1, block.norm_2))):
        torch.nn.init.normal_(norm.weight)
    parts = {"qkv": ("query", "key", "value"), "gate_up": ("gate", "up")}

    def fused(name: str, of: str) -> torch.Tensor:
        """The plain model's weight, or its gradient, under the name of the fused one."""
        *path, layer, _ = name.split(".")
        weights = [plain.get_parameter(".".join([*path, part, "weight"])) for part in parts.get(layer, (layer,))]
        return torch.cat([getattr(weight, of) for weight in weights])

    for name, weight in model.named_parameters():
        weight.data.copy_(fused(name, "data"))
    tokens, labels = torch.randint(TINY.vocabulary, (2, TINY.batch, TINY.sequence))
    loss, gradients = llama_operators.loss_and_gradients(model, tokens, labels)
    expected = plain(tokens, labels)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    assert gradients.keys() == set(model.parameters())
    for name, weight in model.named_parameters():
        torch.testing.assert_close(
            gradients[weight], fused(name, "grad"), msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("build", [partial(operators_step, TINY), partial(llama_operators_step, TINY_LLAMA)])
@pytest.mark.parametrize("bf16", [False, True])
def test_a_step_of_operators_trains(build: Callable[..., Callable[[], torch.Tensor]], bf16: bool) -> None:
    torch.manual_seed(1)
    step = build(bf16=bf16)
    losses = [step().item() for _ in range(20)]
    assert losses[-1] < losses[0] - 0.01
