"""Write the generated pages in docs/ (layouts.md, command-line.md and classic-flags.md), tables and pictures."""

import argparse
import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import _project_root  # noqa: F401
from _atomic_file import atomic_file
from _pictures import PICTURES, learning_rate_curves
from _recipe_table import RECIPES_COLUMNS, recipe_row, recipes

from megatron.cli.classic_flags import OUTCOMES
from megatron.cli.flags import read_flags
from megatron.cli.parser import build_parser
from megatron.cli.presets import PRESETS
from megatron.cli.resolve import resolve_run
from megatron.cli.validation import RULES
from megatron.cli.validation.rules import REASONS, Rule
from megatron.config import ModelConfig, default_ffn_hidden_size
from megatron.model.architectures import ARCHITECTURES
from megatron.parallel.pipeline.schedule import Schedule
from megatron.parallel.pipeline.simulation import PassSeconds, in_flight
from megatron.tools.command_line import ToolParser, output_folder, run_tool
from megatron.tools.finetuning.request import build_parser as build_task_parser
from megatron.tools.planning.schedule_costs import idle_share
from megatron.tools.reporting.pictures import draw_schedules
from megatron.training.lr_schedule import LRSchedule

ROOT = Path(__file__).resolve().parent.parent
RECIPES = "tutorials/recipe.md"

LAYOUTS = """\
# Which layouts are supported

This page lists which layouts are supported, and every rule with its reason; `python tools/write_reference_docs.py`
generates it from the rules. A run that breaks rules is rejected before it starts, with a message that names all of them
and the nearest supported settings. A rule marked as a warning does not stop the run.

## Overview

Each row has settings to which the same applies, each column engines (`DeepSpeedEngine` without a pipeline, or the
pipeline engine) with tensor parallelism (TP), `--sequence-parallel` (SP), `--context-parallel-size` (CP) or
`--ds-sequence-parallel-size` (Ulysses). A number refers to the rule below that excludes the combination. Half
precision at ZeRO 0 runs as ZeRO 1 ([why](training.md#precision)).
"""

RULES_TABLE = """
## Rules

| | rule | reason | DeepSpeed would otherwise |
|---|---|---|---|
"""

COMMAND_LINE = """\
# Command-line reference

This page lists every flag of the training programs, and all tools; `python tools/write_reference_docs.py` generates it
from the code. `--help` of each program prints the same descriptions. Flags may be written with hyphens or underscores.
Names after the first one are aliases. `N` is a whole number and `X` any number. If a flag is repeated, the last value
counts in training programs, with a warning; the other programs refuse another value.
"""

CLASSIC_FLAGS = """\
# Flags of Megatron-LM and Megatron-DeepSpeed

This page lists the training flags of Megatron-LM, Megatron-DeepSpeed and DeepSpeed's 3D-parallelism example
(Megatron-LM v1.1.5) that do not exist here, and what happens to each; `python tools/write_reference_docs.py` generates
it from the code. Most of their flags [exist here](command-line.md), under the same name or an alias.
`name=value` is one value of a flag, and `*` stands for a group of flags. For complete commands see
[Coming from Megatron-LM](coming-from-megatron.md).
"""

OUTCOME_TABLES = {
    "replaced": "Replaced\n\n| flag | read as |",
    "fulfilled": "Accepted: what they ask for happens in any case\n\n| flag | what happens |",
    "ignored": "Accepted with a warning: they have no effect\n\n| flag | what happens instead |",
    "refused": "Not supported\n\n| flag | reason, and what to use |",
}

TASKS = """
## Fine-tuning

Flags of `tasks/main.py` ([Fine-tuning](finetuning.md)), in addition to the flags above that are not for pretraining.

| flag | value | description |
|---|---|---|
"""

TOOLS = """
## Tools

Each tool lists its flags with `--help`.

| tool | what it does |
|---|---|
"""

SAMPLE = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 64 --lr 0.001 --train-iters 10 "
    "--batch-size 1 --gas 8 --data-path corpus --vocab-file vocab.json --merge-file merges.txt"
)
ENGINES = {
    "no pipeline": "--pipe-parallel-size 0",
    "no pipeline, TP": "--pipe-parallel-size 0 --model-parallel-size 2",
    "no pipeline, TP, SP": "--pipe-parallel-size 0 --model-parallel-size 2 --sequence-parallel",
    "no pipeline, Ulysses": "--pipe-parallel-size 0 --ds-sequence-parallel-size 2",
    "no pipeline, CP": "--pipe-parallel-size 0 --context-parallel-size 2",
    "pipeline": "--pipe-parallel-size 2",
    "pipeline, TP": "--pipe-parallel-size 2 --model-parallel-size 2",
    "pipeline, TP, SP": "--pipe-parallel-size 2 --model-parallel-size 2 --sequence-parallel",
    "pipeline, CP": "--pipe-parallel-size 2 --context-parallel-size 2",
    "DualPipeV, TP": "--pipe-parallel-size 2 --model-parallel-size 2 --pipeline-schedule dualpipev",
}


def at_stages(name: str, flags: str, stages: Sequence[int] = range(4)) -> dict[str, str]:
    """The settings ``name`` with ``flags`` at each ZeRO stage. A name may have a place for the stage, {}."""
    name = name if "{}" in name else f"{name}, ZeRO {{}}"
    return {name.format(stage): f"{flags} --zero-stage {stage}".strip() for stage in stages}


SETTINGS = {
    **at_stages("fp32", ""),
    **at_stages("bf16", "--bf16"),
    **at_stages("fp16 on GPUs", "--fp16"),
    "fp16 on the CPU": "cpu --fp16 --zero-stage 1",
    **at_stages("bf16, gradients accumulated in fp32", "--bf16 --grad-accum-dtype fp32"),
    **at_stages("optimizer offloaded to cpu", "--offload-optimizer cpu"),
    **at_stages("optimizer offloaded to nvme", "--offload-optimizer nvme --nvme-path folder"),
    **at_stages("weights offloaded to cpu", "--offload-param cpu", (1, 2, 3)),
    **at_stages("overlapped reduction", "--zero-overlap-comm"),
    **at_stages("round-robin gradients", "--zero-round-robin-gradients"),
    **at_stages("coalesced reduction", "--zero-coalesce-grad-reduction"),
    "full recomputation": "--checkpoint-activations",
    "selective recomputation": "--recompute-granularity selective",
    "partitioned activations": "--checkpoint-activations --partition-activations",
    "activations in a contiguous buffer": "--checkpoint-activations --contiguous-checkpointing",
    "partitioned activations in a contiguous buffer": (
        "--checkpoint-activations --partition-activations --contiguous-checkpointing"
    ),
    "activations in CPU memory": "--checkpoint-activations --checkpoint-in-cpu",
    "partitioned activations in CPU memory": "--checkpoint-activations --partition-activations --checkpoint-in-cpu",
    "separate documents": "--reset-attention-mask --reset-position-ids --eod-mask-loss",
    "hidden states [s, b, h]": "--shape-order SBH",
}


def main() -> None:
    """Parse the command line and write the pages."""
    parser = ToolParser(__doc__)
    parser.add_argument(
        "--output", type=output_folder, default=ROOT / "docs", metavar="DIR", help="folder of the pages"
    )
    args = parser.parse_args()
    pages = {
        "layouts.md": layouts(),
        "command-line.md": command_line(),
        "classic-flags.md": classic_flags(),
        "models.md": with_table("models.md", "presets", PRESETS_COLUMNS, map(preset_row, PRESETS)),
        "parallelism.md": with_table("parallelism.md", "schedules", SCHEDULES_COLUMNS, map(schedule_row, EXAMPLES)),
        "images/schedules.svg": draw_schedules(EXAMPLES),
        "images/learning_rates.svg": learning_rate_curves(rates()),
        RECIPES: with_table(RECIPES, "recipes", RECIPES_COLUMNS, map(recipe_row, recipes())),
        **{f"images/{name}.svg": draw() for name, draw in PICTURES.items()},
    }
    pages |= with_outputs(pages)
    for folder in ("images", "tutorials"):
        (args.output / folder).mkdir(parents=True, exist_ok=True)
    for name, text in pages.items():
        with atomic_file(args.output / name, "--output") as file:
            file.write(text)


def rates() -> dict[str, list[float]]:
    """The curves of the linear, cosine and exponential decay, each followed by the classic one."""
    values = {"start_lr": 1e-3, "min_lr": 1e-4, "warmup_iter": 10, "end_iter": 100}
    return {
        f"{style}{', --classic-lr-decay' if classic else ''}": [schedule.learning_rate(n) for n in range(121)]
        for style in ("linear", "cosine", "exponential")
        for classic in (False, True)
        for schedule in [LRSchedule(**values, decay_style=style, classic=classic)]
    }


def layouts() -> str:
    """The page of supported layouts: settings and engines with equal cells are one row and column; then the rules."""
    engines = [read(words) for words in ENGINES.values()]
    cells: dict[str, list[str]] = {}
    for name, words in SETTINGS.items():
        device = "cpu" if words.startswith("cpu ") else "cuda"
        given = read(f"{SAMPLE} {words.removeprefix('cpu ')}")
        cells[name] = [", ".join(map(str, broken_rules(given | engine, device))) or "yes" for engine in engines]
    columns: dict[tuple[str, ...], list[str]] = {}
    for engine, column in zip(ENGINES, zip(*cells.values(), strict=True), strict=True):
        columns.setdefault(column, []).append(engine)
    rows: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for name, row in zip(cells, zip(*columns, strict=True), strict=True):
        setting, _, stage = name.partition(", ZeRO ")
        rows.setdefault(row, {}).setdefault(setting, []).append(stage)
    lines = [f"\n| | {' | '.join(map('<br>'.join, columns.values()))} |\n", "|---" * (len(columns) + 1) + "|\n"]
    for row, settings in rows.items():
        names = (f"{name}{', ZeRO ' * any(stages)}{', '.join(stages)}" for name, stages in settings.items())
        lines.append(f"| {'<br>'.join(names)} | {' | '.join(row)} |\n")
    lines.append(RULES_TABLE)
    for number, (name, rule) in enumerate(rule_rows().items(), start=1):
        why = REASONS.get(rule.kind, rule.why)
        lines.append(f"| {number} | {name}{' (a warning)' * rule.only_warns} | {why} | {rule.otherwise} |\n")
    return LAYOUTS + "".join(lines)


def read(words: str) -> dict[str, Any]:
    """The settings that these flags give."""
    provided, problems, _ = read_flags(words.split())
    assert not problems, problems
    return provided


def broken_rules(provided: dict[str, Any], device: str) -> list[int]:
    """The numbers of the rules that a run with these settings breaks on this device."""
    run, unresolved = resolve_run(provided, {"DS_ACCELERATOR": device, "WORLD_SIZE": "8"})
    assert not unresolved, unresolved
    numbers = {row: number for number, row in enumerate(rule_rows(), start=1)}
    broken = (rule for rule in RULES if not rule.only_warns and rule.check(run) is not None)
    return sorted({numbers[rule.kind or rule.name] for rule in broken})


def rule_rows() -> dict[str, Rule]:
    """The rules that have a row: one for each function, and one for each kind of what the flags say of each other."""
    return {rule.kind or rule.name: rule for rule in RULES}


def command_line() -> str:
    """The page of flags, of the training programs and of a task, and of tools: the first lines of their docstrings."""
    actions = (action for group in build_task_parser("")._action_groups for action in group._group_actions)
    tasks = [f"{flag_row(action)} |\n" for action in actions if action.option_strings != ["-h", "--help"]]
    tools = []
    for path in sorted((ROOT / "tools").glob("[a-z]*.py")):
        description = (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()[0]
        tools.append(f"| `tools/{path.name}` | {description} |\n")
    return "".join([COMMAND_LINE, *flag_tables(), TASKS, *tasks, TOOLS, *tools])


def flag_tables() -> Iterator[str]:
    """A table of each section of the flags of both training programs."""
    models: dict[str, dict[str, list[str]]] = {}
    pretrained = [architecture for architecture in ARCHITECTURES.values() if architecture.is_language_model]
    for architecture in pretrained:
        for group in build_parser(architecture)._action_groups[2:]:  # without argparse's own two
            rows = models.setdefault(str(group.title), {})
            for action in group._group_actions:
                if action.help is argparse.SUPPRESS:
                    continue
                rows.setdefault(flag_row(action), []).append(architecture.name)
    for title, rows in models.items():
        yield f"\n## {title}\n\n| flag | value | description |\n|---|---|---|\n"
        for row, names in rows.items():
            only = "" if len(names) == len(pretrained) else f" {' and '.join(names)} only."
            yield f"{row}{only} |\n"


def flag_row(action: argparse.Action) -> str:
    """The row of a flag, without its end."""
    values = "" if action.nargs == 0 else ", ".join(f"`{value}`" for value in str(action.metavar).split("|"))
    names = ", ".join(f"`{name}`" for name in action.option_strings)
    return f"| {names} | {values} | {(action.help or '').replace('%%', '%')}"


def classic_flags() -> str:
    """The page of the classic suites' flags."""
    return CLASSIC_FLAGS + "".join(
        f"\n## {heading}\n|---|---|\n" + "".join(outcome_rows(kind)) for kind, heading in OUTCOME_TABLES.items()
    )


def outcome_rows(kind: str) -> Iterator[str]:
    """A row for each text of the outcomes of a kind, with all flags that it applies to."""
    names: dict[str, list[str]] = {}
    for name, outcome in OUTCOMES.items():
        if outcome.kind == kind:
            names.setdefault(outcome.text, []).append(f"`--{name}`")
    for text, flags in names.items():
        marked = re.sub(r"--[a-zA-Z][\w-]*", r"`\g<0>`", text)
        yield f"| {', '.join(flags)} | {marked} |\n"


EXAMPLES = (
    Schedule("1f1b", 4, 8),
    Schedule("interleaved", 4, 8, 2),
    Schedule("zbh1", 4, 8),
    Schedule("zbv", 4, 8, 2),
    Schedule("dualpipev", 4, 8, 2),
)
SCHEDULES_COLUMNS = "schedule | idle, 8 micro-batches | idle, 32 micro-batches | kept by the first stage | by the last"
PRESETS_COLUMNS = "preset | layers | hidden | heads | MLP | sequence | vocabulary | parameters"


def with_table(name: str, mark: str, columns: str, rows: Iterable[Sequence[str]]) -> str:
    """The page ``name`` with a new table between its comments ``mark`` and ``end of mark``."""
    begin, end = f"<!-- {mark} -->\n", f"<!-- end of {mark} -->\n"
    before, _, rest = (ROOT / "docs" / name).read_text().partition(begin)
    lines = [f"| {columns} |\n", "|---|" + "---:|" * columns.count("|") + "\n"]
    lines += [f"| {' | '.join(row)} |\n" for row in rows]
    return f"{before}{begin}{''.join(lines)}{end}{rest.partition(end)[2]}"


_OUTPUT = re.compile(r"<!-- output ([-\d,]+): (.*?) -->\n```\n.*?```\n", re.DOTALL)
"""A comment with the arguments of Python and the lines to show; the block that follows is what the command prints."""


def with_outputs(pages: Mapping[str, str]) -> dict[str, str]:
    """Each page that shows what commands print, with what they print now."""
    found = {}
    for path in sorted((ROOT / "docs").rglob("*.md")):
        name = path.relative_to(ROOT / "docs").as_posix()
        text = pages.get(name) or path.read_text()
        if _OUTPUT.search(text):
            found[name] = _OUTPUT.sub(_output, text)
    return found


def _output(block: re.Match) -> str:
    words = [sys.executable, *shlex.split(block[2])]
    environ = {**os.environ, "DS_ACCELERATOR": "cuda"}
    finished = subprocess.run(words, cwd=ROOT, env=environ, capture_output=True, text=True)
    lines = finished.stdout.splitlines()
    parts = [part.split("-") for part in block[1].split(",")]
    shown = "\n...\n".join("\n".join(lines[int(first) - 1 : int(last)]) for first, last in parts)
    assert shown.strip(), f"{block[2]}: {finished.stderr}"
    return f"<!-- output {block[1]}: {block[2]} -->\n```\n{shown}\n```\n"


def schedule_row(schedule: Schedule) -> list[str]:
    """The share of the time that is idle, and the micro-batches whose activations the first and last stage keep."""
    part = PassSeconds(*(one / schedule.chunks for one in PassSeconds()))
    idle = [f"{idle_share(replace(schedule, micro_batches=number), part):.1%}" for number in (8, 32)]
    kept = [f"{sum(in_flight(schedule, stage)) / schedule.chunks:g}" for stage in (0, schedule.stages - 1)]
    chunks = f", {schedule.chunks} chunks per stage" if schedule.name == "interleaved" else ""
    return [f"`{schedule.name}`{chunks}", *idle, *kept]


def preset_row(name: str) -> list[str]:
    """The cells of a preset; its number of parameters is computed from the layers."""
    preset = PRESETS[name]
    flags = {"max_position_embeddings": preset.flags["seq_length"], **preset.flags}
    fields = {field: value for field, value in flags.items() if field != "seq_length"}
    spec = next(spec for spec in ARCHITECTURES.values() if spec.program == preset.program)
    model = ModelConfig(**fields, architecture=spec.name, padded_vocab_size=preset.vocab_size)
    model = replace(model, ffn_hidden_size=model.ffn_hidden_size or default_ffn_hidden_size(model))
    built = replace(model, num_layers=model.num_layers + model.vision_layers)
    parameters = sum(parameter.numel for parameter in spec.named_parameters(built).values())
    heads = f"{model.num_attention_heads}"
    if model.query_groups != model.num_attention_heads:
        heads += f" in {model.query_groups} groups"
    sizes = (model.ffn_hidden_size, flags["seq_length"], preset.vocab_size, parameters)
    return [f"`{name}`", f"{model.num_layers}", f"{model.hidden_size:,}", heads, *(f"{size:,}" for size in sizes)]


if __name__ == "__main__":
    run_tool(main)
