"""Explains failed imports, of a missing package or because of an environment variable, in one line."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from megatron.common.errors import ConfigError

_REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements.txt"
_DISTRIBUTIONS = {"PIL": "pillow", "yaml": "pyyaml"}
"""pip's names of packages whose module has another name."""


@contextmanager
def required_packages() -> Iterator[None]:
    """Convert exceptions of imports in the block to a ConfigError with the message of ``failed_import``."""
    try:
        yield
    except (ModuleNotFoundError, ValueError) as error:
        if (message := failed_import(error)) is None:
            raise
        raise ConfigError(message) from None


_REJECTED_VARIABLES = {
    "_Accelerator requires": "DS_ACCELERATOR",
    "Invalid log settings": "TORCH_LOGS",
    "The value of TORCH_DISTRIBUTED_DEBUG must": "TORCH_DISTRIBUTED_DEBUG",
}
"""Messages of exceptions that libraries raise on import, and the environment variable that causes each."""


def failed_import(error: BaseException) -> str | None:
    """A message about a missing package of requirements.txt, or a rejected variable; None for another exception."""
    for text, variable in _REJECTED_VARIABLES.items():
        if isinstance(error, ValueError) and text in str(error):
            problem = next(line for line in str(error).splitlines() if text in line)
            return f"environment variable {variable}={os.environ.get(variable, '')}: {problem}; correct or unset it"
    module = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    package = _DISTRIBUTIONS.get(module, module)
    if not package or not _REQUIREMENTS.is_file():
        return None
    required = re.findall(r"^[\w.-]+", _REQUIREMENTS.read_text(), re.MULTILINE)
    return f"the package {package} is not installed: pip install -r requirements.txt" if package in required else None


def exit_without_package(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """``sys.excepthook`` of a tool: explains failed imports before ``main`` is called."""
    if (message := failed_import(error)) is None:
        return sys.__excepthook__(kind, error, trace)
    print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr)
    raise SystemExit(ConfigError.exit_code)
