"""What this package knows of DeepSpeed's private parts, compared with the installed version when it is imported.

An overridden or replaced name that another version has renamed would silently do nothing. So each is declared with the
signature that it has in ``TESTED_VERSION``, and ``check_overrides`` raises one error that lists every difference.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import deepspeed
import torch.distributed as dist
from deepspeed import comm
from deepspeed.comm.torch import TorchBackend

from megatron.common.errors import ConfigError
from megatron.engines import TESTED_VERSION

Method = TypeVar("Method", bound=Callable)
_differences: list[str] = []


def overrides(owner: type, signature: str) -> Callable[[Method], Method]:
    """Mark a method as an override of the method of ``owner`` with the same name, which has this ``signature``."""

    def declared(method: Method) -> Method:
        expect(owner, getattr(method, "__name__"), signature)  # noqa: B009, a bound of Callable has no name
        return method

    return declared


def expect(owner: Any, name: str, signature: str) -> None:
    """Declare that ``owner``, a class or a module, has a function ``name``; the signature is without types."""
    place = f"{owner.__name__}.{name}"
    if not hasattr(owner, name):
        _differences.append(f"{place}{signature} is missing")
    elif (found := _signature(getattr(owner, name))) != signature:
        _differences.append(f"{place} takes {found}, and is known to take {signature}")


def _signature(function: Callable) -> str:
    signature = inspect.signature(function)
    parameters = [one.replace(annotation=one.empty) for one in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty))


# What ``megatron.engines`` replaces or calls before an engine is built.
expect(comm.comm, "mpi_discovery", "(distributed_port=29500, verbose=True)")
expect(sys.modules[TorchBackend.__module__], "build_shm_op", "()")
expect(TorchBackend, "new_group", "(self, ranks)")


def check_overrides() -> None:
    """Raise ConfigError if the installed DeepSpeed differs from the declared names and signatures.

    It is not a LaunchError: the elastic agent starts a run again after that, and another start cannot help.
    """
    if _differences:
        version = deepspeed.__version__
        raise ConfigError(
            f"DeepSpeed {version} is not supported: {'; '.join(_differences)}; install deepspeed=={TESTED_VERSION}"
        )


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """While inside, ``owner`` has these attributes in place of its own, or of its class's."""
    originals = {name: vars(owner)[name] for name in attributes if name in vars(owner)}
    vars(owner).update(attributes)
    try:
        yield
    finally:
        for name in attributes.keys() - originals:
            del vars(owner)[name]
        vars(owner).update(originals)


COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all_single",
)
"""Functions of torch.distributed that ``collectives_wrapped`` replaces."""
_BACKEND_REFERENCES = {
    "all_gather_function": "all_gather_into_tensor",
    "reduce_scatter_function": "reduce_scatter_tensor",
}
"""Functions to which DeepSpeed's backend holds a reference, by the name of its attribute."""


@contextmanager
def collectives_wrapped(wrap: Callable[[str, Callable], Callable]) -> Iterator[None]:
    """While inside, ``torch.distributed.NAME`` is ``wrap(NAME, what it is)`` for each collective.

    torch 2.13: torch.distributed has no hook for collectives on every backend, so the functions are replaced, and
    DeepSpeed's references to them, in comm/torch.py, as well. Test: tests/tools/reporting/test_trace.py.
    """
    backend = comm.comm.cdb
    references = {
        name: wrap(function, getattr(backend, name))
        for name, function in _BACKEND_REFERENCES.items()
        if hasattr(backend, name)
    }
    collectives = {name: wrap(name, getattr(dist, name)) for name in COLLECTIVES}
    with replaced(dist, **collectives), nullcontext() if backend is None else replaced(backend, **references):
        yield
