"""The request queue and the scheduler of continuous batching, which runs the same batch on all ranks."""

import asyncio
import sys
import traceback
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch.distributed import ProcessGroup

from megatron.tokenizer import Tokenizer
from megatron.tools.inference.batches import is_reset_within
from megatron.tools.inference.continuous_batch import ContinuousBatch, Joining, Piece
from megatron.tools.inference.decoding import Sampling
from megatron.tools.inference.model import LanguageModel
from megatron.tools.inference.prompts import StoppingCriteria
from megatron.tools.serving.protocol import CompletionRequest, RequestError

Arrived = Piece | RequestError | None
"""What a request gets: pieces, None after the last one, or the error that ends it."""


class Job:
    """A request in the queue. It is cancelled when its client disconnects or its time limit is reached."""

    def __init__(self, request: CompletionRequest, on_end: Callable[["Job"], None]) -> None:
        self.request = request
        self.is_wanted = True
        self.unreleased: list[Piece] = []
        """Pieces that the generator thread has not passed to the event loop yet."""
        self.loop = asyncio.get_running_loop()
        self.arrived: asyncio.Queue[Arrived] = asyncio.Queue()
        self._on_end = on_end
        self._timers: list[asyncio.TimerHandle] = []

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield the pieces as they arrive. Raises RequestError if generation fails or is cancelled."""
        try:
            while (arrived := await self.arrived.get()) is not None:
                if isinstance(arrived, RequestError):
                    raise arrived
                yield arrived
        finally:
            self.is_wanted = False
            for timer in self._timers:
                timer.cancel()
            self._on_end(self)

    def released(self, is_done: bool) -> tuple[Arrived, ...]:
        """What to ``send`` after a step: the new pieces of a streamed request; of others, all pieces at the end."""
        if not (is_done or getattr(self.request, "stream", True)):
            return ()
        pieces, self.unreleased = self.unreleased, []
        return (*pieces, None) if is_done else tuple(pieces)

    def end_in(self, seconds: float, error: RequestError) -> None:
        """Answer with ``error`` after ``seconds`` unless the job is finished by then."""
        self._timers.append(self.loop.call_later(seconds, self._end, error))

    def _end(self, error: RequestError) -> None:
        self.is_wanted = False
        self.arrived.put_nowait(error)
        self._on_end(self)  # the client may have stopped reading


def send(items: Sequence[tuple[Job, Arrived]]) -> None:
    """Pass items from the generator thread to their jobs, with a single wake-up of the event loop."""

    def put() -> None:
        for job, item in items:
            job.arrived.put_nowait(item)

    if items and not items[0][0].loop.is_closed():  # closed if the server shut down before the last piece
        items[0][0].loop.call_soon_threadsafe(put)


class RequestQueue:
    """Accepts requests in order of arrival, up to a limit."""

    def __init__(self, *, most_waiting: int, seconds: float, most_running: int = 1) -> None:
        """``seconds`` is the time limit of a request, including receiving it and waiting in the queue."""
        self.jobs: SimpleQueue[Job | None] = SimpleQueue()
        """Jobs for the generator thread; None ends the thread."""
        self._open: set[Job] = set()
        self._most, self.seconds = most_running + most_waiting, seconds
        self.running = 0
        """Number of requests in progress; set by the generator thread."""
        self.generated_tokens = 0
        """Number of tokens generated since the start; set by the generator thread."""

    @property
    def pending(self) -> int:
        """Number of requests in progress or waiting."""
        return len(self._open)

    def submit(self, request: CompletionRequest, *, spent: float = 0.0) -> Job:
        """Append a request that took ``spent`` seconds to receive. Raises RequestError if the queue is full."""
        if self.pending >= self._most:
            raise RequestError("too many requests are waiting; try again in a moment", status=503, retry=True)
        job = Job(request, self._open.discard)
        self._open.add(job)
        timeout = RequestError(f"not finished within {self.seconds:g} s; ask for fewer tokens", status=504)
        job.end_in(max(self.seconds - spent, 0.0), timeout)
        self.jobs.put(job)
        return job

    def end_all(self, seconds: float, reason: str) -> None:
        """Answer requests that are not finished within ``seconds`` with an error."""
        for job in self._open:
            job.end_in(seconds, RequestError(reason, status=503, retry=True))


class RequestBatch(ContinuousBatch):
    """A continuous batch of numbered requests, the same on every rank."""

    def __init__(self, model: LanguageModel, tokenizer: Tokenizer, most: int) -> None:
        """``most`` is the maximum number of completions; a single request may have more."""
        super().__init__(model, tokenizer)
        self._config, self._most = model.config, most

    def has_room(self, *requests: CompletionRequest) -> bool:
        """Whether these requests may join together. Requests in progress wait while prompts are computed."""
        prompts = [prompt for request in requests for prompt in request.prompts]
        if len(requests) > 1:
            if sum(map(len, prompts)) > _MOST_PROMPT_TOKENS or is_reset_within(self._config, prompts):
                return False
        elif not self:
            return True
        return len(self) + sum(len(request.prompts) * request.n for request in requests) <= self._most

    def join_requests(self, requests: Mapping[int, CompletionRequest]) -> None:
        """Add the completions of numbered requests, and compute their prompts together."""
        self.join(*(self._joining(number, request) for number, request in requests.items()))

    def _joining(self, number: int, request: CompletionRequest) -> Joining:
        sampling = Sampling(
            greedy=request.temperature == 0,
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            repetition_penalty=request.repetition_penalty,
            seed=request.seed,
            min_p=request.min_p,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            logprobs=request.logprobs,
        )
        context = self._config.max_position_embeddings
        limits = StoppingCriteria(context, request.max_tokens, stop=request.stop, hidden=request.hidden)
        return Joining(number, request.prompts, sampling, limits, samples=request.n, varies=not request.has_seed)


class RankBroadcast:
    """Broadcasts from the first rank, which synchronize the batches of all ranks."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self.has_workers = group.size() > 1

    def share(self, message: Any = None) -> Any:
        """Broadcast the first rank's message to every rank."""
        messages = [message]
        if self.has_workers:
            device = torch.device(get_accelerator().current_device_name())
            dist.broadcast_object_list(messages, group=self._group, group_src=0, device=device)
        return messages[0]


class Change(NamedTuple):
    """The change of the batch before the next step: requests that leave, then requests that join."""

    leaving: tuple[int, ...] = ()
    joining: Mapping[int, CompletionRequest] | None = None
    is_end: bool = False
    """Whether the server shuts down."""


_HEARTBEAT_SECONDS = 60.0
_TOGETHER_SECONDS, _MOST_TOGETHER = 0.002, 16
"""An idle server waits this long after each request for more to start with it, up to this many requests."""
_MOST_PROMPT_TOKENS = 512
"""Maximum number of prompt tokens of requests that join together; a single request may have more."""
_ERROR = "the server failed on this request: see its log"
_NOT_FINITE = "the model's logits are not finite for this request: check its weights; with --fp16 try --bf16"


def run_worker(batch: RequestBatch, ranks: RankBroadcast) -> None:
    """Run the same steps as the first rank on another rank, until the first rank ends."""
    while not (change := ranks.share() or Change()).is_end:
        for number in change.leaving:
            batch.leave(number)
        if change.joining:
            batch.join_requests(change.joining)
        if batch:
            batch.choose()
            batch.advance()


class Driver:
    """The scheduler on the first rank: requests join the batch in order of arrival, and leave it, between two tokens.

    Waiting requests with short prompts join together, one with a long prompt joins alone. An error while joining fails
    the joining requests, an error in a step all requests in progress; non-finite logits fail only their own request.
    With several ranks errors are also raised, since the ranks may be out of step.
    """

    def __init__(self, queue: RequestQueue, batch: RequestBatch, ranks: RankBroadcast) -> None:
        self._queue, self._batch, self._ranks = queue, batch, ranks
        self._waiting: deque[Job] = deque()
        self._running: dict[Any, Job] = {}
        self._numbers = count()

    def run(self) -> None:
        """Run steps until the queue ends."""
        while self._receive():
            leaving = tuple(number for number, job in self._running.items() if not job.is_wanted)
            for number in leaving:
                self._batch.leave(number)
                del self._running[number]
            joining = {next(self._numbers): job for job in self._joining_jobs()}
            requests = {number: job.request for number, job in joining.items()}
            self._ranks.share(Change(leaving, requests or None) if leaving or joining else None)
            self._join(joining)
            self._queue.running = len(self._running)
            if self._batch:
                try:
                    self._step()
                except Exception as error:
                    self._fail(self._running, error)
        self._ranks.share(Change(is_end=True))

    def _receive(self) -> bool:
        """Take jobs from the queue; wait for one only if idle. Returns False at the end of the queue."""
        is_idle = not (self._running or self._waiting)
        seconds = _HEARTBEAT_SECONDS
        while True:
            try:
                job = self._queue.jobs.get(is_idle, seconds)
            except Empty:
                return True  # run a step without changes: the broadcast on the other ranks would time out
            if job is None:
                return False
            self._waiting.append(job)
            is_idle, seconds = is_idle and len(self._waiting) < _MOST_TOGETHER, _TOGETHER_SECONDS

    def _joining_jobs(self) -> list[Job]:
        """Take the waiting jobs that the batch has room for. Cancelled jobs are dropped."""
        self._waiting = deque(job for job in self._waiting if job.is_wanted)
        joining: list[Job] = []
        while self._waiting and self._batch.has_room(*(job.request for job in (*joining, self._waiting[0]))):
            joining.append(self._waiting.popleft())
        return joining

    def _join(self, joining: dict[int, Job]) -> None:
        """Add jobs to the batch. If this fails for several jobs together, each joins alone."""
        try:
            if joining:
                self._batch.join_requests({number: job.request for number, job in joining.items()})
            self._running |= joining
        except Exception as error:
            if len(joining) == 1 or self._ranks.has_workers:
                self._fail(joining, error)
                return
            for number, job in joining.items():
                self._join({number: job})

    def _step(self) -> None:
        chosen = self._batch.choose()
        for number, piece in chosen:
            job = self._running[number]
            if piece.finish_reason != "error":
                job.unreleased.append(piece)
            elif job.is_wanted:
                job.is_wanted = False
                send([(job, RequestError(_NOT_FINITE, status=500))])
        done = [number for number in self._running if not self._batch.has(number)]
        send([(job, item) for number, job in self._running.items() for item in job.released(number in done)])
        for number in done:
            del self._running[number]
        self._queue.generated_tokens += len(chosen)
        self._batch.advance()

    def _fail(self, jobs: dict[int, Job], error: Exception) -> None:
        """Answer ``jobs`` with an error; the server continues with other requests, unless there are several ranks."""
        send([(job, RequestError(_ERROR, status=500)) for job in jobs.values()])
        if self._ranks.has_workers:
            raise error
        traceback.print_exception(error, file=sys.stderr)
        if jobs is self._running:
            self._batch.clear()
            self._running.clear()
