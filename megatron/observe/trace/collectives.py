"""How long this rank is in collectives, such as those of tensor parallelism inside the passes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

_NAMES = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all_single",
)
Tell = Callable[[str, float, float], None]


@contextmanager
def collectives_timed(now: Callable[[], float], tell: Tell) -> Iterator[None]:
    """While inside, call ``tell(name, begin, end)`` for each collective that is called as ``torch.distributed.NAME``.

    torch has no hook for that on every backend, so its functions are replaced while this lasts.
    """
    own = {name: getattr(dist, name) for name in _NAMES}
    for name, function in own.items():
        setattr(dist, name, _timed(name, function, now, tell))
    try:
        yield
    finally:
        for name, function in own.items():
            setattr(dist, name, function)


def _timed(name: str, function: Callable, now: Callable[[], float], tell: Tell) -> Callable:
    def call(*arguments: Any, **options: Any) -> Any:
        begin = now()
        result = function(*arguments, **options)
        tell(name, begin, now())
        return result

    return call
