"""What preprocessing is asked for, and what it has done."""

from dataclasses import dataclass
from pathlib import Path

from megatron.data.corpus import format_of
from megatron.data.journal import Journal


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
