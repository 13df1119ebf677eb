"""Requests on their way to the generator and pieces on their way back, on the side of the event loop."""

import asyncio
import queue
from collections.abc import AsyncIterator, Callable

from megatron.inference.generator import Piece
from megatron.serving.request import CompletionRequest, RequestError


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
