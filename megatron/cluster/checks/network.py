"""Whether hosts agree on the time, and can talk to each other."""

import ipaddress
from collections.abc import Iterator, Sequence

from megatron.cluster.checks.case import Case, Verdict

_MOST_SECONDS_APART = 5


def check_clock(case: Case) -> Iterator[Verdict]:
    """Its clock shows what this host's does."""
    ahead = case.answer.clock
    if abs(ahead) > _MOST_SECONDS_APART:
        way = "ahead of" if ahead > 0 else "behind"
        yield Verdict(
            False, f"{abs(ahead):.0f} s {way} this host's", case.fix("sudo", "timedatectl", "set-ntp", "true")
        )
    else:
        yield Verdict(True, f"{abs(ahead):.1f} s apart")


def check_port(case: Case) -> Iterator[Verdict]:
    """The first host has the master port to give."""
    if case.answer.host != case.others[0].host:
        return
    if owner := case.fact("port"):
        yield Verdict(
            False,
            f"{case.port}: {owner}",
            f"{case.fix('ss', '-ltnp')} | grep :{case.port}  # or start with another --master_port",
        )
    else:
        yield Verdict(True, f"{case.port} is free")


def check_interface(case: Case) -> Iterator[Verdict]:
    """The interface that gloo or NCCL is told to use is there; told nothing, gloo finds one that others can reach."""
    network = case.fact("network")
    variable = "GLOO_SOCKET_IFNAME" if case.device == "cpu" else "NCCL_SOCKET_IFNAME"
    wanted = case.forwarded.get(variable)
    show = f"{case.fix('ip', '-br', 'address')}  # then set {variable} in .deepspeed_env"
    if wanted:
        lost = _not_there(wanted, network["interfaces"], exactly=variable.startswith("GLOO"))
        if lost:
            there = ", ".join(network["interfaces"])
            yield Verdict(False, f"{variable}={wanted}: no {', '.join(lost)}, only {there}", show)
        else:
            yield Verdict(True, f"{variable}={wanted}")
    elif case.device == "cpu" and len(case.others) > 1 and _only_here(network["own_addresses"]):
        own = ", ".join(network["own_addresses"]) or "no address"
        yield Verdict(
            False,
            f"its own name, {network['hostname']}, stands for {own}, where no other host reaches it",
            f"echo {variable}={network['default_interface'] or 'INTERFACE'} >> .deepspeed_env",
        )
    else:
        yield Verdict(True, "found by itself")


def _not_there(wanted: str, interfaces: Sequence[str], *, exactly: bool) -> list[str]:
    """The interfaces of a list that there are none of. NCCL takes beginnings of names, and ^ for all but these."""
    if wanted.startswith("^"):
        return []
    exactly = exactly or wanted.startswith("=")
    names = [name.partition(":")[0] for name in wanted.removeprefix("=").split(",") if name]
    if exactly:
        return [name for name in names if name not in interfaces]
    return [name for name in names if not any(there.startswith(name) for there in interfaces)]


def _only_here(addresses: Sequence[str]) -> bool:
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses)
