"""Planning requests: arguments of an entry script, completed with defaults, and the machine."""

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.cli.flags import read_flags
from megatron.cli.presets import PRESETS, preset_arguments
from megatron.cli.provided import Provided
from megatron.cli.resolve import resolve_run
from megatron.cli.validation import RULES, value_problems
from megatron.cli.validation.rules import EXCLUDES
from megatron.common.errors import ConfigError, DataError
from megatron.common.tokenizer_files import HUGGINGFACE, NULL_TOKENIZER, PUBLISHED, tokenizer_files, tokenizer_kind
from megatron.config import flag_fields
from megatron.config.data import DEFAULT_VOCABULARY
from megatron.config.fields import flag_name
from megatron.model.architectures import GPT2
from megatron.model.spec import ArchitectureSpec
from megatron.tools.planning.machine import Machine

_NOT_FOR_PLANNER = {
    "world_size": "say --devices",
    "explain": "use it with the planned command",
    "dry_run": "use it with the planned command",
    "rank": "use it with the planned command",
    "local_rank": "remove it",
    "deepspeed_config": "it writes this file: give the settings as flags",
}
_LR = 1.5e-4
_PLACEHOLDERS = {"lr": _LR, "vocab_file": "vocab/vocab.json", "merge_file": "vocab/merges.txt"}
"""Default values of required flags that do not affect the layout; files that a user may have are not read."""
_TOKENIZER = "tokenizer"
"""Default of --tokenizer-model for a tokenizer that is read from a folder."""
_SCHEDULE = {"lr_decay_style": "cosine", "save": "checkpoints/my", "save_interval": 1000}
"""Default flags for a real training run: without them it would not decay the learning rate, and save nothing."""


@dataclass(frozen=True)
class Request:
    """A model, a batch, a machine, and the given parts of the layout."""

    given: Mapping[str, Provided]
    machine: Machine
    devices: int
    vocab_size: int
    headroom: float
    """Share of the memory reserved for the driver, kernels and fragmentation."""
    tokens: float
    architecture: ArchitectureSpec = GPT2
    program: str = GPT2.program
    """The entry script, as the user named it."""

    @property
    def environ(self) -> dict[str, str]:
        """The environment variables of the planned run."""
        return {"DS_ACCELERATOR": self.machine.device.accelerator, "WORLD_SIZE": str(self.devices)}

    @property
    def room(self) -> float:
        """Bytes that a rank may use."""
        return self.machine.device.memory * (1 - self.headroom)


def make_request(
    argv: Sequence[str],
    machine: Machine,
    devices: int,
    *,
    model: str | None = None,
    precision: str = "bf16",
    vocab_size: int | None = None,
    headroom: float = 0.06,
    tokens: float = 300e9,
    architecture: ArchitectureSpec = GPT2,
    program: str = GPT2.program,
) -> Request:
    """The planning request for ``argv``, arguments of ``program``, which trains ``architecture``.

    A ``model`` of PRESETS fills in missing flags. ``vocab_size`` is used without a vocabulary file.

    Raises:
        ConfigError: with a line for each problem.
        DataError: the vocabulary file exists, and is damaged.
    """
    given, problems, _ = read_flags(argv, architecture)
    problems += _not_for_planner(given)
    if not {"global_batch_size", "step_batch_size_schedule"} & given.keys():
        problems.append("--global-batch-size is required")
    is_limited = {"train_iters", "train_samples"} & given.keys()
    has_vocabulary = {"vocab_file", "tokenizer_model"} & given.keys()
    without_defaults = replace(architecture, defaults=())  # a given flag may have turned one of them off
    filled, _, _ = read_flags(_fillers(given, tokens, model, architecture), without_defaults)
    given = {**filled, **given}
    kind = tokenizer_kind(_value(given, "tokenizer_type"), _value(given, "tokenizer_model"))
    if kind in (NULL_TOKENIZER, *PUBLISHED) and vocab_size:
        given["vocab_size"] = Provided(vocab_size, f"--vocab-size {vocab_size}")
    if not (_value(given, "bf16") or _value(given, "fp16")) and precision != "fp32":
        given[precision] = Provided(True, f"--{precision}")
    _raise(problems + value_problems(given, architecture))
    default = PRESETS[model].vocab_size if model else DEFAULT_VOCABULARY[architecture.masked_lm is not False]
    size = (has_vocabulary and _vocabulary_size(given)) or vocab_size or default
    if is_limited and (samples := _value(given, "train_samples") or _samples(given)):
        tokens = samples * _value(given, "seq_length")
    request = Request(given, machine, devices, size, headroom, tokens, architecture, program)
    _raise(_contradictions(request))
    return request


def _raise(problems: list[str]) -> None:
    if problems:
        raise ConfigError(problems)


def _not_for_planner(given: Mapping[str, Provided]) -> list[str]:
    """A message for each given flag that the planner sets, or has no use for."""
    return [
        f"{given[name].source} is not for the planner: {word}"
        for name, word in _NOT_FOR_PLANNER.items()
        if name in given
    ]


def _contradictions(request: Request) -> list[str]:
    """Messages for given flags that exclude each other in every layout."""
    run, _ = resolve_run(request.given, request.environ, request.architecture)
    rules = (rule for rule in RULES if rule.kind == EXCLUDES and rule.fields <= request.given.keys())
    return [message for rule in rules if (message := rule.check(run)) is not None]


def _samples(given: Mapping[str, Provided]) -> int:
    """Samples of --train-iters iterations; 0 if the global batch size varies."""
    varies = {"rampup_batch_size", "step_batch_size_schedule"} & given.keys()
    return 0 if varies else _value(given, "train_iters") * _value(given, "global_batch_size")


def _fillers(
    given: Mapping[str, Provided], tokens: float, model: str | None, architecture: ArchitectureSpec
) -> list[str]:
    """The arguments of ``model``, and placeholders for required arguments that do not affect the layout."""
    is_mock = "mock_data" in given and not {"vocab_file", "tokenizer_model"} & given.keys()
    folder, vocabulary = _value(given, "tokenizer_model"), _value(given, "vocab_file")
    is_published = model and PRESETS[model].vocab_size not in DEFAULT_VOCABULARY.values()
    default = NULL_TOKENIZER if is_mock else HUGGINGFACE if is_published and not (vocabulary or folder) else None
    chosen = given["tokenizer_type"].value if "tokenizer_type" in given else default
    tokenizer = tokenizer_kind(chosen, folder, architecture.tokenizers[0])
    values: dict[str, object] = {**_PLACEHOLDERS, **_SCHEDULE, "tokenizer_type": tokenizer}
    values["data_path"] = f"data/my_{_samples_of(architecture)}"
    if tokenizer.startswith("BertWordPiece"):
        values["vocab_file"] = "vocab/vocab.txt"
    values["min_lr"] = f"{(given['lr'].value if 'lr' in given else _LR) / 10:g}"
    if not {"lr_warmup_fraction", "lr_warmup_iters", "lr_warmup_samples"} & given.keys():
        values["lr_warmup_fraction"] = 0.01
    if not {"load", "finetune"} & given.keys():
        values["auto_resume"] = True
    if {"train_data_path", "mock_data"} & given.keys():
        del values["data_path"]
    if tokenizer != "GPT2BPETokenizer" or folder or tokenizer_files(tokenizer, vocabulary, None, None)[1]:
        del values["merge_file"]
    if tokenizer in (NULL_TOKENIZER, *PUBLISHED) or folder:
        del values["vocab_file"]
    if tokenizer in PUBLISHED and not folder and not vocabulary:
        values["tokenizer_model"] = _TOKENIZER
    if not {"train_iters", "train_samples"} & given.keys():
        s = given["seq_length"].value if "seq_length" in given else PRESETS[model].flags["seq_length"] if model else 1
        varies = {"rampup_batch_size", "step_batch_size_schedule"} & given.keys()
        size = given["global_batch_size"].value if "global_batch_size" in given and not varies else 1
        values["train_samples" if varies else "train_iters"] = max(round(tokens / (size * s)), 1) if size * s > 0 else 1
    placeholders = [
        argument
        for name, value in values.items()
        for argument in (flag_name(flag_fields()[name]), *(() if value is True else (str(value),)))
    ]
    return [*(preset_arguments(model) if model else ()), *placeholders]


def _samples_of(architecture: ArchitectureSpec) -> str:
    """The end of the name of a data set for ``architecture``, as preprocessing writes it."""
    if architecture.reads_images:
        return "images_document"
    return "text_sentence" if architecture.masked_lm else "text_document"


def _vocabulary_size(given: Mapping[str, Provided]) -> int | None:
    """The size of the vocabulary in the vocabulary file; None if it does not exist."""
    names = ("vocab_file", "merge_file", "tokenizer_model")
    files = [_value(given, name) for name in names]
    kind = tokenizer_kind(_value(given, "tokenizer_type"), files[-1])
    file, merges = tokenizer_files(kind, *files)
    rows, eod = _value(given, "vocab_size"), _value(given, "eod_text")
    try:
        if not file or not Path(file).is_file():
            return None
        from megatron.tokenizer import build_tokenizer  # imported here: it imports numpy, which is slow

        extra = _value(given, "vocab_extra_ids") if "decoder_seq_length" in given else 0
        return build_tokenizer(kind, file, merges, rows, eod, extra).vocab_size
    except OSError as error:
        raise DataError(f"{error.filename}: {error.strerror}") from None


def _value(given: Mapping[str, Provided], name: str) -> Any:
    """The value of a field in ``given``, or its default."""
    return given[name].value if name in given else flag_fields()[name].default


def as_flag(name: str, value: object) -> Provided:
    """A value for a field, as if its flag had been given."""
    flag = flag_name(flag_fields()[name])
    return Provided(value, flag if value is True else f"{flag} {value}")


def arguments_of(given: Mapping[str, Provided]) -> list[str]:
    """The command-line arguments for these values."""
    return [argument for value in given.values() for argument in value.arguments]


_UNITS = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_BYTES = re.compile(r"([0-9]+\.?[0-9]*(?:e\+?[0-9]+)?) *([KMGT]I?B)", re.IGNORECASE | re.ASCII)


def bytes_of_text(text: str) -> float:
    """Parse a number of bytes with a unit, such as 80GB or 141 GiB."""
    match = _BYTES.fullmatch(text.strip())
    if match is None or not 0 < float(match[1]) < 1e18:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: write one such as 80GB or 75GiB")
    return float(match[1]) * _UNITS[match[2].upper()]
