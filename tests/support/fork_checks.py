"""Fork programs from a process that has imported what is checked before training starts, and no torch.

It reads requests of ``refusals.refusal``, one a line, and answers with exit codes, one a line.
"""

import ctypes
import json
import os
import struct
import sys
from pathlib import Path
from typing import Any, NoReturn

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]

from support.warm import be  # noqa: E402

import megatron.cli  # noqa: E402, F401
import megatron.training.preflight  # noqa: E402, F401
import pretrain_gpt2  # noqa: E402, F401

_READ_AND_WRITE_ANY_FILE = 1 << 1 | 1 << 2
"""CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH."""
_CAPABILITIES = struct.Struct("6I")
"""Effective, permitted and inheritable ones of capabilities(7), the low words first."""


def drop_capabilities() -> None:
    """Drop root's capabilities to read and write any file. Other users do not have them."""
    libc, version = ctypes.CDLL(None), struct.pack("Ii", 0x20080522, 0)
    held = ctypes.create_string_buffer(_CAPABILITIES.size)
    assert libc.capget(version, held) == 0
    words = _CAPABILITIES.unpack(held.raw)
    kept = [word & ~_READ_AND_WRITE_ANY_FILE for word in words[:3]]
    assert libc.capset(version, _CAPABILITIES.pack(*kept, *words[3:])) == 0


def become(modules: str, **program: Any) -> NoReturn:
    """Become a program, which leaves the names of all that it has imported in a file."""
    leave, itself = os._exit, os.getpid()

    def leave_names(code: int) -> NoReturn:
        if os.getpid() == itself:  # and not a process that it has started
            Path(modules).write_text("\n".join(sys.modules))
        leave(code)
        raise AssertionError

    os._exit = leave_names
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    drop_capabilities()
    code: object = 1
    try:
        be(**program)
    except SystemExit as error:
        code = error.code
    finally:
        sys.stdout.flush()
        leave_names(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    answers = os.dup(1)
    for line in sys.stdin:
        if process := os.fork():
            code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
            os.write(answers, f"{code}\n".encode())
        else:
            become(**json.loads(line))
