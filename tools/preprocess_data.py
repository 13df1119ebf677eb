"""Tokenize text, or conversations with images, into indexed data sets: --data-path of the training programs.

Writes PREFIX_KEY_document.bin and .idx for each key, or with --split-sentences, for BERT and T5, PREFIX_KEY_sentence.
Inputs are JSONL or plain text, as they are or compressed by gzip, bzip2 or Zstandard, or Parquet or Arrow.

With --format images, for pretrain_vlm.py, they are LLaVA's JSON, a list of {"image": PATH, "conversations": [{"from":
"human", "value": "<image>\\nWhat is this?"}, {"from": "gpt", ...}]}; JSONL with such an object or OpenAI's {"messages":
[...]} on each line; WebDataset's .tar files, in which such an object is KEY.json and its images are KEY.jpg, KEY.1.jpg
...; Parquet with columns of these names, whose images are bytes; or a multimodal data set of Megatron-LM, PREFIX.idx,
whose images are put before their texts, of which all tokens count. Data URLs (data:image/png;base64,...) are images,
too. The pixels are written next to the tokens.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import _project_root  # noqa: F401
from tqdm import tqdm

from megatron.common.errors import ConfigError, counted
from megatron.common.tokenizer_files import (
    GPT2_BPE,
    NULL_TOKENIZER,
    PUBLISHED,
    TOKENIZER_TYPES,
    check_tokenizer_folder,
    other_words,
    tokenizer_files,
    tokenizer_kind,
    unused_merges,
    used_merges,
)
from megatron.launch.rank import print_warning
from megatron.tools.chat.files import find_chat_template
from megatron.tools.command_line import ToolParser, progress_bar, run_tool
from megatron.tools.preprocess.file_lines import format_of
from megatron.tools.preprocess.inputs import (
    IMAGES,
    add_image_flags,
    add_input_flags,
    check_placeholder,
    expand_inputs,
    image_rules,
    image_settings,
    text_size,
)
from megatron.tools.preprocess.job import Job, Summary
from megatron.tools.preprocess.preprocess import check_output, preprocess
from megatron.tools.preprocess.tokenize_chunk import KEYS, tokenizer_of

MOST_WORKERS = max(256, 4 * (os.cpu_count() or 1))
"""Beyond a few for each core, more workers only take memory."""


def main() -> None:
    """Parse the flags, tokenize, and print what was written."""
    args = parse_arguments()
    # Each of --workers is one process on one core, unless the environment wants otherwise.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    kind = tokenizer_kind(args.tokenizer_type, args.tokenizer_model)
    check_tokenizer_folder(kind, args.tokenizer_model)
    vocab_file, merge_file = tokenizer_files(kind, args.vocab_file, args.merge_file, args.tokenizer_model)
    folder = Path(vocab_file or ".").parent
    needs_template, what = args.format in _WITH_TEMPLATE, f"--format {args.format}"
    template = find_chat_template(args.chat_template, folder, what) if needs_template else None
    job = Job(
        inputs=tuple(args.input),
        output_prefix=args.output_prefix,
        input_format=args.input_format,
        json_keys=tuple(dict.fromkeys(args.json_keys)),
        tokenizer_type=kind,
        vocab_file=vocab_file,
        merge_file=used_merges(kind, merge_file),
        eod_token=args.eod_token,
        prepend_bos=args.prepend_bos,
        append_eod=args.append_eod,
        split_sentences=args.split_sentences,
        keep_newlines=args.keep_newlines,
        conversations=None if args.format == "text" else args.format,
        chat_template=template,
        images=image_settings(args),
        workers=args.workers,
        skip_errors=args.on_error == "skip",
    )
    for warning in (*unused_merges(kind, args.merge_file), *other_words(kind, vocab_file)):
        print_warning(warning)
    tokenizer = tokenizer_of(job)
    if job.images is not None:
        check_placeholder(job.images.token, tokenizer.vocab_size, kind, args.tokenizer_model)
    if getattr(tokenizer, "has_dropout", False):
        print_warning(f"{vocab_file} asks for BPE dropout, by which a text has other tokens each time: switched off")
    check_output(job)
    with progress_of(job, args.log_interval) as report:
        summary = preprocess(job, report, log_skipped, resume=args.resume)
    print(describe(job, summary))


_WITHOUT_EFFECT = {
    "--vocab-extra-ids": "sentinels are in no data set: pretrain_t5.py adds them",
    "--chunk-size": "each worker takes 256 KiB of text at a time",
    "--partitions": "the input is not divided into files: use --workers",
    "--lang": "sentences are found by rules that do not depend on the language",
}
"""Flags of Megatron-LM's program of this name that have no effect here, and why."""


def parse_arguments() -> argparse.Namespace:
    """The command line, checked. Raises ConfigError, or DataError for absent inputs."""
    parser = ToolParser(__doc__)
    add = parser.add_argument
    add_input_flags(parser)
    add("--on-error", choices=("stop", "skip"), default="stop", help="on a bad line, stop, or log and skip it")
    add("--resume", action="store_true", help="continue the same job where it was interrupted")
    _add_tokenizer_flags(parser)
    add_image_flags(parser)
    add("--append-eod", action="store_true", help="end each document with the token that ends one")
    add(
        "--eod-token",
        metavar="TEXT",
        help=f"this token, of {' and '.join(PUBLISHED)} (default: the eos_token that the files name)",
    )
    add("--prepend-bos", action="store_true", help="begin each document with the tokenizer's bos_token")
    add("--split-sentences", action="store_true", help="make each sentence a sequence, as BERT and T5 need it")
    add(
        "--keep-newlines",
        action="store_true",
        help="with --split-sentences, keep the line breaks between sentences; in full documents they are always kept",
    )
    add("--output-prefix", required=True, metavar="PREFIX", help="where to write: folder and first part of the names")
    add("--dataset-impl", default="mmap", choices=("mmap", "lazy", "cached"), help="the format written is always mmap")
    add("--workers", type=int, default=1, metavar="N", help="processes that tokenize")
    add("--log-interval", type=int, default=100, metavar="N", help="documents between updates of the progress")
    group = parser.add_argument_group("flags of Megatron-LM without effect, accepted with a warning")
    for name, reason in _WITHOUT_EFFECT.items():
        group.add_argument(name, metavar="VALUE", help=reason)
    args = parser.parse_args()
    if errors := [message for broken, message in _rules(args) if broken]:
        raise ConfigError(errors)
    if args.format == IMAGES:
        args.input_format = IMAGES
    args.input = expand_inputs(args.input, args.input_format)
    if args.dataset_impl != "mmap":
        print_warning(f"--dataset-impl {args.dataset_impl} has no effect: the data set is written to be memory-mapped")
    for name, reason in _WITHOUT_EFFECT.items():
        if (value := getattr(args, name.removeprefix("--").replace("-", "_"))) is not None:
            print_warning(f"{name} {value} has no effect: {reason}")
    return args


def _add_tokenizer_flags(parser: ToolParser) -> None:
    add = parser.add_argument
    add(
        "--tokenizer-type",
        type=_with_files,
        choices=TOKENIZER_TYPES,
        help=f"kind of tokenizer (default: what --tokenizer-model holds, or {GPT2_BPE})",
    )
    add("--vocab-file", "--vocab", metavar="FILE", help="vocabulary (vocab.json; vocab.txt of WordPiece)")
    add("--merge-file", metavar="FILE", help="merges of the BPE (default: merges.txt in the folder of --vocab-file)")
    add(
        "--tokenizer-model",
        "--tokenizer-name-or-path",
        metavar="PATH",
        help="folder with these files, instead of the two flags, or with a tokenizer.json or tokenizer.model; or one "
        "of the last two files",
    )
    add(
        "--format",
        choices=("text", *KEYS, IMAGES),
        default="text",
        help="what a line's JSON object holds: text; or, for --sft, a list of messages, each with role and content, or "
        "a prompt and a completion; or a conversation with images. These write a second data set, PREFIX_loss_mask "
        "(default: text)",
    )
    add(
        "--chat-template",
        metavar="FILE",
        help="template of Jinja that writes messages as text (default: chat_template.jinja, or tokenizer_config.json, "
        "in the folder of the vocabulary)",
    )


def _with_files(kind: str) -> str:
    """An argparse type: a kind of tokenizer. Raises ArgumentTypeError for the one without files."""
    if kind == NULL_TOKENIZER:
        raise argparse.ArgumentTypeError(f"{kind} reads no text: give the type of the model's tokenizer, and its files")
    return kind


_WITH_TEMPLATE = ("messages", IMAGES)
"""Values of --format whose messages a chat template writes as text."""


def _rules(args: argparse.Namespace) -> list[tuple[bool, str]]:
    """Rules: whether each is broken, and the message."""
    kind = tokenizer_kind(args.tokenizer_type, args.tokenizer_model)
    return [
        *image_rules(args),
        (any("/" in key for key in args.json_keys), "--json-keys: a key with / cannot be part of the name of a file"),
        (
            args.split_sentences and args.append_eod and kind.startswith("BertWordPiece"),
            "--append-eod and --split-sentences exclude each other: BERT's samples end with [SEP]",
        ),
        (
            args.tokenizer_model is not None and (args.vocab_file or args.merge_file) is not None,
            f"--tokenizer-model {args.tokenizer_model} and --vocab-file or --merge-file exclude each other: give one",
        ),
        (
            args.chat_template is not None and args.format not in _WITH_TEMPLATE,
            f"--chat-template {args.chat_template} has no effect without --format messages: add it, or remove the flag",
        ),
        (
            args.format != "text" and (args.split_sentences or kind.startswith("BertWordPiece")),
            f"--format {args.format} is for GPT-2's models: remove --split-sentences, and give their --tokenizer-type",
        ),
        (
            args.format in KEYS and any((args.input_format or format_of(path)) != "jsonl" for path in args.input),
            f"--format {args.format} reads JSONL: give such files, or --input-format jsonl",
        ),
        (
            args.prepend_bos and args.format != "text",
            f"--prepend-bos has no effect with --format {args.format}: write the bos_token into the data",
        ),
        (
            args.eod_token is not None and kind not in PUBLISHED,
            f"--eod-token {args.eod_token} has no effect with {kind}: remove it",
        ),
        (not 1 <= args.workers <= MOST_WORKERS, f"--workers {args.workers} must be from 1 to {MOST_WORKERS}"),
        (args.log_interval < 1, f"--log-interval {args.log_interval} must be 1 or more"),
    ]


@contextmanager
def progress_of(job: Job, interval: int) -> Iterator[Callable[[Summary], None]]:
    """Progress on stderr with MB/s and documents/s; the function it yields updates it, every ``interval`` documents."""
    shown = 0

    def report(summary: Summary) -> None:
        nonlocal shown
        if summary.finished or summary.documents >= shown + interval:
            shown = summary.documents
            rate = (shown - summary.resumed_at) / max(bar.format_dict["elapsed"], 1e-9)
            bar.set_postfix_str(f"{shown:,} documents, {rate:,.0f} documents/s", refresh=False)
            bar.update(summary.input_bytes - bar.n)

    with progress_bar(total=text_size(job.inputs, job.input_format), unit="B", unit_scale=True, after=0) as bar:
        try:
            yield report
        except Exception:
            # Outside of a terminal an error before any progress is a line of its own.
            bar.disable = bar.disable or not (bar.n or sys.stderr.isatty())
            raise


def log_skipped(error: str) -> None:
    """Print the error of a line that is skipped, above the bar."""
    tqdm.write(f"> skipped {error}", file=sys.stderr)


def describe(job: Job, summary: Summary) -> str:
    """The summary in one line."""
    files = ", ".join(f"{prefix}.bin and .idx" for prefix in job.prefixes.values())
    line = (
        f"{files}: {counted(summary.documents, 'document')}, {counted(summary.tokens, 'token')}, "
        f"{summary.output_bytes:,} bytes from {summary.input_bytes:,} bytes of text"
    )
    if job.conversations is not None:
        line += f"; {counted(summary.counted, 'token')} in the loss"
    if job.images is not None:
        line += f"; {counted(summary.images, 'image')}"
    counts = {
        "words not in the vocabulary": summary.unknown,
        "bad lines skipped": summary.bad_lines,
        "empty documents skipped": summary.empty,
        "blank lines": summary.blank,
        "documents written before": summary.resumed_at,
    }
    return "; ".join([line, *(f"{count:,} {what}" for what, count in counts.items() if count)])


if __name__ == "__main__":
    run_tool(main)
