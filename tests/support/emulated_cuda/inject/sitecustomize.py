"""Give a torch without CUDA the emulated device as soon as a program imports it, in whatever process that is.

Python imports this file at its start where PYTHONPATH names its folder.
"""

import ctypes
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

LIBRARY = "EMULATED_CUDA_LIBRARY"


class TorchFinder(MetaPathFinder):
    """Finds torch, and nothing else."""

    def find_spec(self, name, path=None, target=None):
        """The specification of torch, with a loader that adds the device."""
        spec = PathFinder.find_spec(name, path) if name == "torch" else None
        if spec is not None and spec.loader is not None and spec.submodule_search_locations:
            load = spec.loader.exec_module
            folder = Path(spec.submodule_search_locations[0]) / "lib"

            def exec_module(module: ModuleType) -> None:
                # Torch looks for a device while it is imported, and never again.
                for library in (folder / "libc10.so", folder / "libtorch_cpu.so", os.environ[LIBRARY]):
                    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
                load(module)
                import emulated_nccl
                import emulated_torch_cuda

                emulated_torch_cuda.install()
                emulated_nccl.install()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if LIBRARY in os.environ:
    sys.meta_path.insert(0, TorchFinder())
