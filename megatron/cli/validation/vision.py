"""Rules about models that read images."""

from collections.abc import Iterable

from megatron.cli.validation.layout import multiple, partition_fits, stages_have_layers
from megatron.cli.validation.rules import Messages, rule
from megatron.config import ModelConfig, RunConfig
from megatron.config.vision import PARTS
from megatron.model import partition
from megatron.model.spec import LayerSpec


@rule("the projector reads a layer of the encoder", why="Layers are counted from 1 on, or from the last one, -1, back.")
def feature_layer(run: RunConfig) -> Messages:
    count, layer = run.model.vision_num_layers, run.model.vision_feature_layer
    if count > 0 and not 1 <= run.model.vision_layers <= count:
        valid = f"1 to {count}, or {-count} to -1"
        yield f"--vision-feature-layer {layer} is none of --vision-num-layers {count}: use {valid}"


@rule("heads and ranks divide the encoder of images", why="Each rank computes complete heads, and a share of the MLP.")
def encoder_sizes(run: RunConfig) -> Messages:
    model, ranks = run.model, run.parallel.model_parallel_size
    hidden, heads, tensor = model.vision_hidden_size, model.vision_num_attention_heads, f"--model-parallel-size {ranks}"
    if model.vision_num_layers and ranks > 0:
        yield from multiple("--vision-hidden-size", hidden, f"--vision-num-attention-heads {heads}", heads)
        yield from multiple("--vision-num-attention-heads", heads, tensor, ranks)
        yield from multiple("--vision-ffn-hidden-size", model.vision_ffn_hidden_size, tensor, ranks)


@rule("a sample has room for an image", why="An image that does not fit is cut off, with all that follows it.")
def image_fits(run: RunConfig) -> Messages:
    model, length = run.model, run.data.seq_length
    patch, size = model.vision_patch_size, model.vision_image_size
    if not model.vision_num_layers:
        return
    if patch > size:
        yield f"--vision-patch-size {patch} is more than --vision-image-size {size}"
    elif model.image_tokens >= length > 0:
        image = f"the {model.image_tokens} tokens of --vision-image-size {size}"
        yield f"--seq-length {length} has no room for {image} and an answer: raise it"


@rule(
    "every stage has something to train",
    why="DeepSpeed's optimizers need a parameter, and a backward pass something to compute. By parameters and FLOPs "
    "the stages depend on the vocabulary, which is not read yet.",
    otherwise="fails on the empty list of parameters",
)
def stages_train(run: RunConfig) -> Messages:
    model, parallel, method = run.model, run.parallel, run.parallel.pipeline_partition
    flags = " ".join(f"--freeze-{part}" for part in model.frozen_parts).replace("language", "language-model")
    if not flags or model.num_layers < 1:
        return
    if len(model.frozen_parts) == len(PARTS):
        yield f"{flags} leave nothing to train: remove one"
    elif not parallel.uses_pipeline or any(stages_have_layers(run)) or any(partition_fits(run)):
        return
    elif method in ("parameters", "flops"):
        yield f"--pipeline-partition {method} may leave a stage with nothing to train, with {flags}: remove it"
    else:
        stages = partition.plan(run)
        parts = {"the first model chunk": stages[0].layers_of_chunks[0]}
        parts |= {f"stage {number}": stage.layers for number, stage in enumerate(stages)}
        if idle := next((name for name, layers in parts.items() if not _trains(model, layers)), None):
            yield (
                f"{flags}: {idle} has nothing to train; divide the {model.num_layers} layers otherwise with "
                "--pipeline-partition, or use --zero-stage 3 or --model-parallel-size instead of a pipeline"
            )


def _trains(model: ModelConfig, layers: Iterable[LayerSpec]) -> bool:
    """Whether some parameter of ``layers`` is trained."""
    trained = [layer for layer in layers if layer.parameters and layer.part not in ("", *model.frozen_parts)]
    return any(layer.part != "language" or not model.lora_rank or layer.is_block for layer in trained)
