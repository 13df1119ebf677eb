"""A preprocessing job: its settings, its summary, and the journal from which it resumes."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron.common.errors import DataError
from megatron.common.files import replace_file
from megatron.common.reading import read_json
from megatron.common.tokenizer_files import HUGGINGFACE
from megatron.config.data import loss_mask_prefix
from megatron.config.vision import STRETCH
from megatron.data.indexed_dataset_builder import Written, best_dtype
from megatron.tokenizer.published import CONFIG_FILES
from megatron.tools.chat.files import other_templates
from megatron.tools.preprocess.file_lines import format_of

TOKENS, LOSS_MASK = "tokens", "loss mask"
"""Names of the two data sets that conversations are written to, instead of one for each key."""


@dataclass
class Summary:
    """Numbers of documents, tokens, bytes and errors of a job."""

    documents: int = 0
    tokens: int = 0
    input_bytes: int = 0
    """Bytes of text."""
    output_bytes: int = 0
    """Bytes of tokens."""
    blank: int = 0
    """Blank lines in plain text."""
    empty: int = 0
    bad_lines: int = 0
    unknown: int = 0
    """Words that are not in the vocabulary."""
    counted: int = 0
    """Tokens of conversations that count in the loss."""
    images: int = 0
    resumed_at: int = 0
    """Documents written before the job was resumed."""
    finished: bool = False


class Milestone(NamedTuple):
    """A position in the input up to which all output is on disk."""

    position: tuple[int, int]
    """Finished inputs, and finished chunks of the next one."""
    outputs: Mapping[str, Written]
    """Size of each key's data set."""
    summary: Summary


class Journal:
    """The file next to the output that records the newest milestone.

    Args:
        job: all settings that the output depends on; a job with other settings cannot resume from this journal.
    """

    def __init__(self, path: Path, job: Mapping[str, Any]) -> None:
        self.path = path
        self._job = json.loads(json.dumps(job))  # with lists instead of tuples, as JSON is read back

    def read(self) -> Milestone | None:
        """The newest milestone, or None without a journal. Raises DataError if it is broken or of another job."""
        try:
            content = read_json(self.path)
            job, saved = dict(content["job"]), content["milestone"]
            outputs = {key: Written(*written) for key, written in saved["outputs"].items()}
            (inputs, chunks), summary = saved["place"], Summary(**saved["counts"])
            numbers = [inputs, chunks, *chain.from_iterable(outputs.values()), *vars(summary).values()]
            are_bools = [type(number) is bool for number in numbers]
            if not all(isinstance(number, int) and number >= 0 for number in numbers) or any(are_bools[:-1]):
                raise ValueError(numbers)  # the last one is whether the job has finished
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise DataError(f"{self.path} is not a journal: run without --resume to start over") from None
        if changed := [name for name in self._job if job.get(name) != self._job[name]]:
            raise DataError(
                f"{self.path} is of a job with another {' and '.join(changed)}: use the same settings, or run "
                "without --resume to start over"
            )
        return Milestone((inputs, chunks), outputs, summary)

    def write(self, milestone: Milestone) -> None:
        """Record a newer milestone, whose output must be on disk."""
        saved = {"place": milestone.position, "outputs": milestone.outputs, "counts": vars(milestone.summary)}
        with replace_file(self.path, text=True) as file:
            json.dump({"job": self._job, "milestone": saved}, file)

    def remove(self) -> None:
        """Remove the journal, so that the job cannot be resumed."""
        self.path.unlink(missing_ok=True)


class ImageSettings(NamedTuple):
    """Folder and size of images, and their placeholders in the text."""

    folder: Path
    size: int
    """Height and width in pixels."""
    tokens: int
    """Number of placeholders of each image."""
    token: int
    """Id of the placeholder."""
    fit: str = STRETCH
    """See ``VisionConfig.image_fit``."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """The settings of a preprocessing job."""

    inputs: tuple[Path, ...]
    output_prefix: str
    input_format: str | None = None
    """One of ``FORMATS``; None means ``format_of`` each file."""
    json_keys: tuple[str, ...] = ("text",)
    tokenizer_type: str = "GPT2BPETokenizer"
    vocab_file: str | None = None
    merge_file: str | None = None
    eod_token: str | None = None
    """The end-of-document token, instead of the token that the tokenizer's files name."""
    prepend_bos: bool = False
    append_eod: bool = False
    split_sentences: bool = False
    """Whether each sentence of a document becomes a sequence, as BERT and T5 require."""
    keep_newlines: bool = False
    """Whether a sentence includes the white space after it."""
    conversations: str | None = None
    """One of ``tokenize_chunk.KEYS``, or images: documents get a loss mask, and ``json_keys`` is not used."""
    chat_template: str | None = None
    """File of the chat template that renders messages as text."""
    images: ImageSettings | None = None
    """Settings for conversations with images."""
    workers: int = 1
    skip_errors: bool = False
    chunk_bytes: int = 1 << 18
    """Bytes of text that are tokenized at a time."""

    @property
    def prefixes(self) -> dict[str, str]:
        """The prefix of each key's data set."""
        kind = "sentence" if self.split_sentences else "document"
        if self.conversations is not None:
            prefix = f"{self.output_prefix}_{self.conversations}_{kind}"
            return {TOKENS: prefix, LOSS_MASK: loss_mask_prefix(prefix)}
        return {key: f"{self.output_prefix}_{key}_{kind}" for key in self.json_keys}

    def format_of(self, path: Path) -> str:
        """The format of an input."""
        return self.input_format or format_of(path)

    def dtype_of(self, key: str, vocab_size: int) -> np.dtype:
        """The type of the numbers in the data set of ``key``."""
        largest = max(vocab_size, self.images.token + 1 if self.images else 0)
        return np.dtype(np.uint8) if key == LOSS_MASK else best_dtype(largest)

    @property
    def journal(self) -> Journal:
        """The journal of the job, with all settings that its output depends on."""
        config_files: list[Path] = []  # files that name the special tokens of a tokenizer
        if self.tokenizer_type == HUGGINGFACE and self.vocab_file is not None:
            config_files = [path for name in CONFIG_FILES if (path := Path(self.vocab_file).parent / name).is_file()]
        job = {
            "--input": [_version(path) for path in self.inputs],
            "--input-format": [self.format_of(path) for path in self.inputs],
            "--json-keys": self.json_keys,
            "--tokenizer-type": self.tokenizer_type,
            "--vocab-file": _version(self.vocab_file),
            "--merge-file": _version(self.merge_file),
            "files next to the tokenizer": [_version(path) for path in config_files] or None,
            "--eod-token": self.eod_token,
            "--prepend-bos": self.prepend_bos or None,
            "--append-eod": self.append_eod,
            "--split-sentences": self.split_sentences,
            "--keep-newlines": self.keep_newlines,
            "--format": self.conversations,
            "--chat-template": _version(self.chat_template),
            "files of other chat templates": [_version(path) for path in other_templates(self.chat_template)] or None,
            "size of a chunk": self.chunk_bytes,
        }
        return Journal(Path(f"{self.output_prefix}.progress"), job)


def _version(path: Path | str | None) -> list[str | int] | None:
    """Path, size and modification time of a file, to detect that its content has changed."""
    if path is None:
        return None
    stat = Path(path).stat()
    return [str(Path(path).absolute()), stat.st_size, stat.st_mtime_ns]
