"""DeepSpeed's launcher of one host, started on every host, with three workarounds for DeepSpeed 0.19.8.

- ``deepspeed.launcher`` is plain Python, but importing it imports all of DeepSpeed and torch, for a logger and the name
  of an environment variable. Stand-ins for these make each start of a run four seconds faster: two in the runner, two
  here. They can go when ``python -X importtime -m deepspeed.launcher.launch`` shows no torch.
- It polls its ranks once a second. That can go when it waits for the first one to end.
- After a signal it waits 30 s for children of its ranks that have ended, if no process has reaped them. That can go
  when it ends ranks by their process group.

Tests: tests/launch/test_supervise.py.
"""

import glob
import logging
import os
import sys
import time
from collections.abc import Mapping, MutableMapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import psutil

from megatron.tools.cluster.supervise import PREEMPTED

MODULE = "deepspeed.launcher.launch"
OWN_MODULE = "megatron.tools.cluster.deepspeed_launcher"
"""Starts the ranks of a host in place of ``MODULE``."""
_POLL_SECONDS = 0.1
_EXPORTED = {"cpu": [], "cuda": ["NCCL"]}
"""By accelerator: beginnings of the names of variables that are sent to other hosts."""


def main() -> None:
    """Start the ranks of this host, and wait for them: ``deepspeed.launcher.launch``, with its arguments."""
    without_torch(os.environ)
    from deepspeed.launcher import launch

    logging.getLogger("DeepSpeed").addFilter(is_news)
    launch.time = SimpleNamespace(**{**vars(time), "sleep": lambda _: time.sleep(_POLL_SECONDS)})
    launch.psutil = SimpleNamespace(**{**vars(psutil), "wait_procs": wait_for_end})
    launch.main()


def wait_for_end(processes: Sequence[psutil.Process], timeout: float) -> tuple[list, list[psutil.Process]]:
    """``psutil.wait_procs``, for which a process that is not reaped, such as a data worker's, has ended, too."""
    deadline = time.monotonic() + timeout
    while (left := [process for process in processes if _runs(process)]) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return [process for process in processes if process not in left], left


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


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


if __name__ == "__main__":
    main()
