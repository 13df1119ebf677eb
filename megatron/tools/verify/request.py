"""The runs to compare: names of layouts, and the command line of each run. Does not import torch."""

import itertools
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.cli import ParsedRun, read_run
from megatron.cli.flags import read_flags
from megatron.common.errors import ConfigError
from megatron.config import RunConfig
from megatron.model.architectures import GPT2
from megatron.model.spec import ArchitectureSpec
from megatron.tools.command_line import read_architecture

GRAMMAR = "tpA-ppB-dpC[-epE][-zeroZ][-sp][-cpN][-ulyssesN][-interleavedV|-zbh1|-zbv|-dualpipev][-plain]"
_SIZES = ("tp", "pp", "dp", "ep", "zero", "cp", "ulysses", "interleaved")
_SCHEDULES = ("zbh1", "zbv", "dualpipev")
_OPTIONS = ("sp", *_SCHEDULES, "plain")
_PART = re.compile(rf"(?:({'|'.join(_SIZES)})([0-9]{{1,9}}))|({'|'.join(_OPTIONS)})")


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel axes. ``pipe`` 0 is ``DeepSpeedEngine``, 1 and more are stages of ``PipelineEngine``."""

    tensor: int
    pipe: int
    data: int
    zero: int = 0
    sequence_parallel: bool = False
    ulysses: int = 1
    """Size of DeepSpeed-Ulysses sequence parallelism."""
    schedule: str = "1f1b"
    """Pipeline schedule, a choice of --pipeline-schedule."""
    virtual_stages: int = 1
    """Model chunks per stage of the interleaved schedule."""
    context: int = 1
    """Context-parallel size (ring attention)."""
    experts: int = 1
    """Expert-parallel size."""

    @property
    def name(self) -> str:
        """The name that ``parse_layout`` reads."""
        parts = [f"tp{self.tensor}-pp{self.pipe}-dp{self.data}"]
        parts += [f"ep{self.experts}"] if self.experts > 1 else []
        parts += [f"zero{self.zero}"] if self.zero else []
        parts += ["sp"] if self.sequence_parallel else []
        parts += [f"cp{self.context}"] if self.context > 1 else []
        parts += [f"ulysses{self.ulysses}"] if self.ulysses > 1 else []
        parts += [f"interleaved{self.virtual_stages}"] if self.schedule == "interleaved" else []
        return "-".join(parts + ([self.schedule] if self.schedule in _SCHEDULES else []))

    @property
    def processes(self) -> int:
        """Number of ranks."""
        return self.tensor * max(self.pipe, 1) * self.context * self.ulysses * self.data

    @property
    def flags(self) -> list[str]:
        """The flags of the layout, for a world size of ``processes``."""
        flags = f"--model-parallel-size {self.tensor} --pipe-parallel-size {self.pipe} --zero-stage {self.zero}".split()
        flags += ["--sequence-parallel"] if self.sequence_parallel else []
        flags += ["--context-parallel-size", str(self.context)] if self.context > 1 else []
        flags += ["--ds-sequence-parallel-size", str(self.ulysses)] if self.ulysses > 1 else []
        flags += ["--expert-model-parallel-size", str(self.experts)] if self.experts > 1 else []
        flags += ["--pipeline-schedule", self.schedule] if self.schedule != "1f1b" else []
        virtual = ["--num-virtual-stages-per-pipeline-rank", str(self.virtual_stages)]
        return flags + (virtual if self.schedule == "interleaved" else [])


ONE_PROCESS = Layout(1, 0, 1)
ONE_PROCESS_WITH_ZERO = Layout(1, 0, 1, zero=1)
"""The reference of runs that have ZeRO on every layout, such as runs in half precision."""


def parse_layout(name: str) -> Layout:
    """Read the name of a layout. Raises ConfigError if it is malformed."""
    sizes: dict[str, int] = {}
    options: set[str] = set()
    for part in name.split("-"):
        match = _PART.fullmatch(part)
        if match is None or match[1] in sizes or match[3] in options:
            raise ConfigError(f"layout {name}: {part!r} is not part of a layout's name; write {GRAMMAR}")
        if match[1]:
            sizes[match[1]] = int(match[2])
        else:
            options.add(match[3])
    if {"tp", "pp", "dp"} - sizes.keys() or 0 in map(sizes.get, ("tp", "dp", "ep", "cp", "ulysses")):
        raise ConfigError(f"layout {name}: sizes of TP, PP and DP are needed; write {GRAMMAR}")
    if "plain" in options and sizes["pp"] > 1:
        raise ConfigError(f"layout {name}: DeepSpeedEngine has no stages; write pp0 or pp1 with plain")
    schedules = [schedule for schedule in _SCHEDULES if schedule in options]
    schedules += ["interleaved"] if "interleaved" in sizes else []
    if len(schedules) > 1:
        raise ConfigError(f"layout {name}: a pipeline has one schedule; write {GRAMMAR}")
    return Layout(
        tensor=sizes["tp"],
        pipe=0 if "plain" in options else sizes["pp"],
        data=sizes["dp"],
        zero=sizes.get("zero", 0),
        sequence_parallel="sp" in options,
        context=sizes.get("cp", 1),
        ulysses=sizes.get("ulysses", 1),
        schedule=schedules[0] if schedules else "1f1b",
        virtual_stages=sizes.get("interleaved", 1),
        experts=sizes.get("ep", 1),
    )


def grids(processes: int) -> Iterator[Layout]:
    """All layouts of ``processes`` ranks: all grids, engines, ZeRO stages and options, supported or not."""
    sizes = [size for size in range(1, processes + 1) if processes % size == 0]
    for tensor, stages, context, ulysses in itertools.product(sizes, repeat=4):
        data, rest = divmod(processes, tensor * stages * context * ulysses)
        if rest:
            continue
        for pipe in (0, 1) if stages == 1 else (stages,):
            schedules = ("1f1b", "interleaved", *_SCHEDULES) if pipe > 1 else ("1f1b", "dualpipev")
            divisors = [size for size in sizes if data % size == 0]
            for zero, sequence, schedule, experts in itertools.product(range(4), (False, True), schedules, divisors):
                virtual = 2 if schedule == "interleaved" else 1
                yield Layout(tensor, pipe, data, zero, sequence, ulysses, schedule, virtual, context, experts)


LAYOUT_FIELDS = (
    "model_parallel_size",
    "pipe_parallel_size",
    "zero_stage",
    "sequence_parallel",
    "context_parallel_size",
    "cp_comm_type",
    "hierarchical_context_parallel_sizes",
    "ds_sequence_parallel_size",
    "expert_model_parallel_size",
    "pipeline_schedule",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
)
"""Names of the settings that a layout's flags set."""
_TOOL_FIELDS = (
    "save", "load", "save_interval", "exit_interval", "finetune", "metrics_file", "local_rank", "keep_last",
    "keep_every", "async_save", "on_save_error", "auto_resume", "snapshot_interval", "snapshot_dir", "load_strict",
    "no_save_optim", "skip_train", "rewind_on_spike", "spike_factor",
)  # fmt: skip
_REPLACED = ("attention_dropout", "hidden_dropout", "eval_iters", "log_interval", "global_batch_size")
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PROGRAM = Path(__file__).resolve().parents[3] / "pretrain_gpt2.py"


@dataclass(frozen=True)
class Request:
    """A program, and the arguments and environment that its runs on all layouts share."""

    arguments: tuple[str, ...]
    iterations: int
    environ: Mapping[str, str]
    first: Layout = ONE_PROCESS
    """The reference layout."""
    program: Path = PROGRAM
    architecture: ArchitectureSpec = GPT2

    def run(self, layout: Layout) -> RunConfig:
        """The settings of a run on ``layout``. Raises ConfigError if they break a rule."""
        return self.parsed(layout).checked()

    def parsed(self, layout: Layout) -> ParsedRun:
        """The settings of a run on ``layout``, and the rules that they break."""
        environ = {**self.environ, "WORLD_SIZE": str(layout.processes)}
        return read_run([*self.arguments, *layout.flags], environ, self.architecture)

    def command(self, layout: Layout, folder: Path, iterations: int, save_interval: int) -> list[str]:
        """The command that trains on ``layout`` and writes metrics and checkpoints to ``folder``."""
        outputs = ["--metrics-file", str(metrics_file(folder)), "--save", str(checkpoint_folder(folder))]
        intervals = ["--exit-interval", str(iterations), "--save-interval", str(save_interval)]
        return [str(self.program), *self.arguments, *layout.flags, *intervals, *outputs]


def metrics_file(folder: Path) -> Path:
    """The file of a run's metrics."""
    return folder / "metrics.jsonl"


def checkpoint_folder(folder: Path) -> Path:
    """The folder of a run's checkpoints."""
    return folder / "checkpoint"


def make_request(
    argv: Sequence[str],
    iterations: int,
    first: Layout | None,
    environ: Mapping[str, str],
    program: Path = PROGRAM,
) -> Request:
    """The request for ``argv``, arguments of ``program``, with their global batch size on layout ``first``.

    By default the first layout is one process. Raises ConfigError with a line for each problem.
    """
    architecture = read_architecture(program)
    values, problems, _ = read_flags(argv, architecture)
    owned = (
        (LAYOUT_FIELDS, "the layouts: choose it by their names"),
        (_TOOL_FIELDS, "the comparison: remove it"),
    )
    for names, owner in owned:
        problems += [f"{values[name].source} belongs to {owner}" for name in names if name in values]
    if problems:
        raise ConfigError(problems)
    environ = {name: value for name, value in environ.items() if name not in _RANK_VARIABLES}
    arguments = ["--attention-dropout", "0", "--hidden-dropout", "0", "--eval-iters", "0", "--log-interval", "1"]
    if not {"train_iters", "train_samples"} & values.keys():
        arguments += ["--train-iters", str(iterations)]
    for name, value in values.items():
        if name not in _REPLACED:
            arguments += value.arguments
    batch = values["global_batch_size"].arguments if "global_batch_size" in values else []
    request = Request((*arguments, *batch), iterations, environ, program=program.resolve(), architecture=architecture)
    if first is None:
        first = ONE_PROCESS if is_supported(request, ONE_PROCESS) else ONE_PROCESS_WITH_ZERO
    run = request.run(first)
    if run.train.train_iters < iterations:
        raise ConfigError(
            f"--train-iters {run.train.train_iters} is less than the {iterations} iterations that are compared"
        )
    if "micro_batch_size" in values and "gradient_accumulation_steps" in values:
        # Gradient accumulation follows from the micro-batch size and the number of data-parallel ranks.
        arguments = without(arguments, values["gradient_accumulation_steps"].arguments)
    if "step_batch_size_schedule" not in values:
        arguments += ["--global-batch-size", str(run.train.global_batch_size)]
    return replace(request, arguments=tuple(arguments), first=first)


def without(arguments: list[str], pair: list[str]) -> list[str]:
    """``arguments`` without a flag and its value."""
    start = next(n for n in range(len(arguments)) if arguments[n : n + 2] == pair)
    return arguments[:start] + arguments[start + 2 :]


def reference_of(request: Request, layout: Layout) -> Layout:
    """The layout with the same results as ``layout`` except for rounding: the first, if its loss is the same.

    ``global_aux_loss`` balances experts over the micro-batches so far of all replicas, so its value depends on the
    number of replicas. Then the reference is the first layout with as many replicas as ``layout``.
    """
    model = request.run(layout).model
    is_global = model.has_experts and model.moe_router_load_balancing_type == "global_aux_loss"
    if not (is_global and model.moe_aux_loss_coeff) or layout.data == request.first.data:
        return request.first
    return replace(request.first, data=layout.data, experts=1)


def rule_violations(request: Request, layouts: Sequence[Layout]) -> list[str]:
    """A message for each rule that one of ``layouts`` breaks."""
    return [f"layout {layout.name}: {message}" for layout in layouts for message in _problems(request, layout)]


def supported_layouts(request: Request, processes: int, sample: int | None = None, seed: int = 1) -> list[Layout]:
    """The first layout, and all supported layouts of ``processes`` ranks.

    With ``sample``, only that many layouts after the first, drawn at random with ``seed``.
    """
    layouts = [layout for layout in grids(processes) if layout != request.first]
    if sample is not None:
        random.Random(seed).shuffle(layouts)
    supported = (layout for layout in layouts if is_supported(request, layout))
    return [request.first, *itertools.islice(supported, sample)]


def is_supported(request: Request, layout: Layout) -> bool:
    """Whether ``layout`` breaks no rule and keeps the ZeRO stage of its name: half precision runs stage 0 as 1."""
    parsed = request.parsed(layout)
    return not parsed.problems and parsed.run.zero.zero_stage == layout.zero


def _problems(request: Request, layout: Layout) -> list[str]:
    try:
        request.run(layout)
    except ConfigError as error:
        return error.messages
    return []
