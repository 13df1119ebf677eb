"""Settings that offload of the optimizer and of the weights have in common: two keys of a config, and one flag."""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron.config import ZeroConfig

_ZERO = "zero_optimization"
_SECTIONS = ("offload_optimizer", "offload_param")
_SHARED = {"nvme_path": "nvme_path", "offload_pin_memory": "pin_memory"}
"""Field of the run -> key in both sections."""


def shared_offload_settings(file: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Field, section and key of each that a config file says. Where the sections differ, the last of them counts."""
    for field, key in _SHARED.items():
        for section in _SECTIONS:
            if file.get(_ZERO, {}).get(section, {}).get(key) is not None:
                yield field, section, key


def complete_offload(tree: dict[str, Any], zero: ZeroConfig) -> None:
    """Add what the flags say, and the file does not, to each section of ``tree`` that offloads something."""
    for section in _SECTIONS:
        device = getattr(zero, section)
        if device == "none":
            continue
        settings = tree[_ZERO][section]
        if device == "nvme":
            settings.setdefault("nvme_path", zero.nvme_path)
        if not zero.offload_pin_memory:
            settings.setdefault("pin_memory", False)
