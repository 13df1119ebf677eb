"""benchmarks/compare.py measures two commits in turns and finds the slower one."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN = """import json, sys
seconds, file = {seconds}, sys.argv[sys.argv.index("--json") + 1] + "/step.json"
times = lambda s: {{"wall": [s] * 3, "cpu": [s] * 3}}
json.dump({{"rows": [
    {{"what": "a step", "peer": "torch", "measured": {{"ours": times(seconds), "theirs": times(1.0)}}}},
    {{"what": "wait", "peer": "a save", "measured": {{"ours": [seconds], "theirs": [9.0], "unit": "s"}}}}
]}}, open(file, "w"))
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository whose second commit is half as fast; its working tree is twice as fast as the first."""
    folder = tmp_path / "repository"
    (folder / "benchmarks").mkdir(parents=True)
    shutil.copy(ROOT / "benchmarks" / "compare.py", folder / "benchmarks")
    (folder / "megatron").symlink_to(ROOT / "megatron")
    git = ["git", "-c", "user.name=me", "-c", "user.email=me@localhost", "-C", str(folder)]
    subprocess.run([*git, "init", "-q"], check=True)
    for seconds in (2.0, 4.0):
        (folder / "benchmarks" / "run.py").write_text(RUN.format(seconds=seconds))
        subprocess.run([*git, "add", "benchmarks"], check=True)
        subprocess.run([*git, "commit", "-q", "-m", "speed"], check=True)
    (folder / "benchmarks" / "run.py").write_text(RUN.format(seconds=1.0))
    return folder


@pytest.mark.parametrize(("second", "ratio", "code"), [("HEAD", "0.50", 1), (".", "2.00", 0)])
def test_commits_take_turns(repository: Path, second: str, ratio: str, code: int) -> None:
    ended = _compare(repository, "HEAD~1", second, "step", "--turns", "2")
    assert ended.returncode == code, ended.stderr
    lines = ended.stdout.splitlines()
    step, wait = (next(line for line in lines if line.startswith(name)) for name in ("a step", "wait"))
    assert [word.strip() for word in step.split("  ") if word] == [
        "a step",
        ratio,
        f"{ratio} to {ratio}",
        ratio,
        "1.00",
    ]
    assert wait.split()[1] == ratio and any(line.startswith(f"{code * 2} of 2 workloads are slower") for line in lines)


def test_an_unknown_commit_is_one_line(repository: Path) -> None:
    ended = _compare(repository, "nothing", "HEAD", "step")
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1 and "nothing" in ended.stderr


def _compare(repository: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/compare.py", *words]
    return subprocess.run(command, cwd=repository, capture_output=True, text=True)
