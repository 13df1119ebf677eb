"""What the buffers of ``PipelinedEngine`` hold: inputs of a model chunk, which collect gradients, and its outputs.

DeepSpeed uses both like tensors.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from megatron.engines.transfers import as_list


class ChunkOutput:
    """Gradient edges of a chunk's output, to start its backward pass without keeping the output's memory.

    DeepSpeed uses it like a tensor. It runs one backward pass for all tensors of a tuple; DeepSpeed would run one for
    each, which repeats shared layers and fails for recomputed ones. Test: tests/training/test_t5_layouts_agree.py.
    """

    def __init__(self, value: Any):
        self._edges = [get_gradient_edge(tensor) for tensor in as_list(value) if tensor.is_floating_point()]

    def backward(self, gradient: Any) -> None:
        """Run the backward pass from the gradients of all floating-point tensors."""
        torch.autograd.backward(self._edges, as_list(gradient))


class ChunkInput:
    """An input tensor that collects its gradient; layers get a view of it instead of DeepSpeed's copy.

    They must not get the tensor itself: DeepSpeed's partitioned activation checkpointing replaces its data.
    """

    def __init__(self, value: Tensor):
        self.tensor = value.detach().requires_grad_(value.is_floating_point())

    def clone(self) -> Tensor:
        """A view instead of the copy that DeepSpeed asks for."""
        return self.tensor.view_as(self.tensor)


def as_inputs(outputs: Any) -> Any:
    """Wrap outputs of a chunk, or tokens of a micro-batch, as inputs of the next chunk."""
    return ChunkInput(outputs) if isinstance(outputs, Tensor) else tuple(map(ChunkInput, outputs))


def gradients_of(inputs: Any) -> Any:
    """The gradient of an input, or the gradients of all floating-point inputs of a tuple."""
    gradients = []
    for wrapped in inputs if isinstance(inputs, tuple) else (inputs,):
        if wrapped.tensor.is_floating_point():
            assert wrapped.tensor.grad is not None
            gradients.append(wrapped.tensor.grad)
    return tuple(gradients) if isinstance(inputs, tuple) else gradients[0]
