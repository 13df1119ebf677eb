"""What to do about a package of requirements.txt that is not installed, in one line instead of a traceback."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from megatron.common.errors import ConfigError

_REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements.txt"
_DISTRIBUTIONS = {"PIL": "pillow", "yaml": "pyyaml"}
"""Names by which pip knows packages, where Python has another name."""


@contextmanager
def required_packages() -> Iterator[None]:
    """Raises ConfigError, which names the package, instead of ModuleNotFoundError for a required one."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (message := missing_package(error)) is None:
            raise
        raise ConfigError(message) from None


def missing_package(error: BaseException) -> str | None:
    """The package that an import did not find and what to do; None for anything else than a required package."""
    module = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    package = _DISTRIBUTIONS.get(module, module)
    if not package or not _REQUIREMENTS.is_file():
        return None
    required = re.findall(r"^[\w.-]+", _REQUIREMENTS.read_text(), re.MULTILINE)
    return f"the package {package} is not installed: pip install -r requirements.txt" if package in required else None


def exit_without_package(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """``sys.excepthook`` of a tool, whose imports may fail before its ``main`` is called."""
    if (message := missing_package(error)) is None:
        return sys.__excepthook__(kind, error, trace)
    print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr)
    raise SystemExit(ConfigError.exit_code)
