"""Fine-tune a pretrained BERT to classify texts or pairs of texts (GLUE, or any table), or evaluate a GPT-2.

    python tasks/main.py --task MNLI --train-data train.tsv --valid-data dev_matched.tsv dev_mismatched.tsv \\
        --pretrained-checkpoint checkpoints/bert --epochs 3 --batch-size 8 --lr 5e-5 --save checkpoints/mnli
    deepspeed --log_level critical --num_gpus 4 tasks/main.py --task TSV --text-columns question answer \\
        --label-column good ...
    python tasks/main.py --task LAMBADA --valid-data lambada.jsonl --strict-lambada --load checkpoints/gpt2

The classifier is a linear layer on BERT's pooler. After each epoch the accuracy is printed, written to --metrics-file,
and with --save a checkpoint is saved. Sizes and tokenizer come from the checkpoint unless they are given. All flags
of training apply, such as --model-parallel-size, --zero-stage, --bf16 and --load; pretrain_bert.py --help lists them.
LAMBADA, WIKITEXT103 and PPL are tasks of tools/evaluate.py, and take its flags.
"""

import os
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import megatron.common.ctrl_c  # noqa: E402, F401
from megatron.cli import ParsedRun  # noqa: E402
from megatron.common.environment import rank  # noqa: E402
from megatron.launch.environment import prepare_environment  # noqa: E402
from megatron.launch.rank import print_warning, run_rank  # noqa: E402
from megatron.tools.finetuning.request import EVALUATION_TASKS, build_parser, read_task  # noqa: E402
from megatron.tools.reporting.callbacks import default_callbacks  # noqa: E402


def main() -> int | None:
    """Parse and check the command line, then train or evaluate. Returns the exit code of the process.

    Nothing here imports torch before all is checked.
    """
    args, words = build_parser(__doc__).parse_known_args()
    if args.task in EVALUATION_TASKS:
        return import_module("evaluate").main()
    task = read_task(args, words, os.environ)
    is_main_rank = not rank(os.environ)
    if task.run.logging.explain:
        from megatron.tools.planning.explain import explain

        return explain(ParsedRun(task.run, [], [*task.warnings])) if is_main_rank else None
    for warning in task.warnings if is_main_rank else ():
        print_warning(warning)
    from megatron.training.preflight import check

    run, _ = check(task.run)
    prepare_environment(os.environ, run.parallel)
    if run.logging.dry_run:
        from megatron.tools.planning.explain import dry_run

        return dry_run(run) if is_main_rank else None
    from megatron.tools.finetuning.finetune import finetune

    return finetune(replace(task, run=run), default_callbacks())


if __name__ == "__main__":
    run_rank(main)
