"""A pool of processes that does not wait for ever if the host does not allow so many."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.context import BaseContext

from megatron.common.errors import ResourceError, first_line, limit_advice
from megatron.launch.host_limits import try_threads


def started_pool(
    processes: int, flag: str, initializer: Callable[[], object], context: BaseContext | None = None
) -> ProcessPoolExecutor:
    """A pool whose processes have started; ``flag`` names their number.

    Raises ResourceError, and leaves no process, if the host does not allow them.
    """
    others = multiprocessing.active_children()
    pool = ProcessPoolExecutor(processes, context, initializer)
    try:
        try_threads(processes + 2)  # a limit of processes counts threads, of which the pool has two
        pool.submit(int)
    except (OSError, RuntimeError) as error:
        for process in {*multiprocessing.active_children()} - {*others}:  # the pool itself would wait for them
            process.kill()
            process.join()
        raise ResourceError(
            f"{flag} {processes}: this host does not allow so many processes ({first_line(error)}): use fewer, or "
            f"{limit_advice(error) or 'see ulimit -a'}"
        ) from error
    return pool
