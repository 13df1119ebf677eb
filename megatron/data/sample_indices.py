"""Places in the stream of samples: which a rank takes of a global batch, and which samples stand there. No torch."""

from collections.abc import Sequence


def rank_places(first: int, global_batch_size: int, data_rank: int, data_size: int) -> range:
    """What data-parallel rank ``data_rank`` of ``data_size`` takes of the global batch that begins at ``first``."""
    part = global_batch_size // data_size
    return range(first + data_rank * part, first + (data_rank + 1) * part)


def sample_number(place: int, left_out: Sequence[range]) -> int:
    """The sample in ``place`` of a stream, counted from 0, without the samples ``left_out``, which are in order."""
    for samples in left_out:
        if samples.start > place:
            break
        place += len(samples)
    return place


def with_range(left_out: Sequence[range], samples: range) -> tuple[range, ...]:
    """``left_out`` and ``samples``, in order and without overlap. ``samples`` covers whole ranges or none of them."""
    others = [other for other in left_out if other.start not in samples]
    return tuple(sorted([*others, samples], key=lambda span: span.start))
