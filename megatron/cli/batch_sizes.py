"""Derives the missing batch sizes from the provided ones, and parses batch-size schedules."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from megatron.cli.provided import Provided, Source, read_number
from megatron.common.errors import ConfigError, nearest_multiples
from megatron.config.batch_schedule import Steps

_MOST_STEPS = 10_000
"""Limit of the number of batch sizes of a schedule."""
_LARGEST_BATCH, _MOST_TOKENS = 1 << 30, 10**18
GLOBAL, MICRO, ACCUMULATION = "global_batch_size", "micro_batch_size", "gradient_accumulation_steps"


class Batch(NamedTuple):
    """The three batch sizes, in samples or steps: global = micro x accumulation x data-parallel size."""

    global_size: int
    micro_size: int
    accumulation: int


def solve_batch(provided: Mapping[str, Provided], data_parallel_size: int) -> Batch:
    """The three batch sizes from the provided ones. Accumulation defaults to 1 step without a global size.

    If a JSON has ``train_batch_size`` and ``gradient_accumulation_steps``, and a flag gives the micro size,
    ``train_batch_size`` is ignored, as in DeepSpeed's 3D example, whose data loader uses only the flag.

    Raises ConfigError if neither a micro nor a global size is provided, or the sizes contradict each other.
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
    if [isinstance(provided[name].source, Source) for name in (GLOBAL, MICRO, ACCUMULATION)] == [False, True, False]:
        return batch._replace(global_size=product)
    remedy = f"set a global batch of {product}"
    if batch.global_size % (batch.micro_size * data_parallel_size) == 0:
        remedy += f" or an accumulation of {batch.global_size // (batch.micro_size * data_parallel_size)}"
    raise ConfigError(
        f"{provided[GLOBAL].source} is not {provided[MICRO].source} x {provided[ACCUMULATION].source} x "
        f"data-parallel size {data_parallel_size} = {product}: {remedy}"
    )


def ramp_up(numbers: Sequence[int], global_batch_size: int) -> Steps:
    """The steps of ``--rampup-batch-size START INCR SAMPLES``, as in Megatron-LM but with integer thresholds.

    Over the first SAMPLES samples the size grows from START to ``global_batch_size`` by INCR at a time, in equal
    intervals. Raises ConfigError unless the numbers make such a ramp-up.
    """
    flag = f"--rampup-batch-size {' '.join(map(str, numbers))}"
    if len(numbers) != 3 or min(numbers[:2]) < 1 or numbers[2] < 0:
        raise ConfigError(f"{flag}: give the first batch size, its increment and the samples of the ramp-up")
    start, increment, samples = numbers
    if start > global_batch_size:
        raise ConfigError(f"{flag} starts above the global batch of {global_batch_size}: lower the first number")
    increments, rest = divmod(global_batch_size - start, increment)
    if increments > _MOST_STEPS:
        raise ConfigError(f"{flag} has {increments + 1:,} batch sizes, and {_MOST_STEPS:,} are enough: raise INCR")
    if rest:
        raise ConfigError(
            f"{flag}: from {start} to the global batch of {global_batch_size} it is {global_batch_size - start}, which "
            f"is not a multiple of {increment}: choose another increment"
        )
    begins = {
        -(-number * samples // max(increments, 1)): start + number * increment for number in range(increments + 1)
    }
    return tuple(begins.items())  # of sizes that begin at the same sample only the last is left


_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def read_steps(text: str, seq_length: int) -> Steps:
    """The steps of ``--step-batch-size-schedule "0:768 250B:1536"``, whose thresholds are tokens, as in Megatron-LM.

    Raises ConfigError if ``text`` is not such a schedule.
    """
    flag = f'--step-batch-size-schedule "{text}"'
    try:
        pairs = [entry.split(":") for entry in text.replace(",", " ").split()]
        steps = sorted((_number(tokens) // max(seq_length, 1), _number(size)) for tokens, size in pairs)
    except ValueError:
        raise ConfigError(f'{flag}: give TOKENS:SIZE for each batch size, such as "0:768 250B:1536"') from None
    begins = [samples for samples, _ in steps]
    if not steps or begins[0] != 0:
        raise ConfigError(f"{flag}: the first batch size begins at 0 tokens, such as 0:768")
    if len(set(begins)) < len(begins):
        raise ConfigError(f"{flag}: two batch sizes begin with the same sample of {seq_length} tokens: remove one")
    if not all(1 <= size <= _LARGEST_BATCH for _, size in steps):
        raise ConfigError(f"{flag}: a batch has from 1 to {_LARGEST_BATCH:,} samples")
    if len(steps) > _MOST_STEPS or begins[-1] * max(seq_length, 1) > _MOST_TOKENS:
        raise ConfigError(f"{flag[:80]}: more than {_MOST_STEPS:,} batch sizes, or {_MOST_TOKENS:g} tokens")
    if same := next((size for (_, size), (_, after) in pairwise(steps) if size == after), None):
        raise ConfigError(f"{flag} changes from {same} samples to {same}: remove one of the two")
    return tuple(steps)


def _number(text: str) -> int:
    """Parse a non-negative integer with an optional unit, such as 250B or 1.5K. Raises ValueError for other text."""
    unit = _UNITS.get(text[-1:].upper(), 1)
    number = read_number(text[:-1] if unit > 1 else text) * unit
    if number < 0 or number != int(number):
        raise ValueError(text)
    return int(number)
