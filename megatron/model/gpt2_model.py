"""GPT-2 as one list of layers, and the two containers that DeepSpeed's engines run.

b batch, s sequence, h hidden, v padded vocabulary, t tensor-parallel size
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import deepspeed
import torch
from deepspeed.pipe import DualPipeVModule, LayerSpec, PipelineModule, TiedLayerSpec
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.config import ActivationConfig, ModelConfig
from megatron.model.embedding import PositionEmbedding, WordEmbedding, to_logits, without_documents
from megatron.model.sequence import own_part, stream_norm_class
from megatron.model.transformer import ParallelTransformerLayer, Stream
from megatron.mpu.cross_entropy import vocab_parallel_cross_entropy
from megatron.mpu.layout import ParallelLayout

Layer = Callable[[Stream], Stream]


def gpt2_layers(config: ModelConfig, layout: ParallelLayout) -> list[LayerSpec | Layer]:
    """The layers of GPT-2 in order, not yet built: the only place that says what GPT-2 is.

    A layer's place in this list is its number in parameter names and checkpoint files.
    """
    embedding = partial(
        TiedLayerSpec, "embed", WordEmbedding, config, layout, tied_weight_attr="word_embeddings.weight"
    )
    return [
        embedding(),  # tokens [b, s] -> hidden [b, s, h]
        LayerSpec(PositionEmbedding, config, layout),
        *(LayerSpec(ParallelTransformerLayer, config, layout, layer_number=n + 1) for n in range(config.num_layers)),
        without_documents,
        LayerSpec(stream_norm_class(config, layout), config.hidden_size, eps=config.layernorm_epsilon),
        embedding(forward_fn=to_logits),  # hidden -> logits [b, s, v/t]
    ]


def lm_loss(
    logits: Tensor,
    targets: tuple[Tensor, Tensor],
    *,
    group: ProcessGroup,
    vocab_size: int,
    in_fp32: bool,
    sequence_group: ProcessGroup | None = None,
) -> Tensor:
    """The weighted sum of the tokens' cross entropies. Where it is not finite, no gradient of it is.

    targets: labels [b, s], and weights [b, s] that come to 1 over what the loss is a mean of. Where a
    group shares the sequence, the logits are of this rank's part, and the mean over the group is the loss.
    """
    labels, weights = (own_part(target, sequence_group, 1) for target in targets)
    if sequence_group:
        weights = weights * sequence_group.size()
    losses = vocab_parallel_cross_entropy(logits, labels, group, vocab_size, in_fp32=in_fp32)
    loss = (losses.float() * weights).sum()
    # Behind an infinite loss there may be finite gradients. None may change a weight.
    return loss * torch.where(loss.detach().isfinite(), 1.0, torch.nan)


class GPT2ModelPipe(PipelineModule):
    """GPT-2 cut into pipeline stages, where ``bounds`` in the list of its layers say; ZeRO 0 or 1."""

    def __init__(
        self, config: ModelConfig, activation: ActivationConfig, layout: ParallelLayout, *, bounds: Sequence[int]
    ):
        self.recomputed_together = activation.layers_together
        self.parts = list(bounds)
        super().__init__(
            layers=gpt2_layers(config, layout),
            loss_fn=_loss_fn(config, layout),
            topology=layout.topology,
        )

    def _partition_layers(self, method: str) -> None:
        """In place of PipelineModule's own, whose methods can neither be given a list nor weigh operations."""
        assert self.parts[-1] == self._num_layers
        self._set_bounds(self.parts[self.stage_id], self.parts[self.stage_id + 1])

    def forward(self, stream: Stream) -> Stream:
        """This stage's part of the model.

        In place of PipelineModule's own loop, whose recomputation goes by class names and silently
        leaves out every group that is not made of listed layers alone.
        """
        return run_layers(self.forward_funcs, stream, self.recomputed_together if self.training else 0)


class GPT2ModelDualPipeV(DualPipeVModule, GPT2ModelPipe):
    """The same with two pieces to a stage, for DeepSpeed's DualPipeV engine, which it is known to by its class."""


class GPT2Model(nn.Module):
    """GPT-2 whole on every rank; any ZeRO stage. Its parameters are named as GPT2ModelPipe's."""

    def __init__(self, config: ModelConfig, activation: ActivationConfig, layout: ParallelLayout):
        super().__init__()
        self.recomputed_together = activation.layers_together
        self.loss_fn = _loss_fn(config, layout)
        self.tied_modules = nn.ModuleDict()
        self.forward_funcs = [self._build(index, spec) for index, spec in enumerate(gpt2_layers(config, layout))]

    def _build(self, index: int, spec: LayerSpec | Layer) -> Layer:
        if not isinstance(spec, LayerSpec):
            return spec
        if not isinstance(spec, TiedLayerSpec):
            self.add_module(str(index), spec.build())
            return self.get_submodule(str(index))
        if spec.key not in self.tied_modules:
            self.tied_modules[spec.key] = spec.build()
        tied = self.tied_modules[spec.key]
        return partial(spec.forward_fn, tied) if spec.forward_fn else tied

    def forward(self, tokens: Tensor, targets: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """The loss, or the logits [b, s, v/t] where no targets are given."""
        logits = run_layers(self.forward_funcs, tokens, self.recomputed_together if self.training else 0)
        return logits if targets is None else self.loss_fn(logits, targets)


def run_layers(layers: Sequence[Layer], stream: Stream, recomputed_together: int = 0) -> Stream:
    """One layer after the other; runs of ``recomputed_together`` transformer layers keep their input alone."""
    for group in _groups(layers, recomputed_together):
        if recomputed_together and isinstance(group[0], ParallelTransformerLayer):
            tensors = stream if isinstance(stream, tuple) else (stream,)
            stream = deepspeed.checkpointing.checkpoint(partial(_run_group, group), *tensors)
        else:
            stream = run_one_by_one(group, stream)
    return stream


def run_one_by_one(layers: Sequence[Layer], stream: Stream) -> Stream:
    """One layer after the other."""
    for layer in layers:
        stream = layer(stream)
    return stream


def _run_group(group: Sequence[Layer], *tensors: Tensor) -> Stream:
    return run_one_by_one(group, tensors if len(tensors) > 1 else tensors[0])


def _groups(layers: Sequence[Layer], size: int) -> Iterator[list[Layer]]:
    """Transformer layers ``size`` at a time, in order; every other layer by itself."""
    group: list[Layer] = []
    for layer in layers:
        alone = not isinstance(layer, ParallelTransformerLayer)
        if group and (alone or len(group) == size):
            yield group
            group = []
        if alone:
            yield [layer]
        else:
            group.append(layer)
    if group:
        yield group


def _loss_fn(config: ModelConfig, layout: ParallelLayout) -> Callable[[Tensor, tuple[Tensor, Tensor]], Tensor]:
    return partial(
        lm_loss,
        sequence_group=layout.sequence_group,
        group=layout.tensor_group,
        vocab_size=config.vocab_size,
        in_fp32=not config.fp16_lm_cross_entropy,
    )
