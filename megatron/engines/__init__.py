"""The seam to DeepSpeed: subclasses of its engines and optimizers, and process-wide patches applied before.

``engine.py``, ``sequential_engine.py`` and ``pipelined_engine.py`` override methods of DeepSpeed's engines,
``pipelined_model.py`` of its ``PipelineModule``, ``zero.py`` of its optimizers. ``overrides.py`` checks all overridden
names and signatures against the installed DeepSpeed. Each override states what DeepSpeed ``TESTED_VERSION`` does
instead, and the test that fails without it. Code outside of this package uses no private parts of DeepSpeed.
"""

import functools
import importlib
import itertools
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron.common.errors import unwritable

TESTED_VERSION = "0.19.8"
"""The DeepSpeed version that this package is tested with."""

_KNOWN_WARNINGS = (
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "c10d::broadcast_",
    r"barrier\(\): using the device under current context",
    "Dynamo detected a call to a `functools.lru_cache`-wrapped function",
)


def discover_mpi_ranks(port: int) -> None:
    """Set the environment variables of this rank under mpirun, including Open MPI's local rank.

    DeepSpeed: comm/comm.py, ``mpi_discovery`` numbers the ranks of a host in the order of their global ranks, while
    Open MPI may number them otherwise; then the constructor in runtime/engine.py asserts that the numbers are equal.
    Test: tests/engines/test_deepspeed.py. Remove when ``mpi_discovery`` reads OMPI_COMM_WORLD_LOCAL_RANK.
    """
    from deepspeed.comm import comm

    comm.mpi_discovery(distributed_port=port, verbose=False)
    if local_rank := os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK"):
        os.environ["LOCAL_RANK"] = local_rank


def silence_known_warnings() -> None:
    """Filter torch warnings that every run would print.

    DeepSpeed: comm/torch.py and runtime/pipe/p2p.py call deprecated functions of torch.distributed, and barrier() on a
    GPU without a device number, although set_device() was called. torch.compile warns when it traces cached functions.
    Test: tests/launch/test_launchers.py, tests/launch/test_timeouts.py. Remove when DeepSpeed no longer does so.
    """
    for message in _KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", message=f"(?s).*{message}")


def nothing_compiled_for_collectives() -> None:
    """Keep DeepSpeed from compiling its shared-memory all-reduce for inference on a CPU, which training does not use.

    DeepSpeed: comm/torch.py, the constructor of TorchBackend compiles and loads ``deepspeed_shm_comm``: 20 seconds in
    each new environment, and for each rank that the launcher gives LOCAL_SIZE 66 MiB of /dev/shm that outlive the run.
    Without it ``inference_all_reduce()`` is torch's all-reduce.
    Test: tests/bad_input/test_extension_cache.py. Remove when ``inference_all_reduce()`` itself compiles it.
    """
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]


def set_groups_of_deepspeed(new_group: Callable[..., Any]) -> None:
    """Make DeepSpeed create its process groups, such as the pipeline engine's, with ``new_group(ranks)``.

    DeepSpeed: comm/torch.py, TorchBackend.new_group() passes neither timeout nor backend, so that a group gets torch's
    default timeout, 10 minutes with NCCL, and the backend of the default group.
    Test: tests/launch/test_timeouts.py. Remove when new_group() accepts both, or passes on those of init_distributed().
    """
    from deepspeed import comm

    comm.comm.cdb.new_group = new_group


@contextmanager
def deepspeed_silenced(verbose: bool) -> Iterator[None]:
    """Suppress output of DeepSpeed and of gloo (from C++) on stdout, except for DeepSpeed's errors.

    With ``verbose`` nothing is suppressed, and DeepSpeed logs at level INFO.

    DeepSpeed prints hundreds of lines while an engine is built, some of them not through its logger.
    Test: tests/launch/test_launchers.py. Remove when one log level silences all of it.
    """
    if verbose:
        from deepspeed.utils.logging import set_log_level_from_string

        set_log_level_from_string("info")
        yield
        return
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    sys.stdout.flush()
    screen = os.dup(1)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        yield
        sys.stdout.flush()
    finally:
        os.dup2(screen, 1)
        os.close(screen)


def continue_without_reports(engine: Any) -> None:
    """Continue a run, with one warning, if a profile or a file of DeepSpeed's monitors cannot be written.

    DeepSpeed: in runtime/engine.py, an OSError in ``step``, such as a full disk, ends the run, and
    profiling/flops_profiler/profiler.py leaves stdout redirected to the file. It also overwrites existing files, and
    blocks on a named pipe: the profile gets another name then.
    Test: tests/engines/test_deepspeed.py.
    """
    for part, name, what in (
        (getattr(engine, "flops_profiler", None), "print_model_profile", "the profile of flops_profiler"),
        (engine.monitor, "write_events", _MONITORS),
    ):
        if part is not None:
            setattr(part, name, _until_unwritable(getattr(part, name), what))


@contextmanager
def reports_optional() -> Iterator[None]:
    """Like ``continue_without_reports``, for the TensorBoard file that DeepSpeed opens while it builds an engine."""
    from deepspeed.monitor.tensorboard import TensorBoardMonitor

    opened = TensorBoardMonitor.get_summary_writer
    TensorBoardMonitor.get_summary_writer = _until_unwritable(opened, _MONITORS)
    try:
        yield
    finally:
        TensorBoardMonitor.get_summary_writer = opened


_MONITORS = "the files of DeepSpeed's monitors"


def _until_unwritable(write: Callable[..., None], what: str) -> Callable[..., None]:
    """Wrap ``write``: after an OSError it prints a warning, and does nothing from then on."""
    works = True
    unused = functools.cache(_unused)  # each micro-batch of an iteration overwrites the profile of the previous one

    def guarded(*args: Any, **settings: Any) -> None:
        nonlocal works
        screen = sys.stdout
        try:
            if works and settings.get("output_file"):
                settings["output_file"] = unused(settings["output_file"])
            if works:
                write(*args, **settings)
        except OSError as error:
            works, sys.stdout = False, screen
            # Not to stdout, which is silenced while an engine is built.
            print(f"  warning: {unwritable(what, error)}; continuing without", file=sys.stderr)

    return guarded


def _unused(name: str) -> str:
    """``name``, or with a number appended if the file exists already; devices such as /dev/null are kept."""
    numbered = (f"{name}.{number}" if number else name for number in itertools.count())
    free = next(path for path in numbered if not os.path.lexists(path) or path.startswith("/dev/"))
    if free != name:
        print(f"  {name} exists already: writing {free}", flush=True)
    return free
