"""Look at many hosts at once: send each the probe over ssh, and gather what they say. No host waits for another."""

import inspect
import json
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from megatron.checkpoint import fingerprint
from megatron.launch.environment import extensions_folder
from megatron.tools.cluster import allreduce, probe
from megatron.tools.cluster.hostfile import Host
from megatron.tools.cluster.remote import CONNECT_SECONDS, ssh_command

_AT_ONCE = 64
# The launcher will start the python of this path, so that is the one to ask, where there is one.
_PYTHON = 'if [ -x "$0" ]; then exec "$0" -; else exec python3 -; fi'


class Answer(NamedTuple):
    """What came back from a host."""

    host: Host
    address: str | None = None
    """What its name stands for; None where that is nothing."""
    failure: str | None = None
    """Why there are no facts: ssh's last words, mostly."""
    facts: Mapping[str, Any] = {}
    """By the names of ``probe.FACTS``: {"value": ...} or {"error": ...}."""
    seconds: float = 0.0
    """Until the host said its first word."""
    clock: float = 0.0
    """Seconds that its clock is ahead of this host's, give or take the way of a word over the network."""


def survey(
    hosts: Sequence[Host], requests: Sequence[Mapping[str, Any]], port: int | None, seconds: float
) -> list[Answer]:
    """The answer of each host to its request, see ``probe.answer``; a host has so many seconds for it."""
    with ThreadPoolExecutor(min(_AT_ONCE, len(hosts))) as pool:
        return list(pool.map(lambda host, request: _visit(host, request, port, seconds), hosts, requests))


def look_here(request: Mapping[str, Any], seconds: float) -> Answer:
    """This host's own answer, by the same program."""
    return _ask(Host("this host", ()), [sys.executable, "-"], request, seconds)


def _visit(host: Host, request: Mapping[str, Any], port: int | None, seconds: float) -> Answer:
    address = _address(host.name, port)
    if address is None:
        return Answer(host, failure="its name stands for no address")
    words = ["sh", "-c", _PYTHON, sys.executable]
    return _ask(host, ssh_command(host.name, words, port), request, seconds)._replace(address=address)


def _address(name: str, port: int | None) -> str | None:
    """Where ssh goes for ``name``, which may be known to its configuration alone."""
    told = _output([*ssh_command(name, [], port)[:1], "-G", "--", name]) or ""
    settings = dict(line.split(" ", 1) for line in told.splitlines() if " " in line)
    if {"proxyjump", "proxycommand"} & set(settings):
        return name  # resolved elsewhere
    # Not by this process: a resolver without an answer cannot be stopped.
    found = _output(["getent", "ahosts", settings.get("hostname", name)])
    return found.split(None, 1)[0] if found else None


def _output(command: Sequence[str]) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=CONNECT_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def _ask(host: Host, command: Sequence[str], request: Mapping[str, Any], seconds: float) -> Answer:
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        start = time.monotonic()
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, errors="replace"
            )
        except OSError as error:
            return Answer(host, failure=f"{command[0]}: {error.strerror}")
        limit = threading.Timer(seconds, process.kill)
        limit.start()
        try:
            answer = _converse(Answer(host), process, _program(request), start)
        finally:
            limit.cancel()
            process.kill()
            process.wait()
        if answer.facts:
            return answer
        errors.seek(0)
        said = [line.strip() for line in errors.read().splitlines() if line.strip()]
        silent = f"no answer within {seconds:g} s" if time.monotonic() - start >= seconds else "it said nothing"
        return answer._replace(failure=" ".join(said[-2:]) or silent)


def _converse(answer: Answer, process: subprocess.Popen, program: str, start: float) -> Answer:
    try:
        with process.stdin as pipe:
            pipe.write(program)
    except BrokenPipeError:
        return answer
    for line in process.stdout:
        if not line.startswith(probe.MARK):
            continue
        said = json.loads(line.removeprefix(probe.MARK))
        if answer.seconds:
            return answer._replace(facts=said)
        answer = answer._replace(seconds=time.monotonic() - start, clock=said["time"] - time.time())
    return answer


def _program(request: Mapping[str, Any]) -> str:
    """The probe with the functions that it imports here, and its request, as one program."""
    lines = "\n".join(inspect.getsource(module) for module in (fingerprint, extensions_folder, probe)).split("\n")
    own = "\n".join(line for line in lines if not line.startswith("from megatron."))
    return f"from __future__ import annotations\n{own}\nanswer(json.loads({json.dumps(request)!r}))\n"


def on_host(answer: Answer, port: int | None, *words: str) -> str:
    """A command for the user to type, that runs ``words`` on a host."""
    return " ".join(["ssh", *(["-p", str(port)] if port else []), answer.host.name, shlex.quote(shlex.join(words))])


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
        place = {"world_size": world_size, "first_rank": first_rank, "slots": slots}
        programs.append(_allreduce_program({**common, **place}))
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


def _allreduce_program(request: Mapping) -> str:
    source = f"from __future__ import annotations\n{inspect.getsource(allreduce)}\n"
    rank = f"{source}run_rank()\n"
    return f"{source}start_host({rank!r}, json.loads({json.dumps(request)!r}))\n"


def _last_words(errors: str) -> str:
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return lines[-1] if lines else "it ended without a word"
