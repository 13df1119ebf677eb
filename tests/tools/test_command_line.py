"""Exit codes of a tool, and what it prints."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.common import reading
from megatron.common.errors import ConfigError, nearest
from megatron.tools.command_line import ToolParser, output_file, output_folder, read_architecture

ROOT = Path(__file__).resolve().parents[2]


def test_a_choice_that_is_nearly_one_is_suggested() -> None:
    parser = ToolParser("")
    parser.add_argument("--model", choices=("llama3.1-8b", "llama2-7b", "bert-base"))
    with pytest.raises(ConfigError, match="did you mean llama3.1-8b"):
        parser.parse_args(["--model", "llama3-8b"])
    assert nearest("adamw_torch", ("adafactor", "adam", "sgd")) == "adam"
    assert nearest("--zero-stagee", ("--zero", "--zero-stage")) == "--zero-stage"


@pytest.mark.parametrize(
    ("words", "unknown"),
    [
        ("--devises 8", ["unknown flag --devises: did you mean --devices?"]),
        ("--gpus=8 --hidden-size 3 --micro-batch-size 3", ["unknown flag --gpus: see --help"]),
        ("--program my.py --my-flag", []),
        ("--hidden-size -3 --num-layers", []),
    ],
)
def test_unknown_flags_are_named_beside_those_that_miss(words: str, unknown: list[str]) -> None:
    parser = ToolParser("")
    parser.add_argument("--devices", required=True)
    parser.add_argument("--program")
    with pytest.raises(ConfigError) as caught:
        parser.parse_known_args(words.split())
    assert caught.value.messages[1:] == unknown


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        (
            "merge --devises=8 --x=1",
            ["unknown flag --devises: did you mean --devices?", "unknown flag --x: see --help"],
        ),
        ("merge --out-put a", ["unknown flag --out-put: did you mean --output?"]),
        ("merge ٣", ["unrecognized arguments: ٣ (see --help)"]),
    ],
)
def test_unknown_flags_are_named_if_they_are_the_only_mistake(words: str, messages: list[str]) -> None:
    parser = ToolParser("")
    parser.add_argument("--devices")
    commands = parser.add_subparsers(parser_class=ToolParser)
    commands.add_parser("merge", description="").add_argument("--output")
    with pytest.raises(ConfigError) as caught:
        parser.parse_args(words.split())
    assert caught.value.messages == messages


@pytest.mark.parametrize("value", ["-5GB", "-5", "-1e-3", "-.5", "-3x"])
def test_a_negative_value_is_no_flag(value: str) -> None:
    parser = ToolParser("")
    parser.add_argument("--memory")
    parser.add_argument("--devices", type=int)
    assert parser.parse_args(["--memory", value]).memory == value
    with pytest.raises(ConfigError) as caught:
        parser.parse_args(["--memory", value, "--devices", "x"])
    assert len(caught.value.messages) == 1


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
        ("open('x' * 300)", 2, f"-c: error: {'x' * 40}…: File name too long; name another file\n"),
    ],
)
def test_each_error_has_its_exit_code(body: str, code: int, stderr: str) -> None:
    finished = run(body)
    assert (finished.returncode, finished.stderr) == (code, stderr)


def test_an_error_of_a_library_without_proc_is_one_line() -> None:
    """As of psutil, when a converter imports DeepSpeed."""
    finished = run(
        "from megatron.launch import host_limits as h; h.Path = lambda _: __import__('pathlib').Path('/nowhere')\n"
        "    raise LookupError('process PID not found')"
    )
    (line,) = finished.stderr.splitlines()
    assert finished.returncode == 7 and "/proc is missing" in line


def test_an_error_is_the_last_line() -> None:
    finished = run("print('found'); raise errors.ConfigError('why')", stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert finished.stdout == "found\n-c: error: why\n"


@pytest.mark.parametrize(
    ("run", "write", "number", "code"),
    [
        ("run_rank", "atomic_file", signal.SIGINT, -signal.SIGINT),
        ("run_rank", "atomic_file", signal.SIGKILL, -signal.SIGKILL),
        ("run_tool", "atomic_file", signal.SIGTERM, -signal.SIGTERM),
        ("run_tool", "atomic_path", signal.SIGINT, 130),
        ("run_tool", "atomic_path", signal.SIGTERM, 143),
        ("run_tool", "atomic_path", signal.SIGKILL, -signal.SIGKILL),
        ("run_rank", "replace_file", signal.SIGINT, 130),
        ("run_rank", "replace_file", signal.SIGTERM, 143),
    ],
)
def test_an_interrupted_output_leaves_no_file(tmp_path: Path, run: str, write: str, number: int, code: int) -> None:
    more = {"atomic_path": "'-') as place, open(place, 'w'", "atomic_file": "'-'", "replace_file": "text=True"}[write]
    script = (
        "import os, signal, sys; sys.path.append('tools'); from pathlib import Path; from _atomic_file import *; "
        "from megatron.common.files import replace_file; from megatron.launch.rank import run_rank; "
        "from megatron.tools.command_line import run_tool\ndef main():\n"
        f"    with {write}(Path(sys.argv[1]), {more}) as file:\n"
        f"        file.write('x'), file.flush(), os.kill(os.getpid(), {number:d}), signal.pause()\n{run}(main)"
    )
    command = [sys.executable, "-c", script, tmp_path / "new"]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert (finished.returncode, finished.stderr) == (code, "")
    if write == "atomic_path" and number == signal.SIGKILL:
        (left,) = tmp_path.iterdir()
        mine = left.with_name(re.sub("-[0-9]+", f"-{os.getppid()}", left.name))
        mine.mkdir()
        command[2] = script.replace(f", {number:d})", f", {signal.SIGTERM:d})")
        subprocess.run(command, cwd=ROOT, check=False, timeout=60)
        assert [*tmp_path.iterdir()] == [mine], "the other process lives"
        mine.rmdir()
    assert not any(tmp_path.iterdir())


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


@pytest.mark.parametrize("body", ["print('x')", "print('x'); raise SystemExit(0)"])
def test_a_full_disk_is_one_line(body: str) -> None:
    with open("/dev/full", "w") as full:
        finished = run(body, stdout=full)
    assert finished.returncode == 7 and finished.stderr.count("\n") == 1


def test_a_folder_that_may_not_be_entered_is_one_line() -> None:
    finished = run("raise PermissionError(13, 'Permission denied', 'locked/x')")
    assert finished.returncode == 2 and finished.stderr.count("\n") == 1 and "locked/x: " in finished.stderr


def test_what_the_locale_lacks_is_escaped() -> None:
    finished = run("print('caf\\xe9')", stdout=subprocess.PIPE, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "caf\\xe9\n", "")


def test_a_repeated_flag_loses_no_value() -> None:
    parser = ToolParser("")
    parser.add_argument("--input", nargs="+", default=["text"])
    parser.add_argument("--rank", type=int)
    parser.add_argument("--workers", type=int, default=1)
    given = parser.parse_args("--input a b --rank 1 --input c --rank 1".split())
    assert (given.input, given.rank) == (["a", "b", "c"], 1)
    assert parser.parse_args([]).input == ["text"]
    for name in ("--rank", "--workers"):
        with pytest.raises(ConfigError) as caught:
            parser.parse_args(f"{name} 1 {name} 2".split())
        assert caught.value.messages == [f"{name} 1 and {name} 2 exclude each other: give one"]


@pytest.mark.parametrize(
    ("kind", "name", "problem"),
    [
        *(
            (output_file, name, f"{name} is a folder; name a file")
            for name in ("folder", ".", "..", "/", "new/", "new/.")
        ),
        (output_file, "file/x", "file is not a folder; name another folder"),
        (output_file, "/proc/x", "/proc is of the system, and holds no files of users; name another folder"),
        (output_file, "/dev/new", "/dev is of the system, and holds no files of users; name another folder"),
        (output_file, "/dev/shm/new", None),
        (output_file, "/dev/null", None),
        (output_file, "fifo", "fifo is no file, and writing to it may wait forever"),
        (output_file, "locked/x", "locked/x: no permission to write in"),
        (output_file, "locked/file", "locked/file: no permission to write in"),
        (output_file, "x" * 300, "File name too long"),
        (output_folder, "file", "file is not a folder; name another folder"),
        (output_folder, "/sys/class/x", "/sys/class is of the system"),
        (output_folder, "locked/x/y", "locked/x/y: no permission to write in"),
        (
            output_folder,
            "s3://bucket/x",
            "s3://bucket/x: is a URL, and outputs are written to this host's file systems",
        ),
        (output_file, "~/x", "~/x: has a ~ or a variable that no shell has replaced"),
        (output_folder, "~root", "has a ~ or a variable"),
        (output_file, "folder/$USER/x", "has a ~ or a variable"),
        (output_folder, "${SCRATCH}/x", "has a ~ or a variable"),
        (output_folder, "folder/a$/b~", None),
        (output_folder, "kept$x/new", None),
        (output_folder, "under$5/new", None),
        (output_file, "new/x", None),
        (output_file, "file", None),
        (output_folder, "new", None),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_at_once(
    kind: Callable[[str], Path], name: str, problem: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir(), Path("kept$x").mkdir(), Path("file").touch(), Path("locked").mkdir(), os.mkfifo("fifo")
    Path("locked", "file").touch()
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "locked" and access(path, mode))
    parser = ToolParser("")
    parser.add_argument("--output", type=kind)
    if problem is None:
        assert parser.parse_args(["--output", name]).output == Path(name)
        return
    with pytest.raises(ConfigError, match=problem) as caught:
        parser.parse_args(["--output", name])
    assert len(caught.value.messages) == 1
    monkeypatch.setenv("RANK", "1")  # the first rank writes; its disk may be another
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert parser.parse_args(["--output", name]).output == Path(name)


def test_an_empty_value_is_none_of_a_flag_that_has_no_empty_default() -> None:
    parser = ToolParser("")
    parser.add_argument("--prefix")
    parser.add_argument("--include", default="")
    assert parser.parse_args(["--include", ""]).include == ""
    with pytest.raises(ConfigError, match="--prefix needs a value"):
        parser.parse_args(["--prefix", ""])


def test_every_program_names_its_architecture() -> None:
    programs = sorted(ROOT.glob("pretrain_*.py"))
    assert {read_architecture(program).name for program in programs} == {"BERT", "GPT-2", "LLaVA", "T5"}


def test_a_program_that_exits_is_none(tmp_path: Path) -> None:
    (tmp_path / "exits.py").write_text("raise SystemExit(0)")
    with pytest.raises(ConfigError, match="cannot be loaded .SystemExit: 0"):
        read_architecture(tmp_path / "exits.py")


def test_a_device_is_no_program() -> None:
    with pytest.raises(ConfigError, match="--program /dev/zero cannot be loaded"):
        read_architecture(Path("/dev/zero"))


RUN_TOOLS = {
    "plan": "--devices 1",
    "verify_communication": "--world-size 1",
    "verify_layout": "--layouts tp1-pp0-dp1 --iterations 1",
}
"""Tools whose ``--json`` is about a run that reads its data in other processes, if at all."""


@pytest.mark.parametrize("name", ["my_document.idx", "my_document_loss_mask.bin", "vocab.json"])
@pytest.mark.parametrize("program", RUN_TOOLS)
def test_the_results_do_not_replace_what_the_run_reads(
    tool: Callable, vocabulary: Path, monkeypatch: pytest.MonkeyPatch, program: str, name: str
) -> None:
    monkeypatch.chdir(vocabulary.parent)
    monkeypatch.setattr(reading, "_read", set())  # as if this process had read nothing yet
    if name != vocabulary.name:
        Path(name).write_text("tokens")
    before = Path(name).read_bytes()
    sizes = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --batch-size 4 --gas 1"
    data = "--data-path my_document --tokenizer-type WhitespaceTokenizer --vocab-file vocab.json"
    words = f"{RUN_TOOLS[program]} --json {name} {sizes} {data} --global-batch-size 4 --lr 1e-3 --train-iters 20"
    ended = tool(program, *words.split())
    assert ended.returncode == 2 and f"--json {name} is an input of this command" in ended.stderr
    assert Path(name).read_bytes() == before
