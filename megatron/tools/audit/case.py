"""The run to audit: its newest checkpoint, and the data that it was trained on."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from megatron.checkpoint.run_file import SavedRun
from megatron.checkpoint.sample_history import Segment
from megatron.common.errors import CheckpointError, ConfigError, DataError
from megatron.config import DataConfig, TrainConfig
from megatron.data.datasets import BlendedDataset, PretrainingSamples, build_datasets, sample_at
from megatron.data.fingerprint import blend_hash, other_tokenizers, tokenizer_hash
from megatron.data.map_cache import cache_folder
from megatron.model.architectures import ARCHITECTURES
from megatron.tokenizer import Tokenizer, tokenizer_of
from megatron.tools.command_line import print_warnings
from megatron.tools.convert.inspection import find


@dataclass(frozen=True)
class Case:
    """A run to audit, identified by its newest checkpoint."""

    saved: SavedRun
    data: DataConfig
    """The data of the run, at their present paths."""
    train: TrainConfig
    override: bool = False
    """Whether data that another tokenizer made is accepted."""

    @cached_property
    def history(self) -> tuple[Segment, ...]:
        """The samples that the iterations of the run consumed."""
        return self.saved.history

    def segment(self, iteration: int) -> Segment:
        """The segment of the sample history that contains ``iteration``.

        Raises:
            ConfigError: the run has no such iteration.
            CheckpointError: the samples of the iteration are unknown, or it read other data.
        """
        path = self.saved.path
        if not 1 <= iteration <= self.saved.iteration:
            raise ConfigError(f"--iteration {iteration}: {path} has iterations 1 to {self.saved.iteration}")
        segment = next(segment for segment in self.history if segment.finished < iteration <= segment.last)
        if not segment.global_batch_size:
            raise CheckpointError(
                f"{path} has no sample history of iteration {iteration}: it was saved by an older version"
            )
        if segment.stream != self.history[-1].stream:
            raise CheckpointError(
                f"iteration {iteration} has read other data than {path} names, or in another order: name a "
                "checkpoint from before the change"
            )
        return segment

    def samples_up_to(self, iteration: int) -> int:
        """Number of samples up to the end of ``iteration``, including skipped samples. Raises as ``segment()``."""
        self.segment(1)
        last_index = self.segment(iteration).sample_indices(iteration).stop - 1
        return sample_at(last_index, self.saved.skipped_samples) + 1

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The run's tokenizer. Raises ConfigError if its files have changed, DataError if they are missing."""
        data, files = self.data, (self.data.vocab_file, self.data.merge_file)
        tokenizer = tokenizer_of(data)
        if data.tokenizer_hash not in ("", tokenizer_hash(data.tokenizer_type, *files, eod=tokenizer.eod)):
            raise ConfigError(
                f"the vocabulary in {', '.join(file for file in files if file)} is not the vocabulary of "
                f"{self.saved.path}: give that with --vocab-file and --merge-file, or --tokenizer-model"
            )
        if not self.override:
            check_tokenizer(data, tokenizer)
        return tokenizer

    def training_samples(self, samples: int) -> PretrainingSamples | BlendedDataset:
        """At least ``samples`` training samples of the run, in the order of training.

        Raises DataError if the data have changed since the run, ConfigError if they are not pretraining data.
        """
        model = self.saved.model
        spec = ARCHITECTURES.get(architecture := model["architecture"])
        if spec is None or not spec.is_language_model:
            known = ", ".join(name for name, spec in ARCHITECTURES.items() if spec.is_language_model)
            raise ConfigError(f"{self.saved.path} is a {architecture}: only samples of {known} can be listed")
        if self.data.sft:
            raise ConfigError(f"{self.saved.path} was trained with --sft: only samples of pretraining can be listed")
        check_contents(self.data, str(self.saved.path))
        datasets = build_datasets(
            self.data,
            {"train": samples},
            vocab_size=model["vocab_size"],
            seed=self.train.seed,
            masked_lm=bool(spec.masked_lm),
        )
        assert isinstance(datasets.train, PretrainingSamples | BlendedDataset)
        return datasets.train


def open_case(load: Path, data_fields: Mapping[str, Any], *, override: bool = False) -> Case:
    """Open the run whose newest checkpoint is in ``load``.

    Args:
        data_fields: fields of DataConfig with the present paths of the data.
        override: whether data that another tokenizer made is accepted.

    Raises:
        CheckpointError: there is no checkpoint of a training run.
    """
    saved = find(load).saved
    if saved is None:
        raise CheckpointError(f"--load {load}: no checkpoint of a training run; name one, or a folder of them")
    print_warnings(saved.warnings)
    try:
        data = read_section(DataConfig, saved.config["data"])
        train = read_section(TrainConfig, saved.config["train"])
    except (KeyError, TypeError):
        raise CheckpointError(f"{saved.path} does not contain the data it was trained on") from None
    return Case(saved, replace(data, **data_fields), train, override)


def read_section(section: type, saved: Mapping[str, Any]) -> Any:
    """Build a section of a RunConfig from its content in ``run.json``."""
    names = {field.name for field in fields(section)}
    values = {
        name: tuple(value) if isinstance(value, list) else value for name, value in saved.items() if name in names
    }
    if isinstance(values.get("data_path"), str):
        values["data_path"] = (values["data_path"],)
    return section(**values)


def check_tokenizer(data: DataConfig, tokenizer: Tokenizer) -> None:
    """Raises DataError with a line for each data set that another tokenizer has made."""
    if others := other_tokenizers(data.prefixes, tokenizer):
        raise DataError(others)


def check_contents(data: DataConfig, checkpoint: str) -> None:
    """Raises DataError if the data are missing, or their hash is not ``data.data_hash``; ConfigError for mock data."""
    if data.mock_data:
        raise ConfigError(f"{checkpoint} was trained on --mock-data, which has no documents to list")
    try:
        content_hash = blend_hash(data.contents, partial(cache_folder, data))
    except FileNotFoundError as error:
        raise DataError(
            f"{error.filename} is missing: name the present paths of the data of {checkpoint} with --data-path"
        ) from None
    if data.data_hash not in ("", content_hash):
        raise DataError(
            f"{' '.join(data.prefixes)}: not the data that {checkpoint} was trained on: the content is different"
        )
