"""Fixtures of tests with several hosts."""

from collections.abc import Iterator

import pytest
from support import warm_hosts


@pytest.fixture(scope="session")
def warm_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What a launcher's environment needs so that what it starts on hosts forks from a process that has torch."""
    folder = tmp_path_factory.mktemp("site")
    with warm_hosts.start(folder, folder / "log") as server:
        yield {"PYTHONPATH": str(folder)}
        server.kill()
