"""Requests in the queue, and the thread that takes them from there."""

import asyncio
import threading

import pytest

from megatron.tools.inference.continuous_batch import Piece
from megatron.tools.serving.protocol import RequestError
from megatron.tools.serving.scheduler import Driver, RankBroadcast, RequestQueue


class _Alone:
    """A group of one."""

    def size(self) -> int:
        return 1


class _Numbers:
    """A batch of requests for as many pieces as are asked for, or for a failure."""

    def __init__(self, most: int = 1):
        self._done: dict[int, int] = {}
        self._wanted: dict[int, float] = {}
        self._most = most
        self.joined: list[list] = []

    def __len__(self) -> int:
        return len(self._wanted)

    def has(self, number):
        return number in self._wanted

    def has_room(self, *requests):
        return len(self) + len(requests) <= self._most

    def join_requests(self, requests):
        if "bad" in requests.values():
            raise ZeroDivisionError
        self.joined.append(list(requests.values()))
        for number, request in requests.items():
            self._wanted[number], self._done[number] = float("inf") if request == "endless" else request, 0

    def leave(self, number):
        del self._wanted[number]

    def choose(self):
        pieces = [(number, Piece(0, 0, self._done[number], f"{self._done[number]} ")) for number in self._wanted]
        failed = [number for number, wanted in self._wanted.items() if wanted == "not finite"]
        for number in failed:
            del self._wanted[number]
        pieces = [(number, Piece(0, 0, None, "", "error") if number in failed else piece) for number, piece in pieces]
        for number, _ in pieces:
            self._done[number] += 1
        self._wanted = {number: wanted for number, wanted in self._wanted.items() if self._done[number] < wanted}
        return pieces

    def advance(self):
        pass


async def _text(queue, request) -> str:
    return "".join([piece.text async for piece in queue.submit(request).pieces()])


def _with_a_driver(queue, talk, most: int = 1) -> None:
    thread = threading.Thread(target=Driver(queue, _Numbers(most), RankBroadcast(_Alone())).run)
    thread.start()
    try:
        asyncio.run(talk)
    finally:
        queue.jobs.put(None)
        thread.join()


@pytest.mark.parametrize("most", [1, 8], ids=["in order", "together"])
def test_requests_are_answered_in_order_and_fail_independently(capsys, most: int):
    async def talk():
        answers = [_text(queue, request) for request in (2, "bad", "not finite", 3)]
        first, *bad, last = await asyncio.gather(*answers, return_exceptions=True)
        assert (first, last) == ("0 1 ", "0 1 2 ")
        assert all(isinstance(error, RequestError) and error.status == 500 for error in bad)
        assert "not finite" in bad[1].message
        assert queue.pending == 0

    queue = RequestQueue(most_waiting=4, seconds=60)
    _with_a_driver(queue, talk(), most)
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_timeout_of_running_and_waiting_requests():
    async def talk():
        endless = [_text(queue, "endless"), _text(queue, "endless")]
        for error in await asyncio.gather(*endless, return_exceptions=True):
            assert isinstance(error, RequestError) and error.status == 504 and "within 0.2 s" in error.message
        assert await _text(queue, 1) == "0 "
        queue.submit(1)  # and never reads it
        while queue.pending:
            await asyncio.sleep(0.01)

    queue = RequestQueue(most_waiting=4, seconds=0.2)
    _with_a_driver(queue, talk())


def test_requests_run_together_and_one_that_waits_takes_the_place_of_one_that_left():
    async def talk():
        jobs = [queue.submit("endless") for _ in range(3)]
        first, second, third = (job.pieces() for job in jobs)
        assert [(await anext(each)).text for each in (first, second, first, second)] == ["0 ", "0 ", "1 ", "1 "]
        with pytest.raises(RequestError, match="too many requests are waiting"):
            queue.submit(1)
        waiting = asyncio.ensure_future(anext(third))
        assert not (await asyncio.wait([waiting], timeout=0.1))[0] and queue.running == 2
        await first.aclose()
        assert (await waiting).text == "0 " and queue.running == 2
        for each in (second, third):
            await each.aclose()
        assert await _text(queue, 2) == "0 1 "

    queue = RequestQueue(most_waiting=1, most_running=2, seconds=60)
    _with_a_driver(queue, talk(), most=2)
