"""Flags of tools/preprocess_data.py for conversations with images."""

import argparse
from pathlib import Path

from megatron.tools.command_line import ToolParser, check_values
from megatron.tools.preprocess.inputs import IMAGES
from megatron.tools.preprocess.job import ImageSettings

_IMAGE_FLAGS = ("--image-folder", "--vision-image-size", "--image-tokens", "--image-token-id")


def add_image_flags(parser: ToolParser) -> None:
    """Add the flags of conversations with images."""
    add = parser.add_argument_group("conversations with images (--format images)").add_argument
    add("--image-folder", type=Path, metavar="DIR", help="where the paths of images begin (default: this folder)")
    add("--vision-image-size", type=int, metavar="N", help="height and width of images in pixels (default: 336)")
    add("--image-tokens", type=int, metavar="N", help="placeholders of an image: its patches")
    add("--image-token-id", type=int, metavar="N", help="the placeholder, which no text contains")


def image_settings(args: argparse.Namespace) -> ImageSettings | None:
    """Their values, or None for another --format. Raises ConfigError for one outside of its interval."""
    if args.format != IMAGES:
        return None
    check_values(
        args, {"vision_image_size": "[1, 65536]", "image_tokens": "[1, inf)", "image_token_id": "[1, 2147483647]"}
    )
    size = args.vision_image_size or 336
    return ImageSettings(args.image_folder or Path(), size, args.image_tokens, args.image_token_id)


def image_rules(args: argparse.Namespace) -> list[tuple[bool, str]]:
    """Rules about them: whether each is broken, and the message."""
    given = [flag for flag in _IMAGE_FLAGS if getattr(args, flag[2:].replace("-", "_")) is not None]
    has_images = args.format == IMAGES
    return [
        (
            bool(given) and not has_images,
            f"{' and '.join(given)} without --format images: add it, or remove them",
        ),
        (
            has_images and not {*_IMAGE_FLAGS[2:]} <= {*given},
            "--format images needs --image-tokens and --image-token-id",
        ),
        (
            has_images and args.input_format is not None,
            "--format images goes by the names of files: remove --input-format and --document-per-file",
        ),
        (has_images and args.resume, "--format images cannot be resumed: remove --resume"),
    ]
