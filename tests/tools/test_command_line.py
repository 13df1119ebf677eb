"""Exit codes of a tool, and what it prints."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.common.errors import ConfigError
from megatron.tools.command_line import ToolParser, read_architecture

ROOT = Path(__file__).resolve().parents[2]


def test_a_choice_that_is_nearly_one_is_suggested() -> None:
    parser = ToolParser("")
    parser.add_argument("--model", choices=("llama3.1-8b", "llama2-7b", "bert-base"))
    with pytest.raises(ConfigError, match="did you mean llama3.1-8b"):
        parser.parse_args(["--model", "llama3-8b"])


def run(body: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Run a tool whose ``main`` has this body."""
    imports = "from megatron.tools.command_line import run_tool\nfrom megatron.common import errors\n"
    script = f"{imports}def main():\n    {body}\nrun_tool(main)"
    options = {"stderr": subprocess.PIPE} | options
    return subprocess.run([sys.executable, "-c", script], cwd=ROOT, text=True, check=False, **options)


@pytest.mark.parametrize(
    ("body", "code", "stderr"),
    [
        ("pass", 0, ""),
        ("raise errors.DataError('x.idx is missing')", 3, "-c: error: x.idx is missing\n"),
        ("raise errors.ConfigError(['one', 'two'])", 2, "-c: error: one\n-c: error: two\n"),
        ("raise KeyboardInterrupt", 130, ""),
        ("open('x' * 300)", 2, f"-c: error: {'x' * 300}: File name too long; name another file\n"),
    ],
)
def test_each_error_has_its_exit_code(body: str, code: int, stderr: str) -> None:
    finished = run(body)
    assert (finished.returncode, finished.stderr) == (code, stderr)


def test_an_error_is_the_last_line() -> None:
    finished = run("print('found'); raise errors.ConfigError('why')", stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert finished.stdout == "found\n-c: error: why\n"


@pytest.mark.parametrize("program", ["pretrain_gpt2.py", "tasks/main.py", "tools/plan.py"])
def test_ctrl_c_during_the_imports_is_silent(program: str) -> None:
    script = (
        "import runpy, signal, sys; from megatron.common import errors; sys.path.append('tools'); del sys.argv[0]; "
        "find = lambda name, *_: signal.raise_signal(signal.SIGINT) if name == 'megatron.config' else None; "
        "sys.meta_path.insert(0, type('Finder', (), {'find_spec': find})); runpy.run_path(sys.argv[0], {}, '__main__')"
    )
    words = [sys.executable, "-c", script, program, "--help"]
    finished = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (finished.returncode, finished.stderr) == (-signal.SIGINT, "")


def test_a_program_that_is_imported_leaves_ctrl_c_as_it_is() -> None:
    script = "import sys; sys.path.append('tools'); import _project_root, signal; signal.raise_signal(signal.SIGINT)"
    finished = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert finished.stderr.endswith("KeyboardInterrupt\n")


def test_a_bug_keeps_its_traceback() -> None:
    finished = run("1 / 0")
    assert finished.returncode == 1
    assert "ZeroDivisionError" in finished.stderr


def test_closed_pipe_is_not_an_error() -> None:
    head = subprocess.Popen(["true"], stdin=subprocess.PIPE)
    head.wait()
    finished = run("print('x' * 1000000)", stdout=head.stdin)
    head.stdin.close()
    assert (finished.returncode, finished.stderr) == (141, "")


def test_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        finished = run("print('x')", stdout=full)
    assert finished.returncode == 7 and finished.stderr.count("\n") == 1


def test_a_repeated_flag_loses_no_value() -> None:
    parser = ToolParser("")
    parser.add_argument("--input", nargs="+", default=["text"])
    parser.add_argument("--rank", type=int)
    given = parser.parse_args("--input a b --rank 1 --input c --rank 1".split())
    assert (given.input, given.rank) == (["a", "b", "c"], 1)
    assert parser.parse_args([]).input == ["text"]
    with pytest.raises(ConfigError) as caught:
        parser.parse_args("--rank 1 --rank 2".split())
    assert caught.value.messages == ["--rank 1 and --rank 2 exclude each other: give one"]


def test_a_device_is_no_program() -> None:
    with pytest.raises(ConfigError, match="--program /dev/zero cannot be loaded"):
        read_architecture(Path("/dev/zero"))
