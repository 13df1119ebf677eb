"""The arguments of ``deepspeed``, checked and quoted first: no shell runs anything in them.

DeepSpeed's launcher puts hosts, folders and arguments into a command line for remote shells. What it does not quote
is quoted here; what cannot be quoted is an error.
"""

import ast
import importlib.util
import json
import os
import re
import shlex
import shutil
import sys
import warnings
import zipfile
from argparse import REMAINDER, Namespace
from collections.abc import Callable, Mapping, Sequence
from importlib.util import MAGIC_NUMBER
from io import BytesIO
from pathlib import Path

from megatron.checkpoint.files import folder_problem
from megatron.checkpoint.tracker import LATEST
from megatron.cli import parse_run
from megatron.cli.flags import read_flags
from megatron.cli.parser import CONFIG_FILE
from megatron.cli.validation import value_problems
from megatron.common.errors import ConfigError, counted, first_line
from megatron.common.reading import LARGEST_SETTINGS, read_bytes
from megatron.launch.rank import print_warning
from megatron.model.architectures import BERT, GPT2, T5
from megatron.model.spec import ArchitectureSpec
from megatron.tools.cluster.hostfile import Host, check_one_filter, name_problem, read_hostfile, runs_here_alone, select
from megatron.tools.cluster.remote import device_kind, is_plain, quote_for_pdsh, variable_problems
from megatron.tools.cluster.supervise import MOST_FAILURES
from megatron.tools.command_line import ToolParser
from megatron.tools.planning.machine import DEVICES
from megatron.tools.planning.request import bytes_of_text

_DEFAULT_HOSTFILE = Path("/job/hostfile")
_PROJECT = Path(__file__).resolve().parents[3]
_ELASTIC = (
    "elastic",
    "min_hosts",
    "exclude_after",
    "exclude_stragglers",
    "rejoin",
    "standby",
    "device",
    "device_memory",
)
_OWN = ("script", "arguments", "max_restarts", *_ELASTIC)
"""What is not passed on as a flag."""
PDSH_FAN_OUT = 1024
"""Hosts to which DeepSpeed has pdsh connect at a time, unless a later -f says otherwise."""
_LONGEST_WORD = 1 << 17
"""Bytes of an argument of a program on Linux, such as the command line for another host that ssh takes."""
LAUNCHERS = ("pdsh", "openmpi", "mpich", "impi", "slurm", "mvapich")


def add_launcher_flags(parser: ToolParser) -> None:
    """The flags for hosts, processes and ports, by DeepSpeed's names."""
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
    if launch.max_restarts is None:
        launch.max_restarts = 100 if launch.elastic else 0
    _check_elastic_flags(launch)
    launch.exclude_after = launch.exclude_after or MOST_FAILURES
    if not (launch.module or launch.no_python) and os.path.exists(launch.script):
        _check_program(Path(launch.script))
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
    group.add_argument("--min-hosts", type=count, default=1, metavar="N", help="do not restart on fewer hosts")
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
    """Raises ConfigError if a flag needs ``--elastic``, or is not supported with it."""
    if not launch.elastic:
        given = [name for name in _ELASTIC if getattr(launch, name) not in (None, False, "")]
        if launch.min_hosts == 1:
            given.remove("min_hosts")
        if given:
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


def launcher_arguments(launch: Namespace, environ: Mapping[str, str]) -> list[str]:
    """The arguments of ``deepspeed`` for ``launch``; for this host only it uses no ssh, regardless of the hostfile.

    Raises:
        ConfigError: with a line for each problem of the hostfile, and for each value that a remote shell would
            interpret.
    """
    hosts = chosen_hosts(launch)
    if spare := [host.name for host in hosts if host.spare]:
        raise ConfigError(f"{spare[0]} is a spare host in {launch.hostfile}: add --elastic, or exclude it by -e")
    problems = [problem for flag, check in _VALUES.items() for problem in _flag_problems(launch, flag, check)]
    several = (launch.force_multi or len(hosts) > 1) and not launch.no_ssh
    problems += _host_problems(launch, len(hosts)) if not (problems or several) else _rank_problems(launch)
    if several and launch.launcher == "pdsh":
        problems += _length_problems(launch, hosts)
        if len(hosts) > PDSH_FAN_OUT:  # all ranks wait for one another
            launch = Namespace(**{**vars(launch), "launcher_args": f"{launch.launcher_args} -f {len(hosts)}".strip()})
    if several:
        problems += _path_problems(Path.cwd())
        problems += variable_problems(environ, device_kind(environ, Path.cwd()), Path.cwd())
    if problems:
        raise ConfigError(problems)
    here, slurm = runs_here_alone(hosts) and not several, several and launch.launcher == "slurm"
    if (
        here or slurm or (launch.no_ssh and hosts and not launch.master_addr)
    ):  # DeepSpeed would ask the first host for its address, over ssh
        address = launch.master_addr or ("127.0.0.1" if here else hosts[0].name)
        launch = Namespace(**{**vars(launch), "no_ssh_check": True, "master_addr": address})
    script, arguments = launch.script, launch.arguments
    if several and launch.launcher == "pdsh":
        # The script's name reaches the remote shell as it is, even with a space.
        script, arguments = shlex.quote(script).replace("%", "%%"), [quote_for_pdsh(word) for word in arguments]
    return [*_flags(launch), script, *arguments]


def check_arguments(launch: Namespace, environ: Mapping[str, str]) -> None:
    """Check the arguments of a training program before anything is started. Imports no torch.

    Its ranks check them again, where devices, files and the number of processes are known: here they are the same only
    if the processes are on this host, and their number is given.

    Raises ConfigError with a line for each problem.
    """
    if not (launch.module or launch.no_python or chosen_hosts(launch) or Path(launch.script).is_file()):
        raise ConfigError(f"{launch.script}: no such file: name the program to start")
    if launch.no_python and not chosen_hosts(launch) and shutil.which(launch.script) is None:
        raise ConfigError(f"--no_python {launch.script}: no such program, or it may not be run: name the one to start")
    if shadows := _shadow_problems(Path.cwd()):
        raise ConfigError(shadows)
    program = training_program(launch)
    if program is None or "--explain" in launch.arguments:
        return
    hosts = chosen_hosts(launch)
    if not hosts and launch.num_gpus and launch.num_nodes in (None, 1) and not launch.no_ssh:
        parse_run(launch.arguments, {**environ, "WORLD_SIZE": str(launch.num_gpus)}, program)
        return
    values, problems, _ = read_flags(launch.arguments, program)
    known = values if CONFIG_FILE not in values else None  # the JSON file may provide the rest
    if problems := problems + (value_problems(known, program) if known is not None else []):
        raise ConfigError(problems)


def _shadow_problems(folder: Path) -> list[str]:
    """Files that DeepSpeed's launcher, which Python starts as a module, would import instead of a library."""
    loaded = {name.partition(".")[0] for name in sys.modules} & sys.stdlib_module_names
    names = (loaded | {"deepspeed", "numpy", "psutil", "torch"}) - set(sys.builtin_module_names)
    return [
        f"{folder / file} would be imported in place of {name}: rename it, or start in another working folder"
        for name in sorted(names)
        for file in (f"{name}.py", f"{name}/__init__.py")
        if (folder / file).is_file() and _is_found_by_path(name, folder / file)
    ]


def _is_found_by_path(name: str, file: Path) -> bool:
    """Whether Python looks for module ``name`` in folders, after it has started, and ``file`` is another one."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin in ("built-in", "frozen") or name == "encodings":
        return False
    return spec.origin is None or not file.samefile(spec.origin)


def _check_program(path: Path) -> None:
    """Raises ConfigError unless ``path`` is a program in Python. JSON and some YAML can be parsed, but do nothing."""
    try:
        content = read_bytes(path, largest=LARGEST_SETTINGS)
        if content.startswith(MAGIC_NUMBER) or zipfile.is_zipfile(BytesIO(content)):  # compiled, or an archive
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = ast.parse(content)
        only_values = all(isinstance(line, ast.Expr | ast.Assign | ast.AnnAssign) for line in program.body)
        if not only_values or any(isinstance(node, ast.Call) for node in ast.walk(program)):
            return
        problem = "it does nothing"
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    except SyntaxError as error:
        problem = f"{error.msg} in line {error.lineno}" if error.lineno else error.msg
    except (ValueError, RecursionError, MemoryError) as error:
        problem = first_line(error)
    raise ConfigError(f"{path} is no program in Python: {problem}; name the program to start, or add --no_python")


def training_program(launch: Namespace) -> ArchitectureSpec | None:
    """What the program to start trains, if it is one of this project."""
    script = Path(launch.script).resolve()
    known = None if launch.module or launch.no_python else (GPT2, BERT, T5)
    return next((spec for spec in known or () if script == _PROJECT / spec.program), None)


def chosen_hosts(launch: Namespace) -> list[Host]:
    """The hosts of a run; empty, for this host only, without a hostfile. Raises ConfigError."""
    if (launch.num_nodes or launch.num_gpus) and (launch.include or launch.exclude):
        raise ConfigError(
            "--num_nodes and --num_gpus are not supported with --include and --exclude: remove one or the other"
        )
    check_one_filter(launch.include, launch.exclude)
    # DeepSpeed's default.
    hostfile = launch.hostfile or _DEFAULT_HOSTFILE
    if launch.hostfile is None and not hostfile.is_file():
        for flag, text in (("--include", launch.include), ("--exclude", launch.exclude)):
            named = re.findall("[0-9]+", text)
            is_local = re.fullmatch(r"localhost(:[0-9]{1,4}(,[0-9]{1,4})*)?", text)
            if text and (is_local is None or len(set(named)) < len(named)):
                raise ConfigError(
                    f"{flag} {text}: without a hostfile there is only localhost, as in localhost:0,1: add --hostfile"
                )
        return []
    hosts = select(read_hostfile(hostfile), launch.include, launch.exclude)
    if (launch.num_nodes or 0) > len(hosts):
        raise ConfigError(f"--num_nodes {launch.num_nodes}: {hostfile} has {counted(len(hosts), 'host')}")
    hosts = hosts[: launch.num_nodes]
    slots = launch.num_gpus and tuple(range(launch.num_gpus))
    return [host._replace(slots=slots or host.slots) for host in hosts]


def count(text: str) -> int:
    """A whole number from 1 on. Raises ValueError."""
    if not re.fullmatch(r"[0-9]{1,6}", text) or int(text) == 0:
        raise ValueError(f"{text} is not a whole number of 1 or more")
    return int(text)


def restarts(text: str) -> int:
    """A whole number. Raises ValueError."""
    return int(text) and count(text)


def port(text: str) -> int:
    """A port's number. Raises ValueError."""
    if not re.fullmatch(r"[0-9]{1,5}", text) or not 0 < int(text) < 65536:
        raise ValueError(f"{text} is not a port")
    return int(text)


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


def _words_problem(text: str) -> str | None:
    try:
        words = shlex.split(text)
    except ValueError as error:
        return f"{error}; close what was opened"
    wrong = [word for word in words if not is_plain(word.replace("^", ""))]
    return f"{wrong[0]!r} contains a character that a shell interprets; remove it" if wrong else None


def _plain_problem(text: str) -> str | None:
    return None if is_plain(text) else "contains a character that a shell interprets; use letters, digits and @_+=:,./-"


def _cores_problem(text: str) -> str | None:
    last = -1
    for part in text.split(","):
        found = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", part)
        if found is None or not last < int(found[1]) <= int(found[2] or found[1]):
            return "give numbers of cores and ranges in ascending order, such as 1,3-5"
        last = int(found[2] or found[1])
    return None


_VALUES: dict[str, Callable[[str], str | None]] = {
    "master_addr": name_problem,
    "launcher_args": _words_problem,
    "venv_script": _plain_problem,
    "enable_each_rank_log": _plain_problem,
    "bind_core_list": _cores_problem,
}
"""By flag: a function that describes the problem of a value, if it has one."""


def _flag_problems(launch: Namespace, flag: str, check: Callable[[str], str | None]) -> list[str]:
    value = getattr(launch, flag)
    problem = check(value) if value else None
    return [f"--{flag} {value!r}: {problem}"] if problem else []


def _rank_problems(launch: Namespace) -> list[str]:
    """What is wrong with flags that belong to others."""
    problems = []
    if launch.node_rank is not None and not launch.no_ssh:
        problems.append(f"--node_rank {launch.node_rank} has no effect without --no_ssh: add it, or remove the flag")
    if launch.bind_core_list and not launch.bind_cores_to_rank:
        flag = f"--bind_core_list {launch.bind_core_list}"
        problems.append(f"{flag} has no effect without --bind_cores_to_rank: add it, or remove the flag")
    return problems


def _host_problems(launch: Namespace, hosts: int) -> list[str]:
    """The same, and what DeepSpeed's launcher would not find on this host, where all that it starts runs."""
    problems, last = _rank_problems(launch), max(hosts, 1) - 1
    if launch.no_ssh and (launch.node_rank is None or not 0 <= launch.node_rank <= last):
        problems.append(f"--no_ssh needs --node_rank, which of the hosts this one is: a number from 0 to {last}")
    if (folder := launch.enable_each_rank_log) and (
        problem := folder_problem(f"--enable_each_rank_log {folder}:", Path(folder))
    ):
        problems.append(problem)
    if launch.bind_cores_to_rank and shutil.which("numactl") is None:
        problems.append("--bind_cores_to_rank needs numactl, which is not installed: install it, or remove the flag")
    cores = [int(core) for core in re.findall("[0-9]+", launch.bind_core_list)]
    if cores and max(cores) >= (count := os.cpu_count() or 1):
        problems.append(f"--bind_core_list {launch.bind_core_list}: this host has cores 0 to {count - 1}")
    if not hosts and launch.master_addr not in ("", "localhost", "127.0.0.1"):
        print_warning(f"--master_addr {launch.master_addr} has no effect without a hostfile: ranks meet at 127.0.0.1")
    return problems


def _path_problems(folder: Path) -> list[str]:
    """DeepSpeed sends these to remote shells as they are."""
    paths = {"the working folder": str(folder), "python": sys.executable}
    return [
        f"the path of {name}, {path!r}, contains a character that a remote shell interprets; use one of letters, "
        "digits and @_+=:,./-"
        for name, path in paths.items()
        if not is_plain(path)
    ]


def _length_problems(launch: Namespace, hosts: Sequence[Host]) -> list[str]:
    """DeepSpeed sends the list of all hosts to each one, in base64."""
    listed = 4 * len(json.dumps({host.name: host.slots for host in hosts})) // 3
    if listed + len(" ".join(launch.arguments)) < _LONGEST_WORD - _OTHER_WORDS:
        return []
    return [
        f"{len(hosts)} hosts: the names and slots of all are {listed:,} bytes of the command line that pdsh gives to "
        f"ssh, which takes {_LONGEST_WORD:,}: use --launcher slurm or openmpi, or torchrun on each host"
    ]


_OTHER_WORDS = 1 << 13
"""Bytes for the rest of that command line: folder, variables and DeepSpeed's own flags."""


def _flags(launch: Namespace) -> list[str]:
    """The flags of ``launch`` in one form: ``--name=value``, so that no value is taken for a flag."""
    words = []
    for name, value in vars(launch).items():
        if name not in _OWN and value is not None and value is not False and value != "":
            words.append(f"--{name}" if value is True else f"--{name}={value}")
    return words


def checkpoint_folder(arguments: Sequence[str], *, elastic: bool = False) -> Path:
    """The folder of the checkpoints of the run with these training arguments.

    Raises ConfigError if a restarted run would not resume from them.
    """
    flags = {field: flag.value for field, flag in read_flags(arguments).values.items()}
    save = flags.get("save")
    if not save or not (flags.get("auto_resume") or flags.get("load") == save):
        raise ConfigError(
            f"{'--elastic' if elastic else '--max-restarts'} needs --save and --auto-resume among the training "
            "arguments: a restarted run resumes from its newest checkpoint"
        )
    return Path(save).absolute()


def newest_checkpoint(folder: Path) -> str | None:
    """The name of the newest checkpoint in ``folder``; None if there is none."""
    latest = folder / LATEST
    return latest.read_text() if latest.is_file() else None
