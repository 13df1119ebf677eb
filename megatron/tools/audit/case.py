"""What is audited: a checkpoint, and the data that it says its run has read."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron.checkpoint.fingerprint import blend_hash, tokenizer_hash
from megatron.checkpoint.sample_history import Stretch
from megatron.checkpoint.tracker import SavedRun
from megatron.config import DataConfig, TrainConfig
from megatron.config.errors import CheckpointError, ConfigError, DataError
from megatron.data.datasets import Samples, build_datasets
from megatron.model.architectures import GPT2
from megatron.tokenizer import Tokenizer, build_tokenizer
from megatron.tools.convert.kinds import find

TOKENIZER_FLAGS = ("tokenizer_type", "vocab_file", "merge_file")


@dataclass(frozen=True)
class Case:
    """A run, as its newest checkpoint tells it."""

    saved: SavedRun
    data: DataConfig
    """Its data, at the place where they are now."""
    train: TrainConfig

    @property
    def place(self) -> Path:
        """The checkpoint."""
        return self.saved.folder / self.saved.tag

    @cached_property
    def ledger(self) -> tuple[Stretch, ...]:
        """Which samples its iterations took."""
        return self.saved.ledger

    def stretch(self, iteration: int) -> Stretch:
        """The stretch of the ledger that an iteration is in.

        Raises ConfigError where it has not been made, and CheckpointError where the ledger does not know it, or read
        other data in it.
        """
        if not 1 <= iteration <= self.saved.iteration:
            raise ConfigError(f"--iteration {iteration}: {self.place} has iterations 1 to {self.saved.iteration}")
        found = next(stretch for stretch in self.ledger if stretch.finished < iteration <= stretch.last)
        if not found.global_batch_size:
            raise CheckpointError(
                f"{self.place} has no ledger of iteration {iteration}: it was made by an older version"
            )
        if found.stream != self.ledger[-1].stream:
            raise CheckpointError(
                f"iteration {iteration} has read other data than {self.place} names, or in another order: name a "
                "checkpoint from before the change"
            )
        return found

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The run's tokenizer. Raises ConfigError where its files are others now, and DataError where they are gone."""
        files = [getattr(self.data, name) for name in TOKENIZER_FLAGS]
        tokenizer = build_tokenizer(*files)
        if self.data.tokenizer_hash not in ("", tokenizer_hash(*files)):
            raise ConfigError(
                f"the vocabulary in {', '.join(file for file in files[1:] if file)} is not the one of {self.place}: "
                "name that with --vocab-file and --merge-file"
            )
        return tokenizer

    def training_samples(self, samples: int) -> Samples:
        """The run's training samples, ``samples`` at the least, in the order of training.

        Raises DataError where the data are not what the run has read, and ConfigError where it was no GPT-2.
        """
        model = self.saved.description["config"]["model"]
        if (architecture := model.get("architecture", GPT2.name)) != GPT2.name:
            raise ConfigError(f"{self.place} is a {architecture}: only samples of {GPT2.name} can be told one by one")
        check_contents(self.data, str(self.place))
        datasets = build_datasets(
            self.data,
            vocab_size=model["vocab_size"],
            global_batch_size=1,
            train_iters=samples,
            eval_interval=1,
            eval_iters=0,
            seed=self.train.seed,
        )
        assert datasets.train is not None
        return datasets.train


def open_case(load: Path, given: Mapping[str, Any]) -> Case:
    """The run whose newest checkpoint is in ``load``, with fields of DataConfig that say where its data are now.

    Raises:
        CheckpointError: it is no checkpoint of this suite.
    """
    saved = find(load).saved
    if saved is None:
        raise CheckpointError(f"--load {load}: no checkpoint of a training run; name one, or a folder of them")
    try:
        config = saved.description["config"]
        data, train = read_section(DataConfig, config["data"]), read_section(TrainConfig, config["train"])
    except (KeyError, TypeError):
        raise CheckpointError(f"{saved.folder / saved.tag} does not say what it has read") from None
    return Case(saved, replace(data, **given), train)


def read_section(section: type, saved: Mapping[str, Any]) -> Any:
    """A section of a RunConfig as ``run.json`` keeps it."""
    names = {field.name for field in fields(section)}
    values = {
        name: tuple(value) if isinstance(value, list) else value for name, value in saved.items() if name in names
    }
    if isinstance(values.get("data_path"), str):
        values["data_path"] = (values["data_path"],)
    return section(**values)


def check_contents(data: DataConfig, place: str) -> None:
    """Raises DataError where the data are missing, or have another content than ``data.data_hash``."""
    try:
        found = blend_hash(data.contents)
    except FileNotFoundError as error:
        raise DataError(
            f"{error.filename} is missing: say where the data of {place} are now, as --data-path did"
        ) from None
    if data.data_hash not in ("", found):
        raise DataError(f"{' '.join(data.prefixes)}: not the data that {place} has read, whose content was another")
