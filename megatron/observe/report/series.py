"""Metrics files, read: JSON lines, each with an iteration and numbers. No torch."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron.errors import DataError

Points = Mapping[int, float]
"""Iteration -> value, in order."""


def read_series(path: Path, keys: Sequence[str]) -> dict[str, Points]:
    """The points of a metrics file, one JSON object with an ``iteration`` a line, for each of ``keys``.

    Of an iteration that is there twice, as after a resume, the last line counts. Values that are
    null or not finite are no points. Raises DataError, with the line's number, for a line that is
    no such object, and if there is no loss in all the file.
    """
    series: dict[str, dict[int, float]] = {key: {} for key in keys}
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    _add_points(series, f"{path}:{number}", line)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); give a file that --metrics-file wrote") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8; give a file that --metrics-file wrote") from error
    if not (series["lm_loss"] or series["validation_loss"]):
        raise DataError(f"{path}: no lm_loss and no validation_loss to draw; give a file that --metrics-file wrote")
    return {key: dict(sorted(points.items())) for key, points in series.items()}


def _add_points(series: Mapping[str, dict[int, float]], where: str, line: str) -> None:
    """Add what a line holds. Raises DataError if it is not an object with an iteration and numbers."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON ({error.msg}, column {error.colno}); mend or remove the line") from error
    if not isinstance(record, dict) or type(record.get("iteration")) is not int:
        raise DataError(f"{where}: no JSON object with a whole number as its iteration; mend or remove the line")
    for key in series:
        value = record.get(key)
        if value is None:
            continue
        if type(value) not in (int, float):
            raise DataError(f"{where}: {key} is {value!r}, which is no number; mend or remove the line")
        if math.isfinite(value):
            series[key][record["iteration"]] = value
