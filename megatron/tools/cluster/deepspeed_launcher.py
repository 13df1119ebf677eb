"""DeepSpeed's launcher without torch, which it does not need: ranks start two seconds earlier, on every host.

Works around DeepSpeed 0.19.8: ``deepspeed.launcher`` is plain Python, but to import it is to import all of DeepSpeed,
and torch, for a logger and the name of an environment variable. Here it finds stand-ins for these. It can go when
``python -X importtime -m deepspeed.launcher.launch`` shows no torch; tests/launch/test_supervise.py compares the two.
"""

import glob
import logging
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from megatron.tools.cluster.supervise import PREEMPTED

MODULE = "deepspeed.launcher.launch"
OWN_MODULE = "megatron.tools.cluster.host_launch"
"""Starts the ranks of a host in place of ``MODULE``."""
_EXPORTED = {"cpu": [], "cuda": ["NCCL"]}
"""By accelerator: beginnings of the names of variables that are sent to other hosts."""


def is_news(record: logging.LogRecord) -> bool:
    """Not: the error about a run that has saved and exits with code 75, and the warning about a single host."""
    text = record.getMessage()
    return not (text.endswith(f"exits with return code = {PREEMPTED}") or text.startswith("Unable to find hostfile"))


def without_torch(environ: Mapping[str, str]) -> bool:
    """Let this process, which is no rank, import ``deepspeed.launcher`` without torch from here on.

    Returns False, and does nothing, if only torch knows the accelerator of this host.
    """
    name = environ.get("DS_ACCELERATOR") or ("cuda" if glob.glob("/dev/nvidia[0-9]*") else "")
    spec = find_spec("deepspeed")
    if name not in _EXPORTED or spec is None or not spec.submodule_search_locations:
        return False
    folder = Path(spec.submodule_search_locations[0])
    _stand_in("deepspeed", folder)
    utilities = _stand_in("deepspeed.utils", folder / "utils", logger=_logger(), set_log_level_from_string=_set_level)
    _stand_in("deepspeed.accelerator", get_accelerator=lambda: _Accelerator(name))
    _stand_in("deepspeed.autotuning", Autotuner=None)  # which is not offered
    from deepspeed.utils.numa import get_numactl_cmd

    vars(utilities)["get_numactl_cmd"] = get_numactl_cmd
    return True


class _Accelerator:
    """What the launcher asks of DeepSpeed's accelerators of these two kinds."""

    def __init__(self, name: str) -> None:
        self._name = name

    def device_name(self) -> str:
        return self._name

    def export_envs(self) -> list[str]:
        return _EXPORTED[self._name]

    def visible_devices_envs(self) -> list[str]:
        return ["CUDA_VISIBLE_DEVICES"]

    def set_visible_devices_envs(self, environ: MutableMapping[str, str], devices: Sequence[int]) -> None:
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))


def _stand_in(name: str, folder: Path | None = None, **content: object) -> ModuleType:
    module = ModuleType(name)
    module.__path__ = [str(folder)] if folder else []
    vars(module).update(content)
    sys.modules[name] = module
    return module


def _logger() -> logging.Logger:
    logger = logging.getLogger("DeepSpeed")
    logger.propagate = False
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(
        logging.Formatter("[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d:%(funcName)s] %(message)s")
    )
    logger.addHandler(handler)
    _set_level("warning", logger)
    return logger


def _set_level(name: str, logger: logging.Logger | None = None) -> None:
    logger = logger or logging.getLogger("DeepSpeed")
    logger.setLevel(name.upper())
    for handler in logger.handlers:
        handler.setLevel(name.upper())
