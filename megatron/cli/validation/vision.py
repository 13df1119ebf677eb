"""Rules about models that read images."""

from functools import partial

from megatron.cli.validation.layout import stages_without
from megatron.cli.validation.rules import Messages, rule
from megatron.config import ModelConfig, RunConfig
from megatron.config.vision import PARTS
from megatron.model.spec import LayerSpec


@rule("the projector reads a layer of the encoder", why="Layers are counted from 1 on, or from the last one, -1, back.")
def feature_layer(run: RunConfig) -> Messages:
    count, layer = run.model.vision_num_layers, run.model.vision_feature_layer
    if count > 0 and not 1 <= run.model.vision_layers <= count:
        valid = f"1 to {count}, or {-count} to -1"
        yield f"--vision-feature-layer {layer} is none of --vision-num-layers {count}: use {valid}"


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
    model = run.model
    flags = " ".join(f"--freeze-{part}" for part in model.frozen_parts).replace("language", "language-model")
    if len(model.frozen_parts) == len(PARTS):
        yield f"{flags} leave nothing to train: remove one"
    elif flags or model.lora_rank:
        flags = flags or f"--lora-rank {model.lora_rank}"
        for place in stages_without(run, partial(_trains, model), first_chunk=bool(model.frozen_parts)):
            yield (
                f"{place} with nothing to train, with {flags}: give the number of layers of each stage, or use "
                "--zero-stage 3 or --model-parallel-size instead of a pipeline"
            )


def _trains(model: ModelConfig, layer: LayerSpec) -> bool:
    """Whether some parameter of ``layer`` is trained."""
    if not layer.parameters or layer.part in ("", *model.frozen_parts):
        return False
    return layer.part != "language" or not model.lora_rank or layer.is_block
