"""Continue prompts with a model: a checkpoint of any layout, merged weights, or a Hugging Face folder.

    python tools/generate.py --load checkpoints/my --prompt "Once upon a time" --temperature 0.8 --top-k 40
    python tools/generate.py --load checkpoints/my --sample-input-file in.jsonl --sample-output-file out.jsonl
    python tools/generate.py --load checkpoints/my --genfile out.jsonl --num-samples 10
    deepspeed --log_level critical --num_gpus 2 tools/generate.py --load checkpoints/my
    python tools/generate.py --load checkpoints/chat --chat
    python tools/generate.py --load checkpoints/vlm --chat --image cat.jpg --prompt "What is this?"

Without any of these flags, prompts are read from standard input, one per line. A .jsonl file has an object with
"prompt" (or "text") on each line; the output then has the same and "completions". "image" names a file in its folder,
or a list of them. Images come before the text, unless <image> in it says where. --genfile needs no prompt. Hyphens and
underscores in flag names are interchangeable.
"""

import argparse
import os
import sys
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import _project_root  # noqa: F401
from _atomic_file import atomic_file

from megatron.common.environment import rank
from megatron.common.errors import ConfigError, DataError
from megatron.launch.environment import prepare_environment
from megatron.launch.rank import run_rank
from megatron.model.architectures import GPT2, LLAVA, T5
from megatron.tools.chat.files import template_of_model
from megatron.tools.chat.template import ChatPrompts
from megatron.tools.command_line import ToolParser, check_values, output_file
from megatron.tools.inference.images import ImageReader, read_image
from megatron.tools.inference.model_flags import (
    add_chat_template_flag,
    add_model_flags,
    context_length,
    shared_source,
)
from megatron.tools.inference.prompts import (
    NEW_TOKENS,
    Prompt,
    StoppingCriteria,
    checked_length,
    is_jsonl,
    read_prompts,
    read_standard_input,
    tokenized,
)
from megatron.tools.inference.source import Source

if TYPE_CHECKING:
    from megatron.tools.inference.generator import Session
    from megatron.tools.inference.model import LanguageModel

INTERVALS = {
    "num_samples": "[1, inf)",
    "new_tokens": "[1, inf)",
    "out_seq_length": "[1, inf)",
    "seq_length": "[1, inf)",
    "batch_size": "[1, inf)",
    "temperature": "(0, inf)",
    "top_k": "[0, inf)",
    "top_p": "[0, 1]",
    "min_p": "[0, 1]",
    "repetition_penalty": "[0.01, 100]",
    "length_penalty": "[-20, 20]",
    "num_beams": "[1, 1024]",
    "seed": "[0, inf)",
}


def main() -> None:
    """Check everything that can be checked without torch, then import torch and generate."""
    args = _parser().parse_args()
    _check(args)
    source, ranks = shared_source(args, os.environ, (GPT2, T5, LLAVA))
    chat = None
    if args.chat:
        chat = ChatPrompts(template_of_model(source.found, source.tokenizer, args.chat_template), source.tokenizer)
    limits = _limits(args, source, chat)
    images = _images(args, source)
    prompts = _prompts(args, source, limits, chat, images)
    prepare_environment(os.environ)

    from megatron.tools.inference.generator import broadcast
    from megatron.tools.inference.model import opened_model

    with opened_model(source, ranks, args.dtype) as model:
        session = replace(_session(args, source, limits, model, chat), images=images)
        _use(session, args, broadcast(prompts))


def _session(
    args: argparse.Namespace,
    source: Source,
    limits: StoppingCriteria,
    model: "LanguageModel",
    chat: ChatPrompts | None,
) -> "Session":
    """The model, with the settings of its use from the flags."""
    from megatron.tools.inference.decoding import BeamSearch, Sampling
    from megatron.tools.inference.generator import Session, TextGenerator

    generator = TextGenerator(model, source.tokenizer, use_cache=not args.recompute)
    sampling = Sampling(
        greedy=args.greedy,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        repetition_penalty=args.repetition_penalty,
        seed=args.seed,
        min_p=args.min_p,
    )
    beams = BeamSearch(args.num_beams, args.length_penalty, args.repetition_penalty) if args.num_beams > 1 else None
    return Session(
        generator,
        sampling,
        limits,
        args.num_samples,
        beams,
        batch_size=args.batch_size,
        is_main_rank=model.tensor_group.rank() == 0,
        chat=chat,
    )


def _use(session: "Session", args: argparse.Namespace, prompts: list[Prompt] | None) -> None:
    """Run the mode that the flags select."""
    if args.genfile:
        with _output(args.genfile, "--genfile", session) as file:
            session.write_documents(file)
    elif args.sample_input_file:
        output = _output_file(args)
        with _output(output, "--sample-output-file", session) as file:
            session.write_completions(prompts, file, as_json=is_jsonl(args.sample_input_file) or is_jsonl(output))
    elif prompts is None:
        session.converse()
    else:
        for prompt in prompts:
            session.show(prompt)


def _output(path: Path, flag: str, session: "Session") -> AbstractContextManager[IO[str]]:
    """The output file, written atomically by rank 0; nothing is written by other ranks."""
    return atomic_file(path, flag) if session.is_main_rank else open(os.devnull, "w")


def _output_file(args: argparse.Namespace) -> Path:
    return args.sample_output_file or Path(f"{args.sample_input_file}.out")


def _check(args: argparse.Namespace) -> None:
    """Raises ConfigError for values out of range and flags that exclude each other."""
    if args.temperature == 0:
        raise ConfigError("--temperature 0: to choose the most likely token is --greedy: give that instead")
    check_values(args, INTERVALS)
    inputs = [flag for flag in ("prompt", "sample_input_file", "genfile") if getattr(args, flag)]
    problems = []
    if len(inputs) > 1:
        names = " and ".join(f"--{name.replace('_', '-')}" for name in inputs)
        problems.append(f"{names} exclude each other: give one")
    if args.sample_output_file and not args.sample_input_file:
        problems.append("--sample-output-file is for the prompts of a --sample-input-file: give one, or leave it out")
    if args.sample_input_file and _output_file(args).resolve() == args.sample_input_file.resolve():
        problems.append("--sample-output-file is the --sample-input-file: name another")
    ways: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 0.0, "min_p": 0.0}
    if args.num_beams > 1 or args.greedy:
        other = "--num-beams" if args.num_beams > 1 else "--greedy"
        beams = {"greedy": False, "stop": []} if args.num_beams > 1 else {}
        problems += [
            f"--{name.replace('_', '-')} has no effect with {other}: leave one of them out"
            for name, default in (ways | beams).items()
            if getattr(args, name) != default
        ]
    if args.num_beams > 1:
        if args.num_samples > args.num_beams:
            problems.append(
                f"--num-samples {args.num_samples} is more than --num-beams {args.num_beams} find: raise it"
            )
    if args.chat and args.genfile:
        problems.append("--genfile is without a prompt, and --chat answers prompts: leave one of them out")
    if args.chat_template and not args.chat:
        problems.append(f"--chat-template {args.chat_template} has no effect without --chat: add it")
    if not all(args.stop):
        problems.append("--stop is empty: give the string that ends a text")
    if problems:
        raise ConfigError(problems)


def _limits(args: argparse.Namespace, source: Source, chat: ChatPrompts | None) -> StoppingCriteria:
    return StoppingCriteria(
        context=context_length(args, source),
        new_tokens=args.new_tokens,
        out_seq_length=args.out_seq_length,
        # A text that is encoded takes no room from its target.
        slides=args.on_long_context == "slide" or source.config.encoder_num_layers > 0,
        stop=(*args.stop, *(chat.stop if chat else ())),
        hidden=chat.hidden if chat else (),
    )


def _prompts(
    args: argparse.Namespace,
    source: Source,
    limits: StoppingCriteria,
    chat: ChatPrompts | None,
    images: ImageReader | None,
) -> list[Prompt] | None:
    """The prompts; None to read them interactively, and on ranks other than 0 if standard input is a pipe."""
    if args.prompt:
        lines = [("--prompt", text, {}) for text in args.prompt]
    elif args.sample_input_file:
        lines = read_prompts(args.sample_input_file)
    elif args.genfile:
        checked_length([source.tokenizer.eod], limits)
        return None
    elif rank(os.environ) or sys.stdin.isatty():
        return None
    else:
        lines = [(place, text, {}) for place, text in read_standard_input()]
    return tokenized(lines, source.tokenizer, limits, chat, images=images)


def _images(args: argparse.Namespace, source: Source) -> ImageReader | None:
    """Reads the images of prompts, of a model that has an encoder for them."""
    if not source.config.vision_num_layers:
        if args.image:
            raise ConfigError(f"--image {args.image[0]}: {source.name} reads no images: leave it out")
        return None
    if args.on_long_context == "slide":
        raise ConfigError("--on-long-context slide: an image cannot be cut: leave it out")
    try:
        images = [read_image(path, source.config.vision_image_size, source.config.image_fit) for path in args.image]
    except DataError as error:
        raise ConfigError(f"--image {error}") from None
    return ImageReader(source.config, images, (args.sample_input_file or Path()).parent)


def _parser() -> ToolParser:
    parser = ToolParser(__doc__)
    add_model_flags(parser)
    parser.add_argument("--chat", action="store_true", help="prompts are what a user says: answer by the chat template")
    add_chat_template_flag(parser)
    _add_text_flags(parser.add_argument_group("texts"))
    _add_choice_flags(parser.add_argument_group("sampling"))
    return parser


def _add_text_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--prompt", action="append", metavar="TEXT", help="text to continue; may be given several times")
    group.add_argument(
        "--image", type=Path, action="append", default=[], metavar="FILE", help="image of all prompts; may be repeated"
    )
    group.add_argument("--sample-input-file", type=Path, metavar="FILE", help="prompts, one per line")
    group.add_argument(
        "--sample-output-file",
        type=output_file,
        metavar="FILE",
        help="output file (default: the input's name and .out)",
    )
    group.add_argument(
        "--genfile", type=output_file, metavar="FILE", help="JSONL file for --num-samples completions without a prompt"
    )
    group.add_argument("--num-samples", type=int, default=1, metavar="N", help="completions of each prompt")
    group.add_argument(
        "--new-tokens",
        type=int,
        metavar="N",
        help=f"tokens to add at most (default: {NEW_TOKENS}, or what the context leaves)",
    )
    group.add_argument("--out-seq-length", type=int, metavar="N", help="tokens at most, prompt included")
    group.add_argument("--seq-length", type=int, metavar="N", help="context length in tokens (default: the model's)")
    group.add_argument(
        "--on-long-context",
        choices=("error", "slide"),
        default="error",
        help="reject a text longer than the context, or continue it from its last tokens",
    )
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="string that ends a text")
    group.add_argument("--batch-size", type=int, default=8, metavar="N", help="completions computed together")


def _add_choice_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--greedy", action="store_true", help="always choose the most likely token")
    group.add_argument(
        "--temperature", type=float, default=1.0, metavar="T", help="below 1 less random, above 1 more random"
    )
    group.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="sample among the K most likely tokens; 0 is all"
    )
    group.add_argument(
        "--top-p",
        type=float,
        default=0.0,
        metavar="P",
        help="sample among the most likely tokens whose probabilities total P; 0 is all",
    )
    group.add_argument(
        "--min-p", type=float, default=0.0, metavar="P", help="sample among tokens P times as likely as the likeliest"
    )
    group.add_argument(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="R",
        help="above 1, tokens of the text so far are less likely",
    )
    group.add_argument(
        "--num-beams", type=int, default=1, metavar="N", help="beam search with N beams, instead of sampling"
    )
    group.add_argument(
        "--length-penalty", type=float, default=1.0, metavar="L", help="of beam search: above 0, favors longer texts"
    )
    group.add_argument("--seed", type=int, default=1234, metavar="N", help="equal seeds give equal texts")
    group.add_argument("--recompute", action="store_true", help="use no key-value cache")


if __name__ == "__main__":
    run_rank(main)
