"""Whether a host sees the data, the checkpoints and all else that the training arguments name."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from megatron.tools.cluster.checks.case import Case, Unknown, Verdict, told

_SHORT = 12
_LEAST_FREE = 1 << 30
"""Bytes; what a checkpoint takes beyond that is for the run to measure, when it knows its size."""
_SHARED = ("--save", "--load")
"""Folders that all ranks read at a resume."""


def check_arguments(case: Case) -> Iterator[Verdict]:
    """The files that the arguments name say the same there."""
    if case.run is None:
        return
    here, there = told(case.here, "files"), case.fact("files")
    for flag, path in case.files.items():
        if there[flag] != here[flag]:
            wrong = there[flag].get("error", "has another content than here")
            yield Verdict(False, f"{flag} {path}: {wrong}", _copy(case, path))
    if there == here:
        digest = hashlib.sha256(json.dumps([case.run.ds_config, there], sort_keys=True, default=str).encode())
        yield Verdict(True, f"hash {digest.hexdigest()[:_SHORT]}")


def check_data(case: Case) -> Iterator[Verdict]:
    """The data sets are there, with the same tokens."""
    for prefix in case.data:
        fault, digest = _data_fault(case, prefix)
        if fault:
            yield Verdict(False, f"{prefix}{fault}", _copy(case, f"{prefix}.bin", f"{prefix}.idx"))
        else:
            yield Verdict(True, f"hash {digest[:_SHORT]}")


def _data_fault(case: Case, prefix: str) -> tuple[str | None, str]:
    """What is wrong with a data set there, if anything is, and its hash."""
    try:
        there = case.fact("data")[prefix]
    except Unknown as error:
        return f": {error}", ""
    if "error" in there:
        return f": {there['error']}", ""
    for answer in (case.here, *case.others):
        fact = answer.facts.get("data", {}).get("value", {}).get(prefix, {})
        if "value" in fact:
            is_other = fact != there
            return (f" has another content than on {answer.host.name}" if is_other else None), there["value"]
    return None, there["value"]


def check_folders(case: Case) -> Iterator[Verdict]:
    """Folders can be written in, and those of checkpoints are the same ones everywhere."""
    for flag, path in case.folders.items():
        folder = case.fact("folders")[flag]
        if not folder["is_folder"]:
            yield Verdict(False, f"{flag} {path}: {folder['place']} is not a folder", case.fix("ls", "-l", path))
        elif not folder["writable"]:
            yield Verdict(
                False,
                f"{flag} {path}: no permission to write in {folder['place']}",
                f"{case.fix('chmod', 'u+rwx', folder['place'])}  # or mount it for writing",
            )
        elif flag in _SHARED and not _is_shared(case, flag):
            yield Verdict(
                False,
                f"{flag} {path}: a folder of this host's own; a resume reads all ranks' files",
                f"{case.fix('findmnt', '-T', folder['place'])}  # mount one file system there on all hosts",
            )
        else:
            several = flag in _SHARED and len(case.others) > 1
            yield Verdict(True, f"{flag} {path}: writable{', shared' if several else ''}")


def check_disk(case: Case) -> Iterator[Verdict]:
    """There is room to begin with."""
    for flag, path in case.folders.items():
        folder = case.fact("folders")[flag]
        free = folder["free"]
        said = f"{flag} {path}: {free / (1 << 30):.1f} GiB free"
        fix = None if free >= _LEAST_FREE else case.fix("df", "-h", folder["place"])
        yield Verdict(free >= _LEAST_FREE, said, fix)


def _is_shared(case: Case, flag: str) -> bool:
    """Whether this host and the first one that answers see one folder."""
    first = next(answer for answer in case.others if answer.facts)
    mine, other = case.fact("folders")[flag], told(first, "folders")[flag]
    changes = {mine["changed"], other["changed"]} - {None}
    return mine["identity"] == other["identity"] and len(changes) <= 1


def _copy(case: Case, *paths: str) -> str:
    return case.copy_command(*paths, folder=str(Path(paths[0]).parent))
