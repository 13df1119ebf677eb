"""Flags for input files, their formats and images, and expansion of ``--input`` into files."""

import argparse
from collections.abc import Iterable, Sequence
from glob import glob
from pathlib import Path
from typing import Any

from megatron.common.errors import ConfigError, DataError, shown
from megatron.common.reading import is_present, read_json
from megatron.common.tokenizer_files import PUBLISHED
from megatron.config.vision import PADDED, STRETCH
from megatron.model.huggingface import HF_CONFIG, read_config
from megatron.model.huggingface import read_json as read_settings
from megatron.tools.command_line import ToolParser, check_values
from megatron.tools.preprocess.corpus import FORMATS
from megatron.tools.preprocess.file_lines import COMPRESSED, FORMATS_BY_ENDING, format_of, uncompressed
from megatron.tools.preprocess.image_records import READERS
from megatron.tools.preprocess.job import ImageSettings

IMAGES = "images"
"""Value of --format for conversations with images, in any file format of ``image_records``."""


def add_input_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for text files, their format, and the keys to read."""
    add = parser.add_argument
    add(
        "--input",
        type=Path,
        nargs="+",
        required=True,
        metavar="FILE",
        help="JSONL, plain text (one document per line), Parquet or Arrow; also patterns such as 'data/*.jsonl', "
        "folders, of which all such files are read, and folders that save_to_disk of datasets wrote",
    )
    add(
        "--input-format",
        choices=tuple(FORMATS),
        help="format of all inputs (default: by name or content)",
    )
    add(
        "--document-per-file",
        dest="input_format",
        action="store_const",
        const="document",
        help="each file is one document of plain text",
    )
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys of JSON objects, or columns, to read")


def expand_inputs(paths: Sequence[Path], kind: str | None) -> list[Path]:
    """The files of ``--input``: paths, files in folders or saved data sets, and matches of patterns, sorted by name.

    Raises DataError with a line for each path without a file.
    """
    files = {path: _expand(path, kind) for path in paths}
    if missing := [path for path in paths if not files[path]]:
        reasons = {path: "no file of text in this folder" if path.is_dir() else "no such file" for path in missing}
        raise DataError([f"--input {path}: {reason}" for path, reason in reasons.items()])
    return [file for path in paths for file in files[path]]


_STATE = "state.json"
"""File that lists the files of a data set written by ``save_to_disk``, in order."""
_PARTS = "dataset_dict.json"
"""File beside the folders of several data sets that were written together, such as train and test."""


def _expand(path: Path, kind: str | None) -> list[Path]:
    if not path.is_dir():
        return [path] if path.exists() else _files(path, map(Path, glob(str(path), recursive=True)))
    if is_present(path / _STATE):
        try:
            files = [path / Path(part["filename"]).name for part in read_json(path / _STATE)["_data_files"]]
        except OSError as error:
            raise DataError(f"{path / _STATE}: {error.strerror}") from None
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path / _STATE} is not of save_to_disk: no list of _data_files") from error
        if missing := [file.name for file in files if not file.exists()]:
            raise DataError(f"{path / _STATE} names {missing[0]}, and there is no such file")
        return files
    if is_present(path / _PARTS) and (parts := sorted(file.parent.name for file in path.glob(f"*/{_STATE}"))):
        raise DataError(f"{path} holds the data sets {', '.join(parts)}: name one of them, such as {path / parts[-1]}")
    visible = (file for file in path.rglob("*") if not file.name.startswith("."))
    names = {None: tuple(FORMATS_BY_ENDING), IMAGES: tuple(READERS)}.get(kind)
    supported = (file for file in visible if names is None or uncompressed(file).suffix in names)
    return _files(path, (file for file in supported if file.name not in (_STATE, "dataset_info.json", _PARTS)))


def _files(place: Path, found: Iterable[Path]) -> list[Path]:
    """All of ``found`` but the folders, sorted. Raises DataError for each that is no file, which would be left out."""
    files = sorted(path for path in found if not path.is_dir())
    if others := [file for file in files if not file.is_file()]:
        raise DataError(
            f"--input {place}: {file} is a FIFO, a socket, a device or a broken link: remove it, or name the files"
            for file in others
        )
    return files


def text_size(paths: Sequence[Path], kind: str | None) -> int | None:
    """Total bytes of text in files of a format (None: by ``format_of``); None if a file is compressed or a pipe."""
    plain = all(
        (kind or format_of(path)) not in ("parquet", "arrow", IMAGES) and path.suffix not in COMPRESSED
        for path in paths
    )
    return sum(path.stat().st_size for path in paths) or None if plain else None


_IMAGE_FLAGS = ("--image-folder", "--vision-image-size", "--image-tokens", "--image-token-id", "--image-fit")
_FITS = {STRETCH: STRETCH, "crop": "crop", "pad": PADDED["clip"]}


def add_image_flags(parser: ToolParser) -> None:
    """Add the flags of conversations with images."""
    add = parser.add_argument_group("conversations with images (--format images)").add_argument
    add("--image-folder", type=Path, metavar="DIR", help="folder of relative image paths (default: this folder)")
    add("--vision-image-size", type=int, metavar="N", help="height and width of images in pixels (default: 336)")
    add("--image-tokens", type=int, metavar="N", help="placeholders of an image: one for each patch")
    add("--image-token-id", type=int, metavar="N", help="id of the placeholder, a token that no text contains")
    help = "how images become squares (default: as the processor in --tokenizer-model does, or stretch)"
    add("--image-fit", choices=tuple(_FITS), help=help)


def image_settings(args: argparse.Namespace) -> ImageSettings | None:
    """The values of the image flags, or None for another --format. Raises ConfigError for a value out of range."""
    if args.format != IMAGES:
        return None
    check_values(
        args, {"vision_image_size": "[1, 65536]", "image_tokens": "[1, inf)", "image_token_id": "[1, 2147483647]"}
    )
    size = args.vision_image_size or 336
    fit = _FITS[args.image_fit] if args.image_fit else _fit_of_folder(args.tokenizer_model, size)
    return ImageSettings(args.image_folder or Path(), size, args.image_tokens, args.image_token_id, fit)


def check_placeholder(token: int, tokens: int, kind: str, folder: str | None) -> None:
    """Raises ConfigError unless ``token`` is the placeholder of the LLaVA in ``folder``, or else in the vocabulary.

    Args:
        tokens: number of tokens of the tokenizer of this ``kind``; a published one may lack the placeholder.
    """
    settings = _settings_of_folder(folder)
    own = settings.get("image_token_index", settings.get("image_token_id"))
    if settings.get("model_type") == "llava" and own is not None:
        if token != own:
            raise ConfigError(f"--image-token-id is {token}, and that of {folder} is {shown(own)}: give the latter")
        return
    rows = settings.get("vocab_size")
    tokens = max(tokens, rows) if type(rows) is int else tokens
    last = tokens if kind in PUBLISHED else tokens - 1
    if token > last:
        raise ConfigError(f"--image-token-id {token} is beyond the vocabulary of {tokens} tokens: give {last} at most")


def _settings_of_folder(folder: str | None) -> dict[str, Any]:
    """The content of the config.json in ``folder``, empty without one. Raises CheckpointError for a broken one."""
    file = Path(folder or "") / HF_CONFIG
    return read_settings(file) if folder is not None and is_present(file) else {}


def _fit_of_folder(folder: str | None, size: int) -> str:
    """``image_fit`` of the LLaVA in ``folder``; by default ``stretch``. Raises CheckpointError as ``read_config``."""
    if folder is None or _settings_of_folder(folder).get("model_type") != "llava":
        return STRETCH
    config = read_config(Path(folder))
    if config.vision_image_size != size:
        raise ConfigError(f"--vision-image-size is {size}, and that of {folder} is {config.vision_image_size}")
    return config.image_fit


def image_rules(args: argparse.Namespace) -> list[tuple[bool, str]]:
    """Rules about the image flags: for each, whether it is broken, and the message."""
    given = [flag for flag in _IMAGE_FLAGS if getattr(args, flag[2:].replace("-", "_")) is not None]
    has_images = args.format == IMAGES
    return [
        (
            bool(given) and not has_images,
            f"{' and '.join(given)} without --format images: add it, or remove them",
        ),
        (
            has_images and not {*_IMAGE_FLAGS[2:4]} <= {*given},
            "--format images needs --image-tokens and --image-token-id",
        ),
        (
            has_images and args.input_format is not None,
            "--format images detects formats by file suffix: remove --input-format and --document-per-file",
        ),
        (has_images and args.resume, "--format images cannot be resumed: remove --resume"),
    ]
