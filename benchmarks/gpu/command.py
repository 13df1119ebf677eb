"""Check and measure this machine's GPUs, and write a page and a JSON file about them into one folder.

    bash benchmarks/gpu.sh
    bash benchmarks/gpu.sh --quick
    bash benchmarks/gpu.sh --stages correctness --all-layouts

First come checks that end the program: torch with CUDA, driver, DeepSpeed, free memory of each GPU, disk. Then the
stages; one that fails does not keep the others from running, and the page states why:

correctness   kernels against plain torch, training of each model against the CPU, and tools/verify_layout.py on one GPU
              and on all, in each precision
speed         a training step against a plain torch model, transformers and megatron-core, as far as installed
scaling       tokens a second on several GPUs against one
run           a training run with a trace, against the planner's figures
profile       torch's profile of one step

The last line printed is the folder: report.html is the page, gpu.json has all results, to be sent back, logs/ what the
commands printed. benchmarks/write_figures.py FOLDER writes the speeds into docs/performance.md.

Exit code 0: all stages passed; 1: one failed; 2: wrong usage, or something is not installed; 7: no GPU, driver too old,
not enough memory or disk.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:1] = [str(ROOT)]  # instead of this folder

from benchmarks.gpu.machine import Machine, checked, probe  # noqa: E402
from benchmarks.gpu.plan import Failed, Plan, Stage, last_line  # noqa: E402
from benchmarks.gpu.report import FORMAT, PAGE, RESULTS, read_results, render, summary  # noqa: E402
from benchmarks.gpu.stages import GROUPS, stages  # noqa: E402
from benchmarks.measures.gpu_step import DEFAULT, SHAPES  # noqa: E402
from benchmarks.tables import measured_on  # noqa: E402
from megatron.common.errors import ConfigError, ResourceError  # noqa: E402
from megatron.common.files import replace_file  # noqa: E402
from megatron.launch.environment import prepare_environment  # noqa: E402
from megatron.tools.command_line import ToolParser, run_tool  # noqa: E402

FIGURES = "gpu_step.json"


def main() -> None:
    """Check the machine, run all stages, write the folder."""
    arguments = _parser().parse_args()
    if arguments.report:
        _write(arguments.report / PAGE, render(read_results(arguments.report), arguments.report))
        print(arguments.report / PAGE)
        return
    plan = _plan(arguments)
    machine = checked(probe(), plan.folder)
    print("\n".join(f"{name}: {value}" for name, value in machine.describe().items()), flush=True)
    if not plan.groups:
        return
    _make_folders(plan.folder)
    prepare_environment(os.environ)
    content = run_stages(list(stages(plan, machine)), plan, machine)
    print(f"{summary(content)}\n{plan.folder}")
    if any(stage["status"] == "failed" for stage in content["stages"]):
        sys.exit(1)


def run_stages(todo: Sequence[Stage], plan: Plan, machine: Machine) -> dict[str, Any]:
    """Run one stage after the other; their results, which are also in the folder, after each of them."""
    created = datetime.now().astimezone().isoformat(timespec="seconds")
    content: dict[str, Any] = {"format": FORMAT, "created": created, "options": _options(plan)}
    content |= {"machine": asdict(machine), "stages": []}
    for number, stage in enumerate(todo, start=1):
        print(f"[{number}/{len(todo)}] {stage.name} ...", end=" ", flush=True)
        begin, interrupted = time.monotonic(), False
        try:
            status, reason, result = "passed", None, stage.work()
        except KeyboardInterrupt:
            status, reason, result, interrupted = "failed", "interrupted", {}, True
        except ResourceError as error:
            status, reason, result = "left out", error.messages[0], {}
        except Exception as error:
            # Whatever it is, the other stages are run; the reason is on the page.
            result = error.result if isinstance(error, Failed) else {}
            status, reason = "failed", last_line("\n".join(getattr(error, "messages", [_described(error)])))
        seconds = time.monotonic() - begin
        print(f"{status} ({seconds:.0f} s){f': {reason}' if reason else ''}", flush=True)
        shown = {"group": stage.group, "name": stage.name, "status": status, "seconds": seconds}
        content["stages"].append({**shown, "reason": reason, "result": result})
        write_folder(content, plan, machine)
        if interrupted:
            print(plan.folder)
            raise KeyboardInterrupt
    return content


def write_folder(content: dict[str, Any], plan: Plan, machine: Machine) -> None:
    """The results as JSON and as a page, and the speeds as ``benchmarks/run.py`` writes them."""
    _write(plan.folder / RESULTS, json.dumps(content, indent=1) + "\n")
    _write(plan.folder / PAGE, render(content, plan.folder))
    rows = [row for stage in content["stages"] for row in stage["result"].get("rows", [])]
    if rows:
        measured = measured_on(plan.rounds, machine.devices[0].name)
        figures = {"name": "gpu_step", "measured_on": measured, "rows": rows}
        _write(plan.folder / FIGURES, json.dumps(figures, indent=2) + "\n")


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _options(plan: Plan) -> dict[str, Any]:
    return {**plan._asdict(), "folder": str(plan.folder)}


def _plan(arguments: Any) -> Plan:
    """What is asked for, and its folder. Raises ConfigError if something in it is wrong."""
    rounds = arguments.rounds if arguments.rounds is not None else 2 if arguments.quick else 5
    if rounds < 1:
        raise ConfigError(f"--rounds {rounds} must be at least 1")
    groups = [] if arguments.stages == ["none"] else arguments.stages
    if "none" in groups:
        raise ConfigError("--stages none checks the machine alone: name no other stage")
    folder = arguments.output or Path(f"gpu-{datetime.now():%Y%m%d-%H%M%S}")
    sizes = arguments.size or (DEFAULT[:1] if arguments.quick else DEFAULT)
    return Plan(sizes, groups, rounds, arguments.quick, arguments.all_layouts, folder.resolve())


def _make_folders(folder: Path) -> None:
    try:
        for place in (folder / "logs", folder / "run"):
            place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {folder}: {error.strerror}; name another folder") from None


def _write(path: Path, text: str) -> None:
    try:
        with replace_file(path, text=True) as file:
            file.write(text)
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
    add("--output", "--json", type=Path, metavar="DIR", help="folder to write (default: gpu-DATE-TIME)")
    add("--report", type=Path, metavar="DIR", help="only write the page of such a folder again")
    return parser


if __name__ == "__main__":
    sys.argv[0] = "gpu.sh"  # the name in messages
    run_tool(main)
