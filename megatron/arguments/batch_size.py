"""The arithmetic of the batch: global = micro x accumulation x data-parallel size."""

from collections.abc import Mapping
from typing import NamedTuple

from megatron.errors import ConfigError
from megatron.given import Given

GLOBAL, MICRO, ACCUMULATION = "global_batch_size", "micro_batch_size", "gradient_accumulation_steps"


class Batch(NamedTuple):
    """Samples of an iteration, and how they are taken."""

    global_size: int
    micro_size: int
    accumulation: int


def solve_batch(given: Mapping[str, Given], data_parallel_size: int) -> Batch:
    """The three batch sizes from those that were given; with one alone nothing is accumulated.

    Raises:
        ConfigError: neither a micro nor a global size was given, or they do not fit together.
    """
    sizes = {name: given[name].value for name in (GLOBAL, MICRO, ACCUMULATION) if name in given}
    if GLOBAL not in sizes and MICRO not in sizes:
        raise ConfigError("--batch-size is required (or --global-batch-size, or their keys in --deepspeed_config)")
    if min(sizes.values()) < 1:
        raise ConfigError([])  # reported already, as a value out of range
    if GLOBAL not in sizes:
        accumulation = sizes.get(ACCUMULATION, 1)
        return Batch(sizes[MICRO] * accumulation * data_parallel_size, sizes[MICRO], accumulation)
    if len(sizes) == 3:
        return _checked(given, data_parallel_size)
    known = MICRO if MICRO in sizes else ACCUMULATION
    factor = sizes.get(known, 1) * data_parallel_size
    if sizes[GLOBAL] % factor:
        other = f"{given[known].source} x " if known in given else ""
        raise ConfigError(
            f"{given[GLOBAL].source} is not a multiple of {other}data-parallel size {data_parallel_size} = {factor}: "
            f"set a global batch of {_neighbours(sizes[GLOBAL], factor)}"
        )
    rest = sizes[GLOBAL] // factor
    return Batch(sizes[GLOBAL], *((sizes[MICRO], rest) if known == MICRO else (rest, sizes.get(ACCUMULATION, 1))))


def _checked(given: Mapping[str, Given], data_parallel_size: int) -> Batch:
    batch = Batch(*(given[name].value for name in (GLOBAL, MICRO, ACCUMULATION)))
    product = batch.micro_size * batch.accumulation * data_parallel_size
    if batch.global_size == product:
        return batch
    remedy = f"set a global batch of {product}"
    if batch.global_size % (batch.micro_size * data_parallel_size) == 0:
        remedy += f" or an accumulation of {batch.global_size // (batch.micro_size * data_parallel_size)}"
    raise ConfigError(
        f"{given[GLOBAL].source} is not {given[MICRO].source} x {given[ACCUMULATION].source} x "
        f"data-parallel size {data_parallel_size} = {product}: {remedy}"
    )


def _neighbours(number: int, factor: int) -> str:
    below = number // factor * factor
    return f"{below} or {below + factor}" if below else str(factor)
