"""Evaluate a model on tasks of EleutherAI's lm-eval, the evaluation harness (pip install lm-eval==0.4.13).

    python tools/lm_eval_adapter.py --load checkpoints/my --tasks lambada_openai hellaswag
    deepspeed --log_level critical --num_gpus 4 tools/lm_eval_adapter.py --load checkpoints/my \\
        --model-parallel-size 2 --tasks my_task.yaml

A task is a name that lm-eval knows, one of a YAML file in --include-path, or a YAML file. Tasks of lm-eval download
their data from the Hugging Face hub; your own may name a local file. A task may contain code, which is run. The
results are lm-eval's, as a JSON object that is printed and written to the file of --json.

Processes beyond model-parallel size (1 unless it is given) x pipeline stages share the requests. A pipeline scores
texts, and cannot generate any. Hyphens and underscores in flag names are interchangeable.
"""

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import _project_root  # noqa: F401
from _model_ranks import add_rank_flags, find_model, opened, write_result

from megatron.common.errors import ConfigError, UserError, one_line
from megatron.common.reading import read_bytes
from megatron.launch.environment import prepare_environment
from megatron.launch.rank import run_rank
from megatron.tools.command_line import ToolParser, check_values

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

BOOTSTRAP_ITERS = 1000
"""Draws for the standard error of perplexities; lm-eval's own 100,000 take longer than small tasks."""


def main() -> None:
    """Parse the arguments, and evaluate."""
    args = build_parser().parse_args()
    prepare_environment(os.environ)
    evaluate(args)


def evaluate(args: argparse.Namespace) -> None:
    """Find model and tasks, run lm-eval on every rank, and print the results on rank 0."""
    check_values(args, {"num_fewshot": "[0, inf)", "limit": "(0, inf)"})
    source, seq_length = find_model(args)
    _make_importable()
    with contextlib.redirect_stdout(sys.stderr):  # the harness prints
        manager = _tasks(args.tasks, args.include_path)
    with opened(source, args) as model:
        from lm_eval import simple_evaluate

        from megatron.tools.evaluation.harness import HarnessModel

        harness_model = HarnessModel(model, source.tokenizer, batch_size=args.batch_size, seq_length=seq_length)
        with contextlib.redirect_stdout(sys.stderr), _mistakes_of(args.tasks):
            results = simple_evaluate(
                harness_model,
                tasks=list(args.tasks),
                task_manager=manager,
                num_fewshot=args.num_fewshot,
                limit=args.limit,
                bootstrap_iters=BOOTSTRAP_ITERS,
                log_samples=False,
            )
        if model.layout.rank == 0:
            write_result({"model": source.name, **_main_results(results)}, args.json)


def _make_importable() -> None:
    """Make the imports of lm-eval work. Raises ConfigError if it is not installed."""
    # Scripts of this folder, evaluate.py among them, hide packages of the same name.
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]
    if find_spec("lm_eval") is None:
        raise ConfigError("lm-eval is not installed: pip install lm-eval==0.4.13")
    # It would fork, in the middle of a process group, for the standard error of perplexities.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")


def _tasks(names: list[str], include_path: Path | None) -> "TaskManager":
    """The task manager that knows the tasks. Raises ConfigError for an unknown one."""
    from lm_eval.tasks import TaskManager

    if include_path is not None and not include_path.is_dir():
        raise ConfigError(f"--include-path {include_path}: no such folder; name one with YAML files of tasks")
    for file in filter(Path.is_file, map(Path, names)):
        _check_yaml(file)
    with _mistakes_of(names):
        manager = TaskManager(include_path=include_path, include_defaults=False)
    if not _unknown(names, manager):
        return manager
    manager = TaskManager(include_path=include_path)  # reads thousands of files
    if unknown := _unknown(names, manager):
        raise ConfigError(
            f"--tasks {unknown[0]}: no task of lm-eval, of --include-path, nor a YAML file of one; lm-eval ls tasks "
            "lists them"
        )
    return manager


@contextlib.contextmanager
def _mistakes_of(tasks: Sequence[str]) -> Iterator[None]:
    """Turns what goes wrong in lm-eval and in the code of tasks, but not in the model, into a ConfigError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        if any(Path(frame.filename).parts[-3:] == ("tools", "evaluation", "harness.py") for frame in frames):
            raise
        problem = ConfigError(
            f"--tasks {' '.join(tasks)}: {frames[-1].name} of {Path(frames[-1].filename).name} raised "
            f"{type(error).__name__}: {one_line(str(error))}"
        )
        problem.on_every_rank = True
        raise problem from error


def _check_yaml(path: Path) -> None:
    """Raises ConfigError for a file that is no YAML."""
    import yaml

    try:
        list(yaml.parse(read_bytes(path)))
    except (yaml.YAMLError, OSError) as error:
        raise ConfigError(f"--tasks {path}: no YAML file of a task ({' '.join(str(error).split())})") from None


def _unknown(names: list[str], manager: "TaskManager") -> list[str]:
    return [name for name in names if name not in manager.all_tasks and not Path(name).is_file()]


def _main_results(results: dict[str, Any]) -> dict[str, Any]:
    kept = ("results", "groups", "versions", "n-shot", "n-samples")
    return {name: results[name] for name in kept if name in results}


def build_parser() -> ToolParser:
    """The flags."""
    parser = ToolParser(__doc__)
    add = parser.add_argument
    add("--tasks", nargs="+", required=True, metavar="TASK", help="names, or YAML files")
    add("--include-path", type=Path, metavar="FOLDER", help="folder with YAML files of more tasks")
    add("--num-fewshot", type=int, metavar="N", help="examples before each question (default: the task's)")
    add("--limit", type=float, metavar="N", help="questions of each task at most, or, below 1, their share")
    add_rank_flags(parser)
    return parser


if __name__ == "__main__":
    run_rank(main)
