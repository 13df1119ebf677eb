"""Builds DeepSpeed's compiled extensions, once per host; also checks of the device.

Torch guards a build with a lock file. A killed build leaves it behind, and later starts wait for it silently. Here a
file lock of the kernel, which its owner's death releases, surrounds the build: a lock file that exists under it was
left by a dead build, and is removed. (A run whose extensions are built also creates the file for a moment, when
DeepSpeed asks torch again.)
"""

import os
import sys
import time
from pathlib import Path

import torch
from deepspeed.accelerator import get_accelerator
from filelock import FileLock

from megatron.common.errors import ResourceError, first_line
from megatron.config import RunConfig
from megatron.engines import deepspeed_silenced
from megatron.ops.attention import device_facts
from megatron.ops.choices import why_no_fp8
from megatron.ops.fp8 import can_multiply
from megatron.ops.norm import uses_apex

_STALE_SECONDS = 3.0
"""Age from which on torch's lock file is stale."""


def build_extensions(run: RunConfig) -> None:
    """Build the extensions that ``run`` needs, unless they are already built: for offload, and DeepSpeed's optimizers.

    Raises ResourceError if a compiler, or a library that the run requires, is missing, or the folder cannot be written.
    """
    create = get_accelerator().create_op_builder
    if run.zero.uses_nvme and not create("AsyncIOBuilder").is_compatible(verbose=False):
        raise ResourceError(
            "offload to nvme needs libaio, which is not found: install libaio-dev (libaio-devel), or offload to cpu"
        )
    names = ["PinMemoryBuilder", "AsyncIOBuilder"] if run.zero.uses_nvme else []
    for name in _optimizer_builders(run) + names:
        builder = create(name)
        if builder is not None and builder.is_compatible(verbose=False):
            _build(builder)


def _optimizer_builders(run: RunConfig) -> list[str]:
    """The extension of DeepSpeed's optimizer, if ``run`` uses one that is compiled."""
    optimizer, offloads = run.ds_config["optimizer"], run.zero.offloads_optimizer
    kind = optimizer["type"].replace("AdamW", "Adam")
    known = {"Adam": "CPUAdamBuilder", "Adagrad": "CPUAdagradBuilder"} if offloads else _ON_THE_DEVICE
    is_of_torch = optimizer.get("params", {}).get("torch_adam", False)
    is_of_apex = kind == "Adam" and not offloads and uses_apex(run.model.fused_kernels)
    return [known[kind]] if kind in known and not (is_of_torch or is_of_apex) else []


_ON_THE_DEVICE = {"Adam": "FusedAdamBuilder", "Lamb": "FusedLambBuilder"}


def _build(builder) -> None:
    folder = Path(os.environ["TORCH_EXTENSIONS_DIR"]).resolve() / builder.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # A soft lock would remain after a killed build.
        lock = FileLock(folder / "build.flock", fallback_to_soft=False).acquire()
    except OSError as error:
        raise ResourceError(
            f"{folder}: cannot be written ({error.strerror}); set TORCH_EXTENSIONS_DIR to another folder"
        ) from error
    with lock:
        stale = folder / "lock"
        if _is_stale(stale):
            print(f"> removing {stale}, left by a build that was killed", file=sys.stderr, flush=True)
            stale.unlink(missing_ok=True)
        is_new = not (folder / f"{builder.name}.so").exists()
        if is_new:
            print(f"> compiling {builder.name} into {folder}: once, about half a minute ...", flush=True)
        start = time.monotonic()
        try:
            with deepspeed_silenced(verbose=False):
                builder.load(verbose=False)
        except Exception as error:  # the compiler or the loader may raise any
            raise ResourceError(
                f"{builder.name} cannot be compiled ({first_line(error)}): install g++ and Python's headers"
            ) from error
        if is_new:
            print(f"> compiled {builder.name} in {time.monotonic() - start:.0f} s", flush=True)


def _is_stale(path: Path) -> bool:
    """Whether ``path`` continues to exist for ``_STALE_SECONDS``."""
    deadline = time.monotonic() + _STALE_SECONDS
    while path.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    return path.exists()


def check_device(device: str, local_rank: int) -> None:
    """Raise ResourceError if torch finds no ``device`` for the process ``local_rank`` of this host."""
    accelerator = get_accelerator()
    count = accelerator.device_count() if accelerator.is_available() else 0
    if device != "cpu" and local_rank >= count:
        error = ResourceError(
            f"process {local_rank} of this host has no device: torch finds {count} of {device}; start fewer "
            "processes, let each see all devices (Slurm: --gpus-per-node), install a torch that knows the device, or "
            "set DS_ACCELERATOR=cpu to train on the CPU"
        )
        error.only_here = local_rank == count  # only the first process without a device prints it
        raise error


def check_fp8(recipe: str, local_rank: int) -> None:
    """Raise ResourceError if the device of the process ``local_rank`` of this host has no FP8 matmul."""
    device = torch.device(get_accelerator().device_name(local_rank))
    if reason := why_no_fp8(device_facts(device)):
        raise ResourceError(f"--fp8-format cannot be used on this device: {reason}; remove it to train in bf16")
    if not can_multiply(recipe, device):
        raise ResourceError(
            f"--fp8-recipe {recipe}: torch {torch.__version__} has no such matmul on {device.type}; use another recipe "
            "or a newer torch"
        )
