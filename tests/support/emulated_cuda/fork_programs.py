"""Fork programs from a process that has torch, DeepSpeed and the emulated device.

It reads requests of ``EmulatedCuda.run``, one a line, and answers with exit codes, one a line.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

answers = os.dup(1)
os.dup2(2, 1)  # nothing else is an answer

import torch  # noqa: E402
from support import preload  # noqa: E402, F401
from support.warm import be, launch, places  # noqa: E402

# A fork leaves torch's thread pool to be replaced by the next use, which may not be the threads of several devices.
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))


def program(processes: int, words: list[str], environ: dict[str, str], folder: str, log: str) -> None:
    """Become a program, or the launcher of its ranks."""
    if processes == 1:
        be(words, environ, folder, log)
    else:
        launch(places(processes, environ), words, folder, log)


def run(request: dict) -> int:
    """The exit code of a program."""
    if process := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    code = 1
    try:
        program(**request)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    finally:
        os._exit(code)


for line in sys.stdin:
    os.write(answers, f"{run(json.loads(line))}\n".encode())
