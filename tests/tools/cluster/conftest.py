"""Hosts to look at."""

from collections.abc import Iterator

import pytest
from support.local_hosts import MISSING, LocalHosts


@pytest.fixture(scope="session")
def local_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalHosts]:
    """Two hosts, host-a and host-b, that are this machine; skips where there is no sshd to make them with."""
    if MISSING:
        pytest.skip(MISSING)
    hosts = LocalHosts(tmp_path_factory.mktemp("ssh"))
    try:
        hosts.add("host-a")
        hosts.add("host-b")
        yield hosts
    finally:
        hosts.close()
