"""megatron-core as a peer. Its package has this project's name, so it is installed beside, and found by its file."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.comparing import Seconds
from benchmarks.measures.ranks import outside
from benchmarks.measures.shapes import Shape
from megatron.common.errors import LaunchError
from megatron.launch.environment import free_port


class MegatronProcess:
    """Steps of the installed megatron-core on the GPU of this process, in a process of their own."""

    def __init__(self, shape: Shape, dtype: str, steps: int):
        request = {"shape": asdict(shape), "dtype": dtype, "steps": steps, "port": free_port()}
        script = Path(__file__).with_name("megatron_core_step.py")
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(script), json.dumps(request)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=outside(os.environ),
        )
        self.peak: int = self._answer()["peak"]
        """Bytes of memory at most, in two steps."""

    def steps(self) -> Seconds:
        """What they take. Raises LaunchError if the process has failed."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return Seconds(**self._answer())

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("measured: "):
                return json.loads(line.removeprefix("measured: "))
        raise LaunchError(f"the process of megatron-core failed with exit code {self._process.wait()}")
