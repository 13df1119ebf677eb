"""Passes requests from the event loop to the generator's thread and to all ranks, and generated text back."""

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
    """A request in the queue. It is no longer wanted when its client disconnects or its time is over."""

    def __init__(self, request: CompletionRequest, on_end: Callable[["Job"], None]) -> None:
        self.request = request
        self.is_wanted = True
        self._loop = asyncio.get_running_loop()
        self._arrived: asyncio.Queue[Piece | RequestError | None] = asyncio.Queue()
        self._on_end = on_end
        self._timers: list[asyncio.TimerHandle] = []

    async def pieces(self) -> AsyncIterator[Piece]:
        """All pieces as they arrive. Raises RequestError if generation ends early."""
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
        """Called by the generator's thread: a piece, None after the last, or the error that ends the request."""
        if not self._loop.is_closed():  # as it is when the server has shut down before the last piece
            self._loop.call_soon_threadsafe(self._arrived.put_nowait, arrived)

    def end_in(self, seconds: float, error: RequestError) -> None:
        """Answer with ``error`` after so many seconds, if the job is not finished."""
        self._timers.append(self._loop.call_later(seconds, self._end, error))

    def _end(self, error: RequestError) -> None:
        self.is_wanted = False
        self._arrived.put_nowait(error)
        self._on_end(self)  # the client may have stopped reading


class RequestQueue:
    """Accepts requests in order of arrival, up to a limit."""

    def __init__(self, *, most_waiting: int, seconds: float) -> None:
        """A request is answered within so many seconds, the time to receive it and to wait included."""
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        """For the generator's thread; None ends it."""
        self._open: set[Job] = set()
        self.most_waiting, self.seconds = most_waiting, seconds

    @property
    def pending(self) -> int:
        """Number of requests in progress or waiting."""
        return len(self._open)

    def submit(self, request: CompletionRequest, *, spent: float = 0.0) -> Job:
        """Append a request that took ``spent`` seconds to receive. Raises RequestError if too many are waiting."""
        if self.pending > self.most_waiting:
            raise RequestError("too many requests are waiting; try again in a moment", status=503, retry=True)
        job = Job(request, self._open.discard)
        self._open.add(job)
        late = RequestError(f"not finished within {self.seconds:g} s; ask for fewer tokens", status=504)
        job.end_in(max(self.seconds - spent, 0.0), late)
        self.jobs.put(job)
        return job

    def end_all(self, seconds: float, reason: str) -> None:
        """Answer requests that are not finished within so many seconds with an error."""
        for job in self._open:
            job.end_in(seconds, RequestError(reason, status=503, retry=True))


Complete = Callable[[CompletionRequest], Iterator[Piece]]
"""Generates the pieces of a completion, the same on every rank."""
_PIECES = 8
"""Pieces between checks whether the request is still wanted; each check is a collective."""
_HEARTBEAT_SECONDS = 60.0
_HEARTBEAT, _END = "heartbeat", "end"


def completion_function(generator: TextGenerator) -> Complete:
    """The function that answers requests with ``generator``."""

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


class RankBroadcast:
    """Broadcasts from the first rank, which keep all ranks in step."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self.has_workers = group.size() > 1

    def share(self, message: Any = None) -> Any:
        """The first rank's message, on every rank."""
        box = [message]
        if self.has_workers:
            dist.broadcast_object_list(box, group=self._group, group_src=0)
        return box[0]


def run_driver(jobs: "queue.SimpleQueue[Job | None]", complete: Complete, ranks: RankBroadcast) -> None:
    """Process jobs on the first rank until there is None.

    An error fails its job only. With several ranks it is raised, since they may be out of step.
    """
    while (job := _next(jobs, ranks)) is not None:
        try:
            _do(job, complete, ranks)
        except Exception:  # of whatever kind: the next request may be fine
            job.put(RequestError("the server failed on this request: see its log", status=500))
            if ranks.has_workers:
                raise
            traceback.print_exc(file=sys.stderr)
    ranks.share(_END)


def run_worker(complete: Complete, ranks: RankBroadcast) -> None:
    """Process the same requests on another rank until the first rank ends."""
    while (message := ranks.share()) != _END:
        if message != _HEARTBEAT:
            for number, _ in enumerate(complete(message)):
                if number % _PIECES == 0 and not ranks.share():
                    break


def _next(jobs: "queue.SimpleQueue[Job | None]", ranks: RankBroadcast) -> Job | None:
    while True:
        try:
            return jobs.get(timeout=_HEARTBEAT_SECONDS)
        except queue.Empty:
            ranks.share(_HEARTBEAT)  # the other ranks' broadcast would time out


def _do(job: Job, complete: Complete, ranks: RankBroadcast) -> None:
    if not job.is_wanted:
        return
    for number, piece in enumerate(complete(ranks.share(job.request))):
        job.put(piece)
        if number % _PIECES == 0 and not ranks.share(job.is_wanted):
            return
    job.put(None)
