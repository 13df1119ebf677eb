"""Settings of a vision-language model: a vision encoder, and a projector to the language model (LLaVA)."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from megatron.config.fields import derived, flag

_vision_flag = partial(flag, models="llava")

STRETCH = "stretch"
PIXELS = {
    "clip": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    "siglip": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
}
"""Encoder kind to the mean and standard deviation, per RGB channel in [0, 1], that normalize its pixels."""
PADDED = {
    encoder: "pad #" + "".join(f"{int(channel * 255):02x}" for channel in mean) for encoder, (mean, _) in PIXELS.items()
}
"""``image_fit`` of images that are padded with the mean color of an encoder."""
PARTS = ("vision", "projector", "language")
"""Parts of a vision-language model. Any other model has only ``language``."""


class ImageFormat(NamedTuple):
    """Size of an image in pixels, and its placeholder tokens in a text."""

    size: int
    """Height and width in pixels."""
    token: int
    """Placeholder token, repeated ``tokens`` times for each image."""
    tokens: int


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """Vision encoder and projector."""

    vision_encoder: str = _vision_flag("clip", "Kind of the encoder.", choices=("clip", "siglip"))
    vision_num_layers: int = _vision_flag(
        0,
        "Layers of the encoder.",
        within="[1, 20000]",
        required=True,
        needs={"sft": "conversations are packed as for instruction tuning"},
        excludes={
            "mock_data": "there are no mock images",
            "optimizer=muon": "it divides the matrices of all layers into the heads of the language model",
            "offload_param=nvme": "DeepSpeed would save checkpoints without the weights that are not trained",
        },
    )
    vision_hidden_size: int = _vision_flag(
        1024, "Hidden size of the encoder.", within="[1, 1048576]", multiple_of="vision_num_attention_heads"
    )
    vision_ffn_hidden_size: int = _vision_flag(
        4096, "Hidden size of the encoder's MLP.", within="[1, 8388608]", multiple_of="model_parallel_size"
    )
    vision_num_attention_heads: int = _vision_flag(
        16, "Attention heads of the encoder.", within="[1, 1048576]", multiple_of="model_parallel_size"
    )
    vision_layernorm_epsilon: float = _vision_flag(1e-5, "Epsilon of the encoder's norms.", within="(0, inf)")
    vision_image_size: int = _vision_flag(336, "Height and width of images in pixels.", within="[1, 65536]")
    vision_patch_size: int = _vision_flag(14, "Height and width of a patch in pixels.", within="[1, 65536]")
    vision_feature_layer: int = _vision_flag(
        -2,
        "The encoder's layer that the projector reads: -1 is the last one, -2 the one before it.",
        within="[-20000, 20000]",
    )
    vision_feature_select_strategy: str = _vision_flag(
        "default",
        "Outputs of the encoder that are read: all but CLIP's class token (default), or all (full).",
        choices=("default", "full"),
    )
    image_token_id: int = _vision_flag(
        -1, "The placeholder token, one for each patch of an image.", within="[1, inf)", required=True
    )
    images_per_micro_batch: int | None = _vision_flag(
        None, "Images that a micro-batch has room for (default: as many as the data need).", within="[1, 1048576]"
    )
    freeze_vision: bool = _vision_flag(False, "Do not train the vision encoder.", aliases=("freeze-vit",))
    freeze_projector: bool = _vision_flag(False, "Do not train the projector.")
    freeze_language_model: bool = _vision_flag(
        False, "Do not train the language model.", aliases=("freeze-lm",), excludes=("lora_rank",)
    )
    vision_lr_mult: float = _vision_flag(1.0, "Learning rate of the encoder, times --lr.", within="(0, inf)")
    projector_lr_mult: float = _vision_flag(1.0, "Learning rate of the projector, times --lr.", within="(0, inf)")
    image_fit: str = derived(STRETCH)
    """How images become squares: ``stretch``, ``crop``, which cuts out the middle, or ``pad #RRGGBB`` with a color."""
    text_seq_length: int = derived(0)
    """Tokens of a sample, placeholders included."""
    text_samples: int = derived(1)
    """Samples of a micro-batch, which share its image slots."""
    image_slots: int = derived(1)

    @property
    def vision_layers(self) -> int:
        """Encoder layers that are computed, numbered before the language model's layers; 0 without an encoder."""
        layer, count = self.vision_feature_layer, self.vision_num_layers
        return max(layer if layer >= 0 else count + 1 + layer, 0) if count else 0

    @property
    def has_class_token(self) -> bool:
        """Whether the encoder reads a class token before the patches."""
        return self.vision_encoder == "clip"

    @property
    def encoder_tokens(self) -> int:
        """Tokens of an image in the encoder: its patches, and the class token."""
        return (self.vision_image_size // max(self.vision_patch_size, 1)) ** 2 + self.has_class_token

    @property
    def image_tokens(self) -> int:
        """Tokens of an image in the language model."""
        return self.encoder_tokens - (self.vision_feature_select_strategy == "default")

    @property
    def image_format(self) -> ImageFormat:
        """Size and placeholder tokens of an image in the data."""
        return ImageFormat(self.vision_image_size, self.image_token_id, self.image_tokens)

    @property
    def frozen_parts(self) -> tuple[str, ...]:
        """The parts that are not trained at all."""
        frozen = (self.freeze_vision, self.freeze_projector, self.freeze_language_model)
        return tuple(part for part, is_frozen in zip(PARTS, frozen, strict=True) if is_frozen)

    def learning_rate_of(self, part: str) -> float:
        """The learning-rate multiplier of a part of the model."""
        return {"vision": self.vision_lr_mult, "projector": self.projector_lr_mult}.get(part, 1.0)
