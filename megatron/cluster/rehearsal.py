"""All ranks together, once before the run: started over ssh as the launcher will, they add up a few megabytes."""

import inspect
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from megatron.cluster import allreduce
from megatron.cluster.remote import ssh_command
from megatron.cluster.survey import Answer


class Rehearsal(NamedTuple):
    """How it went."""

    bytes_per_second: float | None
    """Bus bandwidth, which does not depend on the number of ranks; None where it failed."""
    failures: Mapping[str, str]
    """Last words, by host; those of the hosts that failed."""


def rehearse(
    answers: Sequence[Answer],
    *,
    address: str,
    port: int,
    ssh_port: int | None,
    device: str,
    environ: Mapping[str, str],
    seconds: float,
) -> Rehearsal:
    """An all-reduce over all slots of all hosts, that meet at ``address``; each host has ``seconds`` to join."""
    world_size = sum(len(answer.host.slots) for answer in answers)
    common = {"address": address, "port": port, "device": device, "environ": dict(environ), "seconds": seconds}
    first_rank, programs = 0, []
    for answer in answers:
        slots = answer.host.slots
        programs.append(_program({**common, "world_size": world_size, "first_rank": first_rank, "slots": slots}))
        first_rank += len(slots)

    def start(answer: Answer, program: str) -> subprocess.CompletedProcess:
        command = ssh_command(answer.host.name, [sys.executable, "-"], ssh_port)
        try:
            return subprocess.run(
                command, input=program, capture_output=True, text=True, errors="replace", timeout=2 * seconds + 10
            )
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, 1, "", "it did not end")

    with ThreadPoolExecutor(len(answers)) as pool:
        ended = list(pool.map(start, answers, programs))
    failures = {
        answer.host.name: _last_words(done.stderr)
        for answer, done in zip(answers, ended, strict=True)
        if done.returncode
    }
    found = [line for line in ended[0].stdout.splitlines() if line.startswith(allreduce.MARK)]
    speed = json.loads(found[0].removeprefix(allreduce.MARK))["bytes_per_second"] if found and not failures else None
    return Rehearsal(speed, failures)


def _program(request: Mapping) -> str:
    source = f"from __future__ import annotations\n{inspect.getsource(allreduce)}\n"
    rank = f"{source}run_rank()\n"
    return f"{source}start_host({rank!r}, json.loads({json.dumps(request)!r}))\n"


def _last_words(errors: str) -> str:
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return lines[-1] if lines else "it ended without a word"
