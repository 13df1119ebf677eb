"""Errors of gloo and of torch's NCCL backend: what they mean, and how the process ends when a thread of NCCL's has one.

gloo reports a lost rank or a timeout as an error of the collective. With NCCL collectives run beside Python: torch's
NCCL watchdog, a thread without Python, finds the error and lets an exception of C++ end the process, by SIGABRT.
"""

import ctypes
import os
import re
from collections.abc import Callable

from megatron.common.errors import LaunchError

_LOST = (
    "Connection closed by peer",  # gloo
    "Connection reset by peer",  # gloo, NCCL
    "Connection closed by remote peer",  # NCCL
    "Connection was likely closed",  # the store, by which NCCL's communicators are set up
    "Broken pipe",
    "remote process exited",
    "ncclRemoteError",
    "NCCL communicator was aborted",
)
_LATE = (
    "Timed out waiting",  # gloo
    "Timed out after",
    "Watchdog caught collective operation timeout",  # NCCL
    "milliseconds before timing out",
    "wait timeout after",  # the store
)


def is_connection_lost(error: Exception) -> bool:
    """Whether ``error`` is the backend's about a rank that has ended, whose own message names the cause."""
    return _says(error, _LOST) and not is_timeout(error)


def is_timeout(error: Exception) -> bool:
    """Whether ``error`` is the backend's about a collective that did not end within its timeout."""
    return _says(error, _LATE)


def failure_of_nccl(error: Exception) -> str | None:
    """The cause of any other error of NCCL, in a line; None if ``error`` is none of NCCL's."""
    text = str(error)
    if not isinstance(error, RuntimeError) or "NCCL error" not in text:
        return None
    _, _, last = text.partition("Last error:")
    named = re.search(r"nccl[A-Z]\w+: .*", text)
    line = next((line.strip() for line in last.splitlines() if line.strip()), named[0].strip() if named else text)
    return f"NCCL failed: {line}; NCCL_DEBUG=INFO shows what it did before"


def _says(error: Exception, texts: tuple[str, ...]) -> bool:
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)


_Terminate = ctypes.CFUNCTYPE(None)
_kept: list[object] = []
"""C++ has only the address of a handler."""


def exit_when_watchdog_fails(report: Callable[[], None]) -> None:
    """When torch's NCCL watchdog ends this process, call ``report`` and exit with code 6 in place of SIGABRT.

    The C++ runtime calls a terminate handler for an exception that nothing catches. Those of the watchdog are of the
    class c10::DistBackendError; any other exception, and abort(), end the process as before.
    """
    try:
        runtime = ctypes.CDLL("libstdc++.so.6")
        set_terminate = runtime["_ZSt13set_terminatePFvvE"]
        exception_type = runtime["__cxa_current_exception_type"]
    except (OSError, AttributeError):
        return  # another C++ runtime
    set_terminate.restype = exception_type.restype = ctypes.c_void_p

    @_Terminate
    def handle() -> None:
        address = exception_type()
        # A std::type_info: the address of its virtual functions, then that of the mangled name.
        name = ctypes.c_char_p.from_address(address + ctypes.sizeof(ctypes.c_void_p)).value if address else None
        if b"DistBackendError" in (name or b""):
            report()
            os._exit(LaunchError.exit_code)
        previous()

    set_terminate.argtypes = [_Terminate]
    previous = _Terminate(set_terminate(handle))
    _kept.append(handle)
