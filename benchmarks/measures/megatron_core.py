"""megatron-core as a peer. Its package has this project's name, so it is installed beside, and found by its file."""

import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

VERSION = "0.16.1"


@contextmanager
def installed() -> Iterator[Path]:
    """A folder that holds megatron-core alone; put it on the PYTHONPATH of another process."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder]
        subprocess.run([*pip, f"megatron-core=={VERSION}"], check=True)
        yield Path(folder)


def compiled_helpers(folder: Path) -> ModuleType:
    """Its compiled builders of index maps."""
    (file,) = (folder / "megatron" / "core" / "datasets").glob("helpers_cpp.*.so")
    specification = importlib.util.spec_from_file_location("helpers_cpp", file)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module
