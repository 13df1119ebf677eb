"""What is to be compared: a command line of pretrain_gpt2.py, on one layout after the other. No torch here."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.config import RunConfig
from megatron.config.command_line import ParsedRun, read_run
from megatron.config.command_line.parser import read_flags
from megatron.config.errors import ConfigError

GRAMMAR = "tpA-ppB-dpC[-zeroZ][-sp][-ulyssesN][-dualpipev][-plain]"
_SIZES = ("tp", "pp", "dp", "zero", "ulysses")
_MARKS = ("sp", "dualpipev", "plain")
_PART = re.compile(rf"(?:({'|'.join(_SIZES)})(\d+))|({'|'.join(_MARKS)})")


@dataclass(frozen=True)
class Layout:
    """How ranks share the work. ``pipe`` 0 is the plain engine, 1 and more are stages of the pipeline engine."""

    tensor: int
    pipe: int
    data: int
    zero: int = 0
    sequence_parallel: bool = False
    ulysses: int = 1
    """DeepSpeed's own sequence parallelism."""
    dualpipev: bool = False

    @property
    def name(self) -> str:
        """The name that ``parse_layout`` reads."""
        parts = [f"tp{self.tensor}-pp{self.pipe}-dp{self.data}"]
        parts += [f"zero{self.zero}"] if self.zero else []
        parts += ["sp"] if self.sequence_parallel else []
        parts += [f"ulysses{self.ulysses}"] if self.ulysses > 1 else []
        return "-".join(parts + (["dualpipev"] if self.dualpipev else []))

    @property
    def processes(self) -> int:
        """Ranks it takes."""
        return self.tensor * max(self.pipe, 1) * self.ulysses * self.data

    @property
    def flags(self) -> list[str]:
        """The words of a command line that ask for it, on so many processes."""
        words = f"--model-parallel-size {self.tensor} --pipe-parallel-size {self.pipe} --zero-stage {self.zero}".split()
        words += ["--sequence-parallel"] if self.sequence_parallel else []
        words += ["--ds-sequence-parallel-size", str(self.ulysses)] if self.ulysses > 1 else []
        return words + (["--pipeline-schedule", "dualpipev"] if self.dualpipev else [])


ONE_PROCESS = Layout(1, 0, 1)
ONE_PROCESS_WITH_ZERO = Layout(1, 0, 1, zero=1)
"""What half precision takes on one process, for the sake of its fp32 weights."""


def parse_layout(name: str) -> Layout:
    """The layout of that name. Raises ConfigError if it is none."""
    sizes: dict[str, int] = {}
    marks: set[str] = set()
    for part in name.split("-"):
        match = _PART.fullmatch(part)
        if match is None or match[1] in sizes or match[3] in marks:
            raise ConfigError(f"layout {name}: {part!r} is not understood there; write {GRAMMAR}")
        if match[1]:
            sizes[match[1]] = int(match[2])
        else:
            marks.add(match[3])
    if {"tp", "pp", "dp"} - sizes.keys() or 0 in (sizes["tp"], sizes["dp"], sizes.get("ulysses")):
        raise ConfigError(f"layout {name}: sizes of TP, PP and DP are needed; write {GRAMMAR}")
    if "plain" in marks and sizes["pp"] > 1:
        raise ConfigError(f"layout {name}: the plain engine has no stages; write pp0 or pp1 with plain")
    return Layout(
        tensor=sizes["tp"],
        pipe=0 if "plain" in marks else sizes["pp"],
        data=sizes["dp"],
        zero=sizes.get("zero", 0),
        sequence_parallel="sp" in marks,
        ulysses=sizes.get("ulysses", 1),
        dualpipev="dualpipev" in marks,
    )


def grids(processes: int) -> Iterator[Layout]:
    """Every grid of so many processes, on either engine, with every ZeRO stage and each mark, legal or not."""
    sizes = [size for size in range(1, processes + 1) if processes % size == 0]
    marks = list(itertools.product(range(4), (False, True), (False, True)))
    for tensor, stages, ulysses in itertools.product(sizes, repeat=3):
        data, rest = divmod(processes, tensor * stages * ulysses)
        if rest:
            continue
        for pipe in (0, 1) if stages == 1 else (stages,):
            for zero, sequence, dualpipev in marks:
                yield Layout(tensor, pipe, data, zero, sequence, ulysses, dualpipev)


_OF_LAYOUT = (
    "model_parallel_size",
    "pipe_parallel_size",
    "zero_stage",
    "sequence_parallel",
    "ds_sequence_parallel_size",
    "pipeline_schedule",
)
_OF_TOOL = ("save", "load", "save_interval", "exit_interval", "finetune", "metrics_file", "local_rank")
_REPLACED = ("attention_dropout", "hidden_dropout", "eval_iters", "log_interval", "global_batch_size")
_PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Request:
    """The words that all layouts share, and what else makes a run of them."""

    words: tuple[str, ...]
    iterations: int
    environ: Mapping[str, str]
    first: Layout = ONE_PROCESS
    """What the others are held to."""

    def run(self, layout: Layout) -> RunConfig:
        """The run of ``layout``. Raises ConfigError where it is illegal."""
        return self.reading(layout).checked()

    def reading(self, layout: Layout) -> ParsedRun:
        """The run of ``layout``, and what speaks against it."""
        return read_run([*self.words, *layout.flags], {**self.environ, "WORLD_SIZE": str(layout.processes)})

    def command(self, layout: Layout, folder: Path) -> list[str]:
        """Arguments that train on ``layout`` and leave metrics and checkpoint in ``folder``."""
        outputs = ["--metrics-file", str(metrics_file(folder)), "--save", str(checkpoint_folder(folder))]
        return [*self.words, *layout.flags, "--exit-interval", str(self.iterations), *outputs]


def metrics_file(folder: Path) -> Path:
    """Where a run leaves its metrics."""
    return folder / "metrics.jsonl"


def checkpoint_folder(folder: Path) -> Path:
    """Where a run leaves its checkpoint."""
    return folder / "checkpoint"


def make_request(argv: Sequence[str], iterations: int, first: Layout | None, environ: Mapping[str, str]) -> Request:
    """The request that ``argv``, arguments of pretrain_gpt2.py, amounts to; its global batch is that of ``first``.

    Without a ``first`` that is one process. Raises ConfigError with a line for each thing that is wrong.
    """
    given, problems = read_flags(argv)
    for names, owner in ((_OF_LAYOUT, "the layouts: say it in their names"), (_OF_TOOL, "the comparison: remove it")):
        problems += [f"{given[name].source} belongs to {owner}" for name in names if name in given]
    if problems:
        raise ConfigError(problems)
    environ = {name: value for name, value in environ.items() if name not in _PLACE}
    words = ["--attention-dropout", "0", "--hidden-dropout", "0", "--eval-iters", "0", "--log-interval", "1"]
    if not {"train_iters", "train_samples"} & given.keys():
        words += ["--train-iters", str(iterations)]
    for name, value in given.items():
        if name not in _REPLACED:
            words += value.words
    batch = given["global_batch_size"].source.split(" ", 1) if "global_batch_size" in given else []
    whole = Request((*words, *batch), iterations, environ)
    if first is None:
        first = ONE_PROCESS if not _complaints(whole, ONE_PROCESS) else ONE_PROCESS_WITH_ZERO
    run = whole.run(first)
    if run.train.train_iters < iterations:
        raise ConfigError(
            f"--iterations {iterations} is more than the {run.train.train_iters} that are trained: lower it"
        )
    if "micro_batch_size" in given and "gradient_accumulation_steps" in given:
        # How often a rank accumulates follows from its micro-batch and from the number of ranks.
        words = _without(words, given["gradient_accumulation_steps"].source.split(" ", 1))
    return Request((*words, "--global-batch-size", str(run.train.global_batch_size)), iterations, environ, first)


def _without(words: list[str], pair: list[str]) -> list[str]:
    place = next(n for n in range(len(words)) if words[n : n + 2] == pair)
    return words[:place] + words[place + 2 :]


def illegal(request: Request, layouts: Sequence[Layout]) -> list[str]:
    """A message for each rule that one of ``layouts`` breaks."""
    return [f"layout {layout.name}: {message}" for layout in layouts for message in _complaints(request, layout)]


def legal_layouts(request: Request, processes: int) -> list[Layout]:
    """The first, and every layout of ``processes`` that no rule is against."""
    legal = [layout for layout in grids(processes) if not _complaints(request, layout)]
    return [request.first, *(layout for layout in legal if layout != request.first)]


def _complaints(request: Request, layout: Layout) -> list[str]:
    try:
        request.run(layout)
    except ConfigError as error:
        return error.messages
    return []
