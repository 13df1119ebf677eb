"""Whether a host can be found, and entered without a password."""

from collections.abc import Iterator

from megatron.cluster.checks.case import Case, Verdict

_CURES = {
    "Permission denied": "test -e ~/.ssh/id_ed25519 || ssh-keygen -t ed25519 -N '' -f ~/.ssh/id_ed25519; "
    "ssh-copy-id {port}{host}",
    "IDENTIFICATION HAS CHANGED": "ssh-keygen -R {host}  # once you know why its key is another",
    "Host key verification failed": "ssh {port}{host} true  # once, and compare the fingerprint it shows",
    "Connection refused": "systemctl start ssh  # on {host} itself; or name its port with --ssh_port",
    "timed out": "ping -c 3 {host}  # is it up, and does a firewall let ssh through?",
    "No route to host": "ping -c 3 {host}  # is it up, and on this network?",
    "unreachable": "ping -c 3 {host}  # is it up, and on this network?",
}
"""By what ssh says."""
_OTHERWISE = "ssh -v {port}{host} true"


def check_name(case: Case) -> Iterator[Verdict]:
    """Its name stands for an address."""
    host, address = case.answer.host.name, case.answer.address
    if address is None:
        yield Verdict(False, "stands for no address", f"echo 'ADDRESS {host}' | sudo tee -a /etc/hosts")
    else:
        yield Verdict(True, address)


def check_ssh(case: Case) -> Iterator[Verdict]:
    """ssh enters it without asking, and a python answers."""
    answer = case.answer
    if answer.address is None:
        return
    if answer.facts:
        yield Verdict(True, f"answers after {answer.seconds:.1f} s")
        return
    said = answer.failure or "it said nothing"
    cure = next((cure for words, cure in _CURES.items() if words in said), _OTHERWISE)
    port = f"-p {case.ssh_port} " if case.ssh_port else ""
    yield Verdict(False, said, cure.format(host=answer.host.name, port=port))
