"""The limit of a training step: torch's operators for GPT-2, one after the other, and nothing else.

Forward, backward, gradient norm and fused AdamW of the plain model in ``peers.py``, without autograd, engine and data.
In bf16 every operator but AdamW is in bf16, gradients are converted once to fp32 and weights once back; the backward
pass of attention is in fp32 where that is faster. Of the libraries that multiply, the faster one is taken, and this
project's attention by products where it is faster than torch's fused one.

b batch, s sequence, t tokens (b x s), h hidden, n heads, d size of a head, v vocabulary
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.measures.peers import BareBlock, BareGPT2
from benchmarks.measures.shapes import CLIP, LEARNING_RATE, WEIGHT_DECAY, Shape
from megatron.model.bf16_attention import attend_by_products, gradients_by_products
from megatron.parallel.tensor.products import ONEDNN_HAS_BF16, affine, product

aten = torch.ops.aten
Heads = tuple[Tensor, Tensor, Tensor]
Gradients = dict[Tensor, Tensor]
"""By weight. Those of a weight that is used twice are added up."""


def operators_step(shape: Shape, *, bf16: bool = False) -> Callable[[], Tensor]:
    """A step over the same tokens again and again. It returns the loss, []."""
    return step_of(BareGPT2(shape), loss_and_gradients, shape, bf16=bf16)


def step_of(
    model: Any,
    differentiate: Callable[[Any, Tensor, Tensor], tuple[Tensor, Gradients]],
    shape: Shape,
    *,
    bf16: bool,
) -> Callable[[], Tensor]:
    """The same of any model: ``differentiate`` returns loss and gradients of it, of tokens and of labels [b, s]."""
    masters = list(model.parameters())
    optimizer = torch.optim.AdamW(masters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)
    if bf16:
        masters = [torch.nn.Parameter(weight.detach().clone()) for weight in masters]
        optimizer.param_groups[0]["params"] = masters
        model.to(torch.bfloat16)
    weights = list(model.parameters())
    tokens, labels = torch.randint(shape.vocabulary, (2, shape.batch, shape.sequence))  # [b, s]

    @torch.no_grad()
    def step() -> Tensor:
        loss, gradients = differentiate(model, tokens, labels)
        for master, weight in zip(masters, weights, strict=True):
            master.grad = gradients.pop(weight).float()
        norm = torch.nn.utils.get_total_norm([master.grad for master in masters])
        optimizer.grad_scale = (norm / CLIP).clamp(min=1.0)
        optimizer.step()
        for master, weight in zip(masters, weights, strict=True):
            master.grad = None
            if bf16:
                weight.copy_(master)
        return loss

    return step


@torch.no_grad()
def loss_and_gradients(model: BareGPT2, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Gradients]:
    """The loss [] of tokens [b, s] and labels [b, s], and its gradient in every weight."""
    embedding, positions = model.words.weight, model.positions.weight
    x = (aten.embedding(embedding, tokens) + positions).flatten(0, 1)  # [t, h]
    kept = []
    for block in model.blocks:
        x, of_block = _forward(block, x, tokens.size(0))
        kept.append(of_block)
    normed, mean, scale = _norm(model.norm, x)
    loss, dnormed, dembedding = through_loss(normed, embedding, labels)
    gradients = {embedding: dembedding}
    dx = _norm_backward(model.norm, dnormed, x, mean, scale, gradients)
    for block in reversed(model.blocks):
        dx = _backward(block, dx, kept.pop(), gradients)
    gradients[embedding].index_add_(0, tokens.flatten(), dx)
    gradients[positions] = dx.view(*tokens.shape, -1).sum(0)
    return loss, gradients


def through_loss(normed: Tensor, embedding: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The loss [] of hidden states [t, h]; its gradients in them, and in the embedding as output projection.

    One pass over the logits: softmax, in their own precision, in which the loss is taken, too. Its divisor, the number
    of tokens, goes to the products' other sides.
    """
    probabilities = aten._softmax(affine(normed, embedding), 1, False)  # [t, v]
    count = labels.numel()
    label = torch.arange(count), labels.flatten()
    own = probabilities[label]  # [t]
    probabilities[label] = own - 1  # where scatter_ would convert all of bf16 to fp32 and back
    loss = -own.float().log().mean()
    return loss, product(probabilities, embedding).div_(count), product(probabilities.t(), normed / count)


class _Kept(NamedTuple):
    """Of a block, for its backward pass."""

    x: Tensor
    normed: tuple[Tensor, Tensor, Tensor]
    """The first norm's output [t, h], mean and scale [t, 1]."""
    heads: Tensor
    """Query, key and value, [3, b, n, s, d]."""
    context: Tensor
    """[b, n, s, d]"""
    sums: Tensor | None
    """Logarithms of attention's sums, [b, n, s], if they are kept."""
    middle: Tensor
    """Between attention and MLP, [t, h]."""
    normed_middle: tuple[Tensor, Tensor, Tensor]
    up: Tensor
    """[t, 4h]"""
    activated: Tensor


def _forward(block: BareBlock, x: Tensor, b: int) -> tuple[Tensor, _Kept]:
    t, h = x.shape
    normed = _norm(block.norm_1, x)
    heads = _linear(block.qkv, normed[0]).view(b, t // b, 3, block.heads, h // block.heads).permute(2, 0, 3, 1, 4)
    context, sums = attend(*heads)
    middle = _linear(block.out, rows_of(context)).add_(x)
    normed_middle = _norm(block.norm_2, middle)
    up = _linear(block.up, normed_middle[0])
    activated = aten.gelu(up)
    output = _linear(block.down, activated).add_(middle)
    return output, _Kept(x, normed, heads, context, sums, middle, normed_middle, up, activated)


def _backward(block: BareBlock, dy: Tensor, kept: _Kept, gradients: Gradients) -> Tensor:
    dactivated = _linear_backward(block.down, dy, kept.activated, gradients)
    dup = aten.gelu_backward(dactivated, kept.up)
    dnormed = _linear_backward(block.up, dup, kept.normed_middle[0], gradients)
    dmiddle = _norm_backward(block.norm_2, dnormed, kept.middle, *kept.normed_middle[1:], gradients).add_(dy)
    rows = _linear_backward(block.out, dmiddle, rows_of(kept.context), gradients)
    b, n, s, d = kept.context.shape
    dheads = attention_gradients(rows.view(b, s, n, d).transpose(1, 2), kept.heads, kept.context, kept.sums)
    dqkv = torch.cat([rows_of(of_kind).to(dy.dtype) for of_kind in dheads], dim=1)  # [t, 3h]
    dnormed = _linear_backward(block.qkv, dqkv, kept.normed[0], gradients)
    return _norm_backward(block.norm_1, dnormed, kept.x, *kept.normed[1:], gradients).add_(dmiddle)


def attend(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
    """Context [b, n, s, d] of query [b, n, s, d], key and value [b, g, s, d]; logarithms of sums, if they are kept."""
    if query.dtype == torch.bfloat16 and ONEDNN_HAS_BF16:
        return attend_by_products(query, key, value, True), None
    context, sums = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True)
    return context, sums


def attention_gradients(dcontext: Tensor, heads: Sequence[Tensor], context: Tensor, sums: Tensor | None) -> Heads:
    """Those of query, key and value."""
    if sums is None:
        return gradients_by_products(dcontext, *heads, True)
    tensors = (*(part.float() for part in (*heads, context)), sums)
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(dcontext.float(), *tensors, 0.0, True)


def rows_of(heads: Tensor) -> Tensor:
    """[b, n, s, d] -> [t, h]."""
    b, _, s, _ = heads.shape
    return heads.transpose(1, 2).reshape(b * s, -1)


def _linear(layer: torch.nn.Linear, x: Tensor) -> Tensor:
    return affine(x, layer.weight, layer.bias)


def _linear_backward(layer: torch.nn.Linear, dy: Tensor, x: Tensor, gradients: Gradients) -> Tensor:
    gradients[layer.weight], gradients[layer.bias] = product(dy.t(), x), dy.sum(0)
    return product(dy, layer.weight)


def _norm(layer: torch.nn.LayerNorm, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return aten.native_layer_norm(x, layer.normalized_shape, layer.weight, layer.bias, layer.eps)


def _norm_backward(
    layer: torch.nn.LayerNorm, dy: Tensor, x: Tensor, mean: Tensor, scale: Tensor, gradients: Gradients
) -> Tensor:
    dx, gradients[layer.weight], gradients[layer.bias] = aten.native_layer_norm_backward(
        dy, x, layer.normalized_shape, mean, scale, layer.weight, layer.bias, [True] * 3
    )
    return dx
