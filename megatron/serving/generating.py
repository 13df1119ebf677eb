"""The thread that computes, and the other ranks, which compute along."""

import queue
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron.inference.generator import Piece, TextGenerator
from megatron.inference.limits import Limits
from megatron.inference.sampling import Sampling
from megatron.serving.desk import Job
from megatron.serving.request import CompletionRequest, RequestError

Complete = Callable[[CompletionRequest], Iterator[Piece]]
"""Computes what was asked for piece by piece, on every rank the same."""
_PIECES = 8
"""After so many pieces the ranks see whether the request is still wanted; after each would cost a collective more."""
_BEAT_SECONDS = 60.0
_BEAT, _END = "still here", "the end"


def completing(generator: TextGenerator) -> Complete:
    """Answer requests with ``generator``."""

    def complete(request: CompletionRequest) -> Iterator[Piece]:
        sampling = Sampling(
            greedy=request.temperature == 0,
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            repetition_penalty=request.repetition_penalty,
            seed=request.seed,
        )
        context = generator.model.config.max_position_embeddings
        limits = Limits(context, new_tokens=request.max_tokens, stop=request.stop)
        return generator.stream(request.prompts, sampling, limits, samples=request.n)

    return complete


class Ranks:
    """What the first rank tells the others, so that all do the same."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self.are_several = group.size() > 1

    def share(self, word: Any = None) -> Any:
        """The word of the first rank, on every rank."""
        box = [word]
        if self.are_several:
            dist.broadcast_object_list(box, group=self._group, group_src=0)
        return box[0]


def lead(jobs: "queue.SimpleQueue[Job | None]", complete: Complete, ranks: Ranks) -> None:
    """Do one job after the other, on the first rank, until there is None.

    An error in a job is the job's; where there are other ranks it is raised, for they no longer agree.
    """
    while (job := _next(jobs, ranks)) is not None:
        try:
            _do(job, complete, ranks)
        except Exception:
            job.put(RequestError("the server failed at this request; its log says how", status=500))
            if ranks.are_several:
                raise
            traceback.print_exc(file=sys.stderr)
    ranks.share(_END)


def follow(complete: Complete, ranks: Ranks) -> None:
    """Compute along on another rank, until the first one ends."""
    while (word := ranks.share()) != _END:
        if word != _BEAT:
            for number, _ in enumerate(complete(word)):
                if number % _PIECES == 0 and not ranks.share():
                    break


def _next(jobs: "queue.SimpleQueue[Job | None]", ranks: Ranks) -> Job | None:
    while True:
        try:
            return jobs.get(timeout=_BEAT_SECONDS)
        except queue.Empty:
            ranks.share(_BEAT)  # a collective gives up in the end where nobody comes


def _do(job: Job, complete: Complete, ranks: Ranks) -> None:
    if not job.is_wanted:
        return
    for number, piece in enumerate(complete(ranks.share(job.request))):
        job.put(piece)
        if number % _PIECES == 0 and not ranks.share(job.is_wanted):
            return
    job.put(None)
