"""Checks that the installed DeepSpeed has the names and signatures that this package overrides or replaces.

If another version renamed one, the override would silently do nothing. Therefore each is declared with its signature
in ``TESTED_VERSION``, and ``check_overrides`` raises one error that lists all differences.
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
    """Declare a method as an override of the method of ``owner`` with the same name and this ``signature``."""

    def declared(method: Method) -> Method:
        expect(owner, getattr(method, "__name__"), signature)  # noqa: B009, a bound of Callable has no name
        return method

    return declared


def expect(owner: Any, name: str, signature: str) -> None:
    """Declare that ``owner``, a class or module, has a function ``name`` with this signature (without annotations)."""
    place = f"{owner.__name__}.{name}"
    if not hasattr(owner, name):
        _differences.append(f"{place}{signature} is missing")
    elif (installed := _signature(getattr(owner, name))) != signature:
        _differences.append(f"{place} takes {installed}, and is known to take {signature}")


def _signature(function: Callable) -> str:
    signature = inspect.signature(function)
    parameters = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty))


# Names that ``megatron.engines`` replaces or calls before an engine is built.
expect(comm.comm, "mpi_discovery", "(distributed_port=29500, verbose=True)")
expect(sys.modules[TorchBackend.__module__], "build_shm_op", "()")
expect(TorchBackend, "new_group", "(self, ranks)")


def check_overrides() -> None:
    """Raise ConfigError if the installed DeepSpeed differs from the declared names and signatures.

    It is not a LaunchError, after which the elastic agent would restart the run in vain.
    """
    if _differences:
        version = deepspeed.__version__
        raise ConfigError(
            f"DeepSpeed {version} is not supported: {'; '.join(_differences)}; install deepspeed=={TESTED_VERSION}"
        )


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """A context in which ``owner`` has these attributes instead of its own or its class's."""
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
"""Attributes of DeepSpeed's backend that refer to collectives, to the name of the function."""


@contextmanager
def collectives_wrapped(wrap: Callable[[str, Callable], Callable]) -> Iterator[None]:
    """A context in which each collective ``torch.distributed.NAME`` is replaced by ``wrap(NAME, function)``.

    torch 2.13 has no hook for collectives of all backends, so the functions are replaced, and DeepSpeed's references to
    them in comm/torch.py as well. Test: tests/tools/reporting/test_trace.py.
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
