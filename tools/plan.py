"""List every layout of a model on a machine with memory, traffic and time, ranked; and why others are not valid.

    python tools/plan.py --model 175b --device a100 --devices 1024 --global-batch-size 1536
    python tools/plan.py --device h100 --devices 16 --global-batch-size 256 ARGUMENTS OF pretrain_gpt2.py
    python tools/plan.py --program pretrain_bert.py --model bert-large --devices 16 --global-batch-size 256

Sizes that no --model gives, and everything else that the layouts share, are arguments of the entry script --program.
One that belongs to a layout, such as --model-parallel-size or --zero-stage, fixes that part of the search. Nothing is
started, and no GPU and no torch are needed, but for --rehearse, which trains a few iterations of single ranks of the
best layouts on this machine, as tools/rehearse.py does.

Exit code 0: a layout fits; 1: none does; 2: wrong usage.
"""

import argparse
import gc
import sys
from pathlib import Path

import _project_root  # noqa: F401
from _atomic_file import atomic_file, check_not_read, write_json

from megatron.cli.presets import PRESETS
from megatron.common.errors import ConfigError, counted
from megatron.common.output_paths import outputs_in_one_place
from megatron.model.architectures import ARCHITECTURES, GPT2
from megatron.tools.command_line import (
    ToolParser,
    check_values,
    output_file,
    output_folder,
    read_architecture,
    run_tool,
)
from megatron.tools.planning.machine import DEVICES, GB, MACHINE_INTERVALS, TERA, Machine
from megatron.tools.planning.memory import stage_memory
from megatron.tools.planning.output import FILES, SCRIPT, as_json, describe_candidate, describe_plan, files
from megatron.tools.planning.request import Request, bytes_of_text, make_request
from megatron.tools.planning.search import Candidate, search
from megatron.tools.verify.request import PROGRAM

PRECISION = {"v100": "fp16", "cpu": "fp32"}
"""Default precision by device; bf16 on the others."""


INTERVALS = {
    "vocab_size": "[1, inf)",
    "tokens": "(0, 9e15]",
    "devices": "[1, 1e6]",
    **MACHINE_INTERVALS,
    "top": "[1, inf)",
    "choose": "[1, inf)",
    "rehearse": "[1, 100]",
}
_STEPS = 5
"""Timed iterations of a rehearsal."""
_BY_PROGRAM = {architecture.program: architecture for architecture in ARCHITECTURES.values()}


def main() -> None:
    """Read the request, search, and print the plan."""
    args, words = _parser().parse_known_args()
    check_values(args, INTERVALS)
    if problems := outputs_in_one_place({"--emit": (args.emit, FILES), "--json": (args.json, ("",))}):
        raise ConfigError(problems)
    request = _request(args, words)
    gc.disable()  # no layout is part of a cycle, and walking over all of them takes long
    plan = search(request, any_schedule=True)
    if args.choose > max(len(plan.fitting), 1):
        raise ConfigError(f"--choose {args.choose}: {counted(len(plan.fitting), 'layout')} fit; choose one of them")
    for candidate in plan.every[:1]:
        check_not_read(args.json, "--json", candidate.run)
    # Files come first: a reader of the screen, such as head, may not want all of it.
    if args.json:
        write_json(args.json, as_json(plan, request, args.top))
    for chosen in plan.fitting[args.choose - 1 : args.choose] if args.emit else ():
        _write_files(args.emit, chosen)
    print("\n".join(describe_plan(plan, request, args.top)), flush=True)
    if not plan.fitting:
        sys.exit(1)
    _describe_chosen(args, plan.fitting[args.choose - 1])
    if args.rehearse:
        _rehearse(plan.fitting[: args.rehearse], Path(args.program or PROGRAM.with_name(request.program)))


def _rehearse(candidates: list[Candidate], program: Path) -> None:
    """Rehearse these layouts, and print them in the order of the expected steps."""
    from megatron.tools.rehearsal.rehearse import ranked, rehearse_layouts

    layouts = []
    for one in rehearse_layouts(candidates, program, _STEPS):
        layouts.append(one)
        print(f"rehearsed {len(layouts)} of {len(candidates)}", file=sys.stderr, flush=True)
    print("\n" + "\n".join(ranked(layouts)), flush=True)


def _write_files(folder: Path, chosen: Candidate) -> None:
    """Write what starts one layout. Raises ConfigError if the folder cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--emit {folder}: {error.strerror}; name another folder") from None
    for name, text in files(chosen).items():
        with atomic_file(folder / name, "--emit") as file:
            file.write(text)
    script = folder / SCRIPT
    mode = script.stat().st_mode
    script.chmod(mode | mode >> 2 & 0o111)  # whoever may read it may run it


def _describe_chosen(args: argparse.Namespace, chosen: Candidate) -> None:
    """Print one layout, and what has been written for it."""
    print(f"\nlayout {args.choose}: " + "\n".join(describe_candidate(chosen, stage_memory(chosen.run))))
    if args.emit:
        print(f"\nwrote {args.emit}/: {', '.join(files(chosen))}")
        ranks = f"--world-size {chosen.run.parallel.world_size}"
        print(f"tools/verify_communication.py {ranks} with the flags of {SCRIPT} tells whether its ranks can hang")


def _request(args: argparse.Namespace, words: list[str]) -> Request:
    device = DEVICES[args.device]
    stated = {
        "memory": args.memory,
        "peak_flops": args.peak_tflops and args.peak_tflops * TERA,
        "intra_bandwidth": args.intra_bandwidth and args.intra_bandwidth * GB,
        "inter_bandwidth": args.inter_bandwidth and args.inter_bandwidth * GB,
    }
    device = device._replace(**{name: value for name, value in stated.items() if value is not None})
    preset = PRESETS[args.model].program if args.model else GPT2.program
    program = args.program or Path(preset)
    architecture = read_architecture(args.program) if args.program else _BY_PROGRAM[preset]
    request = make_request(
        words,
        Machine(device, min(args.devices_per_node or device.per_node, args.devices)),
        args.devices,
        model=args.model,
        precision=args.precision or PRECISION.get(args.device, "bf16"),
        vocab_size=args.vocab_size,
        headroom=args.headroom,
        tokens=args.tokens,
        architecture=architecture,
        program=str(program),
    )
    planned = next((name for name in ("bf16", "fp16") if name in request.given), "fp32")
    if args.precision not in (None, planned):
        raise ConfigError(f"--precision {args.precision} and --{planned} exclude each other: remove one")
    return request


def _parser() -> ToolParser:
    parser = ToolParser(__doc__)
    parser.usage = "%(prog)s --device NAME --devices N --global-batch-size N [flags] ARGUMENTS OF THE PROGRAM"
    model = parser.add_argument_group("model")
    model.add_argument("--model", choices=PRESETS, help="sizes of a model; arguments of its program override them")
    model.add_argument(
        "--program",
        type=Path,
        metavar="FILE",
        help="entry script whose ARCHITECTURE is planned (default: the program of --model, or pretrain_gpt2.py)",
    )
    model.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="tokens, without a --vocab-file that exists (default: 50257, or BERT's 30522)",
    )
    model.add_argument(
        "--tokens",
        type=float,
        default=300e9,
        metavar="N",
        help="tokens to train on, for the days (default: %(default)g)",
    )
    machine = parser.add_argument_group("machine")
    machine.add_argument("--device", choices=DEVICES, default="a100", help="sets the defaults of the following")
    machine.add_argument("--devices", type=int, required=True, metavar="N", help="devices")
    machine.add_argument("--devices-per-node", type=int, metavar="N", help="devices per host")
    machine.add_argument("--memory", type=bytes_of_text, metavar="SIZE", help="memory of a device, such as 80GB")
    machine.add_argument("--headroom", type=float, default=0.06, metavar="X", help="share of it that stays free")
    machine.add_argument("--peak-tflops", type=float, metavar="X", help="dense 16-bit TFLOP/s of a device")
    machine.add_argument("--intra-bandwidth", type=float, metavar="X", help="GB/s, one way, within a host")
    machine.add_argument("--inter-bandwidth", type=float, metavar="X", help="GB/s, one way, between hosts")
    machine.add_argument(
        "--precision",
        choices=("bf16", "fp16", "fp32"),
        help="type of weights, as with --bf16 and --fp16 (default: bf16; fp16 on v100, fp32 on cpu)",
    )
    result = parser.add_argument_group("result")
    result.add_argument("--top", type=int, default=10, metavar="N", help="rows of the table")
    result.add_argument("--choose", type=int, default=1, metavar="N", help="row of the table for the following")
    result.add_argument(
        "--rehearse", type=int, metavar="N", help="rehearse the N best layouts on this machine, and rank them by it"
    )
    result.add_argument(
        "--emit", type=output_folder, metavar="DIR", help="folder for script, DeepSpeed JSON and hostfile"
    )
    result.add_argument("--json", type=output_file, metavar="FILE", help="write all figures to this file")
    return parser


if __name__ == "__main__":
    run_tool(main)
