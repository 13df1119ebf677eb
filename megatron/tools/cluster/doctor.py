"""The doctor's visit: all hosts asked at once, each judged by the same checks, then all ranks together."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron.config import RunConfig
from megatron.tools.cluster import forwarding
from megatron.tools.cluster.checks import examine
from megatron.tools.cluster.checks.case import Case, Verdict
from megatron.tools.cluster.hostfile import Host
from megatron.tools.cluster.survey import Answer, Rehearsal, look_here, rehearse, survey

PROJECT = Path(__file__).resolve().parents[3]


class Visit(NamedTuple):
    """What to look at."""

    hosts: Sequence[Host]
    run: RunConfig | None
    """What is to be trained; None to look at the hosts alone."""
    config_file: str | None
    """DeepSpeed's JSON, if one is given."""
    device: str
    environ: Mapping[str, str]
    master_address: str
    """Empty: the first host's own."""
    master_port: int
    ssh_port: int | None
    seconds: float
    """For each host's answer, and for the ranks to find each other."""


def examine_hosts(visit: Visit) -> tuple[dict[str, dict[str, list[Verdict]]], list[Answer]]:
    """The verdicts on each host, by check; and what the hosts said."""
    sent = forwarding.forwarded(visit.environ, visit.device, Path.cwd())
    request = _request(visit, sent)
    here = look_here(request | {"port": None, "environ": {}}, visit.seconds)
    requests = [request | {"port": visit.master_port if place == 0 else None} for place in range(len(visit.hosts))]
    answers = survey(visit.hosts, requests, visit.ssh_port, visit.seconds)
    unforwarded = forwarding.missing(visit.environ, visit.device, Path.cwd()) if len(visit.hosts) > 1 else []
    findings = {
        answer.host.name: examine(
            Case(
                answer=answer,
                here=here,
                others=answers,
                run=visit.run,
                device=visit.device,
                port=visit.master_port,
                ssh_port=visit.ssh_port,
                forwarded=sent,
                unforwarded=unforwarded,
                files=request["files"],
                folders=request["folders"],
                project=str(PROJECT),
                data=request["data"],
            )
        )
        for answer in answers
    }
    return findings, answers


def rehearse_on(visit: Visit, answers: Sequence[Answer]) -> Rehearsal:
    """The all-reduce over all ranks, for hosts that all have answered."""
    return rehearse(
        answers,
        address=visit.master_address or _address(answers[0]),
        port=visit.master_port,
        ssh_port=visit.ssh_port,
        device=visit.device,
        environ=forwarding.forwarded(visit.environ, visit.device, Path.cwd()),
        seconds=visit.seconds,
    )


def _address(answer: Answer) -> str:
    """What DeepSpeed takes for the address to meet at: the first that the host says it has."""
    return answer.facts["network"].get("value", {}).get("address") or answer.address or answer.host.name


def _request(visit: Visit, sent: Mapping[str, str]) -> dict[str, Any]:
    files: dict[str, str | None] = {"--deepspeed_config": visit.config_file}
    folders: dict[str, str | None] = {}
    data: list[str] = []
    if visit.run is not None:
        run = visit.run
        files |= {"--vocab-file": run.data.vocab_file, "--merge-file": run.data.merge_file}
        folders |= {"--save": run.checkpoint.save, "--load": run.checkpoint.load}
        folders |= {"--tensorboard-dir": run.logging.tensorboard_dir, "--data-cache-path": run.data.data_cache_path}
        data = [str(Path(prefix).absolute()) for prefix in run.data.prefixes]
    return {
        "project": str(PROJECT),
        "files": _absolute(files),
        "folders": _absolute(folders),
        "data": data,
        "environ": dict(sent),
    }


def _absolute(paths: Mapping[str, str | None]) -> dict[str, str]:
    """The paths that are given. A rank starts in the folder that the launcher was started in."""
    return {flag: str(Path(path).absolute()) for flag, path in paths.items() if path is not None}
