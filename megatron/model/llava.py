"""LLaVA's vision encoder and projector, and the embedding that merges images into the text (arXiv 2304.08485).

Encoder layers and the projector pass on (image hidden [i, p, h], tokens, int32 [b, 2, s]): the images of all samples
in order, followed by empty slots. The encoder is not sharded along the sequence, whose length need not be divisible.

b batch, s sequence, i image slots of a micro-batch, p tokens of an image, h hidden
"""

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron.config import ModelConfig
from megatron.config.vision import PIXELS
from megatron.model.architectures import architecture_of
from megatron.model.embedding import WordEmbedding
from megatron.model.transformer import HiddenStates, ParallelTransformerLayer
from megatron.model.weights import column_parallel, hidden_norm, row_parallel, weight
from megatron.ops.packed_attention import as_int32
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.sequence import sequence_shard
from megatron.parallel.tensor.linear import linear
from megatron.parallel.tensor.mappings import copy_to_model_parallel_region

Images = tuple[Tensor, Tensor]
"""State passed between layers: (image hidden, tokens)."""


class PatchEmbedding(nn.Module):
    """Images, uint8 [i, height, width, 3], and tokens -> image hidden [i, p, h] and tokens.

    Applies a linear layer to each patch, which equals a convolution whose kernel and stride are the patch size.
    """

    def __init__(self, config: ModelConfig, layout: ParallelLayout):
        super().__init__()
        vision, h, patch = config.vision_model, config.vision_hidden_size, config.vision_patch_size
        self.kind, self.patch = config.vision_encoder, patch
        patches = weight(vision, "vision.patch_embedding").draw((h, 3, patch, patch))
        self.patch_embedding = _Convolution(patches, has_bias=not config.has_class_token)
        positions = weight(vision, "vision.position_embedding").draw((config.encoder_tokens, h))
        self.position_embedding = nn.Embedding.from_pretrained(positions, freeze=False)
        if config.has_class_token:
            self.class_embedding = nn.Parameter(weight(vision, "vision.class_embedding").draw((h,)))
            self.pre_layrnorm = hidden_norm(vision, whole_sequence(layout))

    def forward(self, batch: Images) -> Images:
        images, tokens = batch
        hidden = self.patch_embedding(self.patches(images))
        if self.kind == "clip":
            hidden = torch.cat([self.class_embedding.expand(hidden.size(0), 1, -1), hidden], dim=1)
        hidden = hidden + self.position_embedding.weight
        return self.pre_layrnorm(hidden) if self.kind == "clip" else hidden, as_int32(tokens)

    def patches(self, images: Tensor) -> Tensor:
        """uint8 [i, height, width, 3] -> normalized pixels of the patches, fp32 [i, patches, 3 x patch x patch]."""
        mean, deviation = _mean_and_deviation(self.kind, images.device)
        height, width = (size // self.patch * self.patch for size in images.shape[1:3])
        pixels = (images[:, :height, :width] / 255 - mean) / deviation
        grid = pixels.unflatten(2, (-1, self.patch)).unflatten(1, (-1, self.patch))  # [i, rows, patch, columns, ..]
        return grid.permute(0, 1, 3, 5, 2, 4).flatten(3).flatten(1, 2)


@cache
def _mean_and_deviation(kind: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of pixels, [3] each. Cached, since the host waits for the copy to the device."""
    mean, deviation = (torch.tensor(channels, device=device) for channels in PIXELS[kind])
    return mean, deviation


class _Convolution(nn.Module):
    """Patch convolution as a linear layer: pixels [i, patches, 3 x patch x patch] -> [i, patches, h]."""

    def __init__(self, patches: Tensor, *, has_bias: bool):
        super().__init__()
        self.weight = nn.Parameter(patches)
        self.bias = nn.Parameter(torch.zeros(len(patches))) if has_bias else None

    def forward(self, pixels: Tensor) -> Tensor:
        return linear(pixels.to(self.weight.dtype), self.weight.flatten(1), self.bias)


def whole_sequence(layout: ParallelLayout) -> ParallelLayout:
    """``layout`` without any sequence sharding, for the vision encoder."""
    return replace(layout, sequence_parallel=False, sequence_group=None, ulysses_group=None, ring_group=None)


class VisionParallelTransformerLayer(ParallelTransformerLayer):
    """A vision encoder layer, with bidirectional attention among the tokens of an image."""

    def __init__(self, config: ModelConfig, layout: ParallelLayout, *, layer_number: int):
        super().__init__(config.vision_model, whole_sequence(layout), layer_number=layer_number, causal=False)

    def forward(self, state: Images) -> Images:  # type: ignore[override]
        hidden, tokens = state
        encoded = super().forward(hidden)
        assert isinstance(encoded, Tensor)
        return encoded, tokens


class UnusedWeights(nn.Module):
    """Holds the encoder's unused weights, so that a converted model is complete; passes on its input."""

    def __init__(self, config: ModelConfig, layout: ParallelLayout):
        super().__init__()
        layers = architecture_of(config).layers(config)
        (this_layer,) = (layer for layer in layers if layer.class_name == type(self).__name__)
        for spec in this_layer.parameters:
            path, _, name = spec.name.rpartition(".")
            module: nn.Module = self
            for part in path.split("."):
                if not hasattr(module, part):
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(name, nn.Parameter(torch.zeros(spec.shape), requires_grad=False))

    def forward(self, state: Images) -> Images:
        return state


class Projector(nn.Module):
    """MLP from encoder hidden [i, p, encoder's h] to language hidden [i, p, h]; drops CLIP's class token."""

    def __init__(self, config: ModelConfig, layout: ParallelLayout):
        super().__init__()
        vision, layout = config.vision_model, whole_sequence(layout)
        sizes = config.vision_hidden_size, config.hidden_size
        self.skipped_tokens = config.encoder_tokens - config.image_tokens
        self.linear_1 = column_parallel(vision, layout, "projector.linear_1", *sizes)
        self.linear_2 = row_parallel(vision, layout, "projector.linear_2", sizes[1], sizes[1])

    def forward(self, state: Images) -> Images:
        hidden, tokens = state
        return self.linear_2(F.gelu(self.linear_1(hidden[:, self.skipped_tokens :]))), tokens


class ImageEmbedding(WordEmbedding):
    """Projected images [i, p, h] and tokens -> hidden [b, s, h], with images in place of placeholder tokens.

    The n-th placeholder in the batch is replaced by the n-th image token.
    """

    def __init__(self, config: ModelConfig, layout: ParallelLayout):
        super().__init__(config, layout)
        self.image_token = config.image_token_id

    def forward(self, inputs: Any, to_logits: bool = False) -> HiddenStates:
        if to_logits or isinstance(inputs, Tensor):  # a tensor has tokens without images
            return super().forward(inputs, to_logits)
        images, tokens = inputs
        embedded = super().forward(tokens)
        hidden, *segment_ids = embedded if isinstance(embedded, tuple) else (embedded,)
        merged = self._merged(hidden, images, tokens if tokens.dim() == 2 else tokens[:, 0])
        return (merged, *segment_ids) if segment_ids else merged  # type: ignore[return-value]

    def _merged(self, hidden: Tensor, images: Tensor, tokens: Tensor) -> Tensor:
        is_image = tokens == self.image_token
        last = images.numel() // images.size(-1) - 1
        places = (is_image.flatten().cumsum(0).view_as(is_image) - 1).clamp(0, last)
        places = places.masked_fill(~is_image, -1).movedim(1, self.sequence_dim)
        places = sequence_shard(places, self.layout, self.sequence_dim, of_tensor_group=True).unsqueeze(-1)
        if self.layout.sequence_parallel:  # each rank merges its shard; the gradients of images are summed
            images = copy_to_model_parallel_region(images, self.layout.tensor_group)
        chosen = F.embedding(places.squeeze(-1).clamp(min=0), images.flatten(0, 1))
        return torch.where(places >= 0, chosen.to(hidden.dtype), hidden)
