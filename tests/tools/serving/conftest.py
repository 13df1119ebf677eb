"""A server that the tests share."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.endless_model import POSITIONS, write_endless_model
from support.programs import Programs
from support.served import Served, served

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role + ':' + message.content + '\n' }}{% endfor %}"
    "{% if messages[0].content == 'slow' %}{% for a in range(9999) %}{% for b in range(9999) %}"
    "{% for c in range(99) %}{% endfor %}{% endfor %}{% endfor %}"
    "{% endif %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model that is never done by itself."""
    folder = tmp_path_factory.mktemp("served") / "endless"
    write_endless_model(folder)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def server(programs: Programs, endless: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """tools/serve.py with that model; one request is in work and one may wait, and bodies are short."""
    log = tmp_path_factory.mktemp("server") / "log"
    most = f"--max-tokens {POSITIONS} --max-batch-size 1 --max-waiting 1 --max-choices 4 --max-body-bytes 4000"
    command = (sys.executable, "tools/serve.py", "--load", endless, *most.split())
    with served(programs, log, *command, key="open-sesame") as running:
        yield running
    assert "Traceback" not in log.read_text() and "open-sesame" not in log.read_text()
