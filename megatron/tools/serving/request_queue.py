"""Passes requests from the event loop to the generator's thread, and generated text back."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from queue import SimpleQueue

from megatron.tools.inference.continuous_batch import Piece
from megatron.tools.serving.protocol import CompletionRequest, RequestError


class Job:
    """A request in the queue. It is no longer wanted when its client disconnects or its time is over."""

    def __init__(self, request: CompletionRequest, on_end: Callable[["Job"], None]) -> None:
        self.request = request
        self.is_wanted = True
        self.unreleased: list[Piece] = []
        """Pieces that the generator's thread has not passed to the event loop yet."""
        self.loop = asyncio.get_running_loop()
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

    def put(self, *arrived: Piece | RequestError | None) -> None:
        """Called by the generator's thread: pieces, None after the last, or the error that ends the request."""
        put_all([(self, arrived)])

    def released(self, is_done: bool) -> tuple[Piece | None, ...]:
        """What to put after a step: all pieces of a stream so far; of other requests nothing until the end."""
        if not (is_done or getattr(self.request, "stream", True)):
            return ()
        pieces, self.unreleased = self.unreleased, []
        return (*pieces, None) if is_done else tuple(pieces)

    def take(self, arrived: Piece | RequestError | None) -> None:
        """``put`` one, in the thread of the event loop."""
        self._arrived.put_nowait(arrived)

    def end_in(self, seconds: float, error: RequestError) -> None:
        """Answer with ``error`` after ``seconds``, if the job is not finished."""
        self._timers.append(self.loop.call_later(seconds, self._end, error))

    def _end(self, error: RequestError) -> None:
        self.is_wanted = False
        self.take(error)
        self._on_end(self)  # the client may have stopped reading


def put_all(arrived: Sequence[tuple[Job, tuple[Piece | RequestError | None, ...]]]) -> None:
    """``put`` for several jobs, which wakes the event loop once."""

    def put() -> None:
        for job, pieces in arrived:
            for piece in pieces:
                job.take(piece)

    if arrived and not arrived[0][0].loop.is_closed():  # as it is when the server shut down before the last piece
        arrived[0][0].loop.call_soon_threadsafe(put)


class RequestQueue:
    """Accepts requests in order of arrival, up to a limit."""

    def __init__(self, *, most_waiting: int, seconds: float, most_running: int = 1) -> None:
        """A request is answered within ``seconds``, including the time to receive it and to wait."""
        self.jobs: SimpleQueue[Job | None] = SimpleQueue()
        """For the generator's thread; None ends it."""
        self._open: set[Job] = set()
        self._most, self.seconds = most_running + most_waiting, seconds
        self.running = 0
        """Number of requests in progress, and tokens generated since the start: set by the generator's thread."""
        self.generated_tokens = 0

    @property
    def pending(self) -> int:
        """Number of requests in progress or waiting."""
        return len(self._open)

    def submit(self, request: CompletionRequest, *, spent: float = 0.0) -> Job:
        """Append a request that took ``spent`` seconds to receive. Raises RequestError if too many are waiting."""
        if self.pending >= self._most:
            raise RequestError("too many requests are waiting; try again in a moment", status=503, retry=True)
        job = Job(request, self._open.discard)
        self._open.add(job)
        late = RequestError(f"not finished within {self.seconds:g} s; ask for fewer tokens", status=504)
        job.end_in(max(self.seconds - spent, 0.0), late)
        self.jobs.put(job)
        return job

    def end_all(self, seconds: float, reason: str) -> None:
        """Answer requests that are not finished within ``seconds`` with an error."""
        for job in self._open:
            job.end_in(seconds, RequestError(reason, status=503, retry=True))
