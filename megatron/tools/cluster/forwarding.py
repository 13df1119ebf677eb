"""What DeepSpeed's launcher carries from this host's environment to the others, and the file that says what more.

It exports each variable whose name begins in certain ways, and those of ``.deepspeed_env`` in the home folder and in
the working folder. Into a remote shell it writes a name as it is, and a value between double quotes at most.
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from megatron.config.environment import expected_device

_ALWAYS = ("MLFLOW", "PYTHON", "MV2", "UCX")
_WITH_DEVICE = {"cuda": ("NCCL",)}
_NEEDED = (
    "CUDA_HOME",
    "CXX",
    "DS_ACCELERATOR",
    "LD_LIBRARY_PATH",
    "MASTER_LISTEN",
    "TORCH_EXTENSIONS_DIR",
    "XDG_CACHE_HOME",
)
_NEEDED_FAMILIES = ("GLOO_", "NCCL_", "TORCH_NCCL_")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OBEYED_IN_QUOTES = re.compile(r"[\"$`\\%\x00-\x1f]")


def forwarded(environ: Mapping[str, str], kind: str, folder: Path) -> dict[str, str]:
    """The variables that ranks on other hosts get, for a run on devices of a ``kind`` that is started in ``folder``."""
    exported = {name: value for name, value in environ.items() if name.startswith(_prefixes(kind))}
    for file in environment_files(environ, folder):
        for _, line in _lines(file):
            name, _, value = line.partition("=")
            exported[name.strip()] = value.strip()
    return exported


def device(environ: Mapping[str, str], folder: Path) -> str:
    """The kind of device that the ranks will compute on: this host's, unless a variable that they get says another."""
    return expected_device({**environ, **forwarded(environ, "", folder)})


def missing(environ: Mapping[str, str], kind: str, folder: Path) -> list[str]:
    """Variables that this host's ranks would obey, and that no other host's would hear of."""
    there = forwarded(environ, kind, folder)
    return sorted(
        name for name in environ if (name in _NEEDED or name.startswith(_NEEDED_FAMILIES)) and name not in there
    )


def problems(environ: Mapping[str, str], kind: str, folder: Path) -> Iterator[str]:
    """A line for each variable that a remote shell would make something else of, or run. Values are not shown."""
    for name, value in environ.items():
        if name.startswith(_prefixes(kind)) and not _is_safe(value):
            yield (
                f"the environment's {name} holds a character that a remote shell would obey; DeepSpeed sends it to "
                "every host: unset it, or give it a plain value"
            )
    for file in environment_files(environ, folder):
        for number, line in _lines(file):
            name, equals, value = line.partition("=")
            if not equals or not _NAME.fullmatch(name.strip()):
                yield f"{file}:{number}:1: not NAME=VALUE; write one variable a line, without export and comments"
            elif not _is_safe(value.strip()):
                column = len(name) + 2
                yield (
                    f"{file}:{number}:{column}: the value of {name} holds a character that a remote shell would obey; "
                    "write it without quotes, $, `, % and \\"
                )


def environment_files(environ: Mapping[str, str], folder: Path) -> list[Path]:
    """The files that DeepSpeed reads, where they are there; the later one wins."""
    name = environ.get("DS_ENV_FILE", ".deepspeed_env")
    places = [Path(os.path.expanduser("~")) / name, folder / name]
    return [place for place in dict.fromkeys(places) if place.is_file()]


def _prefixes(kind: str) -> tuple[str, ...]:
    return (*_ALWAYS, *_WITH_DEVICE.get(kind, ()))


def _is_safe(value: str) -> bool:
    return not _OBEYED_IN_QUOTES.search(value)


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    text = file.read_bytes().decode(errors="replace")
    return enumerate(text.removesuffix("\n").split("\n") if text else [], start=1)
