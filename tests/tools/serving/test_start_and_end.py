"""Shutdown of a server, also on several ranks, and the errors of its start."""

import runpy
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from unittest.mock import MagicMock

import psutil
import pytest
import uvicorn
from support.programs import BIN, TIME_LIMIT
from support.served import events, served

from megatron.common.errors import UserError
from megatron.launch.environment import free_port
from megatron.tools.serving.server import _Server

SAMPLED = {"prompt": ["Hello", "World!"], "n": 2, "max_tokens": 12, "seed": 5, "temperature": 1.2}


def test_two_ranks_generate_the_same_and_exit_together(programs, endless, server, warm_python, tmp_path):
    words = "--model-parallel-size 2 --max-tokens 200000 --grace-seconds 1".split()
    port = str(free_port())
    launcher = (BIN / "deepspeed", "--num_gpus", "2", "--master_port", port)
    command = (*launcher, "tools/serve.py", "--load", endless, *words)
    with served(programs, tmp_path / "log", *command, **warm_python) as two:
        abandoned = two.open(prompt="Hello", max_tokens=190_000, stream=True)
        next(events(abandoned))
        assert two.texts(**SAMPLED) == server.texts(**SAMPLED), "texts depend on what is generated together"
        assert two.load() == {"num_requests_running": 1, "num_requests_waiting": 0}
        abandoned.fp.raw._sock.shutdown(socket.SHUT_RDWR)
        two.wait_for(num_requests_running=0)  # on both ranks, or the next would wait for one
        last = two.open(prompt="Hello", max_tokens=190_000, stream=True)
        bits = events(last)
        next(bits)
        half = socket.create_connection(("127.0.0.1", two.port))
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n")
        half.sendall(b"Content-Length: 100\r\n\r\n{")
        place = {"RANK": "0", "MASTER_PORT": port}
        ranks = [one for one in psutil.process_iter() if place.items() <= environment_of(one).items()]
        first_rank = min(ranks, key=psutil.Process.create_time)  # the others are its own processes
        first_rank.send_signal(signal.SIGTERM)
        *_, farewell = bits
        assert farewell["error"]["message"] == "the server is shutting down"
        assert two.process.wait(TIME_LIMIT) == 0, (tmp_path / "log").read_text()
        half.close()
    assert "Traceback" not in (tmp_path / "log").read_text()


def environment_of(process: psutil.Process) -> dict[str, str]:
    """Nothing of a process that has ended, or is another user's."""
    try:
        return process.environ()
    except psutil.Error:
        return {}


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that is in use."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_server_that_cannot_start_prints_one_line(programs, endless, taken, tmp_path):
    for words, code, message in (
        (["--load", tmp_path / "none"], 2, "none: no such file or folder"),
        (["--load", endless, "--port", str(taken)], 6, f"127.0.0.1:{taken} is not available (Address already in use)"),
    ):
        finished = programs.warm(1, "tools/serve.py", *words)
        assert finished.returncode == code and message in finished.output
        assert finished.output.startswith("serve.py: error: ") and finished.output.count("\n") == 1


@pytest.fixture
def refusal(programs, endless, monkeypatch) -> Callable[..., UserError]:
    """What the tool raises for the endless model and these flags."""
    monkeypatch.syspath_prepend(programs.root / "tools")
    main = runpy.run_path(str(programs.root / "tools" / "serve.py"))["main"]

    def raised(*flags: str | Path) -> UserError:
        monkeypatch.setattr(sys, "argv", ["serve.py", "--load", str(endless), *map(str, flags)])
        with pytest.raises(UserError) as caught:
            main()
        return caught.value

    return raised


@pytest.mark.parametrize(
    ("flags", "code", "messages"),
    [
        ("--host 203.0.113.1", 6, ["203.0.113.1:8000 is not available"]),
        (
            "--port 70000 --grace_seconds -1",
            2,
            ["--port 70000 must be 65,535 at most", "--grace-seconds -1 must be 0 or"],
        ),
        ("--model-parallel-size 2", 2, ["--model-parallel-size 2 with 1 started"]),
        ("--api-key-file nowhere", 2, ["--api-key-file nowhere cannot be read (No such file or directory)"]),
    ],
)
def test_mistakes(refusal, flags, code, messages):
    error = refusal(*flags.split())
    assert error.exit_code == code and len(error.messages) == len(messages)
    assert all(map(str.startswith, error.messages, messages))


def test_key_file_has_one_word_and_is_private(refusal, tmp_path, monkeypatch):
    file = tmp_path / "key"
    for text, mode, message in (
        ("sesame\n", 0o644, f"other users can read it; run chmod 600 {file}"),
        ("", 0o600, "must hold one word of ASCII characters"),
        ("x" * 4097, 0o600, "must hold one word of ASCII characters, at most"),
        ("open sesame", 0o600, "must hold one word of ASCII characters"),
        ("s\u00e9same", 0o600, "cannot be read (not ASCII)"),
    ):
        file.write_text(text, encoding="utf-8")
        file.chmod(mode)
        assert message in str(refusal("--api-key-file", file))
    monkeypatch.setenv("SERVE_API_KEY", "")
    assert "the variable SERVE_API_KEY must hold one word" in str(refusal())


def test_missing_packages_are_named(refusal, monkeypatch):
    """As in an environment that only trains."""
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert str(refusal()) == "the server needs packages that are not installed: pip install uvicorn"


def test_the_server_says_that_it_is_ready_when_it_handles_signals(capsys: pytest.CaptureFixture[str]) -> None:
    """Otherwise a SIGTERM right after that line would end it as if by accident."""
    printed: list[str] = []

    class Stopped(_Server):
        async def main_loop(self) -> None:
            printed.append(capsys.readouterr().out)
            self.should_exit = True

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            pass

    config = uvicorn.Config(lambda *_: None, port=0, lifespan="off", log_level="critical")
    server = Stopped(config, MagicMock(), Future(), 1.0, "m at here")
    before = signal.getsignal(signal.SIGTERM)
    config.load()
    startup = _Server.startup

    async def checked(self: _Server, sockets: list[socket.socket] | None = None) -> None:
        assert signal.getsignal(signal.SIGTERM) != before
        await startup(self, sockets)

    Stopped.startup = checked
    server.run()
    assert printed == ["m at here\n"] and signal.getsignal(signal.SIGTERM) == before
