"""Commands and environment variables for other hosts: ssh commands, and quoting.

DeepSpeed's launcher exports variables with certain name prefixes, and the variables in ``.deepspeed_env`` in the home
folder and in the working folder. In the remote command line it writes names unquoted, and values at most in double
quotes.
"""

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from megatron.common.environment import expected_device
from megatron.common.errors import ConfigError
from megatron.common.reading import LARGEST_SETTINGS, read_bytes

CONNECT_SECONDS = 5
_PLAIN = re.compile(r"[A-Za-z0-9@_+=:,./-]+")


def ssh_command(host: str, command: Sequence[str], port: int | None = None) -> list[str]:
    """The ssh command that runs ``command`` on ``host``, without prompts, and ends if the host is silent.

    ssh's own configuration decides which host keys are trusted. ``host`` must be valid according to
    ``hostfile.name_problem``; as a second protection it comes after ``--``.
    """
    return ["ssh", "-T", *_options(alive=5), *(["-p", str(port)] if port else []), "--", host, shlex.join(command)]


def ssh_options_for_pdsh(environ: Mapping[str, str], alive: int = 60) -> dict[str, str]:
    """Environment of pdsh whose ssh does not prompt, and closes a connection silent for three times ``alive`` seconds.

    Otherwise a launcher would wait forever for a lost host. Options that are already in ``environ`` take precedence.
    """
    own = environ.get("PDSH_SSH_ARGS_APPEND", "")
    return {"PDSH_SSH_ARGS_APPEND": " ".join([own, *_options(alive)]).strip()}


def _options(alive: int) -> list[str]:
    """ssh options. After ``alive`` seconds of silence ssh sends two requests, each with ``alive`` seconds to answer."""
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": CONNECT_SECONDS,
        "ConnectionAttempts": 1,
        "ServerAliveInterval": alive,
        "ServerAliveCountMax": 2,
    }
    return [argument for name, value in options.items() for argument in ("-o", f"{name}={value}")]


def is_plain(text: str) -> bool:
    """Whether ``text`` is one literal word for every shell and for pdsh, which interprets %."""
    return _PLAIN.fullmatch(text) is not None


def quote_for_pdsh(argument: str) -> str:
    """``argument`` quoted for DeepSpeed's pdsh runner, so that the remote program gets it unchanged.

    The runner puts an argument with a space in double quotes and only escapes double quotes in it; it passes other
    arguments to the remote shell unquoted. pdsh expands sequences that start with %; %% is a literal %.
    """
    if " " in argument:
        quoted = re.sub(r"([\\$`])", r"\\\1", argument)
    else:
        quoted = shlex.quote(argument)
    return quoted.replace("%", "%%")


_ALWAYS = ("MLFLOW", "PYTHON", "MV2", "UCX")
_WITH_DEVICE = {"cuda": ("NCCL",)}
ALSO_SENT = ("CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_", "TORCH_FR_", "TORCH_NCCL_")
"""Name prefixes of variables that ``tools/launch.py`` makes DeepSpeed's launcher send, in addition to its own."""
_NEEDED = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_HOME",
    "CXX",
    "DS_ACCELERATOR",
    "LD_LIBRARY_PATH",
    "MASTER_LISTEN",
    "MEGATRON_SHARED_MEMORY",
    "MEGATRON_UMASK",
    "TORCH_EXTENSIONS_DIR",
    "XDG_CACHE_HOME",
)
_NEEDED_PREFIXES = ("GLOO_", "NCCL_", "PYTORCH_", "TORCH_FR_", "TORCH_NCCL_")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SPECIAL_IN_QUOTES = re.compile(r"[\"$`\\%\x00-\x1f]")


def forwarded_variables(environ: Mapping[str, str], kind: str, folder: Path) -> dict[str, str]:
    """The variables sent to ranks on other hosts, for a run on devices of ``kind`` that is started in ``folder``."""
    exported = {name: value for name, value in environ.items() if name.startswith(_prefixes(kind))}
    for file in environment_files(environ, folder):
        for _, line in _lines(file):
            name, _, value = line.partition("=")
            exported[name.strip()] = value.strip()
    return exported


def device_kind(environ: Mapping[str, str], folder: Path) -> str:
    """The kind of device of the ranks: this host's kind, unless a variable sent to them sets another."""
    return expected_device({**environ, **forwarded_variables(environ, "", folder)})


def unforwarded_variables(environ: Mapping[str, str], kind: str, folder: Path) -> list[str]:
    """Variables that affect this host's ranks and are not sent to other hosts."""
    sent = forwarded_variables(environ, kind, folder)
    return sorted(
        name for name in environ if (name in _NEEDED or name.startswith(_NEEDED_PREFIXES)) and name not in sent
    )


def variable_problems(environ: Mapping[str, str], kind: str, folder: Path) -> Iterator[str]:
    """A message for each variable that a remote shell would change or execute. Values are not shown."""
    for name, value in environ.items():
        if name.startswith((*_prefixes(kind), *ALSO_SENT)) and not _is_safe_in_quotes(value):
            yield (
                f"the environment's {name} contains a character that a remote shell interprets; DeepSpeed sends it to "
                "every host: unset it, or give it a plain value"
            )
    for file in environment_files(environ, folder):
        for number, line in _lines(file):
            name, equals, value = line.partition("=")
            if not equals or not _VARIABLE.fullmatch(name.strip()):
                yield f"{file}:{number}:1: not NAME=VALUE; write one variable a line, without export and comments"
            elif not _is_safe_in_quotes(value.strip()):
                column = len(name) + 2
                yield (
                    f"{file}:{number}:{column}: the value of {name} contains a character that a remote shell "
                    "interprets; write it without quotes, $, `, % and \\"
                )


def environment_files(environ: Mapping[str, str], folder: Path) -> list[Path]:
    """The existing environment files that DeepSpeed reads; later files override earlier ones."""
    name = environ.get("DS_ENV_FILE", ".deepspeed_env")
    paths = [Path(os.path.expanduser("~")) / name, folder / name]
    return [path for path in dict.fromkeys(paths) if path.is_file()]


def _prefixes(kind: str) -> tuple[str, ...]:
    return (*_ALWAYS, *_WITH_DEVICE.get(kind, ()))


def _is_safe_in_quotes(value: str) -> bool:
    return not _SPECIAL_IN_QUOTES.search(value)


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    try:
        text = read_bytes(file, largest=LARGEST_SETTINGS).decode(errors="replace")
    except OSError as error:
        raise ConfigError(
            f"{file}, which has variables for all hosts: {error.strerror}; correct or remove it"
        ) from None
    return enumerate(text.removesuffix("\n").split("\n") if text else [], start=1)
