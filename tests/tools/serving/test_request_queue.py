"""Requests in the queue, and the thread that takes them from there."""

import asyncio
import threading
from itertools import count

import pytest

from megatron.tools.inference.generator import Piece
from megatron.tools.serving.request import RequestError
from megatron.tools.serving.request_queue import RankBroadcast, RequestQueue, run_driver


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


async def _text(queue, request) -> str:
    return "".join([piece.text async for piece in queue.submit(request).pieces()])


def _with_a_driver(queue, talk) -> None:
    thread = threading.Thread(target=run_driver, args=(queue.jobs, _completed, RankBroadcast(_Alone())))
    thread.start()
    try:
        asyncio.run(talk)
    finally:
        queue.jobs.put(None)
        thread.join()


def test_requests_are_answered_in_order_and_fail_independently(capsys):
    async def talk():
        answers = [_text(queue, request) for request in (2, "bad", 3)]
        first, bad, last = await asyncio.gather(*answers, return_exceptions=True)
        assert (first, last) == ("0 1 ", "0 1 2 ")
        assert isinstance(bad, RequestError) and bad.status == 500
        assert queue.pending == 0

    queue = RequestQueue(most_waiting=4, seconds=60)
    _with_a_driver(queue, talk())
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


def test_a_shutdown_is_reported():
    async def talk():
        job = queue.submit("endless")
        pieces = job.pieces()
        assert (await anext(pieces)).text == "0 "
        queue.end_all(0.1, "the server is shutting down")
        with pytest.raises(RequestError, match="shutting down"):
            async for _ in pieces:
                pass

    queue = RequestQueue(most_waiting=4, seconds=60)
    _with_a_driver(queue, talk())
