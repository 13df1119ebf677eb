"""How far a job has come whose output is still partial, so that it can go on after it was interrupted."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.data.files import replace_file
from megatron.data.indexed_dataset_builder import Written
from megatron.errors import DataError


@dataclass(frozen=True)
class Milestone:
    """A place up to which all is on the disk."""

    place: tuple[int, int]
    """Inputs that are finished, and chunks of the next one that are."""
    outputs: Mapping[str, Written]
    """How much there is of each key's data set."""
    counts: Mapping[str, Any]
    """The summary so far."""


class Journal:
    """The file beside the output that holds the newest milestone.

    Args:
        job: what the output depends on; a job that differs does not go on from here.
    """

    def __init__(self, path: Path, job: Mapping[str, Any]) -> None:
        self.path = path
        self._job = json.loads(json.dumps(job))  # as it will be read

    def read(self) -> Milestone | None:
        """The newest milestone, or None where there is none. Raises DataError where it is another job's, or broken."""
        try:
            content = json.loads(self.path.read_bytes())
            job, place = content["job"], content["milestone"]
            outputs = {key: Written(*written) for key, written in place["outputs"].items()}
            milestone = Milestone(tuple(place["place"]), outputs, place["counts"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise DataError(f"{self.path} is no journal: run without --resume to begin anew") from None
        if changed := [name for name in self._job if job.get(name) != self._job[name]]:
            raise DataError(
                f"{self.path} is of a job with another {' and '.join(changed)}: give what it was begun with, or run "
                "without --resume to begin anew"
            )
        return milestone

    def write(self, milestone: Milestone) -> None:
        """Replace the milestone by a newer one, whose output is on the disk."""
        content = {"job": self._job, "milestone": vars(milestone)}
        replace_file(self.path, json.dumps(content).encode())

    def remove(self) -> None:
        """There is nothing to go on from any more."""
        self.path.unlink(missing_ok=True)
