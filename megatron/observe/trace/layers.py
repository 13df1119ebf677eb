"""When each transformer layer runs, forward and backward."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from megatron.model.transformer import ParallelTransformerLayer, Stream

Tell = Callable[[int, float, float], None]


@contextmanager
def layers_timed(module: nn.Module, now: Callable[[], float], tell: Tell) -> Iterator[None]:
    """While inside, call ``tell(number, begin, end)`` for each pass through a transformer layer of ``module``.

    A layer's backward pass is from the gradient of its output to that of its input.
    """
    handles = []
    for layer in module.modules():
        if isinstance(layer, ParallelTransformerLayer):
            watch = _Watch(layer.layer_number, now, tell)
            handles.append(layer.register_forward_pre_hook(watch.enter))
            handles.append(layer.register_forward_hook(watch.leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Watch:
    """The stop watch of one layer, which runs one pass at a time."""

    def __init__(self, number: int, now: Callable[[], float], tell: Tell) -> None:
        self._number, self._now, self._tell = number, now, tell
        self._entered = self._returned = 0.0

    def enter(self, layer: nn.Module, inputs: tuple[Stream]) -> None:
        hidden = _hidden(inputs[0])
        if hidden.requires_grad and torch.is_grad_enabled():  # it is not where the layer is recomputed later
            hidden.register_hook(self._back_at_input)
        self._entered = self._now()

    def leave(self, layer: nn.Module, inputs: tuple[Stream], output: Stream) -> None:
        self._tell(self._number, self._entered, self._now())
        hidden = _hidden(output)
        if hidden.requires_grad:
            hidden.register_hook(self._back_at_output)

    def _back_at_output(self, grad: Tensor) -> None:
        self._returned = self._now()

    def _back_at_input(self, grad: Tensor) -> None:
        self._tell(self._number, self._returned, self._now())


def _hidden(stream: Stream) -> Tensor:
    return stream[0] if isinstance(stream, tuple) else stream
