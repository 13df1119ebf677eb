"""Requests on their way to the generator and pieces on their way back, on the side of the event loop."""

import asyncio
import queue
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron.tools.inference.decoding import Sampling
from megatron.tools.inference.generator import Piece, TextGenerator
from megatron.tools.inference.prompts import StoppingCriteria
from megatron.tools.serving.request import CompletionRequest, RequestError


class Job:
    """A request whose pieces somebody waits for. When they leave, or the time is over, it is no longer wanted."""

    def __init__(self, request: CompletionRequest, on_end: Callable[["Job"], None]) -> None:
        self.request = request
        self.is_wanted = True
        self._loop = asyncio.get_running_loop()
        self._arrived: asyncio.Queue[Piece | RequestError | None] = asyncio.Queue()
        self._on_end = on_end
        self._timers: list[asyncio.TimerHandle] = []

    async def pieces(self) -> AsyncIterator[Piece]:
        """All pieces, as they come. Raises RequestError where there will be no more, though not all have come."""
        try:
            while (arrived := await self._arrived.get()) is not None:
                if isinstance(arrived, RequestError):
                    raise arrived
                yield arrived
        finally:
            self.is_wanted = False
            for timer in self._timers:
                timer.cancel()
            self._on_end(self)

    def put(self, arrived: Piece | RequestError | None) -> None:
        """Called by the generator's thread: a piece, None behind the last, or why there will be no more."""
        self._loop.call_soon_threadsafe(self._arrived.put_nowait, arrived)

    def end_in(self, seconds: float, error: RequestError) -> None:
        """Answer with ``error`` then, if the job is not done."""
        self._timers.append(self._loop.call_later(seconds, self._end, error))

    def _end(self, error: RequestError) -> None:
        self.is_wanted = False
        self._arrived.put_nowait(error)
        self._on_end(self)  # nobody may take it: a client can stop reading


class Desk:
    """Takes in requests, in the order in which they come, and not more than can wait."""

    def __init__(self, *, most_waiting: int, seconds: float) -> None:
        """A request is answered within so many seconds, waiting included."""
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        """For the generator's thread; None says that no more will come."""
        self._open: set[Job] = set()
        self.most_waiting, self._seconds = most_waiting, seconds

    @property
    def requests(self) -> int:
        """Those in work and those that wait."""
        return len(self._open)

    def submit(self, request: CompletionRequest) -> Job:
        """Put a request behind the others. Raises RequestError where too many wait already."""
        if self.requests > self.most_waiting:
            raise RequestError("too many requests are waiting; try again in a moment", status=503, retry=True)
        job = Job(request, self._open.discard)
        self._open.add(job)
        late = RequestError(f"not finished within {self._seconds:g} s; ask for fewer tokens", status=504)
        job.end_in(self._seconds, late)
        self.jobs.put(job)
        return job

    def end_all(self, seconds: float, reason: str) -> None:
        """Whatever is not answered in so many seconds is answered with an error."""
        for job in self._open:
            job.end_in(seconds, RequestError(reason, status=503, retry=True))


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
        limits = StoppingCriteria(context, new_tokens=request.max_tokens, stop=request.stop)
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
