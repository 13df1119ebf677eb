"""Measure how well a model predicts text: LAMBADA, WikiText, or the perplexity of any text.

    python tools/evaluate.py --task LAMBADA --valid-data lambada.jsonl --strict-lambada --load checkpoints/my
    python tools/evaluate.py --task WIKITEXT --valid-data wiki.test.tokens --load checkpoints/my
    deepspeed --log_level critical --num_gpus 4 tools/evaluate.py --task PPL --valid-data data/my_text_document \\
        --load checkpoints/my --model-parallel-size 2

LAMBADA takes JSONL with a "text" key, and predicts the last token of each, or with --strict-lambada all tokens of the
last word. WIKITEXT takes a file of WikiText as published. PPL takes plain text, JSONL (.jsonl, .json), Parquet, or the
prefix of a data set. PAIRS, for T5, takes JSONL with "input" and "target" on each line. VQA, for vision-language
models, takes JSONL with "image" (a file in its folder), "question" and "answer" on each line: the answer is generated,
or if there are "choices", the most likely of them. The result is a JSON object, printed and written to the file of
--json.

Processes beyond model-parallel size (1 unless it is given) x pipeline stages share the samples; the metrics are the
same. Hyphens and underscores in flag names are interchangeable.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import _project_root  # noqa: F401
from _atomic_file import atomic_file
from _model_ranks import add_rank_flags, find_model, opened, write_result

from megatron.common.errors import ConfigError
from megatron.common.files import json_line
from megatron.common.output_paths import outputs_in_one_place
from megatron.launch.environment import prepare_environment
from megatron.launch.rank import run_rank
from megatron.model.architectures import GPT2, LLAVA, T5
from megatron.tools.chat.files import template_of_model
from megatron.tools.chat.template import ChatPrompts
from megatron.tools.command_line import ToolParser, check_values, output_file, progress_bar
from megatron.tools.evaluation.tasks import TASKS, Request, make_task
from megatron.tools.evaluation.vqa import VQA, is_right, metrics, predict, read_questions
from megatron.tools.inference.images import ImageReader
from megatron.tools.inference.model_flags import add_chat_template_flag
from megatron.tools.inference.prompts import StoppingCriteria
from megatron.tools.inference.source import Source

CLASSIC_STRIDE = 32
PAIRS = "PAIRS"
"""The task of models with an encoder."""
CLASSIC_NAMES = {"WIKITEXT103": "WIKITEXT"}
"""Names of tasks in Megatron-LM's tasks/main.py that differ from the names in ``TASKS``."""


def main() -> None:
    """Parse the arguments, and evaluate."""
    args = build_parser().parse_args()
    prepare_environment(os.environ)
    evaluate(args)


def evaluate(args: argparse.Namespace) -> None:
    """Find the model and read the file; then import torch, score, and print the metrics on rank 0."""
    outputs = {f"--{name}": (getattr(args, name), ("",)) for name in ("predictions", "json")}
    if problems := outputs_in_one_place(outputs):
        raise ConfigError(problems)
    for flag, (path, _) in outputs.items():
        if path and path.resolve() == args.valid_data.resolve():
            raise ConfigError(f"{flag} is the --valid-data: name another")
    if args.task != VQA and (unused := [name for name in ("predictions", "chat_template") if getattr(args, name)]):
        raise ConfigError([f"--{name.replace('_', '-')} is for VQA: leave it out" for name in unused])
    check_values(args, {"new_tokens": "[1, inf)"})
    accepted = {PAIRS: (T5,), VQA: (LLAVA,)}.get(args.task, (GPT2,))
    source, seq_length = find_model(args, accepted)
    if args.task == VQA:
        return _evaluate_vqa(args, source, seq_length)
    stride, start = _stride(args, seq_length), source.config.decoder_start_token
    request = Request(args.valid_data, seq_length, stride, args.strict_lambada, args.json_keys, start, args.override)
    task = make_task(args.task, request, source.tokenizer)
    with opened(source, args) as model:
        from megatron.tools.evaluation.scoring import score

        is_main_rank = model.layout.rank == 0
        with progress_bar(total=len(task.samples), desc=args.task, shown=is_main_rank) as bar:
            scores = score(model, task.samples, batch_size=args.batch_size, report=bar.update)
        result = {**_settings(args, source, request), **task.metrics(scores)}
        if is_main_rank:
            write_result(result, args.json)


def _evaluate_vqa(args: argparse.Namespace, source: Source, seq_length: int) -> None:
    chat = ChatPrompts(template_of_model(source.found, source.tokenizer, args.chat_template), source.tokenizer)
    limits = StoppingCriteria(seq_length, new_tokens=args.new_tokens, stop=chat.stop, hidden=chat.hidden)
    questions = read_questions(args.valid_data, chat, ImageReader(source.config), limits)
    with opened(source, args) as model:
        is_main_rank = model.layout.rank == 0
        with progress_bar(total=len(questions), desc=VQA, shown=is_main_rank) as bar:
            answers = predict(model, source.tokenizer, questions, limits, batch_size=args.batch_size, report=bar.update)
        if is_main_rank:
            settings = {"task": VQA, "data": str(args.valid_data), "model": source.name, "precision": args.dtype}
            write_result({**settings, "seq_length": seq_length, **metrics(questions, answers)}, args.json)
            if args.predictions:
                with atomic_file(args.predictions, "--predictions") as file:
                    for one, answer in zip(questions, answers, strict=True):
                        folder = str(args.valid_data.parent.resolve())
                        record = {**one.record, "folder": folder, "predicted": answer, "right": is_right(one, answer)}
                        file.write(json_line(record))


def _settings(args: argparse.Namespace, source: Source, request: Request) -> dict[str, Any]:
    """What was evaluated, and how."""
    settings: dict[str, Any] = {"overlapping_eval": request.stride}
    if args.task in ("LAMBADA", PAIRS):
        settings = {"strict_lambada": request.strict} if args.task == "LAMBADA" else {}
    return {
        "task": args.task,
        "data": str(request.path),
        "model": source.name,
        "precision": args.dtype,
        "seq_length": request.seq_length,
        **settings,
    }


def _stride(args: argparse.Namespace, seq_length: int) -> int:
    stride = min(CLASSIC_STRIDE, seq_length) if args.overlapping_eval is None else args.overlapping_eval
    if not 1 <= stride <= seq_length:
        raise ConfigError(
            f"--overlapping-eval {stride}: windows of {seq_length} tokens can begin from 1 to {seq_length} tokens apart"
        )
    return stride


def _task_name(text: str) -> str:
    return CLASSIC_NAMES.get(text.upper(), text.upper())


def build_parser() -> ToolParser:
    """The flags."""
    parser = ToolParser(__doc__)
    add = parser.add_argument
    add(
        "--task",
        type=_task_name,
        choices=(*TASKS, VQA),
        required=True,
        help="task; WIKITEXT103 is WIKITEXT; PAIRS is for T5, VQA for vision-language models",
    )
    add("--valid-data", type=Path, required=True, metavar="FILE", help="data to evaluate on")
    add("--strict-lambada", action="store_true", help="predict the entire last word, not its last token")
    add("--json-keys", default="text", metavar="KEY", help="key of the text in JSONL")
    add(
        "--overlapping-eval",
        type=int,
        metavar="N",
        help="tokens from one window to the next; the others of a window are context. If N is the sequence length, "
        f"windows do not overlap (default: {CLASSIC_STRIDE}, or the sequence length if that is less)",
    )
    add("--override", action="store_true", help="evaluate on a data set that another tokenizer has made")
    add("--predictions", type=output_file, metavar="FILE", help="JSONL file to write the answers of VQA to")
    add("--new-tokens", type=int, default=16, metavar="N", help="tokens of an answer of VQA at most")
    add_chat_template_flag(parser)
    add_rank_flags(parser)
    return parser


if __name__ == "__main__":
    run_rank(main)
