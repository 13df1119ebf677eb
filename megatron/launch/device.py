"""Which kind of device a run will compute on, told without importing torch."""

from collections.abc import Mapping
from pathlib import Path

from megatron.errors import ConfigError

ACCELERATORS = ("cuda", "cpu", "xpu", "npu", "mps", "hpu", "mlu", "sdaa", "supa", "klxpu")
"""Kinds of device that DeepSpeed has an accelerator for, by its names."""


def expected_device(environ: Mapping[str, str], dev: Path = Path("/dev")) -> str:
    """The accelerator DeepSpeed will choose on this host: ``"cuda"``, ``"cpu"``, or the one DS_ACCELERATOR names.

    Args:
        environ: the process's environment.
        dev: folder of device files. An NVIDIA GPU shows as ``nvidia0``, ..., an AMD one as ``kfd``.

    Raises:
        ConfigError: DS_ACCELERATOR names none.
    """
    if name := environ.get("DS_ACCELERATOR"):
        if name not in ACCELERATORS:
            raise ConfigError(f"the environment says DS_ACCELERATOR={name}: choose from {', '.join(ACCELERATORS)}")
        return name
    if environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return "cpu"
    if (dev / "kfd").exists() or any(dev.glob("nvidia[0-9]*")):
        return "cuda"
    return "cpu"
