"""Give a torch without CUDA the emulated device as soon as a program imports it, in whatever process that is; or, with
``ONE_GPU=1``, let all ranks share one GPU, with a backend ``nccl`` that copies through host memory.

Python imports this file at its start where PYTHONPATH names its folder.
"""

import ctypes
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

LIBRARY, SHARED = "EMULATED_CUDA_LIBRARY", "ONE_GPU"


class Finder(MetaPathFinder):
    """Finds torch, and DeepSpeed's accelerator, and nothing else."""

    def find_spec(self, name, path=None, target=None):
        """The specification of the module, with a loader that adds to it."""
        spec = PathFinder.find_spec(name, path) if name in _ADDED else None
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                if name == "torch" and LIBRARY in os.environ:
                    # Torch looks for a device while it is imported, and never again.
                    folder = Path(spec.submodule_search_locations[0]) / "lib"
                    for library in (folder / "libc10.so", folder / "libtorch_cpu.so", os.environ[LIBRARY]):
                        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
                load(module)
                _ADDED[name](module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _add_to_torch(torch: ModuleType) -> None:
    import emulated_nccl
    import emulated_torch_cuda

    shares = os.environ.get(SHARED) == "1"
    if shares and "LOCAL_RANK" in os.environ:
        os.environ["LOCAL_RANK"] = "0"  # from which the device follows
    if LIBRARY in os.environ:
        emulated_torch_cuda.install()
    emulated_nccl.install(copies=shares)


def _add_to_accelerator(module: ModuleType) -> None:
    if os.environ.get(SHARED) == "1":
        module.CUDA_Accelerator.device_count = lambda self: int(os.environ.get("LOCAL_WORLD_SIZE", 1))


_ADDED = {"torch": _add_to_torch, "deepspeed.accelerator.cuda_accelerator": _add_to_accelerator}
if LIBRARY in os.environ or os.environ.get(SHARED) == "1":
    sys.meta_path.insert(0, Finder())
