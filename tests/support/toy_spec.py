"""A third architecture: a GPT with an output table of its own, after a learned scale. Its spec, without torch."""

from megatron.config import ModelConfig
from megatron.model.architectures.layers import WITHOUT_SEGMENT_IDS, final_norm, position_embedding, transformer_layer
from megatron.model.spec import ArchitectureSpec, KeptActivations, LayerSpec, ParameterSpec, register


def layers(config: ModelConfig) -> list[LayerSpec]:
    h, shape = config.hidden_size, (config.padded_vocab_size, config.hidden_size)
    words, output = (ParameterSpec(f"{name}.weight", shape, 0, is_vocabulary=True) for name in ("words", "output"))
    return [
        LayerSpec("ToyEmbedding", (words,), kept=KeptActivations(index_bytes=9)),
        position_embedding(config),
        *[transformer_layer(config)] * config.num_layers,
        WITHOUT_SEGMENT_IDS,
        final_norm(config),
        LayerSpec("Scale", (ParameterSpec("scale", (h,), weight_decay=False),), kept=KeptActivations(local=h)),
        LayerSpec("ToyHead", (output,), 2 * output.numel, kept=KeptActivations(local=h)),
    ]


TOY = register(
    ArchitectureSpec(
        "Toy",
        "toy_pretrain.py",
        ("WhitespaceTokenizer",),
        layers,
        torch_layers="toy_layers:toy_layers",
        torch_loss="megatron.model.gpt2:gpt2_loss",
    )
)
