"""Reads the launcher's environment variables, such as number of processes and ranks, and detects the accelerator."""

import re
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

from megatron.common.errors import ConfigError, first_line

_SIZES = (
    ("WORLD_SIZE", ()),  # deepspeed, torchrun
    # Valid only together with a rank: inside an allocation, Slurm also sets a size for a process without srun.
    ("OMPI_COMM_WORLD_SIZE", ("OMPI_COMM_WORLD_RANK",)),
    ("PMI_SIZE", ("PMI_RANK",)),
    ("SLURM_NTASKS", ("SLURM_PROCID", "SLURM_STEP_ID")),
)
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
"""In each of these, the variables of torchrun and deepspeed come first: mpirun may start one of them on each host."""
_COMPANIONS_OF_RANK = ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_START = "start with deepspeed, torchrun, mpirun or srun"


def adopt_slurm_task(environ: MutableMapping[str, str]) -> None:
    """Set torchrun's variables from Slurm's for a task of srun, unless another launcher has set a rank.

    The rendezvous is on the first host of the step, unless MASTER_ADDR is set. Slurm writes the hosts as in
    ``gpu[07,09-10]-ib,big1`` and their numbers of tasks as in ``8(x2),4``.

    Raises ConfigError if Slurm's variables are not as srun sets them.
    """
    try:
        _adopt_slurm_task(environ)
    except (KeyError, ValueError, IndexError) as error:
        raise ConfigError(
            f"the environment has SLURM_STEP_ID, and not as srun sets it ({type(error).__name__}: {first_line(error)})"
            ": start with srun, or unset SLURM_STEP_ID"
        ) from None


_TASKS = re.compile(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?")
"""Number of tasks on a host, or on each of several hosts."""


def _adopt_slurm_task(environ: MutableMapping[str, str]) -> None:
    if "SLURM_STEP_ID" not in environ or environ.get("SLURM_NTASKS", "1") == "1":
        return
    if "SLURM_PTY_PORT" in environ:  # the shell of srun --pty: its other tasks start no program
        environ.setdefault("WORLD_SIZE", "1")
        return
    number, size = environ["SLURM_PROCID"], environ["SLURM_NTASKS"]
    is_mpirun = (environ.get("PMI_RANK", number), environ.get("PMI_SIZE", size)) != (number, size)
    if is_mpirun or "RANK" in environ or "OMPI_COMM_WORLD_RANK" in environ:
        return
    listed, node, job = (environ[f"SLURM_{name}"] for name in ("STEP_TASKS_PER_NODE", "NODEID", "JOB_ID"))
    tasks = [_TASKS.fullmatch(part) for part in listed.split(",")]
    if not (all(tasks) and re.fullmatch("[0-9]{1,6}", node) and re.fullmatch("[0-9]{1,15}", job)):
        raise ValueError(f"host {node} of SLURM_STEP_TASKS_PER_NODE={listed} in job {job}")
    tasks_per_host = [part[1] for part in tasks if part for _ in range(int(part[2] or 1))]
    first = re.split(r",(?![^[]*\])", environ["SLURM_STEP_NODELIST"])[0]
    port = 20000 + int(job) % 10000  # two jobs may share a host
    local_size = tasks_per_host[int(node)]
    environ.update(RANK=number, LOCAL_RANK=environ["SLURM_LOCALID"], WORLD_SIZE=size, LOCAL_WORLD_SIZE=local_size)
    environ.setdefault("MASTER_ADDR", re.sub(r"\[(\d+)[^]]*\]", r"\1", first))
    environ.setdefault("MASTER_PORT", str(port))


def world_size(environ: Mapping[str, str]) -> int:
    """Number of processes of the run, as set by deepspeed, torchrun, mpirun or srun; 1 without a launcher.

    Raises ConfigError if the variable is not a positive integer.
    """
    for variable, companions in _SIZES:
        if variable in environ and all(name in environ for name in companions):
            return _number(environ, variable, minimum=1)
    return 1


def rank(environ: Mapping[str, str]) -> int | None:
    """The global rank of this process; None without a launcher. Raises ConfigError if it is not an integer."""
    return _first(environ, _RANKS, minimum=0)


def local_rank(environ: Mapping[str, str]) -> int | None:
    """The local rank of this process on its host; None if no launcher sets it.

    Raises ConfigError if the variable is not an integer.
    """
    return _first(environ, _LOCAL_RANKS, minimum=0)


def ranks_on_host(environ: Mapping[str, str]) -> int | None:
    """Number of processes of the run on this host; None if no launcher sets it.

    Raises ConfigError if the variable is not a positive integer.
    """
    return _first(environ, _LOCAL_SIZES, minimum=1)


_MOST_THREADS = 1024


def threads_per_rank(environ: Mapping[str, str]) -> int | None:
    """The value of OMP_NUM_THREADS, the first one of a list; None if it is not set.

    Raises ConfigError if it is not an integer from 1 to 1024: OpenMP would ignore the value, or start too many threads.
    """
    text = environ.get("OMP_NUM_THREADS", "").strip()
    if not text:
        return None
    levels = [int(level) if re.fullmatch(r" *[0-9]{1,9} *", level) else 0 for level in text.split(",")]
    if not all(1 <= level <= _MOST_THREADS for level in levels):
        raise ConfigError(
            f"environment variable OMP_NUM_THREADS={text}: set a whole number from 1 to {_MOST_THREADS}, or unset it "
            "to divide the cores of this host among its ranks"
        )
    return levels[0]


def on_one_host(environ: Mapping[str, str]) -> bool:
    """Whether all processes of the run are on this host, according to the launcher.

    Raises ConfigError if a variable is not a number.
    """
    return world_size(environ) in (1, ranks_on_host(environ))


def check_place(environ: Mapping[str, str]) -> None:
    """Check that the launcher's variables are consistent, and complete if there are several processes.

    Raises ConfigError for a world size without a rank, a rank beyond the last one, a rank without the rendezvous
    address, or one process although ``accelerate launch`` was asked for several.
    """
    size, number = world_size(environ), rank(environ)
    if number is None and "MASTER_ADDR" in environ and _on_cpu_by_accelerate(environ):
        raise ConfigError(
            "accelerate launch --cpu starts several processes only with --mpirun_hostfile: use --use_deepspeed, which "
            "needs no GPU, or --num_processes 1"
        )
    if number is None and size > 1:
        raise ConfigError(
            f"the environment sets {size} processes, but not the rank of this one (RANK): {_START}, or unset WORLD_SIZE"
        )
    if number is not None and number >= size:
        raise ConfigError(f"the environment sets rank {number} of {size} processes, counted from 0: {_START}")
    local, local_size = local_rank(environ), ranks_on_host(environ) or size
    if local is not None and local >= local_size:
        raise ConfigError(
            f"the environment sets local rank {local} of {local_size} on this host, counted from 0: {_START}"
        )
    if "DEEPSPEED_TIMEOUT" in environ:  # DeepSpeed reads it when it is imported
        _number(environ, "DEEPSPEED_TIMEOUT", minimum=1)
    # Under mpirun, which does not set RANK, DeepSpeed gets these variables from MPI.
    if "RANK" in environ:
        missing = [variable for variable in _COMPANIONS_OF_RANK if not environ.get(variable)]
        if missing:
            raise ConfigError(f"the environment has RANK without {', '.join(missing)}: {_START}, or unset RANK")
    if number is not None and "MASTER_PORT" in environ and _number(environ, "MASTER_PORT", minimum=1) > 65535:
        raise ConfigError(f"environment variable MASTER_PORT={environ['MASTER_PORT']}: ports end at 65535")


def _first(environ: Mapping[str, str], variables: tuple[str, ...], *, minimum: int) -> int | None:
    return next((_number(environ, variable, minimum=minimum) for variable in variables if variable in environ), None)


def _number(environ: Mapping[str, str], variable: str, *, minimum: int) -> int:
    text = environ[variable]
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < minimum:
        raise ConfigError(f"environment variable {variable}={text}: set a whole number from {minimum} on, or unset it")
    return int(text)


def _on_cpu_by_accelerate(environ: Mapping[str, str]) -> bool:
    """Whether ``accelerate launch --cpu`` has started this process."""
    return environ.get("ACCELERATE_USE_CPU", "").lower() == "true"


ACCELERATORS = ("cuda", "cpu", "xpu", "npu", "mps", "hpu", "mlu", "sdaa", "supa", "klxpu")
"""Names of DeepSpeed's accelerators."""
_WSL_LIBRARIES = Path("/usr/lib/wsl/lib"), Path("/usr/lib/x86_64-linux-gnu")
"""Folders where the Windows driver puts CUDA's library: under WSL2, and in a container under WSL2."""


def expected_device(
    environ: Mapping[str, str], dev: Path = Path("/dev"), libraries: Sequence[Path] = _WSL_LIBRARIES
) -> str:
    """The accelerator that DeepSpeed will choose on this host: ``"cuda"``, ``"cpu"``, or the value of DS_ACCELERATOR.

    ``dev`` is the folder of device files: ``nvidia0``, ... for NVIDIA GPUs, ``kfd`` for AMD GPUs, and under WSL2
    ``dxg`` for GPUs of any vendor; CUDA's library in one of the folders ``libraries`` then shows that one is NVIDIA's.
    Raises ConfigError if DS_ACCELERATOR is unknown.
    """
    if name := environ.get("DS_ACCELERATOR"):
        if name not in ACCELERATORS:
            raise ConfigError(f"environment variable DS_ACCELERATOR={name}: choose from {', '.join(ACCELERATORS)}")
        return name
    if _on_cpu_by_accelerate(environ) or environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return "cpu"
    if (dev / "kfd").exists() or any(dev.glob("nvidia[0-9]*")):
        return "cuda"
    if (dev / "dxg").exists() and any((folder / "libcuda.so.1").exists() for folder in libraries):
        return "cuda"
    return "cpu"
