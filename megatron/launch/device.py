"""Which kind of device a run will compute on, told without importing torch."""

from collections.abc import Mapping
from pathlib import Path


def expected_device(environ: Mapping[str, str], dev: Path = Path("/dev")) -> str:
    """The accelerator DeepSpeed will choose on this host: ``"cuda"``, ``"cpu"``, or the one DS_ACCELERATOR names.

    Args:
        environ: the process's environment.
        dev: folder of device files. An NVIDIA GPU shows as ``nvidia0``, ..., an AMD one as ``kfd``.
    """
    if environ.get("DS_ACCELERATOR"):
        return environ["DS_ACCELERATOR"]
    if environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return "cpu"
    if (dev / "kfd").exists() or any(dev.glob("nvidia[0-9]*")):
        return "cuda"
    return "cpu"
