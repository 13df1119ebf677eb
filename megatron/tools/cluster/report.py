"""What the doctor found, for a person and for a program."""

import json
from collections.abc import Iterator, Mapping, Sequence

from megatron.tools.cluster.checks.case import Verdict
from megatron.tools.cluster.survey import Rehearsal

Findings = Mapping[str, Mapping[str, Sequence[Verdict]]]
"""Host, check, verdicts."""

_GREEN, _RED, _PLAIN = "\033[32m", "\033[31m", "\033[0m"


def table(findings: Findings, *, colour: bool) -> str:
    """A block of lines for each host; under each red one, the command that mends it."""
    return "\n".join(line for host, checks in findings.items() for line in (host, *_lines(checks, colour)))


def rehearsal_lines(rehearsal: Rehearsal, ranks: int, *, colour: bool) -> str:
    """How the all-reduce went."""
    if rehearsal.bytes_per_second is not None:
        speed = f"{rehearsal.bytes_per_second / 1e9:.2f} GB/s"
        return _line(Verdict(True, f"over {ranks} ranks: {speed}"), "all-reduce", colour)
    failed = [
        _line(Verdict(False, f"{host}: {said}"), "all-reduce", colour) for host, said in rehearsal.failures.items()
    ]
    return "\n".join([*failed, "       fix: ip -br address  # on each: do they reach each other, by which interface?"])


def as_json(findings: Findings, rehearsal: Rehearsal | None) -> str:
    """All of it as one JSON object."""
    hosts = {
        host: [{"check": check, **verdict._asdict()} for check, verdicts in checks.items() for verdict in verdicts]
        for host, checks in findings.items()
    }
    return json.dumps(
        {"ok": is_well(findings, rehearsal), "hosts": hosts, "all_reduce": rehearsal and rehearsal._asdict()}, indent=2
    )


def is_well(findings: Findings, rehearsal: Rehearsal | None) -> bool:
    """Whether nothing is red."""
    return problem_count(findings) == 0 and (rehearsal is None or rehearsal.bytes_per_second is not None)


def problem_count(findings: Findings) -> int:
    """Red lines of the hosts."""
    return sum(not verdict.ok for checks in findings.values() for verdicts in checks.values() for verdict in verdicts)


def _lines(checks: Mapping[str, Sequence[Verdict]], colour: bool) -> Iterator[str]:
    for check, verdicts in checks.items():
        for verdict in verdicts:
            yield _line(verdict, check, colour)
            if not verdict.ok and verdict.fix:
                yield f"       fix: {verdict.fix}"


def _line(verdict: Verdict, check: str, colour: bool) -> str:
    word = "ok " if verdict.ok else "BAD"
    if colour:
        word = f"{_GREEN if verdict.ok else _RED}{word}{_PLAIN}"
    return f"  {word}  {check:12} {verdict.found}"
