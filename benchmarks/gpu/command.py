"""Check and measure this machine's GPUs, and write the result into one archive.

    bash benchmarks/gpu.sh
    bash benchmarks/gpu.sh --quick
    bash benchmarks/gpu.sh --minutes 9 --stages speed links

First come checks that end the program: torch with CUDA, driver, DeepSpeed, free memory of each GPU, disk. Then the
stages; one that fails does not keep the others from running, and the page states why:

links         bandwidth between the GPUs, and to host memory
speed         a training step against a plain torch model, transformers and megatron-core, as installed, and in FP8
scaling       tokens a second on several GPUs against one: DP, TP, PP, CP, with and without overlapped communication
rehearsal     one rank of large runs, without the others (tools/rehearse.py)
profile       torch's profile of one step
correctness   kernels against plain torch, delayed communication, training of each model against the CPU, and
              tools/verify_layout.py on one GPU and on all, in each precision
run           a training run with a trace, against the planner's figures

With --minutes N the program ends after N minutes. What is worth most comes first; a command may take half of the time
that is left, and what no time is left for is named. With --continue the stages that have passed in --output DIR are not
repeated. After each stage, and after Ctrl-C or SIGTERM, the results are complete: DIR/report.html is the page,
DIR/gpu.json has all results, DIR/logs what the commands printed, and DIR.tar.gz, whose path is the last line printed,
is all of these, a few MB to send back. benchmarks/write_figures.py DIR writes the speeds into benchmarks/RESULTS.md.

Exit code 0: all stages passed or were left out; 1: one failed; 2: wrong usage, or something is not installed; 7: no
GPU, driver too old, not enough memory or disk; 130: interrupted.
"""

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from io import BytesIO
from math import inf
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:1] = [str(ROOT)]  # instead of this folder

from benchmarks.gpu.machine import Machine, checked, probe  # noqa: E402
from benchmarks.gpu.plan import Failed, Plan, Stage, last_line  # noqa: E402
from benchmarks.gpu.report import FORMAT, PAGE, RESULTS, read_results, render, summary  # noqa: E402
from benchmarks.gpu.speed import DEFAULT, SHAPES  # noqa: E402
from benchmarks.gpu.stages import GROUPS, stages  # noqa: E402
from benchmarks.tables import measured_on  # noqa: E402
from megatron.common.errors import ConfigError, ResourceError  # noqa: E402
from megatron.common.files import replace_file  # noqa: E402
from megatron.common.processes import die_with_parent  # noqa: E402
from megatron.launch.environment import prepare_environment  # noqa: E402
from megatron.tools.command_line import ToolParser, run_tool  # noqa: E402

FIGURES = "gpu_step.json"
_LONGEST_LOG, _LARGEST_FILE = 100_000, 2_000_000
"""Bytes in the archive: of a log its end, of other files all or nothing."""
_WRITING = 3
"""Seconds of --minutes that are kept for the last page and archive."""
_BEGIN = time.monotonic()


def main() -> None:
    """Check the machine, run all stages, write the archive."""
    arguments = _parser().parse_args()
    if arguments.report:
        _write(arguments.report / PAGE, render(read_results(arguments.report), arguments.report))
        print(arguments.report / PAGE)
        return
    plan = _plan(arguments)
    earlier = _earlier(plan.folder) if arguments.resumes else []
    machine = checked(probe(), plan.folder)
    print("\n".join(f"{name}: {value}" for name, value in machine.describe().items()), flush=True)
    if not plan.groups:
        return
    _make_folders(plan.folder)
    prepare_environment(os.environ)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if machine.nvidia_smi:
        with open(plan.folder / "logs" / "clocks.txt", "w") as log:  # power and clocks, until this process ends
            dmon = ["nvidia-smi", "dmon", "-s", "pc", "-d", "5"]
            subprocess.Popen(dmon, stdout=log, stderr=subprocess.STDOUT, preexec_fn=die_with_parent)
    content = run_stages(list(stages(plan, machine)), plan, machine, earlier)
    print(f"{summary(content)}\n{archive_of(plan.folder)}")
    if any(stage["reason"] == INTERRUPTED for stage in content["stages"]):
        raise KeyboardInterrupt
    if any(stage["status"] == "failed" for stage in content["stages"]):
        sys.exit(1)


INTERRUPTED = "interrupted"


def run_stages(
    todo: Sequence[Stage], plan: Plan, machine: Machine, earlier: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    """Run one stage after the other; their results, which are also in the folder, after each of them.

    ``earlier`` are results of stages that are not run again.
    """
    created = datetime.now().astimezone().isoformat(timespec="seconds")
    content: dict[str, Any] = {"format": FORMAT, "created": created, "options": _options(plan)}
    content |= {"machine": asdict(machine), "stages": [*earlier]}
    todo = [stage for stage in todo if stage.name not in {one["name"] for one in earlier}]
    for number, stage in enumerate(todo, start=1):
        print(f"[{number}/{len(todo)}] {stage.name} ...", end=" ", flush=True)
        found = _run(stage, plan)
        print(
            f"{found['status']} ({found['seconds']:.0f} s){': ' * bool(found['reason'])}{found['reason'] or ''}",
            flush=True,
        )
        content["stages"].append(found)
        if found["reason"] == INTERRUPTED:
            for one in (signal.SIGINT, signal.SIGTERM):
                signal.signal(one, signal.SIG_IGN)  # until all is written
            content["stages"] += [_found(stage, "left out", INTERRUPTED) for stage in todo[number:]]
        write_folder(content, plan, machine)
        if found["reason"] == INTERRUPTED:
            break
    return content


def _run(stage: Stage, plan: Plan) -> dict[str, Any]:
    """The result of a stage, whatever becomes of it."""
    begin = time.monotonic()
    try:
        plan.time_limit()
        status, reason, result = "passed", None, stage.work()
    except KeyboardInterrupt:
        status, reason, result = "left out", INTERRUPTED, {}
    except ResourceError as error:
        status, reason, result = "left out", error.messages[0], {}
    except Exception as error:
        # Whatever it is, the other stages are run; the reason is on the page.
        result = error.result if isinstance(error, Failed) else {}
        status, reason = "failed", last_line("\n".join(getattr(error, "messages", [_described(error)])))
    return _found(stage, status, reason, result, time.monotonic() - begin)


def _found(
    stage: Stage, status: str, reason: str | None, result: dict[str, Any] | None = None, seconds: float = 0.0
) -> dict[str, Any]:
    shown = {"group": stage.group, "name": stage.name, "status": status, "seconds": seconds}
    return {**shown, "reason": reason, "result": result or {}}


def write_folder(content: dict[str, Any], plan: Plan, machine: Machine) -> None:
    """The results as JSON and as a page, the speeds as ``benchmarks/run.py`` writes them, and the archive of all."""
    _write(plan.folder / RESULTS, json.dumps(content, indent=1) + "\n")
    _write(plan.folder / PAGE, render(content, plan.folder))
    rows = [row for stage in content["stages"] for row in stage["result"].get("rows", [])]
    if rows:
        measured = measured_on(plan.rounds, machine.devices[0].name)
        figures = {"name": "gpu_step", "measured_on": measured, "rows": rows}
        _write(plan.folder / FIGURES, json.dumps(figures, indent=2) + "\n")
    archive = BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for name, text in _small_files(plan.folder):
            entry = tarfile.TarInfo(f"{plan.folder.name}/{name}")
            entry.size, entry.mtime = len(text), int(time.time())
            tar.addfile(entry, BytesIO(text))
    _write(archive_of(plan.folder), archive.getvalue())


def archive_of(folder: Path) -> Path:
    """The file to send back."""
    return folder.with_name(f"{folder.name}.tar.gz")


def _small_files(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Names and contents of all files, of a log the end; profiles that are larger stay behind."""
    for file in sorted(folder.rglob("*")):
        if file.suffix == ".txt" or file.is_file() and file.stat().st_size <= _LARGEST_FILE:
            yield str(file.relative_to(folder)), file.read_bytes()[-_LONGEST_LOG if file.suffix == ".txt" else 0 :]


def _earlier(folder: Path) -> list[dict[str, Any]]:
    """Results of the stages that have passed in ``folder``, if there are any."""
    stages = read_results(folder)["stages"] if (folder / RESULTS).exists() else []
    return [stage for stage in stages if stage["status"] == "passed"]


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _options(plan: Plan) -> dict[str, Any]:
    return {**plan._asdict(), "folder": str(plan.folder), "deadline": None}


def _plan(arguments: Any) -> Plan:
    """What is asked for, and its folder. Raises ConfigError if something in it is wrong."""
    rounds = arguments.rounds if arguments.rounds is not None else 2 if arguments.quick else 5
    if rounds < 1:
        raise ConfigError(f"--rounds {rounds} must be at least 1")
    if arguments.minutes is not None and not arguments.minutes > 0:
        raise ConfigError(f"--minutes {arguments.minutes:g} must be above 0")
    groups = [] if arguments.stages == ["none"] else arguments.stages
    if "none" in groups:
        raise ConfigError("--stages none checks the machine alone: name no other stage")
    folder = arguments.output or Path(f"gpu-{datetime.now():%Y%m%d-%H%M%S}")
    sizes = arguments.size or (DEFAULT[:1] if arguments.quick else DEFAULT)
    deadline = _BEGIN + 60 * arguments.minutes - _WRITING if arguments.minutes else inf
    which = sizes, groups, rounds, arguments.quick, arguments.all_layouts
    return Plan(*which, folder.resolve(), arguments.minutes, deadline)


def _make_folders(folder: Path) -> None:
    try:
        for place in (folder / "logs", folder / "run"):
            place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {folder}: {error.strerror}; name another folder") from None


def _write(path: Path, content: str | bytes) -> None:
    try:
        with replace_file(path, text=isinstance(content, str)) as file:
            file.write(content)
    except OSError as error:
        raise ResourceError(f"{path}: {error.strerror}; make room, or name another --output") from None


def _parser() -> ToolParser:
    parser = ToolParser(__doc__, usage="bash benchmarks/gpu.sh [flags]")
    add = parser.add_argument
    sizes = ", ".join(SHAPES)
    add("--size", nargs="+", choices=SHAPES, metavar="SIZE", help=f"models to measure: {sizes} (default: all but tiny)")
    add("--quick", action="store_true", help="the smallest size, one precision, fewer layouts and rounds")
    stages = [*GROUPS, "none"]
    add("--stages", nargs="+", choices=stages, default=list(GROUPS), metavar="STAGE", help=", ".join(stages))
    add("--rounds", type=int, metavar="N", help="measurements of each speed (default: 5, and 2 with --quick)")
    add("--all-layouts", action="store_true", help="compare every layout that is legal, not a choice of them")
    add("--minutes", type=float, metavar="N", help="end after so many minutes with what has been measured until then")
    add("--output", type=Path, metavar="DIR", help="folder to write, beside DIR.tar.gz (default: gpu-DATE-TIME)")
    add("--continue", dest="resumes", action="store_true", help="do not repeat what has passed in --output DIR")
    add("--report", type=Path, metavar="DIR", help="only write the page of such a folder again")
    return parser


if __name__ == "__main__":
    sys.argv[0] = "gpu.sh"  # the name in messages
    run_tool(main)
