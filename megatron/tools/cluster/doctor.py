"""The health check: probes all hosts concurrently, checks each of them, and formats the results.

``tools/doctor.py`` prints the results; an elastic run starts on the healthy hosts.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from megatron.common.errors import counted
from megatron.tools.cluster.all_reduce import AllReduceResult
from megatron.tools.cluster.checks import check_host
from megatron.tools.cluster.hostfile import Host
from megatron.tools.cluster.probe_hosts import (
    PROJECT,
    CheckResult,
    Examination,
    HostContext,
    HostReport,
    probe_hosts,
    probe_local_host,
)
from megatron.tools.cluster.remote import forwarded_variables

_GREEN, _RED, _PLAIN = "\033[32m", "\033[31m", "\033[0m"

_REQUIRED = ("ssh", "python", "versions", "project", "arguments", "devices", "data", "folders", "leftovers")
"""The checks that a host must pass to take part in an elastic run. Other checks concern all hosts, or only warn."""

Results = Mapping[str, Mapping[str, Sequence[CheckResult]]]
"""Results by host and check."""


def examine_hosts(examination: Examination) -> tuple[Results, list[HostReport]]:
    """Probe and check all hosts. Returns the results of the checks, and the reports of the hosts."""
    request = _probe_request(examination)
    here = request | {"port": None, "environ": {}, "leftovers": None}
    requests = [request | {"port": None if i else examination.master_port} for i in range(len(examination.hosts))]
    with ThreadPoolExecutor(1) as pool:
        locally = pool.submit(probe_local_host, here, examination.seconds)
        if examination.uses_ssh:
            reports = probe_hosts(examination.hosts, requests, examination.ssh_port, examination.seconds)
        else:
            only = probe_local_host(requests[0], examination.seconds)
            reports = [only._replace(host=examination.hosts[0], without_ssh="there is no hostfile")]
        local = locally.result()
    return {r.host.name: check_host(HostContext(r, local, reports, examination, request)) for r in reports}, reports


def _probe_request(examination: Examination) -> dict[str, Any]:
    files: dict[str, str | None] = {"--deepspeed_config": examination.config_file}
    folders: dict[str, str | None] = {}
    data: list[str] = []
    if (run := examination.run) is not None:
        files |= {"--vocab-file": run.data.vocab_file, "--merge-file": run.data.merge_file}
        folders |= {"--save": run.checkpoint.save, "--load": run.checkpoint.load}
        if run.checkpoint.snapshot_interval is not None:
            folders["--snapshot-dir"] = run.checkpoint.snapshot_dir
        folders |= {"--tensorboard-dir": run.logging.tensorboard_dir, "--data-cache-path": run.data.data_cache_path}
        data = [str(Path(prefix).absolute()) for prefix in run.data.prefixes]
    return {
        "project": str(PROJECT),
        "files": _absolute(files),
        "folders": _absolute(folders),
        "data": data,
        "environ": forwarded_variables(examination.environ, examination.device, Path.cwd()),
        "leftovers": examination.leftovers,
    }


def _absolute(paths: Mapping[str, str | None]) -> dict[str, str]:
    """The given paths, made absolute: a rank starts in the working folder of the launcher."""
    return {flag: str(Path(path).absolute()) for flag, path in paths.items() if path is not None}


class HostState(NamedTuple):
    """Whether a host can take part in an elastic run."""

    host: Host
    problem: str | None
    """Why the host cannot take part; None if it can."""
    address: str = ""
    """The first address that the host lists, which DeepSpeed uses as MASTER_ADDR."""
    owner_has_ended: bool = False
    """Whether the process that holds the lock of the checkpoint folder was on this host, and has ended."""


def host_states(examination: Examination) -> list[HostState]:
    """The state of each host of ``examination``, after processes of earlier starts have been ended."""
    if not examination.hosts:
        return []
    results, reports = examine_hosts(examination)
    return [_state(report, results[report.host.name]) for report in reports]


def _state(report: HostReport, checks: Mapping[str, Sequence[CheckResult]]) -> HostState:
    failed = ((name, result) for name in _REQUIRED for result in checks.get(name, ()) if not result.ok)
    problem = next((f"{name}: {result.found.removeprefix('ssh: ')}" for name, result in failed), None)
    network, leftovers = (report.facts.get(name, {}).get("value") or {} for name in ("network", "leftovers"))
    return HostState(report.host, problem, network.get("address", ""), leftovers.get("owner_has_ended", False))


_LISTED = 16
"""Maximum number of hosts that are listed separately, or named in a line of a table that is grouped."""


def table(results: Results, *, color: bool) -> str:
    """A block of lines for each host, or grouped by check for many hosts; each failure with a command that fixes it."""
    if len(results) > _LISTED:
        return "\n".join(_grouped(results, color))
    return "\n".join(line for host, checks in results.items() for line in (host, *_lines(checks, color)))


def all_reduce_lines(result: AllReduceResult, ranks: int, *, color: bool) -> str:
    """Lines with the bandwidth of the all-reduce, or with the hosts that failed."""
    if result.bytes_per_second is not None:
        speed = f"{result.bytes_per_second / 1e9:.2f} GB/s"
        return _line(CheckResult(True, f"over {counted(ranks, 'rank')}: {speed}"), "all-reduce", color)
    failed = [
        _line(CheckResult(False, f"{host}: {error}"), "all-reduce", color) for host, error in result.failures.items()
    ]
    return "\n".join([*failed, "       fix: ip -br address  # on each: do they reach each other, by which interface?"])


def as_json(results: Results, all_reduce_result: AllReduceResult | None) -> str:
    """All results as a JSON object."""
    report = {
        "ok": is_ready(results, all_reduce_result),
        "hosts": {
            host: [{"check": check, **line._asdict()} for check, lines in checks.items() for line in lines]
            for host, checks in results.items()
        },
        "all_reduce": all_reduce_result and all_reduce_result._asdict(),
    }
    return json.dumps(report, indent=2)


def is_ready(results: Results, all_reduce_result: AllReduceResult | None) -> bool:
    """Whether all checks and the all-reduce passed."""
    return problem_count(results) == 0 and (all_reduce_result is None or all_reduce_result.bytes_per_second is not None)


def problem_count(results: Results) -> int:
    """Number of failed checks of all hosts."""
    return sum(not line.ok for checks in results.values() for lines in checks.values() for line in lines)


def _lines(checks: Mapping[str, Sequence[CheckResult]], color: bool) -> Iterator[str]:
    for check, results in checks.items():
        for result in results:
            yield _line(result, check, color)
            if not result.ok and result.fix:
                yield f"       fix: {result.fix}"


def _grouped(results: Results, color: bool) -> Iterator[str]:
    """For each check the number of hosts that pass, and each failure once, with its hosts and the first host's fix."""
    passed: dict[str, set[str]] = {}
    failed: dict[tuple[str, str], dict[str, str | None]] = {}
    for host, checks in results.items():
        for check, lines in checks.items():
            passed.setdefault(check, set())
            for line in lines:
                if not line.ok:
                    failed.setdefault((check, line.found.replace(host, "HOST")), {})[host] = line.fix
            if all(line.ok for line in lines):
                passed[check].add(host)
    for name, good in passed.items():
        if good:
            yield _line(CheckResult(True, counted(len(good), "host")), name, color)
        for (check, found), hosts in failed.items():
            if check == name:
                more = f" and {len(hosts) - _LISTED} more" if len(hosts) > _LISTED else ""
                named = f"{', '.join(list(hosts)[:_LISTED])}{more}"
                yield _line(CheckResult(False, f"{counted(len(hosts), 'host')}, {named}: {found}"), check, color)
                if fix := next(iter(hosts.values())):
                    yield f"       fix: {fix}{'  # and so on each' if len(hosts) > 1 else ''}"


def _line(result: CheckResult, check: str, color: bool) -> str:
    status = "ok " if result.ok else "BAD"
    if color:
        status = f"{_GREEN if result.ok else _RED}{status}{_PLAIN}"
    return f"  {status}  {check:12} {result.found}"
