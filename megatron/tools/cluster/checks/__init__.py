"""What has to be so on every host before a run can start: a table of checks, each with the way to mend what is not."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megatron.tools.cluster.checks.case import Case, Unknown, Verdict
from megatron.tools.cluster.checks.files import check_arguments, check_data, check_disk, check_folders
from megatron.tools.cluster.checks.hosts import (
    check_clock,
    check_devices,
    check_environment,
    check_interface,
    check_locks,
    check_name,
    check_port,
    check_project,
    check_python,
    check_ssh,
    check_versions,
)

Check = Callable[[Case], Iterator[Verdict]]

FIRST: Mapping[str, Check] = {"name": check_name, "ssh": check_ssh}
"""Without these a host cannot be asked for more."""

CHECKS: Mapping[str, Check] = {
    "python": check_python,
    "versions": check_versions,
    "project": check_project,
    "arguments": check_arguments,
    "devices": check_devices,
    "data": check_data,
    "folders": check_folders,
    "disk": check_disk,
    "clock": check_clock,
    "port": check_port,
    "interface": check_interface,
    "extensions": check_locks,
    "environment": check_environment,
}
"""What is asked of a host that answers; in this order it is shown."""


def examine(case: Case) -> dict[str, list[Verdict]]:
    """The verdicts on one host, by check. A check that does not concern it, or this run, has none."""
    found = {name: list(check(case)) for name, check in FIRST.items()}
    if case.answer.facts:
        found |= {name: _verdicts(check, case) for name, check in CHECKS.items()}
    return {name: verdicts for name, verdicts in found.items() if verdicts}


def _verdicts(check: Callable[[Case], Any], case: Case) -> list[Verdict]:
    try:
        return list(check(case))
    except Unknown as error:
        return [Verdict(False, f"cannot be seen: {error}", f"ssh {case.answer.host.name}  # and look")]
