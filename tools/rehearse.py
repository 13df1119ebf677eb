"""Rehearse single ranks of a large run on one device: time, launches and memory, and the expected step of the run.

    python tools/rehearse.py --world-size 64 --rank 9 ARGUMENTS OF pretrain_gpt2.py
    python tools/rehearse.py --world-size 64 --ranks representative --device h100 ARGUMENTS OF pretrain_gpt2.py
    python tools/rehearse.py --world-size 64 --rank 9 --fake ARGUMENTS OF pretrain_gpt2.py

A rank trains its first iterations: its part of the model, engine, optimizer and data are real, and operations of
torch.distributed deliver made-up data at once. Without communication a step takes as long as the device needs for it;
communication is added by the bandwidths of the links, and the other stages by the simulation of the schedule. --fake
describes a rank without its memory and computation: bytes by kind and counts, and no times. Nothing is saved.

Exit code 0: each rank fits; 1: one does not; 2: wrong usage; 7: this machine has too little memory.
"""

import argparse
import sys
from pathlib import Path

import _project_root  # noqa: F401
from _atomic_file import check_not_read, write_json

from megatron.cli.provided import read_number
from megatron.common.errors import ConfigError
from megatron.common.reading import read_json
from megatron.config.fields import inside
from megatron.tools.command_line import ToolParser, check_values, output_file, read_architecture, run_tool
from megatron.tools.planning.machine import DEVICES, GB, LINKS, MACHINE_INTERVALS, TERA, Machine
from megatron.tools.planning.request import bytes_of_text
from megatron.tools.rehearsal.estimate import Expected
from megatron.tools.rehearsal.output import as_json, describe_expected, describe_rank
from megatron.tools.rehearsal.rehearse import Rehearsal, check_ranks, checked_run, ranks_of_text, rehearse_ranks
from megatron.tools.verify.request import PROGRAM

INTERVALS = {
    "world_size": "[1, 1e6]",
    "steps": "[1, 1000]",
    **MACHINE_INTERVALS,
}


def main() -> None:
    """Check the run, rehearse each rank, and print what is expected of all of them."""
    args, words = _parser().parse_known_args()
    check_values(args, INTERVALS)
    if args.rank is not None and args.ranks is not None:
        raise ConfigError(f"--rank {args.rank} and --ranks {args.ranks} exclude each other: give one")
    program = args.program or PROGRAM
    machine = _machine(args)
    rehearsal = Rehearsal(
        words, read_architecture(program), args.world_size, machine.per_node, args.steps, args.fake
    )  # fmt: skip
    run = checked_run(rehearsal)
    check_not_read(args.json, "--json", run)
    numbers = ranks_of_text(args.ranks, run) if args.ranks else check_ranks([args.rank or 0], run)
    room = machine.device.memory * (1 - args.headroom)
    ranks = []
    for rank in rehearse_ranks(rehearsal, numbers, program):
        ranks.append(rank)
        print("\n".join(describe_rank(run, rank, room)), flush=True)
    expected = None if args.fake else Expected(run, machine, ranks)
    if expected is not None:
        print("\n" + "\n".join(describe_expected(expected)), flush=True)
    write_json(args.json, as_json(run, ranks, expected))
    if any(rank["memory_bytes"]["peak"] > room for rank in ranks):
        sys.exit(1)


def _machine(args: argparse.Namespace) -> Machine:
    """The machine of the run, whose links may be measured."""
    device = DEVICES[args.device]
    stated = {
        "memory": args.memory,
        "peak_flops": args.peak_tflops and args.peak_tflops * TERA,
        "intra_bandwidth": args.intra_bandwidth and args.intra_bandwidth * GB,
        "inter_bandwidth": args.inter_bandwidth and args.inter_bandwidth * GB,
    }
    stated |= _measured_links(args.doctor) if args.doctor else {}
    device = device._replace(**{name: value for name, value in stated.items() if value is not None})
    return Machine(device, min(args.devices_per_node or device.per_node, args.world_size))


def _measured_links(file: Path) -> dict[str, float]:
    """The bandwidth of the links that the doctor's all-reduce has crossed, of which collectives reach a share."""
    try:
        report = read_json(file)
        name = "inter_bandwidth" if len(report["hosts"].keys()) > 1 else "intra_bandwidth"
        measured = read_number(str(report["all_reduce"]["bytes_per_second"]))
        if not inside(measured / GB, MACHINE_INTERVALS[name]):
            raise ValueError
        return {name: measured / LINKS}
    except OSError as error:
        raise ConfigError(f"--doctor {file}: {error.strerror}; name a file that doctor.py --json wrote") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(
            f"--doctor {file} has no measured all-reduce: write it with tools/doctor.py --json, without --quick"
        ) from None


def _parser() -> ToolParser:
    parser = ToolParser(__doc__)
    parser.usage = "%(prog)s --world-size N [--rank N | --ranks LIST] [flags] ARGUMENTS OF THE PROGRAM"
    what = parser.add_argument_group("what is rehearsed")
    what.add_argument("--world-size", type=int, required=True, metavar="N", help="ranks of the run")
    what.add_argument("--rank", type=int, metavar="N", help="the rank (default: 0)")
    what.add_argument(
        "--ranks", metavar="LIST", help="several, such as 0,9; or representative: a rank of each kind of stage"
    )
    what.add_argument("--program", type=Path, metavar="FILE", help="entry script (default: pretrain_gpt2.py)")
    what.add_argument("--steps", type=int, default=5, metavar="N", help="timed iterations")
    what.add_argument("--fake", action="store_true", help="no memory, no computation, no times: bytes and counts")
    machine = parser.add_argument_group("machine of the run")
    machine.add_argument("--device", choices=DEVICES, default="a100", help="sets the defaults of the following")
    machine.add_argument("--devices-per-node", type=int, metavar="N", help="devices per host")
    machine.add_argument("--memory", type=bytes_of_text, metavar="SIZE", help="memory of a device, such as 80GB")
    machine.add_argument("--headroom", type=float, default=0.06, metavar="X", help="share of it that stays free")
    machine.add_argument("--peak-tflops", type=float, metavar="X", help="dense 16-bit TFLOP/s of a device, for the MFU")
    machine.add_argument("--intra-bandwidth", type=float, metavar="X", help="GB/s, one way, within a host")
    machine.add_argument("--inter-bandwidth", type=float, metavar="X", help="GB/s, one way, between hosts")
    machine.add_argument(
        "--doctor", type=Path, metavar="FILE", help="the output of tools/doctor.py --json, with the measured bandwidth"
    )
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write all figures to this file")
    return parser


if __name__ == "__main__":
    run_tool(main)
