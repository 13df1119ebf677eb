"""Peak memory of tools/preprocess_data.py for growing inputs, and a check that an interrupted run can be resumed.

Inputs are synthetic JSONL with bad and empty lines. The run over the largest input is also killed half-way and resumed
with --resume: its data set must equal that of the uninterrupted run, byte for byte.
"""

import filecmp
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron.common.errors import LaunchError  # noqa: E402
from megatron.tools.command_line import ToolParser, run_tool  # noqa: E402

WORDS = [f"w{n}" for n in range(1000)]
BAD_LINES = ('{"text": "cut', "[1, 2]", '{"txt": "another key"}', '{"text": 7}', '{"text": ""}', "")
BAD_EVERY = 500


class Run(NamedTuple):
    """One run of the tool."""

    megabytes: float
    seconds: float
    peak_megabytes: float
    output: str


def main() -> None:
    """Make the inputs, run, kill, compare, say."""
    parser = ToolParser(__doc__)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[10, 100], metavar="X", help="sizes of inputs")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "vocab.json").write_text(
            json.dumps({word: n for n, word in enumerate([*WORDS, "<unk>", "<|endoftext|>"])})
        )
        print("input MB  peak MB  seconds")
        for megabytes in args.megabytes:
            planted = write_corpus(folder / "corpus.jsonl", megabytes)
            run = measure(folder, megabytes)
            print(f"{run.megabytes:8.0f}  {run.peak_megabytes:7.1f}  {run.seconds:7.1f}", flush=True)
        print(f"{planted} lines planted; the tool says: {run.output.split('; ', 1)[1]}")
        print(kill_and_resume(folder, run))


def write_corpus(path: Path, megabytes: float) -> int:
    """Write so much JSONL; how many bad and empty lines are in it."""
    chance = random.Random(1)
    written = number = planted = 0
    with open(path, "w") as file:
        while written < megabytes * 1e6:
            number += 1
            if number % BAD_EVERY:
                line = json.dumps({"text": " ".join(chance.choices(WORDS, k=chance.randint(5, 300)))})
            else:
                line = BAD_LINES[planted % len(BAD_LINES)]
                planted += 1
            written += file.write(line + "\n")
    return planted


def measure(folder: Path, megabytes: float) -> Run:
    """Run the tool to its end."""
    start = time.monotonic()
    with open(folder / "output", "w") as output, open(folder / "errors", "w") as errors:
        process = subprocess.Popen(command(folder, "whole"), stdout=output, stderr=errors)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise LaunchError(f"the tool exited with {process.returncode}: {(folder / 'errors').read_text()[-500:]}")
    seconds = time.monotonic() - start
    return Run(megabytes, seconds, usage.ru_maxrss / 1024, (folder / "output").read_text().strip())


def kill_and_resume(folder: Path, whole: Run) -> str:
    """Kill the tool when half of the output is written, resume it, and return the result."""
    words = command(folder, "parts")
    half = (folder / "whole_text_document.bin").stat().st_size // 2
    partial = folder / "parts_text_document.bin.partial"
    with open(folder / "errors", "w") as errors:
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=errors)
        while not (partial.exists() and partial.stat().st_size > half):
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    left = sorted(path.name for path in folder.glob("parts*"))
    finished = subprocess.run([*words, "--resume"], capture_output=True, text=True)
    if finished.returncode:
        raise LaunchError(f"resumed, the tool exited with {finished.returncode}: {finished.stderr[-500:]}")
    same = all(
        filecmp.cmp(folder / f"whole_text_document.{end}", folder / f"parts_text_document.{end}", shallow=False)
        for end in ("bin", "idx")
    )
    before = finished.stdout.strip().rpartition("; ")[2]
    return f"killed half-way it left {', '.join(left)}; {before}; {'the same' if same else 'OTHER'} bytes"


def command(folder: Path, output: str) -> list[str]:
    """The tool's command line."""
    tool = [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), "--input", str(folder / "corpus.jsonl")]
    tool += ["--tokenizer-type", "WhitespaceTokenizer", "--vocab-file", str(folder / "vocab.json"), "--append-eod"]
    return [*tool, "--on-error", "skip", "--output-prefix", str(folder / output)]


if __name__ == "__main__":
    run_tool(main)
