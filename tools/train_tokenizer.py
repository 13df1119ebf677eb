"""Train a tokenizer on text: writes vocab.json and, for the BPE, merges.txt."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import _project_root  # noqa: F401
from _atomic_file import atomic_file
from tqdm import tqdm

from megatron.cli import ToolParser, run_tool
from megatron.data.corpus import FORMATS, format_of, read_chunks, text_size
from megatron.errors import ConfigError, DataError
from megatron.tokenizer import TOKENIZERS
from megatron.tokenizer.training import train_gpt2_bpe, train_whitespace
from megatron.tokenizer.vocabulary import EOD

CHUNK_BYTES = 1 << 20


def main() -> None:
    """Read the flags, train, write, say what was made."""
    args = parse_arguments()
    corpus = Corpus(args.input, args.input_format, args.json_keys)
    if args.tokenizer_type == "GPT2BPETokenizer":
        # The library's bars are for eyes only: beside them it writes empty lines to stdout.
        bars = sys.stderr.isatty()
        vocabulary, merges = train_gpt2_bpe(corpus, args.vocab_size, args.min_frequency, show_progress=bars)
    else:
        vocabulary, merges = train_whitespace(corpus, args.vocab_size, args.min_frequency), None
    if not corpus.documents:
        raise DataError(f"{', '.join(map(str, args.input))}: no text to train on")
    write(args.output_dir, vocabulary, merges)
    short = "" if len(vocabulary) == args.vocab_size else f" (the text makes no more; {args.vocab_size} were asked for)"
    print(
        f"{args.output_dir}: {len(vocabulary)} tokens{short}, {EOD} = {vocabulary[EOD]}, "
        f"from {corpus.documents:,} documents, {corpus.bytes / 1e6:.2f} MB"
    )


def parse_arguments() -> argparse.Namespace:
    """The command line, checked. Raises ConfigError, or DataError for absent inputs."""
    parser = ToolParser(__doc__)
    add = parser.add_argument
    add("--input", type=Path, nargs="+", required=True, metavar="FILE", help="JSONL, a document a line, or Parquet")
    add("--input-format", choices=tuple(FORMATS), help="format of all inputs (default: by the name)")
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys of JSON objects, or columns, to read")
    add("--tokenizer-type", choices=tuple(TOKENIZERS), default="GPT2BPETokenizer", help="kind of tokenizer")
    add("--vocab-size", type=int, required=True, metavar="N", help=f"tokens to make, {EOD} counted in")
    add("--min-frequency", type=int, default=2, metavar="N", help="times a pair or a word is seen to become a token")
    add("--output-dir", type=Path, required=True, metavar="DIR", help="folder to write into")
    args = parser.parse_args()
    if args.min_frequency < 1:
        raise ConfigError(f"--min-frequency {args.min_frequency} must be 1 or more")
    if missing := [f"--input {path}: no such file" for path in args.input if not path.is_file()]:
        raise DataError(missing)
    return args


class Corpus:
    """The documents of some files, one after the other, with a progress bar on stderr.

    Iterating raises DataError, which names file and line, for a line that holds no document. What
    was read is then counted in ``documents`` and ``bytes``.
    """

    def __init__(self, paths: Sequence[Path], kind: str | None, keys: Sequence[str]):
        self.paths = paths
        self.kind = kind
        self.keys = keys
        self.documents = 0
        self.bytes = 0

    def __iter__(self) -> Iterator[str]:
        with tqdm(total=text_size(self.paths, self.kind), unit="B", unit_scale=True, desc="reading") as progress:
            for path in self.paths:
                kind = self.kind or format_of(path)
                # Plain text is the same under every key.
                keys = self.keys[:1] if kind == "text" else self.keys
                for chunk in read_chunks(path, kind, keys, size=CHUNK_BYTES):
                    for number, line in enumerate(chunk.lines, start=chunk.first_line):
                        texts = [text for text in FORMATS[kind].texts(f"{path}:{number}", line, keys) if text]
                        self.documents += len(texts)
                        yield from texts
                    self.bytes += chunk.size
                    progress.update(chunk.size)


def write(folder: Path, vocabulary: dict[str, int], merges: list[tuple[str, str]] | None) -> None:
    """Write the files, each whole or not at all. Raises ConfigError or ResourceError if they cannot be written."""
    with ExitStack() as files:
        vocab_file = files.enter_context(atomic_file(folder / "vocab.json", "--output-dir"))
        vocab_file.write(json.dumps(vocabulary, ensure_ascii=False) + "\n")
        if merges is not None:
            merge_file = files.enter_context(atomic_file(folder / "merges.txt", "--output-dir"))
            merge_file.write("#version: 0.2\n")
            merge_file.writelines(f"{left} {right}\n" for left, right in merges)


if __name__ == "__main__":
    run_tool(main)
