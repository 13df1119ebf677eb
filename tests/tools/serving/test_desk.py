"""Requests in the queue, and the thread that takes them from there."""

import asyncio
import threading
from itertools import count

import pytest

from megatron.tools.inference.generator import Piece
from megatron.tools.serving.request import RequestError
from megatron.tools.serving.request_queue import Desk, Ranks, lead


class _Alone:
    """A group of one."""

    def size(self) -> int:
        return 1


def _completed(request):
    """As many pieces as are asked for, or a failure."""
    if request == "bad":
        raise ZeroDivisionError
    for number in count() if request == "endless" else range(request):
        yield Piece(0, 0, number, f"{number} ")


async def _text(desk, request) -> str:
    return "".join([piece.text async for piece in desk.submit(request).pieces()])


def _with_a_leader(desk, talk) -> None:
    thread = threading.Thread(target=lead, args=(desk.jobs, _completed, Ranks(_Alone())))
    thread.start()
    try:
        asyncio.run(talk)
    finally:
        desk.jobs.put(None)
        thread.join()


def test_requests_are_answered_in_order_and_failures_are_theirs_alone(capsys):
    async def talk():
        answers = [_text(desk, request) for request in (2, "bad", 3)]
        first, bad, last = await asyncio.gather(*answers, return_exceptions=True)
        assert (first, last) == ("0 1 ", "0 1 2 ")
        assert isinstance(bad, RequestError) and bad.status == 500
        assert desk.requests == 0

    desk = Desk(most_waiting=4, seconds=60)
    _with_a_leader(desk, talk())
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_time_runs_out_for_the_one_in_work_and_for_those_that_wait():
    async def talk():
        endless = [_text(desk, "endless"), _text(desk, "endless")]
        for error in await asyncio.gather(*endless, return_exceptions=True):
            assert isinstance(error, RequestError) and error.status == 504 and "within 0.2 s" in error.message
        assert await _text(desk, 1) == "0 "
        desk.submit(1)  # and nobody reads it
        while desk.requests:
            await asyncio.sleep(0.01)

    desk = Desk(most_waiting=4, seconds=0.2)
    _with_a_leader(desk, talk())


def test_a_server_that_leaves_says_so():
    async def talk():
        job = desk.submit("endless")
        pieces = job.pieces()
        assert (await anext(pieces)).text == "0 "
        desk.end_all(0.1, "the server is leaving")
        with pytest.raises(RequestError, match="leaving"):
            async for _ in pieces:
                pass

    desk = Desk(most_waiting=4, seconds=60)
    _with_a_leader(desk, talk())
