"""tools/launch.py checks the training arguments before it starts anything, each rank before it imports torch."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.command_lines import SMALL
from support.refusals import ROOT, launched, refusal

from megatron.common.errors import ConfigError
from megatron.tools.cluster.launching import check_arguments, read_launch

PROGRAM = str(ROOT / "pretrain_gpt2.py")
CPU = {"DS_ACCELERATOR": "cpu"}


@pytest.mark.parametrize(
    "launcher, words, message",
    [
        ("--num_gpus 2", f"{PROGRAM} {SMALL} --wrong 1", "unknown flag --wrong: see --help"),
        ("--num_gpus 3", f"{PROGRAM} {SMALL} --model-parallel-size 2", "3 processes cannot be split"),
        ("", f"{PROGRAM} {SMALL} --model-parallel-size 3 --fp16", None),
        ("--num_gpus 2", f"{PROGRAM} {SMALL} --wrong 1 --explain", None),
        ("--hostfile hosts", f"{PROGRAM} {SMALL.replace('--lr 0.001', '--lr -1')}", "--lr -1 must be more than 0"),
        ("--hostfile hosts", f"{PROGRAM} {SMALL} --config none.yaml", "--config none.yaml: No such file or directory"),
        ("--hostfile hosts", f"{PROGRAM} {SMALL} --model-parallel-size 3 --fp16", None),
        ("--num_gpus 2", f"{PROGRAM} {SMALL}", None),
        ("--num_gpus 2", "own.py --wrong 1", None),
    ],
)
def test_arguments_are_checked_where_they_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: str, words: str, message: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\n")
    launch = read_launch([*launcher.split(), *words.split()])
    if message is None:
        check_arguments(launch, CPU)
        return
    with pytest.raises(ConfigError) as caught:
        check_arguments(launch, CPU)
    assert len(caught.value.messages) == 1 and message in caught.value.messages[0]


def test_the_launcher_starts_nothing_and_imports_no_torch() -> None:
    words = [sys.executable, "-X", "importtime", ROOT / "tools" / "launch.py", "--num_gpus", "2", PROGRAM]
    ended = subprocess.run([*words, *SMALL.split(), "--wrong"], capture_output=True, text=True)
    lines = [line for line in ended.stderr.splitlines() if not line.startswith("import time:")]
    assert (ended.returncode, lines) == (2, ["launch.py: error: unknown flag --wrong: see --help"])
    imported = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines()}
    assert "megatron.tools.cluster.launching" in imported and not imported & {"torch", "deepspeed"}


def test_one_line_for_all_ranks_before_torch(tmp_path: Path) -> None:
    """``refusal`` fails if a rank imports torch."""
    ended = [refusal(tmp_path, "--wrong", launched(rank, 2)) for rank in range(2)]
    assert ended == [(2, ["unknown flag --wrong: see --help"]), (2, [])]
