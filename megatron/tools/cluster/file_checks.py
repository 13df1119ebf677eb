"""What is checked of the files and folders that a run names, on every host."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from megatron.checkpoint.snapshot_files import planned_host_bytes
from megatron.model.architectures import architecture_of
from megatron.tools.cluster.probe_hosts import CheckResult, HostContext, Unknown

SHORT = 12
"""Characters of a hash that are shown."""
_LEAST_FREE = 1 << 30
"""Bytes; what a checkpoint takes beyond that is for the run to measure, when it knows its size."""
_SHARED = ("--save", "--load")
"""Folders that all ranks read at a resume."""


def check_arguments(host: HostContext) -> Iterator[CheckResult]:
    """Files named by the arguments have the same content there."""
    if (run := host.examination.run) is None:
        return
    local, remote = host.local.fact("files"), host.fact("files")
    for flag, path in host.request["files"].items():
        if remote[flag] != local[flag]:
            wrong = remote[flag].get("error", "differs from here")
            yield CheckResult(False, f"{flag} {path}: {wrong}", _copy(host, path))
    if remote == local:
        digest = hashlib.sha256(json.dumps([run.ds_config, remote], sort_keys=True, default=str).encode())
        yield CheckResult(True, f"hash {digest.hexdigest()[:SHORT]}")


def check_data(host: HostContext) -> Iterator[CheckResult]:
    """The data sets exist, with the same tokens."""
    for prefix in host.request["data"]:
        problem, digest = _data_problem(host, prefix)
        if problem:
            yield CheckResult(False, f"{prefix}{problem}", _copy(host, f"{prefix}.bin", f"{prefix}.idx"))
        else:
            yield CheckResult(True, f"hash {digest[:SHORT]}")


def _data_problem(host: HostContext, prefix: str) -> tuple[str | None, str]:
    """The problem of a data set there, if there is one, and its hash."""
    try:
        remote = host.fact("data")[prefix]
    except Unknown as error:
        return f": {error}", ""
    if "error" in remote:
        return f": {remote['error']}", ""
    for report in (host.local, *host.all_reports):
        fact = report.facts.get("data", {}).get("value", {}).get(prefix, {})
        if "value" in fact:
            is_other = fact != remote
            return (f" differs from {report.host.name}" if is_other else None), remote["value"]
    return None, remote["value"]


def check_folders(host: HostContext) -> Iterator[CheckResult]:
    """Folders are writable, and the folders of checkpoints are shared by all hosts."""
    for flag, path in host.request["folders"].items():
        folder = host.fact("folders")[flag]
        if not folder["is_folder"]:
            yield CheckResult(False, f"{flag} {path}: {folder['place']} is not a folder", host.fix("ls", "-l", path))
        elif not folder["writable"]:
            yield CheckResult(
                False,
                f"{flag} {path}: no permission to write in {folder['place']}",
                f"{host.fix('chmod', 'u+rwx', folder['place'])}  # or mount it for writing",
            )
        elif flag in _SHARED and not _is_shared(host, flag):
            yield CheckResult(
                False,
                f"{flag} {path}: not shared; a resume reads all ranks' files",
                f"{host.fix('findmnt', '-T', folder['place'])}  # mount one file system there on all hosts",
            )
        else:
            several = flag in _SHARED and len(host.all_reports) > 1
            yield CheckResult(True, f"{flag} {path}: writable{', shared' if several else ''}")


def check_disk(host: HostContext) -> Iterator[CheckResult]:
    """Enough disk space is free to begin with."""
    for flag, path in host.request["folders"].items():
        folder = host.fact("folders")[flag]
        free, least = folder["free"], _least_free(host, flag)
        text = f"{flag} {path}: {free / (1 << 30):.1f} GiB free"
        fix = None if free >= least else host.fix("df", "-h", folder["place"])
        yield CheckResult(free >= least, text, fix)


def _least_free(host: HostContext, flag: str) -> int:
    """Bytes: for snapshots what they need; the vocabulary is not counted, unless it is known without its files."""
    run = host.examination.run
    if flag != "--snapshot-dir" or run is None or architecture_of(run.model).provider is not None:
        return _LEAST_FREE
    return planned_host_bytes(run, len(host.report.host.slots))


def _is_shared(host: HostContext, flag: str) -> bool:
    """Whether this host and the first one that answers see the same folder."""
    first = next(report for report in host.all_reports if report.facts)
    mine, other = host.fact("folders")[flag], first.fact("folders")[flag]
    changes = {mine["changed"], other["changed"]} - {None}
    return mine["identity"] == other["identity"] and len(changes) <= 1


def _copy(host: HostContext, *paths: str) -> str:
    return host.copy_command(*paths, folder=str(Path(paths[0]).parent))
