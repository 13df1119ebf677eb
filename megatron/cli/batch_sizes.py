"""The sizes of a batch: those that are provided decide the others."""

from collections.abc import Mapping
from typing import NamedTuple

from megatron.common.errors import ConfigError, nearest_multiples
from megatron.config.fields import Provided

GLOBAL, MICRO, ACCUMULATION = "global_batch_size", "micro_batch_size", "gradient_accumulation_steps"


class Batch(NamedTuple):
    """The three batch sizes, in samples or steps: global = micro x accumulation x data-parallel size."""

    global_size: int
    micro_size: int
    accumulation: int


def solve_batch(provided: Mapping[str, Provided], data_parallel_size: int) -> Batch:
    """The three batch sizes from those that are provided. Without an accumulation or a global size, it is 1 step.

    Raises:
        ConfigError: neither a micro nor a global size is provided, or the sizes contradict each other.
    """
    sizes = {name: provided[name].value for name in (GLOBAL, MICRO, ACCUMULATION) if name in provided}
    if GLOBAL not in sizes and MICRO not in sizes:
        raise ConfigError("--batch-size is required (or --global-batch-size, or their keys in --deepspeed_config)")
    if min(sizes.values()) < 1:
        raise ConfigError([])  # reported already, as a value out of range
    if GLOBAL not in sizes:
        accumulation = sizes.get(ACCUMULATION, 1)
        return Batch(sizes[MICRO] * accumulation * data_parallel_size, sizes[MICRO], accumulation)
    if len(sizes) == 3:
        return _consistent(provided, data_parallel_size)
    known = MICRO if MICRO in sizes else ACCUMULATION
    factor = sizes.get(known, 1) * data_parallel_size
    if sizes[GLOBAL] % factor:
        other = f"{provided[known].source} x " if known in provided else ""
        raise ConfigError(
            f"{provided[GLOBAL].source} is not a multiple of {other}data-parallel size {data_parallel_size} = {factor}:"
            f" set a global batch of {nearest_multiples(sizes[GLOBAL], factor)}"
        )
    rest = sizes[GLOBAL] // factor
    return Batch(sizes[GLOBAL], *((sizes[MICRO], rest) if known == MICRO else (rest, sizes.get(ACCUMULATION, 1))))


def _consistent(provided: Mapping[str, Provided], data_parallel_size: int) -> Batch:
    batch = Batch(*(provided[name].value for name in (GLOBAL, MICRO, ACCUMULATION)))
    product = batch.micro_size * batch.accumulation * data_parallel_size
    if batch.global_size == product:
        return batch
    remedy = f"set a global batch of {product}"
    if batch.global_size % (batch.micro_size * data_parallel_size) == 0:
        remedy += f" or an accumulation of {batch.global_size // (batch.micro_size * data_parallel_size)}"
    raise ConfigError(
        f"{provided[GLOBAL].source} is not {provided[MICRO].source} x {provided[ACCUMULATION].source} x "
        f"data-parallel size {data_parallel_size} = {product}: {remedy}"
    )
