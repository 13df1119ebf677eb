"""Check every host of a hostfile for problems that would make a run fail; each failure comes with a command to fix it.

    python tools/doctor.py --hostfile hostfile [-i host:0,1@host2] [--quick] [ARGUMENTS OF pretrain_gpt2.py]

All hosts are probed at once, over ssh and without a password; this host, if ssh does not answer there or without a
hostfile, without ssh. Without training arguments the data, the checkpoints and what else they name are not checked.
--quick skips the all-reduce over all ranks, which comes last. Whether ranks can wait for each other forever is for
tools/verify_communication.py to say, without any host.

Exit code 0: ready; 2: the hostfile or the arguments are wrong; 6: a check failed.
"""

import os
import socket
import sys
from pathlib import Path

import _project_root  # noqa: F401

from megatron.cli import parse_run
from megatron.cli.flags import read_flags
from megatron.cli.parser import CONFIG_FILE
from megatron.common.errors import ConfigError, LaunchError, counted
from megatron.tools.cluster.all_reduce import all_reduce
from megatron.tools.cluster.doctor import (
    all_reduce_lines,
    as_json,
    examine_hosts,
    is_ready,
    problem_count,
    table,
)
from megatron.tools.cluster.hostfile import Host, name_problem
from megatron.tools.cluster.launch_flags import add_launcher_flags, chosen_hosts
from megatron.tools.cluster.probe_hosts import Examination
from megatron.tools.cluster.remote import device_kind, variable_problems
from megatron.tools.command_line import ToolParser, check_values, run_tool


def main() -> None:
    """Probe, check and print; then the all-reduce, unless a check failed."""
    args, words = _parser().parse_known_args()
    examination = _examination(args, words[1:] if words and words[0].endswith(".py") else words)
    results, reports = examine_hosts(examination)
    color, count = sys.stdout.isatty(), problem_count(results)
    if not args.json:
        print(table(results, color=color), flush=True)
    ranks = sum(len(host.slots) for host in examination.hosts)
    bandwidth = None if args.quick or count else all_reduce(examination, reports)
    if args.json:
        print(as_json(results, bandwidth))
    else:
        if bandwidth is not None:
            print(all_reduce_lines(bandwidth, ranks, color=color))
        count += bandwidth is not None and bandwidth.bytes_per_second is None
        state = f"{counted(count, 'check')} failed" if count else "ready"
        print(f"{counted(len(results), 'host')}, {counted(ranks, 'rank')}: {state}")
    if not is_ready(results, bandwidth):
        sys.exit(LaunchError.exit_code)


def _examination(args, words: list[str]) -> Examination:
    """What to check. Raises ConfigError with the problems of the command line or the hostfile."""
    if args.master_addr and (problem := name_problem(args.master_addr)):
        raise ConfigError(f"--master_addr: {problem}")
    check_values(args, {"time_limit": "(0, 86400]"})
    listed = chosen_hosts(args)
    device = device_kind(os.environ, Path.cwd())
    hosts = listed or [Host(socket.gethostname(), tuple(range(args.num_gpus or 1)))]
    if problems := list(variable_problems(os.environ, device, Path.cwd())):
        raise ConfigError(problems)
    ranks = sum(len(host.slots) for host in hosts if not host.spare)
    config_file = read_flags(words).values.get(CONFIG_FILE)
    return Examination(
        hosts=hosts,
        run=parse_run(words, {**os.environ, "DS_ACCELERATOR": device, "WORLD_SIZE": str(ranks)}) if words else None,
        config_file=config_file and config_file.value,
        device=device,
        environ=os.environ,
        uses_ssh=bool(listed),
        master_address=args.master_addr,
        master_port=args.master_port,
        ssh_port=args.ssh_port,
        seconds=args.time_limit,
    )


def _parser() -> ToolParser:
    parser = ToolParser(__doc__)
    parser.usage = "%(prog)s --hostfile FILE [flags] [ARGUMENTS OF pretrain_gpt2.py]"
    add_launcher_flags(parser)
    parser.add_argument("--quick", action="store_true", help="no all-reduce")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument(
        "--time-limit", type=float, default=60, metavar="S", help="seconds that a host may take to answer"
    )
    return parser


if __name__ == "__main__":
    run_tool(main)
