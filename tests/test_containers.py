"""The images' entry point, run for real: as an unprivileged user who is the first process of a host, on two hosts.

The hosts are network namespaces in place of containers, see ``support/hosts.py``.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hosts import INTERFACE, ROOT, Hosts, why_not
from support.programs import BIN, TINY_MODEL, Programs, read_metrics

from megatron.launch.environment import _private_extensions_folder

USER = 10_000
AS_USER = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--no-new-privs"]


def _why_not() -> str | None:
    reason = why_not()
    if reason is None:
        readable = subprocess.run([*AS_USER, sys.executable, str(ROOT / "pretrain_gpt2.py"), "--help"], capture_output=True)
        reason = None if readable.returncode == 0 else "other users cannot read the checkout, or its Python environment"
    return reason


pytestmark = pytest.mark.skipif(_why_not() is not None, reason=str(_why_not()))
