"""Reads and writes the files of a run that its report shows: metrics, trace.json and run.json."""

import json
import os
import platform
import re
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megatron.common.errors import DataError
from megatron.common.files import replace_file
from megatron.common.reading import LARGEST, parse_json, read_json, read_lines, regular, type_problem
from megatron.config import RunConfig
from megatron.model.partition import TRACE, plan
from megatron.tools.planning.machine import Machine, device_of_name
from megatron.tools.planning.memory import Memory, stage_memory
from megatron.tools.planning.timing import timing, traffic
from megatron.tools.reporting.timeline import Event, Shape, Timeline
from megatron.training.summary import describe_config

Points = Mapping[int, float]
"""Iteration -> value, in order."""
LARGEST_DRAWN = 1e100
"""Values of at least this size cannot be drawn."""


def read_series(path: Path, keys: Sequence[str]) -> dict[str, Points]:
    """The values of each of ``keys`` in a metrics file, which has one JSON object with an ``iteration`` per line.

    If an iteration occurs twice, as after a resume, the last line counts. Values that are null, not finite or too
    large are skipped. Raises DataError, with the line number, for an invalid line, and if the file has no loss.
    """
    series: dict[str, dict[int, float]] = {key: {} for key in keys}
    for where, record in read_metrics(path):
        for key in series:
            value = record.get(key)
            if value is None:
                continue
            if type(value) not in (int, float):
                raise DataError(f"{where}: {key} is {value!r}, which is not a number; fix or remove the line")
            if abs(value) < LARGEST_DRAWN:  # which NaN is not
                series[key][record["iteration"]] = value
    if not (series["lm_loss"] or series["validation_loss"]):
        raise DataError(f"{path}: no lm_loss and no validation_loss to draw; give a file that --metrics-file wrote")
    return {key: dict(sorted(points.items())) for key, points in series.items()}


_LOAD = re.compile(r"layer_(\d{1,9})/expert_(\d{1,9})_load", re.ASCII)


def read_expert_loads(path: Path) -> dict[int, dict[int, Points]]:
    """The load of each expert of each layer over time, from a metrics file of ``--moe-per-layer-logging``.

    Raises DataError as ``read_series``.
    """
    loads: dict[int, dict[int, dict[int, float]]] = {}
    for _, record in read_metrics(path):
        for key, value in record.items():
            if (match := _LOAD.fullmatch(key)) and isinstance(value, int | float) and abs(value) < LARGEST_DRAWN:
                layer_loads = loads.setdefault(int(match[1]), {})
                layer_loads.setdefault(int(match[2]), {})[record["iteration"]] = float(value)
    return {
        layer: {expert: dict(sorted(points.items())) for expert, points in sorted(experts.items())}
        for layer, experts in sorted(loads.items())
    }


def read_metrics(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Location and content of each line of a metrics file. Raises DataError as ``read_series``."""
    try:
        with open(path, "rb", opener=regular) as file:
            for number, line in enumerate(read_lines(file), start=1):
                is_cut_off = line.startswith(b'{"iteration": ') and not line.endswith((b"\n", b"}"))  # by a kill
                if line.strip() and not is_cut_off:
                    yield f"{path}:{number}", _parsed_line(f"{path}:{number}", line.decode())
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); give a file that --metrics-file wrote") from error
    except ValueError as error:
        reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        raise DataError(f"{path}: {reason}; give a file that --metrics-file wrote") from error


def _parsed_line(where: str, line: str) -> dict[str, Any]:
    try:
        record = parse_json(line)
    except ValueError as error:
        raise DataError(f"{where}: not JSON ({getattr(error, 'msg', error)}); fix or remove the line") from error
    if (
        not isinstance(record, dict)
        or type(record.get("iteration")) is not int
        or not 0 <= record["iteration"] <= 2**53
    ):
        raise DataError(f"{where}: not a JSON object with an integer iteration; fix or remove the line")
    if type(record.get("consumed_samples", 0)) is not int:
        raise DataError(f"{where}: consumed_samples is not an integer; fix or remove the line")
    return record


TRACE_FORMAT = 1


def to_json(timeline: Timeline, **metadata: Any) -> str:
    """All events in Chrome's trace format, for Perfetto and chrome://tracing, with additional ``metadata``."""
    rows: list[dict[str, Any]] = []
    for rank, events in enumerate(timeline.events):
        coordinates = ", ".join(f"{axis} {number}" for axis, number in timeline.coordinates[rank].items())
        rows.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}: {coordinates}"}})
        rows.append({"name": "process_sort_index", "ph": "M", "pid": rank, "args": {"sort_index": rank}})
        rows += [_row(rank, event) for event in events]
    other_data = {"format": TRACE_FORMAT, **asdict(timeline.shape), "places": list(timeline.coordinates), **metadata}
    return json.dumps({"displayTimeUnit": "ms", "otherData": other_data, "traceEvents": rows})


def _row(rank: int, event: Event) -> dict[str, Any]:
    details = {name: value for name in Event._fields[3:] if (value := getattr(event, name)) is not None}
    return {
        "name": event.collective or (event.name if event.is_instruction else f"layer {event.layer}"),
        "cat": event.category,
        "ph": "X",
        "pid": rank,
        "tid": 0,
        "ts": round(event.begin * 1e6, 3),
        "dur": round(event.seconds * 1e6, 3),
        "args": {"instruction": event.name, **details},
    }


def read_timeline(path: Path) -> Timeline:
    """Read the timeline in a folder of ``--trace``, or in its trace.json.

    Raises:
        DataError: the file cannot be read, or was not written by a run of this suite.
    """
    path = path / TRACE if path.is_dir() else path
    try:
        content = read_json(path, largest=LARGEST)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); name a folder of --trace") from error
    except ValueError as error:
        raise DataError(f"{path}: not JSON; name a folder of --trace") from error
    try:
        return _timeline(content)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise DataError(f"{path}: not a trace of this suite; name a folder of --trace") from error


def _timeline(content: Any) -> Timeline:
    metadata = content["otherData"]
    if metadata["format"] != TRACE_FORMAT:
        raise ValueError
    shape = Shape(**{part.name: metadata[part.name] for part in fields(Shape)})
    events: list[list[Event]] = [[] for _ in metadata["places"]]
    for row in content["traceEvents"]:
        if row["ph"] == "X":
            arguments, begin = dict(row["args"]), row["ts"] / 1e6
            name = arguments.pop("instruction")
            event = Event(name, begin, begin + row["dur"] / 1e6, **arguments)
            if not _is_possible(event) or type(row["pid"]) is not int or row["pid"] < 0:
                raise ValueError
            events[row["pid"]].append(event)
    if not any(events) or any("pipe" not in coordinates for coordinates in metadata["places"]):
        raise ValueError
    sizes = (shape.stages, shape.micro_batches, shape.chunks)
    if type_problem(Shape, asdict(shape)) or type_problem(list[dict[str, int]], metadata["places"]):
        raise ValueError
    if not 0 < min(sizes) <= max(sizes) < _MANY or not 0 <= shape.layers < _MANY or shape.stages > len(events):
        raise ValueError
    timeline = Timeline(shape, metadata["places"], events)
    instructions = (event for rank_events in events for event in rank_events if event.is_instruction)
    if {event.iteration for event in instructions} != {*timeline.iterations}:
        raise ValueError  # an iteration without an instruction
    return timeline


_MANY = 1 << 20
"""Larger than the number of stages, micro-batches, chunks or layers of any run."""
_LATEST = 1e12
"""Seconds on any clock, in 30,000 years."""


def _is_possible(event: Event) -> bool:
    numbers = (event.iteration, event.micro_batch or 0, event.phase or 0, event.layer or 0)
    texts = (event.name, event.collective or "")
    are_typed = all(type(number) is int for number in numbers) and all(isinstance(text, str) for text in texts)
    return are_typed and -_LATEST <= event.begin <= event.end <= _LATEST


RECORD = "run.json"
_PACKAGES = ("torch", "deepspeed", "numpy")


class PlannedStage(NamedTuple):
    """The planner's estimates for a pipeline stage."""

    share: float
    """Share of the FLOPs of a forward pass."""
    memory: float
    """Peak memory of a rank of the stage, in bytes."""


@dataclass(frozen=True)
class Record:
    """The content of run.json in ``--run-dir``."""

    description: Mapping[str, str]
    """Layout, model, batch and schedule as text."""
    stages: Sequence[PlannedStage]
    seconds: float | None
    """Planned seconds of an iteration; None for a device that the planner does not know."""
    environment: Mapping[str, str]
    config: Mapping[str, Mapping[str, Any]]
    format: Literal[1] = 1
    layouts: Mapping[int, str] = field(default_factory=dict)
    """The layout from each of these iterations on, of this start of the run and of those that it continues."""


def write_record(run: RunConfig, device: str) -> None:
    """Write run.json, with the layouts of an earlier one that the run continues.

    Raises OSError if it cannot be written.
    """
    stages, memories, description = plan(run), stage_memory(run), describe_config(run)
    path, begin = Path(str(run.observe.run_dir)) / RECORD, run.train.resumed_after + 1
    layouts = dict[int, str]()
    if begin > 1:
        with suppress(DataError):
            layouts = {first: layout for first, layout in read_record(path).layouts.items() if first < begin}
    if [*layouts.values()][-1:] != [description["layout"]]:
        layouts[begin] = description["layout"]
    flops = [stage.flops(run.data.seq_length) for stage in stages]
    record = Record(
        description=description,
        stages=[PlannedStage(f / sum(flops), memory.total) for f, memory in zip(flops, memories, strict=True)],
        seconds=_planned_seconds(run, device, memories),
        environment=_environment(device),
        config=asdict(run),
        layouts=layouts,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(path, text=True) as file:
        file.write(json.dumps(asdict(record), indent=1))


def read_record(path: Path) -> Record:
    """Read the run.json at ``path``. Raises DataError if it cannot be read or is invalid."""
    from pydantic import TypeAdapter

    try:
        return TypeAdapter(Record).validate_python(read_json(path))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); name a folder of --run-dir") from error
    except ValueError as error:
        raise DataError(f"{path}: not a record of a run; name a folder that --run-dir wrote") from error


def _planned_seconds(run: RunConfig, device: str, memories: Sequence[Memory]) -> float | None:
    spec = device_of_name(device)
    if spec is None:
        return None
    stages = [(s, traffic(run, s, memory)) for s, memory in zip(plan(run), memories, strict=True)]
    return timing(run, Machine(spec, spec.per_node), stages).total


def _environment(device: str) -> dict[str, str]:
    """Host and package versions of rank 0; no environment variables, which may contain secrets."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "device": device,
        "processors": str(os.cpu_count()),
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: version(name) for name in _PACKAGES},
        "command": " ".join(sys.argv),
    }
