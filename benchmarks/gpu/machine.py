"""What a machine with GPUs has, and what keeps it from training.

``python benchmarks/gpu/machine.py`` prints it as JSON. That is a process of its own, because torch keeps memory of the
GPU as long as a process lives that has asked it for something. No torch here until then.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:1] = [str(ROOT)]  # instead of this folder

from megatron.common.environment import expected_device  # noqa: E402
from megatron.common.errors import ConfigError, LaunchError, ResourceError, UserError  # noqa: E402

PACKAGES = ("torch", "deepspeed", "transformers", "apex", "megatron-core", "triton", "numpy")
DRIVERS = {"12": 525, "13": 580}
"""The oldest driver of each major version of CUDA (NVIDIA, CUDA Compatibility, minor version compatibility)."""
LEAST_MEMORY, LEAST_DISK = 3e9, 2e9
"""Bytes."""
_QUERY = "index,name,driver_version,memory.total,memory.used,power.limit,clocks.max.sm,ecc.mode.current,pstate"
_HELP = "see docs/accelerators.md"
_SECONDS = 300
"""Time that the probe may take: a first import from a network disk is slow."""


@dataclass(frozen=True)
class Device:
    """A GPU, as torch describes it."""

    name: str
    capability: tuple[int, int]
    total: int
    """Bytes, as ``free``."""
    free: int

    @property
    def title(self) -> str:
        """Name and memory."""
        return f"{self.name}, {self.free / 1e9:.1f} of {self.total / 1e9:.1f} GB free"


@dataclass(frozen=True)
class Machine:
    """Packages, driver and devices."""

    versions: dict[str, str]
    """Of the installed packages, by name."""
    python: str = ""
    system: str = ""
    processors: int = 0
    expected: str = "cpu"
    """The accelerator that DeepSpeed chooses here."""
    driver: str | None = None
    """None without nvidia-smi."""
    nvidia_smi: list[str] = field(default_factory=list)
    """Lines of its table, and of the links between GPUs."""
    cuda: str | None = None
    """Version of CUDA, or ROCm, that torch was built with."""
    architectures: list[str] = field(default_factory=list)
    """What torch has kernels for, such as sm_90; empty if that is not known."""
    nccl: str | None = None
    bf16: bool = False
    compiler: str | None = None
    """Of C, which torch.compile needs."""
    devices: list[Device] = field(default_factory=list)
    error: str | None = None
    """What the import of torch or DeepSpeed, or the start of CUDA, raised."""

    @property
    def dtype(self) -> str:
        """The half precision of the measurements."""
        return "bf16" if self.bf16 else "fp16"

    @property
    def fp8(self) -> bool:
        """Whether matmuls in FP8 are faster than those in bf16."""
        return self.bf16 and all(device.capability >= (8, 9) for device in self.devices)

    @property
    def compiles(self) -> bool:
        """Whether torch.compile has what it needs."""
        return "triton" in self.versions and bool(self.compiler)

    @property
    def free(self) -> int:
        """Bytes that are free on the first device."""
        return self.devices[0].free

    def describe(self) -> dict[str, str]:
        """Rows of a table."""
        rows = {f"GPU {number}": device.title for number, device in enumerate(self.devices)}
        rows |= {"driver": self.driver or "unknown: no nvidia-smi", "CUDA of torch": self.cuda or "unknown"}
        rows |= {"NCCL": self.nccl or "unknown", "precision": self.dtype}
        rows |= self.versions
        return rows | {"python": self.python, "system": f"{self.system}, {self.processors} cores"}


def from_json(content: Mapping[str, Any]) -> Machine:
    """What ``asdict()`` made of a machine."""
    devices = [Device(**{**device, "capability": tuple(device["capability"])}) for device in content["devices"]]
    return Machine(**{**content, "devices": devices})


def probe() -> Machine:
    """This machine, as another process sees it. Raises LaunchError if that process fails."""
    command = [sys.executable, "-W", "ignore", __file__]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        raise LaunchError(f"torch does not answer within {_SECONDS} s: does nvidia-smi?") from None
    if ended.returncode or not ended.stdout:
        reason = ([*ended.stderr.split("\n"), ""][-2:] if ended.stderr else [f"exit code {ended.returncode}"])[0]
        raise LaunchError(f"a process that imports torch and asks for its GPUs failed: {reason}")
    return from_json(json.loads(ended.stdout.splitlines()[-1]))


def checked(machine: Machine, folder: Path) -> Machine:
    """``machine`` if it can train and ``folder`` has room. Raises the UserError of the first problem otherwise."""
    for problem in problems(machine):
        raise problem
    for place in {nearest_folder(folder), Path(os.environ.get("TMPDIR", "/tmp"))}:
        free = shutil.disk_usage(place).free
        if free < LEAST_DISK:
            raise ResourceError(f"{place} has {free / 1e9:.1f} GB free, {LEAST_DISK / 1e9:.0f} are needed: make room")
    return machine


def nearest_folder(path: Path) -> Path:
    """``path``, or the first of its parents that exists."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())


def problems(machine: Machine) -> Iterator[UserError]:
    """What keeps ``machine`` from training on a GPU, the cause before its consequences."""
    torch = f"torch {machine.versions.get('torch', '')}"
    for package in ("torch", "deepspeed"):
        if package not in machine.versions:
            yield ConfigError(f"{package} is not installed for {sys.executable}: pip install -r requirements.txt")
    if machine.devices and machine.expected != "cuda":
        yield ConfigError(f"DS_ACCELERATOR selects {machine.expected}, and this measures CUDA devices: unset it")
    if not machine.devices:
        yield _no_device(machine, torch)
    elif machine.error:
        yield ConfigError(f"torch or DeepSpeed cannot be used: {machine.error}")
    for number, device in enumerate(machine.devices):
        if machine.architectures and not is_supported(device.capability, machine.architectures):
            has = " ".join(machine.architectures)
            name = f"GPU {number} ({device.name}) of compute capability {'.'.join(map(str, device.capability))}"
            yield ResourceError(f"{torch} has no kernels for {name}, only {has}: install another torch, {_HELP}")
        if device.free < LEAST_MEMORY:
            yield ResourceError(
                f"GPU {number}: {device.title}, {LEAST_MEMORY / 1e9:.0f} GB are needed: end the programs that use it "
                "(nvidia-smi), or choose others with CUDA_VISIBLE_DEVICES"
            )


def _no_device(machine: Machine, torch: str) -> UserError:
    if machine.expected != "cuda" and machine.driver is None:
        return ResourceError("this measures a GPU, and there is none here: run it on a machine that has one")
    if machine.cuda is None and machine.error:
        return ConfigError(f"torch cannot be used: {machine.error}")
    if machine.cuda is None:
        return ConfigError(f"{torch} is built without CUDA, and this machine has a GPU: install another, {_HELP}")
    needed = DRIVERS.get(machine.cuda.split(".")[0], 0)
    if machine.driver and int(machine.driver.split(".")[0]) < needed:
        return ResourceError(
            f"driver {machine.driver} is too old for CUDA {machine.cuda}, which {torch} is built with: update it to "
            f"{needed} or later, or install torch for an older CUDA, {_HELP}"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    detail = f"CUDA_VISIBLE_DEVICES is {visible!r}" if visible is not None else machine.error or "no reason is given"
    return ResourceError(f"{torch} finds no GPU, although this machine has one: {detail}")


def is_supported(capability: tuple[int, int], architectures: list[str]) -> bool:
    """Whether torch has kernels for it: of the same major version and no later minor one, or PTX that is older."""
    for architecture in architectures:
        kind, _, digits = architecture.rstrip("af").partition("_")
        if not digits.isdigit() or kind not in ("sm", "compute"):
            return True  # of another maker, such as gfx942
        version = int(digits[:-1]), int(digits[-1])
        if version <= capability and (kind == "compute" or version[0] == capability[0]):
            return True
    return False


def examine() -> Machine:
    """This machine, as this process sees it."""
    versions = {name: version for name in PACKAGES if (version := _version(name))}
    found: dict[str, Any] = {}
    try:
        found = _torch_facts()
        if found.get("devices"):
            import deepspeed  # noqa: F401
    except Exception as error:  # whatever a broken installation raises is for the reader to know
        found["error"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
    drivers = _nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader")
    table = _nvidia_smi(f"--query-gpu={_QUERY}", "--format=csv")
    links = _nvidia_smi("topo", "-m") if len(drivers) > 1 else []
    return Machine(
        versions=versions,
        python=platform.python_version(),
        system=platform.platform(),
        processors=os.cpu_count() or 0,
        expected=expected_device(os.environ),
        driver=drivers[0] if drivers else None,
        nvidia_smi=[*table, *links],
        compiler=shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang"),
        **found,
    )


def _torch_facts() -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {"cuda": torch.version.cuda or getattr(torch.version, "hip", None)}
    if not torch.cuda.is_available():
        if found["cuda"]:
            try:
                torch.cuda.init()
            except RuntimeError as error:
                found["error"] = str(error).splitlines()[0]
        return found
    with_kernels = hasattr(torch._C, "_cuda_getArchFlags")
    devices = []
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        devices.append(
            Device(torch.cuda.get_device_name(number), torch.cuda.get_device_capability(number), total, free)
        )
    return found | {
        "devices": devices,
        "architectures": torch.cuda.get_arch_list() if with_kernels else [],
        "bf16": all(device.capability >= (8, 0) for device in devices) or bool(torch.version.hip),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if hasattr(torch._C, "_nccl_version") else None,
    }


def _nvidia_smi(*words: str) -> list[str]:
    """Lines that it prints; none if it is missing or fails."""
    try:
        ended = subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return ended.stdout.strip().splitlines() if ended.returncode == 0 else []


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    from dataclasses import asdict

    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)  # what libraries print when they are imported is no answer
    text = json.dumps(asdict(examine()))
    os.write(kept, f"{text}\n".encode())
