"""Runs of layers of equal weight. No torch here."""

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise


def balanced(weights: Sequence[int], parts: int) -> list[int]:
    """Lengths of ``parts`` runs of ``weights``, none of them empty.

    The largest run is as small as possible, and then the sum of squares is. Of equally good partitions the one whose
    first runs are longer is chosen. (DeepSpeed's ``partition_balanced`` minimizes only the largest run, and needs
    torch.)
    """
    return list(_balanced(tuple(weights), parts))


@lru_cache(maxsize=256)
def _balanced(weights: tuple[int, ...], parts: int) -> tuple[int, ...]:
    """Dynamic programming over the end of each part: the least sum of squares, and where its last part begins."""
    sums, lightest = [0, *accumulate(weights)], _lightest(weights, parts)
    found: list[dict[int, tuple[int, int]]] = [{0: (0, 0)}]
    for part in range(1, parts + 1):
        before, best = found[-1], dict[int, tuple[int, int]]()
        for end in range(part, len(sums) - (parts - part)):
            for begin in range(end - 1, part - 2, -1):
                run = sums[end] - sums[begin]
                if run > lightest or (end in best and run * run >= best[end][0]):
                    break  # a run that is longer still costs no less
                if begin in before and (end not in best or before[begin][0] + run * run < best[end][0]):
                    best[end] = before[begin][0] + run * run, begin
        found.append(best)
    ends = [len(weights)]
    for best in reversed(found[1:]):
        ends.append(best[ends[-1]][1])
    return tuple(end - begin for begin, end in pairwise(reversed(ends)))


def _lightest(weights: Sequence[int], parts: int) -> int:
    """The least weight that the heaviest of ``parts`` runs can have."""

    def is_enough(heaviest: int) -> bool:
        runs, weight = 1, 0
        for one in weights:
            weight += one
            if weight > heaviest:
                runs, weight = runs + 1, one
        return runs <= parts

    least = max(weights)
    return least + bisect_left(range(least, sum(weights)), True, key=is_enough)
