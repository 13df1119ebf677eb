"""pretrain_gpt2.py, one rank of which does not write its files before it is released.

    python held_writer.py RANK GO ARGUMENTS OF pretrain_gpt2.py

Rank RANK waits before each file, but those of the first checkpoint, until there is a file GO.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import pretrain_gpt2  # noqa: E402
from megatron.launch.rank import run_rank  # noqa: E402


def main() -> None:
    """Put a wait before the writer's work, and train."""
    rank, go = sys.argv[1], Path(sys.argv[2])
    sys.argv = ["pretrain_gpt2.py", *sys.argv[3:]]
    if os.environ["RANK"] == rank:
        _hold(go)
    pretrain_gpt2.main()


def _hold(go: Path) -> None:
    from megatron.launch.environment import prepare_environment

    prepare_environment(os.environ)
    from megatron.checkpoint import save as saving

    write = saving.write_file

    def write_when_released(path: Path, content: Any) -> Any:
        while path.parent.name != "global_step1.partial" and not go.exists():
            time.sleep(0.05)
        return write(path, content)

    saving.write_file = write_when_released


if __name__ == "__main__":
    run_rank(main)
