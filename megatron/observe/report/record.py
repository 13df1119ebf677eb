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
from megatron.describe import describe_config
from megatron.errors import ConfigError
from megatron.partition import plan

RECORD = "run.json"
_FORMAT = 1
_PACKAGES = ("torch", "deepspeed", "numpy")


class StageRecord(NamedTuple):
    """What was planned of a pipeline stage."""

    parameters: int
    share: float
    """Of the operations of a forward pass."""


@dataclass(frozen=True)
class Record:
    """What run.json says."""

    description: Mapping[str, str]
    """Layout, model, batch and schedule in words."""
    stages: Sequence[StageRecord]
    environment: Mapping[str, str]
    config: Mapping[str, Any]


def write_record(run: RunConfig, device: str) -> None:
    """Write it. Raises OSError where that cannot be done."""
    stages = plan(run)
    flops = sum(stage.flops for stage in stages)
    record = Record(
        description=describe_config(run),
        stages=[StageRecord(stage.parameters, stage.flops / flops) for stage in stages],
        environment=_environment(device),
        config=asdict(run),
    )
    folder = Path(str(run.observe.run_dir))
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{RECORD}.partial"
    partial.write_text(json.dumps({"format": _FORMAT, **asdict(record)}, indent=1))
    os.replace(partial, folder / RECORD)


def read_record(path: Path) -> Record:
    """What ``path`` says. Raises ConfigError where it is no such file."""
    try:
        found = json.loads(path.read_bytes())
        if found["format"] != _FORMAT:
            raise ValueError
        stages = [StageRecord(int(parameters), float(share)) for parameters, share in found["stages"]]
        words = [{str(k): str(v) for k, v in found[part].items()} for part in ("description", "environment")]
        record = Record(words[0], stages, words[1], found["config"])
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); name a folder of --run-dir") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: not a record of a run; name a folder that --run-dir wrote") from error
    return record


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
