"""A third architecture: a GPT with an output table that is not its word embedding, after a learned scale. No torch."""

from megatron.config import ModelConfig
from megatron.model.architectures.layers import WITHOUT_SEGMENT_IDS, final_norm, positions, transformer_layer
from megatron.model.spec import ArchitectureSpec, KeptActivations, LayerSpec, ParameterSpec, register


def layers(config: ModelConfig) -> list[LayerSpec]:
    h, shape = config.hidden_size, (config.padded_vocab_size, config.hidden_size)
    words, output = (ParameterSpec(f"{name}.weight", shape, 0, is_vocabulary=True) for name in ("words", "output"))
    scale = ParameterSpec("scale", (h,), weight_decay=False)
    return [
        LayerSpec("toy_layers:ToyEmbedding", parameters=(words,), kept=KeptActivations(index_bytes=9)),
        positions(config),
        *[transformer_layer(config)] * config.num_layers,
        WITHOUT_SEGMENT_IDS,
        final_norm(config),
        LayerSpec("toy_layers:Scale", parameters=(scale,), kept=KeptActivations(local=h)),
        LayerSpec(
            "toy_layers:ToyHead",
            parameters=(output,),
            matmul_flops=2 * output.numel,
            kept=KeptActivations(local=h),
        ),
    ]


TOY = register(
    ArchitectureSpec("Toy", "toy_pretrain.py", ("WhitespaceTokenizer",), layers, loss="megatron.model.loss:lm_loss")
)
