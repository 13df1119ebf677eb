"""The project's programs on a CUDA device that is emulated in host memory, under DeepSpeed's own CUDA accelerator.

``device.cpp`` is the device, ``inject/`` what a program needs to use it: ``sitecustomize.py`` brings the rest in.
"""

import hashlib
import importlib.util
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from support.programs import TIME_LIMIT, TINY_MODEL, Finished, Programs

from megatron.launch.environment import extensions_folder

HERE = Path(__file__).parent
NO_COMPILER = "the emulated CUDA device needs g++ (apt-get install g++)"
REAL_CUDA = "the emulated CUDA device needs a torch without CUDA"


def build() -> Path:
    """The device as a library, compiled once for each torch. Skips the test where it cannot be."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.submodule_search_locations
    torch = Path(spec.submodule_search_locations[0])
    if (torch / "lib" / "libtorch_cuda.so").exists():
        pytest.skip(REAL_CUDA)
    if shutil.which("g++") is None:
        pytest.skip(NO_COMPILER)
    source = HERE / "device.cpp"
    key = hashlib.sha256(source.read_bytes() + version("torch").encode()).hexdigest()[:16]
    folder = Path(extensions_folder(os.environ, sys.prefix)) / "emulated_cuda"
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"{key}.so"
    with FileLock(folder / "build.flock"):
        if not library.exists():
            includes = [f"-I{torch / path}" for path in ("include", "include/torch/csrc/api/include")]
            links = [f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch / 'lib'}"]
            unfinished = library.with_suffix(".unfinished")
            command = ["g++", "-O0", "-shared", "-fPIC", "-std=c++20", *includes, str(source), *links, "-o"]
            subprocess.run([*command, str(unfinished)], check=True)
            unfinished.rename(library)
    return library


class EmulatedCuda:
    """Starts programs on emulated devices, one for each rank, in processes that have torch already."""

    def __init__(self, programs: Programs):
        self._programs = programs
        self.environ = {
            "EMULATED_CUDA_LIBRARY": str(build()),
            "PYTHONPATH": str(HERE / "inject"),
            "DS_ACCELERATOR": "cuda",
        }
        """What a program's environment needs, whoever starts it."""

    def pretrain(self, processes: int, *arguments: str | Path, **environ: str) -> Finished:
        """``pretrain_gpt2.py`` with the tiny model and corpus on so many devices."""
        words = (*TINY_MODEL, *self._programs.data_arguments, *arguments)
        return self.run(processes, "pretrain_gpt2.py", *words, **environ)

    def run(self, processes: int, *command: str | Path, **environ: str) -> Finished:
        """``python COMMAND`` on so many devices; the exit code of the first rank that failed."""
        server = self._server
        with tempfile.NamedTemporaryFile() as log:
            request: dict[str, Any] = {
                "processes": processes,
                "words": [str(word) for word in command],
                "environ": {**os.environ, **self.environ, **environ},
                "folder": str(self._programs.root),
                "log": log.name,
            }
            server.stdin.write(json.dumps(request) + "\n")
            server.stdin.flush()
            answered, _, _ = select.select([server.stdout], [], [], TIME_LIMIT)
            output = Path(log.name).read_text()
            if not answered:
                self.close()
            assert answered, f"{command} ran past {TIME_LIMIT} s:\n{output[-6000:]}"
            return Finished(int(server.stdout.readline()), output)

    @cached_property
    def _server(self) -> subprocess.Popen:
        tests = HERE.parents[1]
        return subprocess.Popen(
            [sys.executable, str(HERE / "fork_programs.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=self._programs.root,
            env={**os.environ, **self.environ, "PYTHONPATH": os.pathsep.join([self.environ["PYTHONPATH"], str(tests)])},
            start_new_session=True,
        )

    def close(self) -> None:
        """End the processes."""
        if "_server" in vars(self):
            server = vars(self).pop("_server")
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


class OneGpu(EmulatedCuda):
    """The same on this machine's first GPU, which all ranks share. Their collectives are copies through host memory."""

    def __init__(self, programs: Programs):
        self._programs = programs
        paths = [str(HERE / "inject"), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.environ = {"PYTHONPATH": os.pathsep.join(paths), "DS_ACCELERATOR": "cuda"}

    def run(self, processes: int, *command: str | Path, **environ: str) -> Finished:
        """``python COMMAND`` on so many ranks; NCCL if there is one."""
        environ = {**self.environ, **environ}
        if processes == 1:
            return self._programs.python(*command, **environ)
        finished = self._programs.torchrun(processes, *command, **{"ONE_GPU": "1"} | environ)
        failed = re.search(r"failed \(exitcode: (\d+)\)", finished.output)  # torchrun's own code is always 1
        return Finished(int(failed[1]) if failed else finished.returncode, finished.output)
