"""DeepSpeed's compiled extensions: built once, by one process of a host, with a word on the screen.

Torch guards a build with a file that a killed build leaves behind, and then every later start waits
for it without a word. Here a lock of the kernel's, which dies with its owner, goes around the build;
under it such a file that nobody has open can only be a dead build's, and is removed. (A run that has
everything built makes one for a moment, too, when DeepSpeed asks torch once more.)
"""

import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from deepspeed.accelerator import get_accelerator

from megatron.config import RunConfig
from megatron.config.errors import ResourceError
from megatron.launch.quiet import deepspeed_silenced

_MOMENT = 0.5
"""Seconds."""


def build_extensions(run: RunConfig) -> None:
    """Build what ``run`` will ask for, unless it is built already.

    Raises ResourceError where a compiler, or a library that the run cannot do without, is missing.
    """
    from deepspeed.accelerator import get_accelerator

    create = get_accelerator().create_op_builder
    if run.zero.uses_nvme and not create("AsyncIOBuilder").is_compatible(verbose=False):
        raise ResourceError(
            "offload to nvme needs libaio, which is not found: install libaio-dev (libaio-devel), or offload to cpu"
        )
    for name in _needed(run, get_accelerator().device_name()):
        builder = create(name)
        if builder is not None and builder.is_compatible(verbose=False):
            _build(builder)


def _needed(run: RunConfig, device: str) -> list[str]:
    names = ["ShareMemCommBuilder"] if device == "cpu" else []
    if run.zero.offloads_optimizer and not run.zero.cpu_torch_adam:
        names.append("CPUAdamBuilder")
    if run.zero.uses_nvme:
        names += ["PinMemoryBuilder", "AsyncIOBuilder"]
    return names


def _build(builder) -> None:
    folder = Path(os.environ["TORCH_EXTENSIONS_DIR"]).resolve() / builder.name
    folder.mkdir(parents=True, exist_ok=True)
    with _kernel_lock(folder / "build.flock"):
        stale = folder / "lock"
        if _is_left(stale):
            print(f"> removing {stale}, left by a build that was killed", file=sys.stderr, flush=True)
            stale.unlink(missing_ok=True)
        is_new = not (folder / f"{builder.name}.so").exists()
        if is_new:
            print(f"> compiling {builder.name} into {folder}: once, about half a minute ...", flush=True)
        start = time.monotonic()
        try:
            with deepspeed_silenced(verbose=False):
                builder.load(verbose=False)
        except Exception as error:  # whatever the compiler or the loader has against it
            raise ResourceError(
                f"{builder.name} cannot be compiled ({str(error).splitlines()[0]}): install g++ and Python's headers"
            ) from error
        if is_new:
            print(f"> compiled {builder.name} in {time.monotonic() - start:.0f} s", flush=True)


def _is_left(path: Path) -> bool:
    """Whether ``path`` is there and nobody works with it, nor did a moment ago: torch closes it, then removes it."""
    for _ in range(2):
        if not path.exists() or _is_open(path):
            return False
        time.sleep(_MOMENT)
    return path.exists()


def _is_open(path: Path) -> bool:
    """Whether a process has ``path`` open, as torch has such a file while it works."""
    for file in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(file) == str(path):
                return True
    return False


@contextlib.contextmanager
def _kernel_lock(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def check_device(device: str, local_rank: int) -> None:
    """See that torch finds a ``device`` for the process ``local_rank`` of this host.

    Raises:
        ResourceError: it does not.
    """
    accelerator = get_accelerator()
    found = accelerator.device_count() if accelerator.is_available() else 0
    if device != "cpu" and local_rank >= found:
        raise ResourceError(
            f"process {local_rank} of this host has no device: torch finds {found} of {device}; start fewer "
            "processes, install a torch that knows the device, or set DS_ACCELERATOR=cpu to train on the CPU"
        )
