"""What the conversions of convert_checkpoint.py share: their flags, the source that is checked, the output."""

import argparse
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from _atomic_file import atomic_path, check_vacant

from megatron.checkpoint.commit import remove_unfinished
from megatron.checkpoint.folder_lock import LOCK, FolderLock, check_unlocked
from megatron.checkpoint.tracker import holds_checkpoint
from megatron.common.errors import ConfigError, ResourceError
from megatron.common.output_paths import is_folder_name
from megatron.tools.command_line import print_warnings
from megatron.tools.convert.inspection import KINDS, FoundCheckpoint, find, verify

if TYPE_CHECKING:
    from megatron.tools.convert.full_model import FullModel
    from megatron.tools.convert.vocabulary import Vocabulary

MAX_SHARD_SIZE = "5GB"


def paths(parser: argparse.ArgumentParser, source: str, output: str) -> None:
    """Add PATH and --output, with what each is."""
    parser.add_argument("path", type=Path, metavar="PATH", help=source)
    parser.add_argument("--output", type=_new_path, required=True, metavar="NAME", help=output)


def _new_path(text: str) -> Path:
    """An argparse type: a name to write. Raises ArgumentTypeError for a folder with the ending of a file."""
    if Path(text).suffix == ".safetensors" and is_folder_name(text):
        raise argparse.ArgumentTypeError(f"{text} is a folder; name a file, or a folder without this ending")
    return Path(text)


def tokenizer_flags(parser: argparse.ArgumentParser, why: str) -> None:
    """Add --vocab-file and --merge-file."""
    parser.add_argument("--vocab-file", metavar="FILE", help=f"vocab.json, {why}")
    parser.add_argument(
        "--merge-file", metavar="FILE", help=f"merges.txt, {why} (default: in the folder of --vocab-file)"
    )


def model_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of properties of a model that files of another Megatron may lack."""
    parser.add_argument("--vocab-size", type=int, metavar="N", help="tokens without padding, if no file is given")
    parser.add_argument("--num-attention-heads", type=int, metavar="N", help="if the files lack it")
    parser.add_argument(
        "--openai-gelu", action="store_true", help="GELU is the tanh approximation, as with bias fusion"
    )
    parser.add_argument("--layernorm-epsilon", type=float, metavar="E", help="if it is not 1e-5 and the files lack it")
    parser.add_argument(
        "--position-embedding-type",
        choices=("rope", "none"),
        help="without a table of positions, if the files lack it",
    )
    parser.add_argument("--rotary-base", type=float, metavar="B", help="if it is not 10000 and the files lack it")
    parser.add_argument("--max-position-embeddings", type=int, metavar="N", help="if the files lack it")
    parser.add_argument(
        "--checkpoint-version",
        type=float,
        choices=(0.0, 1.0, 2.0, 3.0),
        help="order of query_key_value, if the files lack it or are wrong: 0 [3, heads, size], "
        "1 [heads, size, 3], 2 and 3 [heads, 3, size]",
    )


def max_shard_size(parser: argparse.ArgumentParser) -> None:
    """Add --max-shard-size."""
    parser.add_argument(
        "--max-shard-size", metavar="SIZE", help=f"largest file of a folder, such as 500MB (default: {MAX_SHARD_SIZE})"
    )


def shard_size(args: argparse.Namespace) -> int:
    """``--max-shard-size`` in bytes. Raises ConfigError if it is none."""
    size = args.max_shard_size or MAX_SHARD_SIZE
    match = re.fullmatch(r"([0-9]{1,15})\s*([KMGT]?)(i?)B?", size, re.IGNORECASE | re.ASCII)
    if match is None or int(match[1]) == 0:
        raise ConfigError(f"--max-shard-size {size} is not a size; give one such as 500MB or 2GiB")
    return int(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2].upper() or " ")


def find_source(args: argparse.Namespace, *kinds: str) -> FoundCheckpoint:
    """What is at PATH, which must be of one of ``kinds``, undamaged; ``--output`` is checked, too.

    Raises ConfigError or CheckpointError.
    """
    check_output(args)
    found = find(args.path)
    if found.kind not in kinds:
        accepted = " or ".join(KINDS[kind].title for kind in kinds)
        raise ConfigError(f"{args.path} is {found.what}, and {args.command} accepts {accepted}")
    if found.saved:
        print_warnings(found.saved.warnings)
        verify(found.saved.path, "*" if found.saved.layout.zero_stage == 3 else "*model_states.pt")
    return found


def check_output(args: argparse.Namespace) -> None:
    """Raises ConfigError if --output exists, CheckpointError if a run of this host saves into its folder."""
    check_vacant(args.output, "--output")
    check_unlocked(args.output.parent)


@contextmanager
def new_output(args: argparse.Namespace) -> Iterator[Path]:
    """A temporary path that becomes --output. Raises as ``atomic_path`` and ``sole_writer``."""
    with sole_writer(args.output.parent), atomic_path(args.output, "--output") as path:
        yield path


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Keep runs from saving into ``folder`` meanwhile, if it is a folder of checkpoints, and remove unfinished files.

    Runs, too, remove such files. Raises CheckpointError if a run saves into it, ResourceError if it cannot be written.
    """
    if not (holds_checkpoint(folder) or (folder / LOCK).exists()):
        yield
        return
    lock = FolderLock(folder)
    try:
        lock.take()
    except OSError as error:
        raise ResourceError(f"{folder} cannot be written ({error.strerror}); name another place") from error
    try:
        remove_unfinished(folder)
        yield
    finally:
        lock.release()


def write_checkpoint(
    args: argparse.Namespace,
    model: "FullModel",
    tokenizer: "Vocabulary | None",
    *,
    source: Path | None = None,
    carried: Mapping[str, Path] = MappingProxyType({}),
) -> None:
    """Write ``model`` as the checkpoint ``--output``, with its tokenizer and the ``carried`` files of ``source``.

    Raises as ``new_output``.
    """
    from megatron.tools.convert.huggingface_files import copy_carried
    from megatron.tools.convert.load_and_save import write_checkpoint as write

    published = [name for name in ("tokenizer.json", "tokenizer.model") if name in carried]
    names = tokenizer.names if tokenizer is not None else published[:1]
    vocab_file, merge_file, *_ = *(args.output / name for name in names), None, None
    kind = None if tokenizer is None else tokenizer.kind
    with new_output(args) as folder:
        folder.mkdir()
        if tokenizer is not None:
            tokenizer.write(folder)
        copy_carried(carried, folder)
        write(folder, model, vocab_file=vocab_file, merge_file=merge_file, source=source, tokenizer_type=kind)


def report(args: argparse.Namespace, model: "FullModel") -> None:
    """Print the size of ``model``, which has been written."""
    from megatron.checkpoint.tensor_files import outlines_of

    outlines = list(outlines_of(model.weights).values())
    count, dtype = sum(one.numel() for one in outlines), str(outlines[0].dtype).removeprefix("torch.")
    print(f"{args.output}: {len(model.weights)} tensors, {count:,} parameters, {dtype}, from {args.path}")
