"""The cluster doctor: probes all hosts at once, runs the same checks on each, and prints what to fix."""

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from megatron.common.errors import counted
from megatron.config import RunConfig
from megatron.tools.cluster.checks import check_host
from megatron.tools.cluster.hostfile import Host, runs_here_alone
from megatron.tools.cluster.probe_hosts import (
    AllReduceResult,
    CheckResult,
    HostContext,
    HostReport,
    all_reduce,
    probe_hosts,
    probe_local_host,
)
from megatron.tools.cluster.remote import forwarded_variables, unforwarded_variables

PROJECT = Path(__file__).resolve().parents[3]
_GREEN, _RED, _PLAIN = "\033[32m", "\033[31m", "\033[0m"

Results = Mapping[str, Mapping[str, Sequence[CheckResult]]]
"""By host and check."""


class Examination(NamedTuple):
    """What to check."""

    hosts: Sequence[Host]
    run: RunConfig | None
    """What is to be trained; None to check the hosts alone."""
    config_file: str | None
    """DeepSpeed's JSON, if there is one."""
    device: str
    environ: Mapping[str, str]
    uses_ssh: bool
    """False: the one host is this machine, which no hostfile names."""
    master_address: str
    """Empty: the first host's own."""
    master_port: int
    ssh_port: int | None
    seconds: float
    """Time limit for each host's report, and for the rendezvous of the all-reduce."""
    leftovers: Mapping[str, Any] | None = None
    """What is ended on the hosts first, see ``leftovers.end_leftovers``."""


def examine_hosts(examination: Examination) -> tuple[Results, list[HostReport]]:
    """The results of all checks, and what the hosts reported."""
    environ, device = examination.environ, examination.device
    sent = forwarded_variables(environ, device, Path.cwd())
    request = _probe_request(examination, sent)
    here = request | {"port": None, "environ": {}, "leftovers": None}
    requests = [request | {"port": None if i else examination.master_port} for i in range(len(examination.hosts))]
    with ThreadPoolExecutor(1) as pool:
        locally = pool.submit(probe_local_host, here, examination.seconds)
        if examination.uses_ssh:
            reports = probe_hosts(examination.hosts, requests, examination.ssh_port, examination.seconds)
        else:
            only = probe_local_host(requests[0], examination.seconds)
            reports = [
                only._replace(host=examination.hosts[0], address="127.0.0.1", without_ssh="there is no hostfile")
            ]
        local = locally.result()
    unforwarded = unforwarded_variables(environ, device, Path.cwd()) if len(examination.hosts) > 1 else []
    results = {
        report.host.name: check_host(
            HostContext(
                report=report,
                local=local,
                all_reports=reports,
                run=examination.run,
                device=device,
                port=examination.master_port,
                ssh_port=examination.ssh_port,
                forwarded=sent,
                unforwarded=unforwarded,
                files=request["files"],
                folders=request["folders"],
                project=str(PROJECT),
                data=request["data"],
            )
        )
        for report in reports
    }
    return results, reports


def run_all_reduce(examination: Examination, reports: Sequence[HostReport]) -> AllReduceResult:
    """The all-reduce over all ranks, of hosts that have all reported."""
    first = reports[0]
    # DeepSpeed takes the first address that the host lists for the rendezvous.
    listed = None if runs_here_alone(examination.hosts) else first.facts["network"].get("value", {}).get("address")
    own_address = listed or first.address or first.host.name
    return all_reduce(
        reports,
        address=examination.master_address or own_address,
        port=examination.master_port,
        ssh_port=examination.ssh_port,
        device=examination.device,
        environ=forwarded_variables(examination.environ, examination.device, Path.cwd()),
        seconds=examination.seconds,
    )


def _probe_request(examination: Examination, sent: Mapping[str, str]) -> dict[str, Any]:
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
        "environ": dict(sent),
        "leftovers": examination.leftovers,
    }


def _absolute(paths: Mapping[str, str | None]) -> dict[str, str]:
    """The paths that are set. A rank starts in the folder that the launcher was started in."""
    return {flag: str(Path(path).absolute()) for flag, path in paths.items() if path is not None}


def table(results: Results, *, color: bool) -> str:
    """A block of lines for each host; under each failure, the command that fixes it."""
    return "\n".join(line for host, checks in results.items() for line in (host, *_lines(checks, color)))


def all_reduce_lines(result: AllReduceResult, ranks: int, *, color: bool) -> str:
    """The bandwidth of the all-reduce, or the hosts that failed."""
    if result.bytes_per_second is not None:
        speed = f"{result.bytes_per_second / 1e9:.2f} GB/s"
        return _line(CheckResult(True, f"over {counted(ranks, 'rank')}: {speed}"), "all-reduce", color)
    failed = [
        _line(CheckResult(False, f"{host}: {error}"), "all-reduce", color) for host, error in result.failures.items()
    ]
    return "\n".join([*failed, "       fix: ip -br address  # on each: do they reach each other, by which interface?"])


def as_json(results: Results, all_reduce_result: AllReduceResult | None) -> str:
    """Everything as one JSON object."""
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
    """Whether nothing failed."""
    return problem_count(results) == 0 and (all_reduce_result is None or all_reduce_result.bytes_per_second is not None)


def problem_count(results: Results) -> int:
    """Failed checks of all hosts."""
    return sum(not line.ok for checks in results.values() for lines in checks.values() for line in lines)


def _lines(checks: Mapping[str, Sequence[CheckResult]], color: bool) -> Iterator[str]:
    for check, results in checks.items():
        for result in results:
            yield _line(result, check, color)
            if not result.ok and result.fix:
                yield f"       fix: {result.fix}"


def _line(result: CheckResult, check: str, color: bool) -> str:
    status = "ok " if result.ok else "BAD"
    if color:
        status = f"{_GREEN if result.ok else _RED}{status}{_PLAIN}"
    return f"  {status}  {check:12} {result.found}"
