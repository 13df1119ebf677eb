"""Train a tokenizer on text: writes vocab.json and, for the BPE, merges.txt; for WordPiece vocab.txt."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import _project_root  # noqa: F401
from _atomic_file import write_texts

from megatron.common.errors import DataError, counted
from megatron.common.tokenizer_files import GPT2_BPE
from megatron.tokenizer.base import EOD, check_texts
from megatron.tokenizer.words import SEP
from megatron.tools.command_line import ToolParser, check_values, output_folder, progress_bar, run_tool
from megatron.tools.convert.vocabulary import CASED, LOWER_CASE, Vocabulary
from megatron.tools.preprocess.corpus import line_texts, read_chunks
from megatron.tools.preprocess.file_lines import format_of
from megatron.tools.preprocess.inputs import add_input_flags, expand_inputs, text_size
from megatron.tools.preprocess.tokenizer_training import train_gpt2_bpe, train_whitespace, train_wordpiece

CHUNK_BYTES = 1 << 20
KINDS = (GPT2_BPE, "WhitespaceTokenizer", LOWER_CASE, CASED)


def main() -> None:
    """Parse the flags, train, write, and print what was written."""
    args = parse_arguments()
    corpus = Corpus(args.input, args.input_format, args.json_keys)
    vocabulary = train(args.tokenizer_type, corpus, args.vocab_size, args.min_frequency)
    if not corpus.documents:
        raise DataError(
            f"{', '.join(map(str, args.input))}: no text to train on; name files with text, and its --json-keys"
        )
    write_texts({args.output_dir / name: text for name, text in vocabulary.files().items()}, "--output-dir")
    tokens = vocabulary.tokens
    too_few = f" (the text yields no more; {args.vocab_size} were requested)"
    short = "" if len(tokens) == args.vocab_size else too_few
    end = next(f"{token} = {tokens[token]}" for token in (EOD, SEP) if token in tokens)
    print(
        f"{args.output_dir}: {len(tokens)} tokens{short}, {end}, "
        f"from {counted(corpus.documents, 'document')}, {corpus.bytes / 1e6:.2f} MB"
    )


def parse_arguments() -> argparse.Namespace:
    """The command line, checked. Raises ConfigError, or DataError for absent inputs."""
    parser = ToolParser(__doc__)
    add = parser.add_argument
    add_input_flags(parser)
    add("--tokenizer-type", choices=KINDS, default=GPT2_BPE, help="kind of tokenizer")
    add("--vocab-size", type=int, required=True, metavar="N", help="size of the vocabulary, including special tokens")
    add("--min-frequency", type=int, default=2, metavar="N", help="minimum count of a pair or a word to become a token")
    add("--output-dir", type=output_folder, required=True, metavar="DIR", help="folder to write into")
    args = parser.parse_args()
    check_values(args, {"min_frequency": "[1, 1e9]", "vocab_size": "[1, 1e7]"})
    args.input = expand_inputs(args.input, args.input_format)
    return args


class Corpus:
    """The documents of some files, with progress on stderr; counts them in ``documents`` and ``bytes``.

    Iterating raises DataError, which names file and line, for a line that holds no document.
    """

    def __init__(self, paths: Sequence[Path], kind: str | None, keys: Sequence[str]):
        self.paths = paths
        self.kind = kind
        self.keys = keys
        self.documents = 0
        self.bytes = 0

    def __iter__(self) -> Iterator[str]:
        size = text_size(self.paths, self.kind)
        with progress_bar(total=size, unit="B", unit_scale=True, desc="reading", after=0) as progress:
            for path in self.paths:
                kind = self.kind or format_of(path)
                # Plain text is the same under every key.
                keys = self.keys[:1] if kind == "text" else self.keys
                for chunk in read_chunks(path, kind, keys, size=CHUNK_BYTES):
                    for number, line in enumerate(chunk.lines, start=chunk.first_line):
                        texts = [text for text in line_texts(path, self.kind, number, line, keys) if text]
                        check_texts(texts, f"{path}:{number}: ")
                        self.documents += len(texts)
                        yield from texts
                    self.bytes += chunk.size
                    progress.update(chunk.size)


def train(kind: str, corpus: Corpus, vocab_size: int, min_frequency: int) -> Vocabulary:
    """Train a tokenizer of ``kind``. Raises ConfigError if ``vocab_size`` is too small for it."""
    if kind == GPT2_BPE:
        # The library's progress bars also write empty lines to stdout.
        is_shown = sys.stderr.isatty()
        return Vocabulary(kind, *train_gpt2_bpe(corpus, vocab_size, min_frequency, show_progress=is_shown))
    if kind == "WhitespaceTokenizer":
        return Vocabulary(kind, train_whitespace(corpus, vocab_size, min_frequency))
    return Vocabulary(kind, train_wordpiece(corpus, vocab_size, min_frequency, lower_case=kind == LOWER_CASE))


if __name__ == "__main__":
    run_tool(main)
