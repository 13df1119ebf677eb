"""The limit of a training step does all of its work: it has the loss and the gradients of autograd."""

import pytest
import torch

from benchmarks.measures.operators import loss_and_gradients, operators_step
from benchmarks.measures.peers import BareGPT2, Shape

TINY = Shape(layers=2, hidden=32, heads=2, sequence=16, batch=3, vocabulary=64)


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


@pytest.mark.parametrize("bf16", [False, True])
def test_a_step_of_operators_trains(bf16: bool) -> None:
    torch.manual_seed(1)
    step = operators_step(TINY, bf16=bf16)
    losses = [step().item() for _ in range(20)]
    assert losses[-1] < losses[0] - 0.01
