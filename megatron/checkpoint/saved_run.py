"""A complete checkpoint, by its ``run.json``: what it contains and how to build its model. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron.checkpoint.sample_history import Segment, read_history
from megatron.checkpoint.saved_layout import SavedLayout
from megatron.common.errors import CheckpointError
from megatron.config import ModelConfig
from megatron.model.architectures import GPT2


@dataclass(frozen=True)
class SavedRun:
    """A complete checkpoint: where it is, and what its ``run.json`` contains."""

    folder: Path
    tag: str
    description: Mapping[str, Any]
    """The content of ``run.json``."""
    newer_problems: tuple[str, ...] = ()
    """What is wrong with the newer checkpoints of the folder, which cannot be loaded."""

    @property
    def path(self) -> Path:
        """The folder of the tag."""
        return self.folder / self.tag

    @property
    def iteration(self) -> int:
        """Finished iterations."""
        return self.description["iteration"]

    @cached_property
    def layout(self) -> SavedLayout:
        """The layout of its files."""
        return SavedLayout.from_json(self.description["layout"])

    @property
    def has_optimizer(self) -> bool:
        """Whether the optimizer's state was saved."""
        return bool(self.description.get("has_optimizer"))

    @property
    def has_rng(self) -> bool:
        """Whether the random number states were saved."""
        return bool(self.description.get("has_rng"))

    @property
    def config(self) -> Mapping[str, Mapping[str, Any]]:
        """The sections of the run's configuration, as JSON."""
        return self.description["config"]

    @property
    def model(self) -> dict[str, Any]:
        """The fields of the run's ModelConfig. Without an architecture it is GPT-2, which was once the only one."""
        saved = self.config["model"].items()
        return {"architecture": GPT2.name} | {key: tuple(v) if isinstance(v, list) else v for key, v in saved}

    @property
    def skipped_samples(self) -> tuple[range, ...]:
        """Samples that training skips, in order."""
        return tuple(range(start, stop) for start, stop in self.description.get("left_out_samples", ()))

    @property
    def history(self) -> tuple[Segment, ...]:
        """The samples of its iterations. Raises CheckpointError if they cannot be read."""
        return read_history(self.description, str(self.path))

    def whole_model_config(self) -> ModelConfig:
        """The configuration of the saved model without parallelism and padding, in fp32."""
        try:
            config = ModelConfig(**self.model)
        except TypeError as error:
            raise CheckpointError(f"{self.path} was saved by another version: {error}") from None
        return replace(config, padded_vocab_size=config.vocab_size, dtype="fp32")
