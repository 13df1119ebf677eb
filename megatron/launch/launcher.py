"""What the launcher says through the environment: how many processes there are, and which one this is."""

from collections.abc import Mapping

from megatron.errors import ConfigError

_SIZES = (
    ("WORLD_SIZE", ()),  # deepspeed, torchrun
    # A size counts only beside a rank: inside an allocation, Slurm sets its own for a plain process too.
    ("OMPI_COMM_WORLD_SIZE", ("OMPI_COMM_WORLD_RANK",)),
    ("PMI_SIZE", ("PMI_RANK",)),
    ("SLURM_NTASKS", ("SLURM_PROCID", "SLURM_STEP_ID")),
)
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")


def world_size(environ: Mapping[str, str]) -> int:
    """Processes of the run: as deepspeed, torchrun, mpirun or srun say; 1 where none of them does.

    Raises:
        ConfigError: the variable is not a positive whole number.
    """
    for variable, companions in _SIZES:
        if variable in environ and all(name in environ for name in companions):
            return _number(environ, variable, minimum=1)
    return 1


def rank(environ: Mapping[str, str]) -> int | None:
    """This process's number among all; None where no launcher says.

    Raises:
        ConfigError: the variable is not a whole number.
    """
    return _first(environ, _RANKS)


def local_rank(environ: Mapping[str, str]) -> int | None:
    """This process's place on its host, counted from 0; None where no launcher says.

    Raises:
        ConfigError: the variable is not a whole number.
    """
    return _first(environ, _LOCAL_RANKS)


def _first(environ: Mapping[str, str], variables: tuple[str, ...]) -> int | None:
    return next((_number(environ, variable, minimum=0) for variable in variables if variable in environ), None)


def _number(environ: Mapping[str, str], variable: str, *, minimum: int) -> int:
    text = environ[variable]
    if not text.isdecimal() or int(text) < minimum:
        raise ConfigError(f"the environment says {variable}={text}: set a whole number from {minimum} on, or unset it")
    return int(text)
