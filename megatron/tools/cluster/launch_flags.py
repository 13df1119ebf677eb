"""Command line of ``tools/launch.py``: flags of deepspeed and of ``--elastic``, and the hosts that they select."""

import re
from argparse import REMAINDER, Namespace
from collections.abc import Sequence
from pathlib import Path

from megatron.common.errors import ConfigError, counted
from megatron.tools.cluster.hostfile import LOCALHOST, Host, check_one_filter, read_hostfile, select
from megatron.tools.cluster.supervise import MOST_FAILURES
from megatron.tools.command_line import ToolParser
from megatron.tools.planning.machine import DEVICES
from megatron.tools.planning.request import bytes_of_text

_DEFAULT_HOSTFILE = Path("/job/hostfile")
"""The deepspeed launcher's default."""
_ANY_SLOTS = tuple(range(10_000))
"""Slots of this host without a hostfile; only the ranks know the real number of devices."""
ELASTIC = (
    "elastic",
    "min_hosts",
    "exclude_after",
    "exclude_stragglers",
    "rejoin",
    "standby",
    "device",
    "device_memory",
)
LAUNCHERS = ("pdsh", "openmpi", "mpich", "impi", "slurm", "mvapich")
_SWITCHES = {
    "force_multi": "start through the launcher even on one host",
    "no_ssh": "start this host's processes only; the same command runs on each host",
    "no_ssh_check": "do not try ssh first",
    "no_local_rank": "do not pass --local_rank",
    "save_pid": "write the launcher's process id to a file",
    "bind_cores_to_rank": "bind each rank to cores of its own",
    "module": "the program is a module",
    "no_python": "the program starts without python",
}


def add_launcher_flags(parser: ToolParser) -> None:
    """Add the flags for hosts, processes and ports, with the names of the deepspeed launcher."""
    parser.add_argument("-H", "--hostfile", type=Path, metavar="FILE", help="hosts, see hostfile.example")
    parser.add_argument("-i", "--include", default="", metavar="HOST:SLOTS", help="use only these: host:0,1@host2")
    parser.add_argument("-e", "--exclude", default="", metavar="HOST:SLOTS", help="use all but these")
    for name, text in (("--num_nodes", "use the first N hosts"), ("--num_gpus", "processes on each host")):
        parser.add_argument(name, type=count, metavar="N", help=text)
    parser.add_argument("--master_addr", "--master-addr", default="", metavar="HOST", help="address of the first host")
    parser.add_argument("--master_port", "--master-port", type=port, default=29500, metavar="PORT", help="its port")
    parser.add_argument(
        "--ssh_port", "--ssh-port", type=port, metavar="PORT", help="port of sshd, if ssh's configuration has none"
    )


def read_launch(argv: Sequence[str], description: str = "") -> Namespace:
    """Parse a command line of ``tools/launch.py``, whose help begins with ``description``. Raises ConfigError."""
    parser = ToolParser(description)
    parser.usage = "%(prog)s [flags of deepspeed] pretrain_gpt2.py ARGUMENTS"
    add_launcher_flags(parser)
    parser.add_argument("--node_rank", type=int, metavar="N", help="with --no_ssh: which host this is, counted from 0")
    parser.add_argument("--launcher", default="pdsh", choices=LAUNCHERS, help="what starts processes on other hosts")
    parser.add_argument("--launcher_args", default="", metavar="TEXT", help="flags for the launcher")
    parser.add_argument("--venv_script", default="", metavar="FILE", help="script that activates the environment")
    parser.add_argument("--enable_each_rank_log", default="", metavar="DIR", help="a log file for each rank")
    parser.add_argument("--bind_core_list", default="", metavar="CORES", help="cores to bind to: 1,3-5")
    parser.add_argument(
        "--max-restarts",
        "--max_restarts",
        type=restarts,
        metavar="N",
        help="restart a failed run up to N times (default: 0; with --elastic 100)",
    )
    _add_elastic_flags(parser)
    for switch, text in _SWITCHES.items():
        parser.add_argument(f"--{switch}", action="store_true", help=text)
    levels = ("debug", "info", "warning", "error", "critical")
    parser.add_argument("--log_level", default="critical", choices=levels, help="info shows the command with values")
    parser.add_argument("script", help="the program to start")
    parser.add_argument("arguments", nargs=REMAINDER, help="its arguments")
    launch = parser.parse_args(argv)
    _check_elastic_flags(launch)
    if launch.max_restarts is None:
        launch.max_restarts = 100 if launch.elastic else 0
    launch.min_hosts = launch.min_hosts or 1
    launch.exclude_after = launch.exclude_after or MOST_FAILURES
    return launch


def _add_elastic_flags(parser: ToolParser) -> None:
    group = parser.add_argument_group("with --elastic")
    switches = {
        "--elastic": "restart on the remaining hosts, with the layout that suits them",
        "--exclude-stragglers": "leave out the hosts that --straggler-report has named, at the next restart",
        "--rejoin": "hosts that come back join at the next checkpoint",
        "--standby": "wait until another agent ends the run; take over if its host is lost",
    }
    for flag, text in switches.items():
        group.add_argument(flag, action="store_true", help=text)
    group.add_argument("--min-hosts", type=count, metavar="N", help="do not restart on fewer hosts")
    group.add_argument(
        "--exclude-after",
        type=count,
        metavar="N",
        help="leave out the host that fails in this many failures in a row without a new checkpoint "
        f"(default: {MOST_FAILURES})",
    )
    group.add_argument("--device", choices=DEVICES, help="see tools/plan.py --device")
    group.add_argument("--device-memory", type=bytes_of_text, metavar="SIZE", help="memory of a device, such as 80GB")


def _check_elastic_flags(launch: Namespace) -> None:
    """Raise ConfigError if a flag needs ``--elastic``, or is not supported with it."""
    if not launch.elastic:
        if given := [name for name in ELASTIC if getattr(launch, name)]:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise ConfigError(f"these flags are for --elastic: {flags}; add it, or remove them")
        return
    if launch.hostfile is None:
        raise ConfigError("--elastic needs --hostfile: it starts the run on the healthy hosts of that file")
    wrong = [flag for flag in ("no_ssh", "num_nodes", "num_gpus", "module", "no_python") if getattr(launch, flag)]
    wrong += [f"launcher {launch.launcher}"] * (launch.launcher != "pdsh")
    if wrong:
        raise ConfigError(
            f"--{wrong[0]} is not supported with --elastic, which starts python programs with pdsh: remove it"
        )


def chosen_hosts(launch: Namespace) -> list[Host]:
    """The hosts of a run; empty without a hostfile, which means only this host. Raises ConfigError."""
    if (launch.num_nodes or launch.num_gpus) and (launch.include or launch.exclude):
        raise ConfigError(
            "--num_nodes and --num_gpus are not supported with --include and --exclude: remove one or the other"
        )
    check_one_filter(launch.include, launch.exclude)
    hostfile = launch.hostfile or _DEFAULT_HOSTFILE
    if launch.hostfile is None and not hostfile.is_file():
        try:
            select([Host(LOCALHOST, _ANY_SLOTS)], launch.include, launch.exclude)
        except ConfigError as error:
            given = f"--include {launch.include}" if launch.include else f"--exclude {launch.exclude}"
            only = "without a hostfile there is only localhost, as in localhost:0,1: add --hostfile"
            raise ConfigError(f"{given}: {only}") from error
        return []
    hosts = select(read_hostfile(hostfile), launch.include, launch.exclude)
    if (launch.num_nodes or 0) > len(hosts):
        raise ConfigError(
            f"--num_nodes {launch.num_nodes}: {hostfile} has {counted(len(hosts), 'host')}; add hosts, or lower it"
        )
    hosts = hosts[: launch.num_nodes]
    slots = launch.num_gpus and tuple(range(launch.num_gpus))
    return [host._replace(slots=slots or host.slots) for host in hosts]


def count(text: str) -> int:
    """Parse an integer of 1 or more. Raises ValueError."""
    if not re.fullmatch(r"[0-9]{1,6}", text) or int(text) == 0:
        raise ValueError(f"{text} is not a whole number of 1 or more")
    return int(text)


def restarts(text: str) -> int:
    """Parse a non-negative integer. Raises ValueError."""
    return 0 if text == "0" else count(text)


def port(text: str) -> int:
    """Parse a port number. Raises ValueError."""
    if not re.fullmatch(r"[0-9]{1,5}", text) or not 0 < int(text) < 65536:
        raise ValueError(f"{text} is not a port")
    return int(text)
