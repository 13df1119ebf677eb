"""A lower bound for the time of a Llama's training step: its torch operators, called in order, without autograd.

As ``operators.py`` for GPT-2. The products of query, key and value are one, and so are those of gate and up. RMSNorm is
computed in fp32, its backward pass by the kernel of layer norm, since torch has none for RMSNorm on a CPU.

b batch, s sequence, t tokens (b x s), h hidden, n heads, g query groups, d size of a head, f size inside the MLP
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.measures.operators import Gradients, attend, attention_gradients, rows_of, step_of, through_loss
from benchmarks.measures.shapes import LlamaShape
from megatron.parallel.tensor.products import affine, product

aten = torch.ops.aten


def rotations(shape: LlamaShape) -> Tensor:
    """The complex numbers that turn pairs of neighbors, [s, d/2] (arXiv 2104.09864)."""
    d = shape.hidden // shape.heads
    angles = torch.outer(torch.arange(shape.sequence), 10000.0 ** -(torch.arange(0, d, 2) / d))
    return torch.polar(torch.ones_like(angles), angles)


class FusedBlock(nn.Module):
    """Weights of a layer."""

    def __init__(self, shape: LlamaShape):
        super().__init__()
        h, d = shape.hidden, shape.hidden // shape.heads
        self.heads, self.groups = shape.heads, shape.groups
        linear = partial(nn.Linear, bias=False)
        self.norm_1, self.norm_2 = nn.RMSNorm(h, eps=1e-5), nn.RMSNorm(h, eps=1e-5)
        self.qkv, self.out = linear(h, h + 2 * shape.groups * d), linear(h, h)
        self.gate_up, self.down = linear(h, 2 * shape.ffn), linear(shape.ffn, h)


class FusedLlama(nn.Module):
    """Weights of the plain Llama in ``llama_step.py``."""

    def __init__(self, shape: LlamaShape):
        super().__init__()
        self.words = nn.Embedding(shape.vocabulary, shape.hidden)
        self.blocks = nn.ModuleList(FusedBlock(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        nn.init.normal_(self.words.weight, std=0.02)
        self.rotations = rotations(shape)


def llama_operators_step(shape: LlamaShape, *, bf16: bool = False) -> Callable[[], Tensor]:
    """A step over the same tokens again and again. It returns the loss, []."""
    return step_of(FusedLlama(shape), loss_and_gradients, shape, bf16=bf16)


@torch.no_grad()
def loss_and_gradients(model: FusedLlama, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Gradients]:
    """The loss [] of tokens [b, s] and labels [b, s], and its gradient in every weight."""
    x = aten.embedding(model.words.weight, tokens).flatten(0, 1)  # [t, h]
    kept, gradients = [], {}
    for block in model.blocks:
        x, of_block = _forward(block, x, model.rotations)
        kept.append(of_block)
    normed, scale = _norm(model.norm, x)
    loss, dnormed, gradients[model.words.weight] = through_loss(normed, model.words.weight, labels)
    dx = _norm_backward(model.norm, dnormed, x, scale, gradients)
    for block in reversed(model.blocks):
        dx = _backward(block, dx, kept.pop(), model.rotations, gradients)
    gradients[model.words.weight].index_add_(0, tokens.flatten(), dx)
    return loss, gradients


class _Kept(NamedTuple):
    """Of a layer, for its backward pass."""

    x: Tensor
    normed: tuple[Tensor, Tensor]
    """The first norm's output [t, h] and scale [t, 1]."""
    heads: tuple[Tensor, Tensor, Tensor]
    """Query [b, n, s, d], key and value [b, g, s, d]."""
    context: Tensor
    """[b, n, s, d]"""
    sums: Tensor | None
    """Logarithms of attention's sums, [b, n, s], if they are kept."""
    middle: Tensor
    """Between attention and MLP, [t, h]."""
    normed_middle: tuple[Tensor, Tensor]
    gate_up: Tensor
    """[t, 2f]"""
    activated: Tensor
    """[t, f]"""


def _forward(block: FusedBlock, x: Tensor, rotations: Tensor) -> tuple[Tensor, _Kept]:
    t, h = x.shape
    s, n, g = len(rotations), block.heads, block.groups
    normed = _norm(block.norm_1, x)
    columns = affine(normed[0], block.qkv.weight).view(t // s, s, n + 2 * g, h // n)
    turned = _turned(columns[:, :, : n + g], rotations)
    heads = tuple(part.transpose(1, 2) for part in (*turned.split([n, g], dim=2), columns[:, :, n + g :]))
    context, sums = attend(*heads)
    middle = affine(rows_of(context), block.out.weight).add_(x)
    normed_middle = _norm(block.norm_2, middle)
    gate_up = affine(normed_middle[0], block.gate_up.weight)
    gate, up = gate_up.chunk(2, dim=1)
    activated = F.silu(gate).mul_(up)
    output = affine(activated, block.down.weight).add_(middle)
    return output, _Kept(x, normed, heads, context, sums, middle, normed_middle, gate_up, activated)


def _backward(block: FusedBlock, dy: Tensor, kept: _Kept, rotations: Tensor, gradients: Gradients) -> Tensor:
    dactivated = _product_backward(block.down, dy, kept.activated, gradients)
    gate, up = kept.gate_up.chunk(2, dim=1)
    dgate_up = torch.empty_like(kept.gate_up)
    dgate, dup = dgate_up.chunk(2, dim=1)
    torch.mul(F.silu(gate), dactivated, out=dup)
    aten.silu_backward.grad_input(dactivated.mul_(up), gate, grad_input=dgate)
    dnormed = _product_backward(block.gate_up, dgate_up, kept.normed_middle[0], gradients)
    dmiddle = _norm_backward(block.norm_2, dnormed, kept.middle, kept.normed_middle[1], gradients).add_(dy)
    drows = _product_backward(block.out, dmiddle, rows_of(kept.context), gradients)
    b, n, s, d = kept.context.shape
    dcontext = drows.view(b, s, n, d).transpose(1, 2)
    dquery, dkey, dvalue = attention_gradients(dcontext, kept.heads, kept.context, kept.sums)
    dturned = torch.cat([dquery, dkey], dim=1).transpose(1, 2)  # [b, s, n + g, d]
    dheads = torch.cat([_turned(dturned, rotations.conj()), dvalue.transpose(1, 2)], dim=2)
    dnormed = _product_backward(block.qkv, dheads.view(b * s, -1).to(dy.dtype), kept.normed[0], gradients)
    return _norm_backward(block.norm_1, dnormed, kept.x, kept.normed[1], gradients).add_(dmiddle)


def _turned(x: Tensor, rotations: Tensor) -> Tensor:
    """x [b, s, heads, d] with every pair of neighbors turned."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotations.unsqueeze(1)).flatten(3).to(x.dtype)


def _product_backward(layer: nn.Linear, dy: Tensor, x: Tensor, gradients: Gradients) -> Tensor:
    gradients[layer.weight] = product(dy.t(), x)
    return product(dy, layer.weight)


def _norm(layer: nn.RMSNorm, x: Tensor) -> tuple[Tensor, Tensor]:
    """x [t, h] -> normalized [t, h], and the scale of each row [t, 1]."""
    norm = torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=torch.float32)
    scale = norm.square_().div_(x.size(1)).add_(layer.eps).rsqrt_()
    return (x.float() * scale).mul_(layer.weight).to(x.dtype), scale


def _norm_backward(layer: nn.RMSNorm, dy: Tensor, x: Tensor, scale: Tensor, gradients: Gradients) -> Tensor:
    """As the layer norm of rows whose mean is 0, and what that takes away for the mean's sake added again."""
    wide, weight = dy.float(), layer.weight.float()
    dx, dweight, _ = aten.native_layer_norm_backward(
        wide, x.float(), layer.normalized_shape, torch.zeros_like(scale), scale, weight, None, [True, True, False]
    )
    gradients[layer.weight] = dweight
    return dx.add_((wide @ (weight / x.size(1))).unsqueeze(1).mul_(scale)).to(x.dtype)
