"""run.json in ``--run-dir``: what a run was, for the report about it."""

import json
import os
import platform
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from megatron.config import RunConfig
from megatron.config.errors import ConfigError
from megatron.config.summary import describe_config
from megatron.launch.files import replace_file
from megatron.parallel.pipeline.partition import plan
from megatron.tools.planning.memory import Memory, activations, stage_memory
from megatron.tools.planning.timing import DEVICES, Machine, timing, traffic

RECORD = "run.json"
_FORMAT = 1
_PACKAGES = ("torch", "deepspeed", "numpy")


class PlannedStage(NamedTuple):
    """What was planned of a pipeline stage."""

    share: float
    """Of the operations of a forward pass."""
    memory: float
    """Bytes of one of its ranks, at its peak."""


@dataclass(frozen=True)
class Record:
    """What run.json says."""

    description: Mapping[str, str]
    """Layout, model, batch and schedule in words."""
    stages: Sequence[PlannedStage]
    seconds: float | None
    """What an iteration was planned to take; None on a device of which the planner knows nothing."""
    environment: Mapping[str, str]
    config: Mapping[str, Any]


def write_record(run: RunConfig, device: str) -> None:
    """Write it. Raises OSError where that cannot be done."""
    stages, memories = plan(run), stage_memory(run)
    flops = [stage.flops(run.data.seq_length) for stage in stages]
    record = Record(
        description=describe_config(run),
        stages=[PlannedStage(f / sum(flops), memory.total) for f, memory in zip(flops, memories, strict=True)],
        seconds=_planned_seconds(run, device, memories),
        environment=_environment(device),
        config=asdict(run),
    )
    folder = Path(str(run.observe.run_dir))
    folder.mkdir(parents=True, exist_ok=True)
    with replace_file(folder / RECORD, text=True) as file:
        file.write(json.dumps({"format": _FORMAT, **asdict(record)}, indent=1))


def read_record(path: Path) -> Record:
    """What ``path`` says. Raises ConfigError where it is no such file."""
    try:
        found = json.loads(path.read_bytes())
        if found["format"] != _FORMAT:
            raise ValueError
        stages = [PlannedStage(float(share), float(memory)) for share, memory in found["stages"]]
        seconds = None if found["seconds"] is None else float(found["seconds"])
        words = [{str(k): str(v) for k, v in found[part].items()} for part in ("description", "environment")]
        record = Record(words[0], stages, seconds, words[1], found["config"])
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); name a folder of --run-dir") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: not a record of a run; name a folder that --run-dir wrote") from error
    return record


def _planned_seconds(run: RunConfig, device: str, memories: Sequence[Memory]) -> float | None:
    known = next((about for name, about in DEVICES.items() if name in device.lower()), None)
    if known is None:
        return None
    hidden = activations(run).hidden
    stages = [(s, traffic(run, s, held.parameters, hidden)) for s, held in zip(plan(run), memories, strict=True)]
    return timing(run, Machine(known, known.per_node), stages).total


def _environment(device: str) -> dict[str, str]:
    """Where the run was started, by its first rank; no variables, among which there may be secrets."""
    return {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "device": device,
        "processors": str(os.cpu_count()),
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: version(name) for name in _PACKAGES},
        "command": " ".join(sys.argv),
    }
