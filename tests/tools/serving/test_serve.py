"""tools/serve.py from a client: OpenAI's format, limits and authentication."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from support.served import events

HELLO = {"prompt": "Hello", "max_tokens": 12, "seed": 5}
ENDLESS = {"prompt": "Hello", "max_tokens": 190_000}


def test_a_completion_has_the_shape_that_clients_know(server):
    answer = server.complete(**HELLO)
    assert answer.pop("id").startswith("cmpl-") and answer.pop("created") > 1.7e9
    text = answer["choices"][0].pop("text")
    assert text and answer == {
        "object": "text_completion",
        "model": "endless",
        "choices": [{"index": 0, "logprobs": None, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 12, "total_tokens": 17},
    }


def test_a_seed_gives_the_same_text_again(server):
    assert server.texts(**HELLO) == server.texts(**HELLO) != server.texts(**{**HELLO, "seed": 6})
    first, second = server.texts(**{**HELLO, "prompt": ["Hello"] * 2})
    assert first == second == server.texts(**HELLO)[0]
    first, second = server.texts(**{**HELLO, "prompt": ["Hello"] * 2, "seed": None})
    assert first != second
    assert server.texts(prompt="Hello", temperature=0) == server.texts(prompt="Hello", temperature=0, seed=1)


def test_choices_come_in_the_order_of_prompts(server):
    several = server.texts(**{**HELLO, "prompt": ["Hello", "World"]}, n=2, echo=True)
    assert [text[:5] for text in several] == ["Hello", "Hello", "World", "World"]
    assert several[0] == "Hello" + server.texts(**HELLO)[0] != several[1]


def test_a_stop_string_ends_a_text_and_is_no_part_of_it(server):
    text = server.texts(**HELLO)[0]
    choice = server.complete(**HELLO, stop=["never there", text[4:6]])["choices"][0]
    assert choice["text"] == text[: text.index(text[4:6])] and choice["finish_reason"] == "stop"
    plain, held = (server.complete(**HELLO, logprobs=0, stop=stop)["choices"][0] for stop in ([], [f"{text[3]}no"]))
    assert held == plain and len({*plain["logprobs"]["text_offset"]}) > 3, "offsets of text that is held back"


def test_streamed_pieces_equal_the_completion(server):
    response = server.open(**HELLO, n=2, stream=True, stream_options={"include_usage": True}, echo=True)
    assert response.getheader("Content-Type").startswith("text/event-stream")
    *bits, last = events(response)
    texts = ["", ""]
    for bit in bits:
        (choice,) = bit["choices"]
        assert texts[choice["index"]] is not None, "text after the end"
        texts[choice["index"]] += choice["text"]
        assert bit["id"] == last["id"] and bit["usage"] is None
    assert texts == server.texts(**HELLO, n=2, echo=True) and len(bits) > 10
    assert [bit["choices"][0]["finish_reason"] for bit in bits[-2:]] == ["length", "length"]
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 24


def test_openai_client_is_compatible(server):
    import openai

    with openai.OpenAI(base_url=f"{server.url}v1", api_key=server.key, max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["endless"]
        assert client.models.retrieve("endless").owned_by == "this server"
        whole = client.completions.create(model="endless", **HELLO)
        bits = client.completions.create(model="endless", stream=True, **HELLO)
        assert "".join(bit.choices[0].text for bit in bits) == whole.choices[0].text
        with pytest.raises(openai.NotFoundError, match="no model 'other' here"):
            client.completions.create(model="other", **HELLO)
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="endless", prompt="a" * 3000, max_tokens=198_000)
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(openai.AuthenticationError) as caught:
            client.with_options(api_key="guessed").models.list()
        assert (caught.value.code, caught.value.type) == ("invalid_api_key", "invalid_request_error")


def test_a_slow_template_holds_up_nobody_else(server):
    body = json.dumps({"messages": [{"role": "user", "content": "slow"}], "max_tokens": 1}).encode()
    answers = 0
    with ThreadPoolExecutor() as pool:
        slow = pool.submit(lambda: server.request("POST", "/v1/chat/completions", body).status)
        while not slow.done():
            answers += server.request("GET", "/health").status == 200
    assert slow.result() == 400 and answers > 10


def test_openai_client_chats(server):
    import openai

    said = [{"role": "developer", "content": "Talk"}, {"role": "user", "content": [{"type": "text", "text": "Hi?"}]}]
    wanted = {"model": "endless", "seed": 5, "max_tokens": 9, "n": 2}
    with openai.OpenAI(base_url=f"{server.url}v1", api_key=server.key, max_retries=0) as client:
        prompt = "system:Talk\nuser:Hi?\nassistant:"
        plain = client.completions.create(prompt=prompt, logprobs=2, **wanted)
        chat = client.chat.completions.create(messages=said, logprobs=True, top_logprobs=2, **wanted)
        for choice, other in zip(chat.choices, plain.choices, strict=True):
            assert (choice.message.role, choice.message.content) == ("assistant", other.text) and other.text
            assert [one.logprob for one in choice.logprobs.content] == other.logprobs.token_logprobs
            first, second = choice.logprobs.content[0].top_logprobs
            expected = {one.token: one.logprob for one in (first, second, choice.logprobs.content[0])}
            assert other.logprobs.top_logprobs[0] == expected
            assert first.logprob >= second.logprob
        assert chat.usage == plain.usage and chat.choices[0].finish_reason == "length"
        texts = ["", ""]
        options = {"include_usage": True}
        for part in client.chat.completions.create(messages=said, stream=True, stream_options=options, **wanted):
            for choice in part.choices:
                texts[choice.index] += choice.delta.content or ""
        assert texts == [choice.message.content for choice in chat.choices] and part.usage == chat.usage
        likely = client.completions.create(prompt="Hi", temperature=0, **{**wanted, "n": 1}).choices[0].text
        only = client.completions.create(prompt="Hi", **{**wanted, "n": 1}, extra_body={"min_p": 1.0}).choices[0].text
        assert only == likely
        for field, value in {"tools": [{"type": "function"}], "logit_bias": {"5": 1}}.items():
            with pytest.raises(openai.BadRequestError, match=f"{field} is not a field of this server's chat"):
                client.chat.completions.create(messages=said, model="endless", extra_body={field: value})
        for content in ("<|endoftext|>", None):
            with pytest.raises(openai.BadRequestError, match="message"):
                client.chat.completions.create(messages=[{"role": "user", "content": content}], model="endless")
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(messages=said, model="endless", max_tokens=199_990)
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
        with pytest.raises(openai.NotFoundError, match="this server has POST /v1/chat/completions, "):
            client.responses.create(model="endless", input="Hi")


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status", "message"),
    [
        ("GET", "/v1/models", None, {"Authorization": ""}, 401, "Authorization: Bearer KEY"),
        ("POST", "/v1/completions", b"{}", {"Authorization": "Bearer \u00e9"}, 401, "Authorization: Bearer KEY"),
        ("GET", "/", None, {"Host": "rebound.example"}, 403, "localhost and 127.0.0.1 only"),
        ("GET", "/v2", None, {}, 404, "Not Found"),
        ("GET", "/", None, {"Host": "[::1].example"}, 403, "localhost and 127.0.0.1 only"),
        ("GET", "/", None, {"Host": "127.0.0.1:example"}, 403, "localhost and 127.0.0.1 only"),
        ("GET", "/health/", None, {"Host": "rebound.example"}, 404, "Not Found"),
        ("POST", "/v1/completions", b"x" * 4001, {}, 413, "more than 4000 bytes"),
        ("POST", "/v1/completions", b"{}", {"Content-Length": "5000"}, 413, "more than 4000 bytes"),
        ("POST", "/v1/completions", b"{}", {"Content-Type": "text/plain"}, 415, "application/json"),
    ],
)  # fmt: skip
def test_errors_have_the_format_of_openai(server, method, path, body, headers, status, message):
    response = server.request(method, path, body, **headers)
    error = json.loads(response.read())["error"]
    assert response.status == status and message in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


def test_health_and_page_need_no_key(server):
    assert json.loads(server.request("GET", "/health", Authorization="").read()) == {"status": "ok", "requests": 0}
    page = server.request("GET", "/", Authorization="")
    assert page.status == 200 and "default-src 'none'" in page.getheader("Content-Security-Policy")


def test_server_listens_on_loopback_only(server):
    """Neither the server nor the rendezvous of its ranks listens on another address."""
    connections = psutil.Process(server.process.pid).net_connections("tcp")
    listening = {connection.laddr for connection in connections if connection.status == psutil.CONN_LISTEN}
    assert ("127.0.0.1", server.port) in listening and {address.ip for address in listening} == {"127.0.0.1"}


def test_disconnected_client_frees_its_place(server):
    """Both requests would take minutes, the one in work and the one that waits."""
    first = server.open(**ENDLESS, stream=True)
    next(events(first))
    second = server.send(**ENDLESS)
    _until_there_are(server, 2)
    assert server.load() == {"num_requests_running": 1, "num_requests_waiting": 1}
    refused = server.open(**HELLO)
    assert refused.status == 503 and refused.getheader("Retry-After") == "1"
    assert "too many requests" in refused.read().decode()
    first.fp.raw._sock.shutdown(socket.SHUT_RDWR)
    second.close()
    _until_there_are(server, 0)
    assert server.complete(**HELLO)["usage"]["completion_tokens"] == 12


def _until_there_are(server, requests: int) -> None:
    """The test's time limit ends a wait in vain."""
    while json.loads(server.request("GET", "/health").read())["requests"] != requests:
        time.sleep(0.05)
