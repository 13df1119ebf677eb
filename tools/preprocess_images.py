"""Tokenize conversations with images into a data set of pretrain_vlm.py: PREFIX.bin and .idx, loss mask, pixels.

    python tools/preprocess_images.py --input llava.json --image-folder images --output-prefix data/llava \\
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model llava-new --image-token-id 32000 \\
        --vision-image-size 336 --image-tokens 576

Reads LLaVA's JSON, a list of {"image": PATH, "conversations": [{"from": "human", "value": "<image>\\nWhat is this?"},
{"from": "gpt", ...}]}; JSONL with such an object or OpenAI's {"messages": [...]} on each line; WebDataset's .tar files,
in which such an object is KEY.json and its images are KEY.jpg, KEY.1.jpg ...; and Parquet with columns of these names,
whose images are bytes. Paths of images begin in --image-folder; data URLs (data:image/png;base64,...) are images, too.
"""

import sys
from pathlib import Path

import _project_root  # noqa: F401

from megatron.common.errors import counted
from megatron.config.tokenizer_files import (
    GPT2_BPE,
    TOKENIZER_TYPES,
    check_tokenizer_folder,
    tokenizer_files,
    tokenizer_kind,
    used_merges,
)
from megatron.tokenizer import build_tokenizer
from megatron.tools.chat.files import chat_template, find_chat_template
from megatron.tools.command_line import ToolParser, check_values, run_tool
from megatron.tools.preprocess.image_conversations import ImageJob, preprocess_images


def main() -> None:
    """Parse the flags, convert, and print what was written."""
    parser = ToolParser(__doc__)
    add = parser.add_argument
    add("--input", type=Path, nargs="+", required=True, metavar="FILE", help="conversations: JSON, JSONL, tar, Parquet")
    add("--image-folder", type=Path, default=Path(), metavar="DIR", help="where the paths of images begin")
    add("--on-error", choices=("stop", "skip"), default="stop", help="on a bad document, stop, or log and skip it")
    add("--output-prefix", required=True, metavar="PREFIX", help="where to write: folder and first part of the names")
    add("--vision-image-size", type=int, default=336, metavar="N", help="height and width of images in pixels")
    add("--image-tokens", type=int, required=True, metavar="N", help="placeholders of an image: its patches")
    add("--image-token-id", type=int, required=True, metavar="N", help="the placeholder, which no text contains")
    add("--chat-template", metavar="FILE", help="template of Jinja (default: in the tokenizer's folder)")
    add("--tokenizer-type", choices=TOKENIZER_TYPES, default=GPT2_BPE, help="kind of tokenizer")
    add("--tokenizer-model", metavar="PATH", help="folder or file of the tokenizer")
    add("--vocab-file", metavar="FILE", help="vocabulary")
    add("--merge-file", metavar="FILE", help="merges of the BPE")
    args = parser.parse_args()
    check_values(args, {"vision_image_size": "[1, 65536]", "image_tokens": "[1, inf)", "image_token_id": "[0, inf)"})
    kind = tokenizer_kind(args.tokenizer_type, args.tokenizer_model)
    check_tokenizer_folder(kind, args.tokenizer_model)
    vocab_file, merge_file = tokenizer_files(kind, args.vocab_file, args.merge_file, args.tokenizer_model)
    tokenizer = build_tokenizer(kind, vocab_file, used_merges(kind, merge_file))
    folder = Path(vocab_file or ".").parent
    template = chat_template(find_chat_template(args.chat_template, folder, "a conversation"), tokenizer)
    sizes = args.vision_image_size, args.image_tokens, args.image_token_id
    job = ImageJob(args.input, args.image_folder, args.output_prefix, *sizes)
    done = preprocess_images(job, tokenizer, template, log_skipped if args.on_error == "skip" else None)
    numbers = (done.documents, "document"), (done.tokens, "token"), (done.images, "image")
    skipped = f"; {counted(done.skipped, 'document')} skipped" if done.skipped else ""
    print(f"{args.output_prefix}: {', '.join(counted(*number) for number in numbers)}{skipped}")


def log_skipped(error: str) -> None:
    """Print the error of a document that is skipped."""
    print(f"> skipped {error}", file=sys.stderr)


if __name__ == "__main__":
    run_tool(main)
