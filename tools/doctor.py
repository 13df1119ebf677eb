"""Look at every host of a hostfile and say what a run would fail of, with the command that mends it.

    python tools/doctor.py --hostfile hostfile [-i host:0,1@host2] [--quick] [ARGUMENTS OF pretrain_gpt2.py]

All hosts are asked at once, over ssh and without a password. Without training arguments the data, the checkpoints and
what else they name are left out. --quick leaves out the all-reduce over all ranks, which is for the end.

Exit code 0: all is well; 2: the hostfile or the arguments are wrong; 6: something is to be mended.
"""

import os
import sys
from pathlib import Path

import _project_root  # noqa: F401

from megatron.config.command_line import parse_run
from megatron.config.command_line.parser import CONFIG_FILE, read_flags
from megatron.config.errors import ConfigError, LaunchError
from megatron.tools.cluster import forwarding
from megatron.tools.cluster.doctor import Visit, examine_hosts, rehearse_on
from megatron.tools.cluster.hostfile import name_problem
from megatron.tools.cluster.launching import add_launcher_flags, chosen_hosts
from megatron.tools.cluster.report import as_json, is_well, problem_count, rehearsal_lines, table
from megatron.tools.command_line import ToolParser, run_tool


def main() -> None:
    """Ask, judge, show; then the all-reduce, if nothing is against it."""
    args, words = _parser().parse_known_args()
    visit = _visit(args, words[1:] if words and words[0].endswith(".py") else words)
    findings, answers = examine_hosts(visit)
    colour = sys.stdout.isatty()
    if not args.json:
        print(table(findings, colour=colour), flush=True)
    ranks = sum(len(host.slots) for host in visit.hosts)
    rehearsal = rehearse_on(visit, answers) if not (args.quick or problem_count(findings)) else None
    if args.json:
        print(as_json(findings, rehearsal))
    else:
        if rehearsal is not None:
            print(rehearsal_lines(rehearsal, ranks, colour=colour))
        count = problem_count(findings)
        print(f"{len(findings)} hosts, {ranks} ranks: {f'{count} to mend' if count else 'ready'}")
    if not is_well(findings, rehearsal):
        sys.exit(LaunchError.exit_code)


def _visit(args, words: list[str]) -> Visit:
    """What is to be looked at. Raises ConfigError with what is wrong with the command line or the hostfile."""
    if args.master_addr and (problem := name_problem(args.master_addr)):
        raise ConfigError(f"--master_addr: {problem}")
    hosts = chosen_hosts(args)
    if not hosts:
        raise ConfigError("no hostfile is given: name one with --hostfile, see hostfile.example")
    device = forwarding.device(os.environ, Path.cwd())
    if problems := list(forwarding.problems(os.environ, device, Path.cwd())):
        raise ConfigError(problems)
    ranks = sum(len(host.slots) for host in hosts)
    config_file = read_flags(words)[0].get(CONFIG_FILE)
    return Visit(
        hosts=hosts,
        run=parse_run(words, {**os.environ, "DS_ACCELERATOR": device, "WORLD_SIZE": str(ranks)}) if words else None,
        config_file=config_file and config_file.value,
        device=device,
        environ=os.environ,
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
