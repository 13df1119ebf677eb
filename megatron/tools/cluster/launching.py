"""Checks and quotes the arguments of the ``deepspeed`` launcher, so that no shell executes parts of them.

DeepSpeed's launcher puts hosts, folders and arguments into a command line for remote shells. Arguments that it does not
quote are quoted here; values that cannot be quoted are rejected.
"""

import json
import re
import shlex
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron.checkpoint.tracker import LATEST
from megatron.cli import parse_run
from megatron.cli.flags import read_flags
from megatron.cli.parser import CONFIG_FILE
from megatron.cli.validation import value_problems
from megatron.common.errors import ConfigError
from megatron.common.output_paths import folder_problem
from megatron.launch.rank import print_warning
from megatron.model.architectures import BERT, GPT2, T5
from megatron.model.spec import ArchitectureSpec
from megatron.tools.cluster.hostfile import Host, name_problem, runs_here_alone
from megatron.tools.cluster.launch_flags import ELASTIC, chosen_hosts
from megatron.tools.cluster.remote import device_kind, is_plain, quote_for_pdsh, variable_problems

_PROJECT = Path(__file__).resolve().parents[3]
_OWN = ("script", "arguments", "max_restarts", *ELASTIC)
"""Values that are not passed on to deepspeed as flags."""
PDSH_FAN_OUT = 1024
"""Number of concurrent connections that DeepSpeed sets for pdsh; a later -f overrides it."""
_LONGEST_ARGUMENT = 1 << 17
"""Maximum bytes of an argument of a program on Linux, such as the remote command line that pdsh passes to ssh."""


def launcher_arguments(launch: Namespace, environ: Mapping[str, str]) -> list[str]:
    """The arguments of ``deepspeed`` for ``launch``; a run only on this host uses no ssh, even with a hostfile.

    Raises:
        ConfigError: with a line for each problem of the hostfile, and for each value that a remote shell would
            interpret.
    """
    hosts = chosen_hosts(launch)
    several = (launch.force_multi or len(hosts) > 1) and not launch.no_ssh
    problems = [*_flag_problems(launch, hosts)]
    if several:
        problems += _remote_problems(launch, hosts)
        problems += variable_problems(environ, device_kind(environ, Path.cwd()), Path.cwd())
    else:
        problems += _host_problems(launch, hosts)
    if problems:
        raise ConfigError(problems)
    flags, script, arguments = vars(launch), launch.script, launch.arguments
    here, slurm = runs_here_alone(hosts) and not several, several and launch.launcher == "slurm"
    if here or slurm or (launch.no_ssh and hosts and not launch.master_addr):
        # DeepSpeed would ask the first host for its address, over ssh.
        address = launch.master_addr or ("127.0.0.1" if here else hosts[0].name)
        flags = {**flags, "no_ssh_check": True, "master_addr": address}
    if several and launch.launcher == "pdsh":
        if len(hosts) > PDSH_FAN_OUT:  # all ranks wait for each other, so all hosts must be connected
            flags = {**flags, "launcher_args": f"{launch.launcher_args} -f {len(hosts)}".strip()}
        # DeepSpeed passes the script's name to the remote shell unquoted, even with a space.
        script = shlex.quote(script).replace("%", "%%")
        arguments = [quote_for_pdsh(argument) for argument in arguments]
    return [*_flag_arguments(flags), script, *arguments]


def check_arguments(launch: Namespace, environ: Mapping[str, str]) -> None:
    """Check the arguments of a training program before anything is started, without torch.

    Its ranks check them again, since only they know devices, files and the number of processes. Here all rules are
    checked only if the processes run on this host, and their number is given.

    Raises ConfigError with a line for each problem.
    """
    check_program(launch, hosts := chosen_hosts(launch))
    program = training_program(launch)
    if program is None or "--explain" in launch.arguments:
        return
    if not hosts and launch.num_gpus and launch.num_nodes in (None, 1) and not launch.no_ssh:
        parse_run(launch.arguments, {**environ, "WORLD_SIZE": str(launch.num_gpus)}, program)
        return
    values, problems, _ = read_flags(launch.arguments, program)
    known = values if CONFIG_FILE not in values else None  # the JSON file may provide other values
    if problems := problems + (value_problems(known, program) if known is not None else []):
        raise ConfigError(problems)


_SETTINGS = (".json", ".yaml", ".yml")
"""Suffixes of settings files, which Python may execute as programs without an effect."""


def check_program(launch: Namespace, hosts: Sequence[Host]) -> None:
    """Raise ConfigError if the program cannot be started; DeepSpeed's launcher would notice later or not at all."""
    script, problems = Path(launch.script), []
    if launch.no_python:
        if not hosts and shutil.which(launch.script) is None:
            problems = [f"--no_python {script}: no such program, or it may not be run: name the one to start"]
    elif script.suffix in _SETTINGS and not launch.module:
        problems = [f"{script} has settings and is no program: name the program to start"]
    elif not (launch.module or hosts or script.is_file()):
        problems = [f"{script}: no such file: name the program to start"]
    if problems:
        raise ConfigError(problems)


def training_program(launch: Namespace) -> ArchitectureSpec | None:
    """The architecture that the program to start trains, if it is a program of this project."""
    script = Path(launch.script).resolve()
    if launch.module or launch.no_python or script.parent != _PROJECT:
        return None
    return {"pretrain_gpt.py": GPT2, **{spec.program: spec for spec in (GPT2, BERT, T5)}}.get(script.name)


def _arguments_problem(text: str) -> str | None:
    try:
        arguments = shlex.split(text)
    except ValueError as error:
        return f"{error}; close what was opened"
    wrong = [argument for argument in arguments if not is_plain(argument.replace("^", ""))]
    return f"{wrong[0]!r} contains a character that a shell interprets; remove it" if wrong else None


def _plain_problem(text: str) -> str | None:
    return None if is_plain(text) else "contains a character that a shell interprets; use letters, digits and @_+=:,./-"


def _cores_problem(text: str) -> str | None:
    bounds = re.findall("[0-9]{1,5}", text)
    is_list = re.fullmatch("([0-9]{1,5}(-[0-9]{1,5})?)(,[0-9]{1,5}(-[0-9]{1,5})?)*", text)
    if is_list and all(int(low) < int(high) for low, high in pairwise(bounds)):
        return None
    return "give numbers of cores and ranges in ascending order, such as 1,3-5"


_VALUES: dict[str, Callable[[str], str | None]] = {
    "master_addr": name_problem,
    "launcher_args": _arguments_problem,
    "venv_script": _plain_problem,
    "enable_each_rank_log": _plain_problem,
    "bind_core_list": _cores_problem,
}
"""Flag to a function that returns the problem of its value, or None."""


def _flag_problems(launch: Namespace, hosts: Sequence[Host]) -> Iterator[str]:
    """Problems of the flags, regardless of where the ranks are started."""
    if spare := [host.name for host in hosts if host.spare]:
        yield f"{spare[0]} is a spare host in {launch.hostfile}: add --elastic, or exclude it by -e"
    for flag, check in _VALUES.items():
        value = getattr(launch, flag)
        if value and (problem := check(value)):
            yield f"--{flag} {value!r}: {problem}"
    if launch.node_rank is not None and not launch.no_ssh:
        yield f"--node_rank {launch.node_rank} has no effect without --no_ssh: add it, or remove the flag"
    if launch.bind_core_list and not launch.bind_cores_to_rank:
        flag = f"--bind_core_list {launch.bind_core_list}"
        yield f"{flag} has no effect without --bind_cores_to_rank: add it, or remove the flag"


def _host_problems(launch: Namespace, hosts: Sequence[Host]) -> Iterator[str]:
    """Problems of a run whose processes all run on this host, which DeepSpeed's launcher does not report."""
    last, folder = max(len(hosts), 1) - 1, launch.enable_each_rank_log
    if launch.no_ssh and (launch.node_rank is None or not 0 <= launch.node_rank <= last):
        yield f"--no_ssh needs --node_rank, which of the hosts this one is: a number from 0 to {last}"
    if folder and (problem := folder_problem(f"--enable_each_rank_log {folder}:", Path(folder))):
        yield problem
    if launch.bind_cores_to_rank and shutil.which("numactl") is None:
        yield "--bind_cores_to_rank needs numactl, which is not installed: install it, or remove the flag"
    if not hosts and launch.master_addr not in ("", "localhost", "127.0.0.1"):
        print_warning(f"--master_addr {launch.master_addr} has no effect without a hostfile: ranks meet at 127.0.0.1")


def _remote_problems(launch: Namespace, hosts: Sequence[Host]) -> Iterator[str]:
    """Problems of values that DeepSpeed sends unquoted to remote shells, which would interpret or reject them."""
    for name, path in {"the working folder": str(Path.cwd()), "python": sys.executable}.items():
        if not is_plain(path):
            yield (
                f"the path of {name}, {path!r}, contains a character that a remote shell interprets; use one of "
                "letters, digits and @_+=:,./-"
            )
    # DeepSpeed sends the list of all hosts to each host, in base64.
    listed = 4 * len(json.dumps({host.name: host.slots for host in hosts})) // 3
    if launch.launcher == "pdsh" and listed + len(" ".join(launch.arguments)) >= _LONGEST_ARGUMENT - _OTHER_BYTES:
        yield (
            f"{len(hosts)} hosts: the names and slots of all are {listed:,} bytes of the command line that pdsh gives "
            f"to ssh, which takes {_LONGEST_ARGUMENT:,}: use --launcher slurm or openmpi, or torchrun on each host"
        )


_OTHER_BYTES = 1 << 13
"""Bytes reserved for the rest of the remote command line: folder, variables and DeepSpeed's own flags."""


def _flag_arguments(flags: Mapping[str, Any]) -> list[str]:
    """The flags as arguments ``--name=value``, so that no value is mistaken for a flag."""
    arguments = []
    for name, value in flags.items():
        if name not in _OWN and value is not None and value is not False and value != "":
            arguments.append(f"--{name}" if value is True else f"--{name}={value}")
    return arguments


def checkpoint_folder(arguments: Sequence[str], *, elastic: bool = False) -> Path:
    """The checkpoint folder of the run with these training ``arguments``.

    Raises ConfigError if a restarted run would not resume from it.
    """
    flags = {field: flag.value for field, flag in read_flags(arguments).values.items()}
    save = flags.get("save")
    if not save or not (flags.get("auto_resume") or flags.get("load") == save):
        raise ConfigError(
            f"{'--elastic' if elastic else '--max-restarts'} needs --save and --auto-resume among the training "
            "arguments: a restarted run resumes from its newest checkpoint"
        )
    return Path(save).absolute()


_LONGEST_NAME = 255


def newest_checkpoint(folder: Path) -> str | None:
    """The name of the newest checkpoint in ``folder``; None if there is none."""
    latest = folder / LATEST
    if not latest.is_file():
        return None
    with open(latest, "rb") as file:  # the run reports what is wrong with it
        return file.read(_LONGEST_NAME).decode(errors="replace")
