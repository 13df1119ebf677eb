"""What preprocessing is asked for, and what it has done."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.config.errors import DataError
from megatron.launch.files import replace_file
from megatron.tools.preprocess.corpus import format_of
from megatron.tools.preprocess.indexed_dataset_builder import Written


@dataclass(frozen=True)
class Milestone:
    """A place up to which all is on the disk."""

    place: tuple[int, int]
    """Inputs that are finished, and chunks of the next one that are."""
    outputs: Mapping[str, Written]
    """How much there is of each key's data set."""
    counts: Mapping[str, Any]
    """The summary so far."""


class Journal:
    """The file beside the output that holds the newest milestone.

    Args:
        job: what the output depends on; a job that differs does not go on from here.
    """

    def __init__(self, path: Path, job: Mapping[str, Any]) -> None:
        self.path = path
        self._job = json.loads(json.dumps(job))  # as it will be read

    def read(self) -> Milestone | None:
        """The newest milestone, or None where there is none. Raises DataError where it is another job's, or broken."""
        try:
            content = json.loads(self.path.read_bytes())
            job, place = content["job"], content["milestone"]
            outputs = {key: Written(*written) for key, written in place["outputs"].items()}
            milestone = Milestone(tuple(place["place"]), outputs, place["counts"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise DataError(f"{self.path} is no journal: run without --resume to begin anew") from None
        if changed := [name for name in self._job if job.get(name) != self._job[name]]:
            raise DataError(
                f"{self.path} is of a job with another {' and '.join(changed)}: give what it was begun with, or run "
                "without --resume to begin anew"
            )
        return milestone

    def write(self, milestone: Milestone) -> None:
        """Replace the milestone by a newer one, whose output is on the disk."""
        content = {"job": self._job, "milestone": vars(milestone)}
        with replace_file(self.path, text=True) as file:
            json.dump(content, file)

    def remove(self) -> None:
        """There is nothing to go on from any more."""
        self.path.unlink(missing_ok=True)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to make of which files."""

    inputs: tuple[Path, ...]
    output_prefix: str
    input_format: str | None = None
    """One of ``FORMATS``; None goes by each file's name."""
    json_keys: tuple[str, ...] = ("text",)
    tokenizer_type: str = "GPT2BPETokenizer"
    vocab_file: str | None = None
    merge_file: str | None = None
    append_eod: bool = False
    split_sentences: bool = False
    """Whether each sentence of a document is a sequence of its own, as BERT's samples need it."""
    workers: int = 1
    skip_errors: bool = False
    chunk_bytes: int = 1 << 18
    """Text that is tokenized at a time."""

    @property
    def prefixes(self) -> dict[str, str]:
        """The prefix of each key's data set."""
        kind = "sentence" if self.split_sentences else "document"
        return {key: f"{self.output_prefix}_{key}_{kind}" for key in self.json_keys}

    def format_of(self, path: Path) -> str:
        """The format of an input."""
        return self.input_format or format_of(path)

    @property
    def journal(self) -> Journal:
        """Where it is kept how far the job has come, with all that its output depends on."""
        job = {
            "--input": [_version(path) for path in self.inputs],
            "--input-format": [self.format_of(path) for path in self.inputs],
            "--json-keys": self.json_keys,
            "--tokenizer-type": self.tokenizer_type,
            "--vocab-file": self.vocab_file and _version(Path(self.vocab_file)),
            "--merge-file": self.merge_file and _version(Path(self.merge_file)),
            "--append-eod": self.append_eod,
            "--split-sentences": self.split_sentences,
            "size of a chunk": self.chunk_bytes,
        }
        return Journal(Path(f"{self.output_prefix}.progress"), job)


@dataclass
class Summary:
    """What was read and written."""

    documents: int = 0
    tokens: int = 0
    input_bytes: int = 0
    """Bytes of text."""
    output_bytes: int = 0
    """Bytes of tokens."""
    blank: int = 0
    """Lines between the documents of plain text."""
    empty: int = 0
    bad_lines: int = 0
    resumed_at: int = 0
    """Documents that were there before."""
    finished: bool = False


def _version(path: Path) -> list:
    """What tells a file from another, or from itself before it was changed."""
    stat = path.stat()
    return [str(path.absolute()), stat.st_size, stat.st_mtime_ns]
