"""What model a checkpoint holds. No torch here."""

from dataclasses import replace

from megatron.checkpoint.tracker import SavedRun
from megatron.config import ModelConfig
from megatron.errors import CheckpointError


def whole_model_config(saved: SavedRun) -> ModelConfig:
    """The model that was saved, as it is built whole on one rank and in fp32."""
    try:
        config = ModelConfig(**saved.description["config"]["model"])
    except TypeError as error:
        raise CheckpointError(f"{saved.folder / saved.tag} was saved by another version: {error}") from None
    return replace(config, padded_vocab_size=config.vocab_size, dtype="fp32")
